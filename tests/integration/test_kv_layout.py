"""Only caches whose layout is known are scrubbed; the others are named."""

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_mtp.config import ConfigError
from vllm_mtp.integration.worker import kv_layout

SLOTS = torch.zeros(8, dtype=torch.int64)


def layer(backend: str, cache: torch.Tensor, isa: str = "vec") -> SimpleNamespace:
    named = SimpleNamespace(get_name=lambda: backend)
    return SimpleNamespace(kv_cache=cache, get_attn_backend=lambda: named, isa=isa)


def planes(one: SimpleNamespace, cache_dtype: str = "auto") -> list:
    return kv_layout.slot_planes({"a": one}, {"a": SLOTS}, {"a": 16}, cache_dtype)


def test_every_known_backend_is_one_of_vllms() -> None:
    known = {backend.name for backend in AttentionBackendEnum}
    assert known >= kv_layout.ROW_WISE | {"CPU_ATTN"}


def test_strides_tell_token_major_from_head_major() -> None:
    heads_first = torch.zeros(4, 2, 16, 8)
    tokens_first = torch.zeros(4, 16, 2, 8).transpose(1, 2)
    assert heads_first.shape == tokens_first.shape
    (head_major,) = planes(layer("FLASH_ATTN", heads_first))
    (token_major,) = planes(layer("FLASH_ATTN", tokens_first))
    assert (head_major.num_chunks, head_major.chunk_bytes) == (2, 32)
    assert (token_major.num_chunks, token_major.chunk_bytes) == (1, 64)
    assert head_major.block_size == token_major.block_size == 16
    assert head_major.first_slot == 16


def test_latent_rows_have_no_heads() -> None:
    (plane,) = planes(layer("CPU_MLA", torch.zeros(4, 16, 576, dtype=torch.bfloat16)))
    assert plane.slot_bytes == 1152
    assert plane.num_slots == 64


@pytest.mark.parametrize(
    ("backend", "shape", "cache_dtype", "isa", "words"),
    [
        ("DEEPSEEK_V32_INDEXER", (4, 16, 132), "auto", "", "DEEPSEEK_V32_INDEXER"),
        ("FLASH_ATTN", (2, 4, 16, 2, 8), "auto", "", "cache of 5 dimensions"),
        ("FLASH_ATTN", (4, 2, 16, 8), "int8_per_token_head", "", "int8_per_token"),
        ("CPU_ATTN", (4, 2, 32, 64), "auto", "neon", "'neon'; known: vec"),
    ],
)
def test_an_unknown_layout_is_refused_with_layer_and_reason(
    backend: str, shape: tuple[int, ...], cache_dtype: str, isa: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        planes(layer(backend, torch.zeros(shape), isa), cache_dtype)
    sentence = str(caught.value)
    assert "kv_rollback='scrub'" in sentence
    assert "layer a " in sentence
    assert words in sentence


def test_recurrent_states_are_no_slots() -> None:
    state = SimpleNamespace(kv_cache=[torch.zeros(4, 8), torch.zeros(4, 8)])
    assert not kv_layout.is_slot_addressed(state)


def test_layers_of_one_allocation_share_a_storage() -> None:
    whole = torch.zeros(2, 4, 2, 16, 8)
    (storage,) = kv_layout.storages(layer("FLASH_ATTN", cache) for cache in whole)
    assert storage.numel() == whole.numel() * 4
    assert storage.data_ptr() == whole.data_ptr()
