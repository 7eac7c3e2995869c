"""Expansion must not change what trunk and MTP layer compute."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from examples.tiny_model.expand import Expansion, expand_weights
from examples.tiny_model.model import MiMoModel
from examples.tiny_model.shape import ModelShape
from tests.unit.tiny_model.random_model import make_random_model

NUM_STEPS = 3
# Sums over more channels, in float32, are taken in another order.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}

KINDS = {
    "layers": Expansion(num_hidden_layers=5),
    "mlp": Expansion(intermediate_size=200),
    "hidden, a power of four": Expansion(hidden_size=128),
    "hidden, an odd factor": Expansion(hidden_size=96),
    "vocabulary": Expansion(vocab_size=512),
    "all together": Expansion(
        num_hidden_layers=3, intermediate_size=100, hidden_size=64, vocab_size=333
    ),
}


def grow(model: MiMoModel, expansion: Expansion, seed: int = 0) -> MiMoModel:
    shape = expansion.apply_to(model.shape)
    weights = expand_weights(model.state_dict(), model.shape, shape, seed=seed)
    grown = MiMoModel(shape)
    grown.load_state_dict(weights, strict=True)
    return grown.eval()


@torch.no_grad()
def assert_same_function(
    old: MiMoModel, new: MiMoModel, token_ids: torch.Tensor
) -> None:
    vocab = old.shape.vocab_size
    is_silent = new.shape.hidden_size > old.shape.hidden_size
    first_draft, *drafts = new.draft_logits(token_ids, NUM_STEPS)
    # At position 0 the MTP layer does not know the token.
    for logits in (new(token_ids), first_draft[:, 1:], *drafts):
        added = logits[..., vocab:]
        assert (added < -30).all() if is_silent else not added.any()
    torch.testing.assert_close(new(token_ids)[..., :vocab], old(token_ids), **TOLERANCE)
    for new_logits, old_logits in zip(
        new.draft_logits(token_ids, NUM_STEPS),
        old.draft_logits(token_ids, NUM_STEPS),
        strict=True,
    ):
        torch.testing.assert_close(new_logits[..., :vocab], old_logits, **TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
def test_expansion_keeps_trunk_and_mtp_logits(
    kind: str, small_model: MiMoModel, token_ids: torch.Tensor
) -> None:
    grown = grow(small_model, KINDS[kind])

    assert grown.shape != small_model.shape
    assert_same_function(small_model, grown, token_ids)


@settings(max_examples=25, deadline=None)
@given(
    more_layers=st.integers(0, 3),
    more_inner=st.integers(0, 70),
    group_factor=st.integers(2, 6),
    more_vocab=st.integers(0, 50),
    seed=st.integers(0, 1000),
)
def test_any_mix_of_expansions_keeps_the_function(
    more_layers: int, more_inner: int, group_factor: int, more_vocab: int, seed: int
) -> None:
    shape = ModelShape(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=1,
        num_heads=4,
        num_kv_heads=2,
    )
    model = make_random_model(shape, seed)
    generator = torch.Generator().manual_seed(seed)
    expansion = Expansion(
        num_hidden_layers=1 + more_layers,
        intermediate_size=20 + more_inner,
        hidden_size=8 * group_factor,
        vocab_size=50 + more_vocab,
    )
    if (more_layers, more_inner, group_factor, more_vocab) == (0, 0, 2, 0):
        return  # Nothing grows: refused, and tested below.

    grown = grow(model, expansion, seed)

    token_ids = torch.randint(50, (1, 9), generator=generator)
    assert_same_function(model, grown, token_ids)


def test_new_tokens_are_never_sampled_where_the_hidden_size_grows(
    small_model: MiMoModel, token_ids: torch.Tensor
) -> None:
    grown = grow(small_model, Expansion(hidden_size=512, vocab_size=3000))
    grown.bfloat16()  # as they are served

    with torch.no_grad():
        first_draft, *drafts = grown.draft_logits(token_ids, NUM_STEPS)
        for logits in (grown(token_ids), first_draft[:, 1:], *drafts):
            chances = logits.float().softmax(-1)[..., small_model.shape.vocab_size :]
            assert chances.sum(-1).max() < 1e-9


def test_the_head_is_as_dear_as_one_of_real_tokens(small_model: MiMoModel) -> None:
    grown = grow(small_model, Expansion(hidden_size=512, vocab_size=3000))
    rows = grown.lm_head.weight[small_model.shape.vocab_size :]
    assert rows[:, small_model.shape.hidden_size :].all()


def test_the_comparison_notices_a_missing_norm_scale(
    small_model: MiMoModel, token_ids: torch.Tensor
) -> None:
    grown = grow(small_model, Expansion(hidden_size=64))
    with torch.no_grad():
        grown.model.norm.weight.mul_(1.01)

    with pytest.raises(AssertionError):
        assert_same_function(small_model, grown, token_ids)


def test_dead_weights_are_filled_so_that_no_kernel_gains_from_zeros(
    small_model: MiMoModel,
) -> None:
    grown = grow(small_model, Expansion(num_hidden_layers=3, intermediate_size=96))

    added = grown.state_dict()["model.layers.2.mlp.gate_proj.weight"]
    widened = grown.state_dict()["model.layers.0.mlp.up_proj.weight"][48:]
    assert added.count_nonzero() == added.numel()
    assert widened.count_nonzero() == widened.numel()


def test_the_head_size_stays_when_the_hidden_size_grows(
    small_shape: ModelShape,
) -> None:
    grown = Expansion(hidden_size=128).apply_to(small_shape)

    assert grown.head_dim == small_shape.head_dim
    assert (grown.num_heads, grown.num_kv_heads) == (16, 8)
    assert grown.rms_norm_eps == pytest.approx(small_shape.rms_norm_eps / 4)


@pytest.mark.parametrize(
    ("expansion", "message"),
    [
        (Expansion(num_hidden_layers=1), "num_hidden_layers: 1 is smaller"),
        (Expansion(intermediate_size=47), "intermediate_size: 47 is smaller"),
        (Expansion(hidden_size=16), "hidden_size: 16 is smaller"),
        (Expansion(vocab_size=299), "vocab_size: 299 is smaller"),
        (Expansion(hidden_size=40), "hidden_size: 40 is not a multiple of 16"),
        (Expansion(), "no size grows"),
        (Expansion(hidden_size=32), "no size grows"),
    ],
)
def test_bad_sizes_are_refused_by_name(
    expansion: Expansion, message: str, small_shape: ModelShape
) -> None:
    with pytest.raises(ValueError, match=message):
        expansion.apply_to(small_shape)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValidationError, match="vocab_size"):
        Expansion(vocab_size=0)


def test_weights_that_do_not_fit_the_config_are_refused(
    small_model: MiMoModel, small_shape: ModelShape
) -> None:
    fewer = small_shape.model_copy(update={"num_hidden_layers": 1})

    with pytest.raises(ValueError, match="weights hold layers"):
        expand_weights(small_model.state_dict(), fewer, small_shape)
