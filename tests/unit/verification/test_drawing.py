"""One number draws a token: as often as its weight says, and never one without any."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import chisquare

from vllm_mtp.verification.drawing import draw

NUM_DRAWS = 100_000
JUST_BELOW_ONE = np.nextafter(1.0, 0.0)
SIGNIFICANCE = 1e-4


def test_tokens_come_as_often_as_their_weights_say() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(3, 40, generator=generator) ** 4
    weights[1, ::2] = 0.0
    uniforms = torch.rand(3 * NUM_DRAWS, dtype=torch.double, generator=generator)
    drawn = draw(weights.repeat_interleave(NUM_DRAWS, dim=0), uniforms)
    for row, tokens in zip(weights, drawn.view(3, -1), strict=True):
        counts = torch.bincount(tokens, minlength=40).numpy()
        wanted = (row / row.sum()).double().numpy()
        assert not counts[wanted == 0].any()
        counts, wanted = counts[wanted > 0], wanted[wanted > 0]
        expected = wanted / wanted.sum() * NUM_DRAWS
        assert chisquare(counts, expected).pvalue > SIGNIFICANCE


def test_a_small_share_of_a_large_vocabulary_is_not_rounded_away() -> None:
    """In float32 the sum stands still where single shares are below its last bit."""
    weights = torch.full((1, 1 << 18), 2.0**-26)
    weights[0, 0] = 1.0
    rest = (2**18 - 1) * 2.0**-26
    uniforms = torch.tensor([(1.0 + 0.75 * rest) / (1.0 + rest)], dtype=torch.double)
    (found,) = draw(weights, uniforms).tolist()
    assert found == pytest.approx(0.75 * 2**18, rel=0.001)


@given(
    weights=arrays(
        np.float32,
        (1, 9),
        elements=st.one_of(st.just(0.0), st.floats(2.0**-40, 2.0**40, width=32)),
    ),
    uniform=st.one_of(
        st.floats(0.0, 1.0, exclude_max=True), st.sampled_from([0.0, JUST_BELOW_ONE])
    ),
)
def test_a_token_without_weight_is_never_drawn(
    weights: np.ndarray, uniform: float
) -> None:
    uniforms = torch.tensor([uniform], dtype=torch.double)
    (token,) = draw(torch.from_numpy(weights), uniforms).tolist()
    assert weights[0, token] > 0 or (not weights.any() and token == 0)


@pytest.mark.parametrize("num_tokens", [1025, 1280])
def test_a_large_vocabulary_is_looked_up_in_blocks_like_a_small_one(
    num_tokens: int,
) -> None:
    """Whole blocks without weight, single tokens, ends of blocks and of the row."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(64, num_tokens, generator=generator) ** 8
    weights[torch.rand(weights.shape, generator=generator) < 0.7] = 0.0
    weights[::2, 128:512] = 0.0
    weights[1::4, :1000] = 0.0
    weights[3] = 0.0
    weights[5] = 0.0
    weights[5, 700] = 1.0
    uniforms = torch.rand(64, dtype=torch.double, generator=generator)
    uniforms[8:16], uniforms[16:24] = 0.0, JUST_BELOW_ONE
    ends = weights.double().numpy().cumsum(axis=1)
    for row, token in enumerate(draw(weights, uniforms).tolist()):
        if row == 3:
            assert token == 0
            continue
        assert weights[row, token] > 0
        wanted = float(uniforms[row]) * ends[row, -1]
        # Blocks are summed up in float32, as the weights themselves are rounded.
        assert ends[row, token] >= wanted * (1 - 2e-7)
        assert ends[row, token] - weights[row, token].item() <= wanted * (1 + 2e-7)


def test_what_is_no_number_stays_in_the_vocabulary() -> None:
    for num_tokens in (5, 1025):
        weights = torch.full((2, num_tokens), float("nan"))
        tokens = draw(weights, torch.tensor([0.0, 0.9], dtype=torch.double))
        assert ((tokens >= 0) & (tokens < num_tokens)).all()
