"""``cpu_attention_planes`` against the bytes that vLLM's own CPU kernel writes."""

import pytest
import torch

from tests.support.processor import can_cache_fp8
from vllm_mtp.kernels import reference
from vllm_mtp.kernels.planes import LayoutError, cpu_attention_planes, plane_table
from vllm_mtp.kernels.reference import byte_offsets

NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE = 3, 2, 64
CACHES = {
    "float32": (torch.float32, torch.float32, "auto"),
    "bfloat16": (torch.bfloat16, torch.bfloat16, "auto"),
    "float16": (torch.float16, torch.float16, "auto"),
    "fp8": (torch.bfloat16, torch.uint8, "fp8"),
}
"""Dtype of keys and values, of the cache, and vLLM's ``kv_cache_dtype``."""


def write_token(cache: torch.Tensor, slot: int, isa: str, dtypes) -> None:
    """Write keys and values whose bytes are all nonzero into one slot, as vLLM does."""
    import vllm._custom_ops as ops

    dtype, _, cache_dtype = dtypes
    head_size = cache.shape[-1] // 2
    # At least 1: what is converted to fp8 is no zero byte, either.
    keys_values = (1 + torch.rand(2, 1, NUM_HEADS, head_size)).to(dtype)
    as_bytes = keys_values.view(torch.uint8)
    as_bytes[as_bytes == 0] = 0x11
    keys, values = keys_values
    # What CPU attention itself sees: keys, then values, of each head.
    packed = cache.view(NUM_BLOCKS, NUM_HEADS, 2 * BLOCK_SIZE, head_size)
    key_cache, value_cache = packed.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(
        keys,
        values,
        key_cache,
        value_cache,
        torch.tensor([slot]),
        isa,
        k_scale=1.0,
        v_scale=1.0,
        kv_cache_dtype=cache_dtype,
    )


def written_bytes(cache: torch.Tensor) -> list[int]:
    return cache.view(torch.uint8).flatten().nonzero().flatten().tolist()


def skip_unless_vllm_writes(cache: torch.Tensor, isa: str, dtypes) -> None:
    if isa == "amx" and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this CPU has no AMX")
    try:
        write_token(torch.zeros_like(cache), 0, isa, dtypes)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"vLLM does not write {isa} here: {str(error).splitlines()[0]}")


def vllm_has_amx_packing(name: str, head_size: int) -> bool:
    """Where it has none its kernel packs as for vec, whatever it was told."""
    return name != "float32" and head_size % 32 == 0


CASES = [
    (name, isa, head_size)
    for name in CACHES
    for isa in ("vec", "vec16", "amx")
    for head_size in (32, 64, 80)
    if isa != "amx" or vllm_has_amx_packing(name, head_size)
]


@pytest.mark.parametrize(("name", "isa", "head_size"), CASES)
def test_the_planes_of_a_slot_are_the_bytes_that_vllm_writes(
    name, isa, head_size
) -> None:
    dtypes = CACHES[name]
    shape = NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * head_size
    cache = torch.zeros(shape, dtype=dtypes[1])
    skip_unless_vllm_writes(cache, isa, dtypes)
    slot_mapping = torch.zeros(1, dtype=torch.int64)
    planes = cpu_attention_planes(cache, isa=isa, slot_mapping=slot_mapping)
    table = plane_table(planes, torch.device("cpu"))
    for slot in (0, 5, 15, 16, 37, 63, BLOCK_SIZE + 33, 2 * BLOCK_SIZE + 62):
        write_token(cache, slot, isa, dtypes)
        owned = [
            plane.base_address - cache.data_ptr() + offset
            for plane in planes
            for offset in byte_offsets(plane, torch.tensor([slot])).tolist()
        ]
        assert written_bytes(cache) == sorted(owned), f"slot {slot}"

        slot_mapping[0] = slot
        reference.scrub_rejected_slots(
            [cache.view(torch.uint8).flatten()],
            [slot_mapping],
            table,
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([1]),
        )
        assert written_bytes(cache) == []


@pytest.mark.parametrize(
    ("dtype", "head_size"), [(torch.float32, 64), (torch.bfloat16, 80)]
)
def test_planes_are_refused_where_vllm_has_no_amx_packing(dtype, head_size) -> None:
    cache = torch.zeros(NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, 2 * head_size, dtype=dtype)
    with pytest.raises(LayoutError, match=f"heads of {head_size} elements"):
        cpu_attention_planes(cache, isa="amx", slot_mapping=torch.zeros(1))


def test_vllm_picks_amx_only_where_it_has_that_packing() -> None:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    for name, (dtype, _, cache_dtype) in CACHES.items():
        for head_size in (32, 64, 80, 96, 112, 128):
            if name == "fp8" and (head_size % 32 or not can_cache_fp8()):
                continue
            isa = _get_attn_isa(dtype, BLOCK_SIZE, head_size, cache_dtype)
            assert isa != "amx" or vllm_has_amx_packing(name, head_size)
