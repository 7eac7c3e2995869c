"""Where vLLM's attention backends keep a KV slot's bytes.

Since 0.32 a layer's cache is a view ``[num_blocks, num_heads, block_size, content]``
(``[num_blocks, block_size, content]`` for MLA) whose strides tell NHD from HND from
block-major memory. A backend listed in ``ROW_WISE`` keeps what belongs to a slot in
``content``, so the strides say everything. ``CPU_ATTN`` packs keys for vector units.
Others (pages with scales behind all rows, several tokens in one state) are refused by
name: zeroing the wrong bytes would change committed tokens.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.kernels.planes import (
    LayoutError,
    SlotPlane,
    cpu_attention_planes,
    strided_planes,
)

ROW_WISE = frozenset(
    {
        "FLASH_ATTN",
        "FLASH_ATTN_DIFFKV",
        "FLASHINFER",
        "FLEX_ATTENTION",
        "TRITON_ATTN",
        "TRITON_ATTN_DIFFKV",
        # Multi-head latent attention: one latent row per slot.
        "AMX_MLA",
        "CPU_MLA",
        "CUTLASS_MLA",
        "FLASH_ATTN_MLA",
        "FLASHINFER_MLA",
        "FLASHMLA",
        "FLASHMLA_SPARSE",
        "TRITON_MLA",
    }
)
PLAIN_CACHE_DTYPES = frozenset(
    {"auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"}
    | {"fp8_ds_mla"}
)
"""Values of ``--kv-cache-dtype`` that keep a slot's scales, if any, in its row."""


def slot_planes(
    layers: Mapping[str, Any],
    slot_mappings: Mapping[str, torch.Tensor],
    num_null_slots: Mapping[str, int],
    cache_dtype: str,
) -> list[SlotPlane]:
    """Planes of the given layers.

    Args:
        layers: vLLM's ``static_forward_context``.
        slot_mappings: slot mapping of each layer's cache group.
        num_null_slots: slots of the null block, of each layer to describe.
        cache_dtype: vLLM's ``kv_cache_dtype``.

    Raises:
        ConfigError: a layer keeps its slots in a way that is not known.
    """
    return [
        plane
        for name, null_slots in num_null_slots.items()
        for plane in _layer_planes(
            name, layers[name], slot_mappings[name], null_slots, cache_dtype
        )
    ]


def is_slot_addressed(layer: Any) -> bool:
    """Whether a layer has a KV cache of slots, not a recurrent state.

    vLLM picks the recurrent state of the last accepted token itself.
    """
    return isinstance(layer.kv_cache, torch.Tensor) and layer.kv_cache.numel() > 0


def storages(layers: Iterable[Any]) -> list[torch.Tensor]:
    """``[num_bytes]`` uint8 tensors over the memory of the caches, each once."""
    by_address = {}
    for layer in layers:
        storage = layer.kv_cache.untyped_storage()
        by_address[storage.data_ptr()] = storage
    return [
        torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        for storage in by_address.values()
    ]


def _layer_planes(
    name: str,
    layer: Any,
    slot_mapping: torch.Tensor,
    num_null_slots: int,
    cache_dtype: str,
) -> list[SlotPlane]:
    cache: torch.Tensor = layer.kv_cache
    backend = layer.get_attn_backend().get_name()
    try:
        if cache_dtype not in PLAIN_CACHE_DTYPES:
            raise LayoutError(f"--kv-cache-dtype {cache_dtype} is not a plain one")
        if backend == "CPU_ATTN":
            return cpu_attention_planes(
                cache,
                isa=layer.isa,
                slot_mapping=slot_mapping,
                num_null_slots=num_null_slots,
            )
        if backend in ROW_WISE and cache.dim() in (3, 4):
            return strided_planes(
                cache,
                block_dim=0,
                slot_dim=-2,
                slot_mapping=slot_mapping,
                num_null_slots=num_null_slots,
            )
        raise LayoutError(
            f"attention backend {backend} with a cache of {cache.dim()} dimensions is "
            "not known"
        )
    except LayoutError as problem:
        raise ConfigError(
            f"speculative_config.kv_rollback='scrub' is not allowed for layer {name} "
            f"of this model with method {METHOD!r}: {problem}; leave kv_rollback "
            "unset (the output is the same)."
        ) from None
