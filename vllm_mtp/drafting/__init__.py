"""What to propose: torch, no vllm."""
