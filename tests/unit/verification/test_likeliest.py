"""The likeliest token by blocks is the one that a plain search finds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtp.verification import likeliest
from vllm_mtp.verification.likeliest import likeliest_tokens

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def first_of_the_largest(logits: torch.Tensor) -> torch.Tensor:
    values = logits.float().tolist()
    return torch.tensor([row.index(max(row)) for row in values], dtype=torch.int64)


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    num_rows=st.integers(0, 4),
    vocab_size=st.sampled_from([128, 256, 384, 512, 1000, 1280]),
    num_values=st.sampled_from([1, 2, 7, 1 << 20]),
    seed=st.integers(0, 1 << 20),
)
def test_it_is_the_first_of_the_largest(
    dtype: torch.dtype, num_rows: int, vocab_size: int, num_values: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_rows, vocab_size)
    logits = torch.randint(num_values, shape, generator=generator).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likeliest, "_MIN_VOCAB_SIZE", 1)
        found = likeliest_tokens(logits)
    assert found.dtype == torch.int64
    assert torch.equal(found, first_of_the_largest(logits))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_no_numbers_are_ranked_as_by_torch(value: float) -> None:
    logits = torch.randn(3, 1 << 14)
    logits[0, [700, 9000]] = value
    logits[1] = value
    assert torch.equal(likeliest_tokens(logits), logits.argmax(dim=-1))


def test_rows_may_be_part_of_wider_ones() -> None:
    wide = torch.randn(6, (1 << 14) + 64)
    logits = wide[::2, : 1 << 14]
    assert torch.equal(likeliest_tokens(logits), logits.argmax(dim=-1))


def test_large_vocabularies_are_searched_by_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []
    plain = likeliest._by_blocks

    def note(logits: torch.Tensor) -> torch.Tensor:
        sizes.append(tuple(logits.shape[1:]))
        return plain(logits)

    monkeypatch.setattr(likeliest, "_by_blocks", note)
    for vocab_size in (32_000, 131_072, 151_936, 50_257, 4096):
        likeliest_tokens(torch.zeros(2, vocab_size))
    assert sizes == [(125, 256), (512, 256), (1187, 128)]
