"""The likeliest token of a head is found by way of 8 bits, whatever rounding does."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtp.verification.prefilter import (
    BLOCK_TOKENS,
    Int8Prefilter,
    RoundingNorms,
    rounding_norms,
    row_order,
)

VOCAB_SIZE, HIDDEN_SIZE = 1000, 64


def rounded(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in 8 bits and their scales."""
    scales = rows.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / 127
    return (rows.float() / scales).round().to(torch.int8), scales


ROUNDOFF = 1.01 * 2.0**-8
"""Of products in bfloat16."""


def prefilter_of(weight: torch.Tensor, roundoff: float = 0.0) -> Int8Prefilter:
    token_ids = row_order(weight)
    rows, scales = rounded(weight[token_ids])
    norms = rounding_norms(weight[token_ids], rows, scales)

    def multiply(x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        tokens, token_scales = rounded(x)
        sums = tokens.double() @ rows.double().t()
        products = sums.float() * token_scales * scales.t()
        product.copy_(products.bfloat16() if roundoff else products)
        return (x - tokens.float() * token_scales).norm(dim=1)

    return Int8Prefilter(multiply, norms, token_ids, weight, roundoff)


def found(weight: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """Logits of a new prefilter that never needs the whole head."""
    return prefilter_of(weight).logits(hidden_states, never)


def never(hidden_states: torch.Tensor) -> torch.Tensor:
    raise AssertionError(f"{len(hidden_states)} rows are left to the whole head")


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def pointing(weight: torch.Tensor, token_ids: torch.Tensor, seed: int) -> torch.Tensor:
    """Hidden states for which some tokens stand out, more or less."""
    direction = torch.nn.functional.normalize(weight[token_ids].float())
    noise = torch.nn.functional.normalize(random(*direction.shape, seed=seed))
    return 20 * (0.7 * direction + noise)


@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(1, 700),
    num_tokens=st.sampled_from([1, 3, 70]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    sizes=st.sampled_from([0.0, 1.0, 3.0]),
    outlier=st.sampled_from([1.0, 40.0]),
    roundoff=st.sampled_from([0.0, ROUNDOFF]),
)
@settings(deadline=None, max_examples=120)
def test_no_token_that_may_be_the_likeliest_is_ruled_out(
    seed: int,
    vocab_size: int,
    num_tokens: int,
    dtype: torch.dtype,
    sizes: float,
    outlier: float,
    roundoff: float,
) -> None:
    weight = random(vocab_size, HIDDEN_SIZE, seed=seed)
    weight *= (sizes * random(vocab_size, 1, seed=seed + 1)).exp()
    weight[:, 3] *= outlier
    weight = weight.to(dtype)
    token_ids = torch.arange(num_tokens) % vocab_size
    hidden_states = pointing(weight, token_ids, seed + 2).to(dtype)
    num_whole = 0

    def whole(some: torch.Tensor) -> torch.Tensor:
        nonlocal num_whole
        num_whole += len(some)
        return (some.float() @ weight.float().t()).to(dtype)

    prefilter = prefilter_of(weight, roundoff)
    logits = prefilter.logits(hidden_states, whole)
    assert not prefilter.is_stale
    if logits is None:
        return
    assert logits.shape == (num_tokens, vocab_size)
    assert 2 * num_whole <= num_tokens
    exact = hidden_states.double() @ weight.double().t()
    wanted = exact.to(dtype)  # as the target has them
    is_best = wanted == wanted.amax(dim=1, keepdim=True)
    assert (logits[is_best] > -torch.inf).all()
    is_kept = logits > -torch.inf
    of_sums = HIDDEN_SIZE * 2.0**-24 * hidden_states.norm(dim=1).amax()
    slack = torch.finfo(dtype).eps * exact.abs().amax()
    slack += of_sums * weight.float().norm(dim=1).amax()
    assert (logits[is_kept] - exact[is_kept]).abs().max() <= slack


def test_nearly_all_tokens_are_ruled_out() -> None:
    weight = random(VOCAB_SIZE, HIDDEN_SIZE)
    logits = found(weight, pointing(weight, torch.arange(40), 1))
    assert logits is not None
    assert int((logits > -torch.inf).sum()) < 3 * 40


def rounded_weights_mislead() -> tuple[torch.Tensor, torch.Tensor]:
    """Token 7 is the likeliest and rounded down, half of token 99 is rounded up."""
    steps = torch.full((BLOCK_TOKENS, HIDDEN_SIZE), -90.0)
    steps[7] = 60.45
    steps[99, ::2], steps[99, 1::2] = 60.55, 60.2
    steps[:, 0] = 127.0  # so a step is 1 / 127
    hidden_states = torch.ones(1, HIDDEN_SIZE)
    hidden_states[0, 0] = 0.0
    return steps / 127, hidden_states


def rounded_hidden_states_mislead() -> tuple[torch.Tensor, torch.Tensor]:
    """What token 7 reads is rounded down, half of what token 99 reads is rounded up."""
    weight = torch.full((BLOCK_TOKENS, HIDDEN_SIZE), -1.0)
    weight[7], weight[99] = 0.0, 0.0
    weight[7, 1:21] = weight[99, 21:41] = 1.0
    steps = torch.zeros(1, HIDDEN_SIZE)
    steps[0, 0], steps[0, 1:21] = 127.0, 60.45
    steps[0, 21:31], steps[0, 31:41] = 60.55, 60.2
    return weight, steps / 127


@pytest.mark.parametrize(
    "case", [rounded_weights_mislead, rounded_hidden_states_mislead]
)
def test_the_head_decides_between_tokens_that_8_bits_confuse(
    case: Callable[[], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    weight, hidden_states = case()
    (rows, scales), (tokens, token_scales) = rounded(weight), rounded(hidden_states)
    in_8_bits = (rows.float() * scales) @ (tokens.float() * token_scales).t()
    assert in_8_bits.argmax() == 99, "or this shows nothing"
    logits = found(weight, hidden_states)
    assert logits is not None
    assert logits.argmax() == 7


def test_products_that_were_rounded_mislead() -> None:
    """Tokens 7 and 99 differ by less than bfloat16 can say."""
    weight = torch.full((BLOCK_TOKENS, HIDDEN_SIZE), -1.0)
    weight[7], weight[99] = 1.0, 1.0
    weight[99, :3] = 126 / 127
    hidden_states = torch.full((1, HIDDEN_SIZE), 1.0)
    rows, scales = rounded(weight)
    products = ((hidden_states @ rows.float().t()) * scales.t()).bfloat16()
    assert products[0, 7] == products[0, 99], "or this shows nothing"
    logits = prefilter_of(weight, ROUNDOFF).logits(hidden_states, never)
    assert logits is not None
    assert (logits > -torch.inf).nonzero()[:, 1].tolist() == [7, 99]
    assert logits.argmax() == 7


def test_products_that_were_rounded_apart_rule_nothing_out() -> None:
    """Token 7 is the likeliest; the copy has it below 64.25, which bfloat16 makes 64.0,
    and token 200, in another block, above, which it makes 64.5."""
    weight = torch.zeros(2 * BLOCK_TOKENS, HIDDEN_SIZE)
    weight[7, 0], weight[200, 0] = 64.26, 64.24
    in_8_bits = weight[:, 0].clone()
    in_8_bits[7], in_8_bits[200] = 64.245, 64.255

    def multiply(x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        product.copy_(in_8_bits.bfloat16())
        return torch.zeros(len(x))

    token_ids = torch.arange(len(weight))
    norms = RoundingNorms(torch.full((len(weight),), 0.02), weight.norm(dim=1))
    prefilter = Int8Prefilter(multiply, norms, token_ids, weight, ROUNDOFF)
    logits = prefilter.logits(torch.eye(1, HIDDEN_SIZE), never)
    assert logits is not None
    assert (logits > -torch.inf).nonzero()[:, 1].tolist() == [7, 200]
    assert logits.argmax() == 7


def test_of_equal_tokens_the_first_one_stays_the_likeliest() -> None:
    weight = random(VOCAB_SIZE, HIDDEN_SIZE)
    weight[[950, 411]] = weight[30].clone()
    logits = found(weight, pointing(weight, torch.tensor([411]), 1))
    assert logits is not None
    assert (logits > -torch.inf).nonzero()[:, 1].tolist() == [30, 411, 950]
    assert logits.argmax() == 30


def test_rows_that_fill_the_last_block_are_no_tokens() -> None:
    weight = -random(BLOCK_TOKENS + 1, HIDDEN_SIZE).abs()
    hidden_states = torch.ones(2, HIDDEN_SIZE)
    weight[-1] = -0.01  # even this logit is negative: rows of zeros would be likelier
    logits = found(weight, hidden_states)
    assert logits is not None
    assert logits.shape == (2, BLOCK_TOKENS + 1)
    assert logits.argmax(dim=1).tolist() == [BLOCK_TOKENS] * 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_rows_that_say_nothing_are_left_to_the_whole_head(value: float) -> None:
    """Not finite, or all tokens equal."""
    weight = random(100 * BLOCK_TOKENS, HIDDEN_SIZE)
    hidden_states = pointing(weight, torch.arange(3), 1)
    hidden_states[1] = value
    asked = []

    def whole(some: torch.Tensor) -> torch.Tensor:
        asked.append(some)
        return some @ weight.t()

    logits = prefilter_of(weight).logits(hidden_states, whole)
    assert logits is not None
    assert torch.equal(torch.cat(asked), hidden_states[1:2]) or value != 0.0
    assert len(torch.cat(asked)) == 1
    wanted = hidden_states[1] @ weight.t()
    assert torch.equal(logits[1].nan_to_num(7.0), wanted.nan_to_num(7.0))
    best = (hidden_states @ weight.t()).argmax(dim=1)
    for row in (0, 2):
        assert logits[row].argmax() == best[row]


def test_where_most_rows_say_nothing_prefiltering_is_no_use() -> None:
    weight = random(100 * BLOCK_TOKENS, HIDDEN_SIZE)
    prefilter = prefilter_of(weight)
    assert prefilter.logits(torch.zeros(2, HIDDEN_SIZE), never) is None
    assert not prefilter.is_stale


def test_weights_that_changed_are_noticed() -> None:
    weight = random(VOCAB_SIZE, HIDDEN_SIZE)
    hidden_states = pointing(weight, torch.arange(4), 1)
    prefilter = prefilter_of(weight)
    assert prefilter.logits(hidden_states, never) is not None
    assert not prefilter.is_stale
    weight *= 1.2
    assert prefilter.logits(hidden_states, never) is None
    assert prefilter.is_stale


def test_nothing_is_left_of_the_call_before() -> None:
    weight = random(VOCAB_SIZE, HIDDEN_SIZE)
    prefilter = prefilter_of(weight)
    for num_tokens in (5, 3, 80, 2):
        hidden_states = pointing(weight, torch.arange(num_tokens) * 7, num_tokens)
        logits = prefilter.logits(hidden_states, never)
        assert logits is not None
        alone = found(weight, hidden_states)
        assert alone is not None
        assert torch.equal(logits, alone)
