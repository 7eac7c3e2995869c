"""The only place that imports vllm."""
