"""How long to draft. Pure Python: no torch, no vllm."""
