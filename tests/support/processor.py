"""What vLLM can do on the CPU that runs the tests."""

import torch


def can_cache_fp8() -> bool:
    """Whether vLLM 0.32 has an fp8 KV cache here; it raises where it has none."""
    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()
