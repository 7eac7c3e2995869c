"""The plain-torch model: shapes, causality, and the unrolled MTP layer."""

import pytest
import torch
from torch.nn import functional as F

from examples.tiny_model.attention import rotate
from examples.tiny_model.model import MiMoModel
from examples.tiny_model.shape import ModelShape

NUM_STEPS = 3


def test_logits_have_one_row_for_each_token(
    small_model: MiMoModel, token_ids: torch.Tensor
) -> None:
    with torch.no_grad():
        logits = small_model(token_ids)
        drafts = small_model.draft_logits(token_ids, NUM_STEPS)

    assert logits.shape == (2, 20, 300)
    assert [draft.shape for draft in drafts] == [(2, 17, 300)] * NUM_STEPS


def test_no_logit_depends_on_a_later_token(
    small_model: MiMoModel, token_ids: torch.Tensor
) -> None:
    changed = token_ids.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 300

    with torch.no_grad():
        before, after = small_model(token_ids), small_model(changed)
        drafts_before = small_model.draft_logits(token_ids, NUM_STEPS)
        drafts_after = small_model.draft_logits(changed, NUM_STEPS)

    torch.testing.assert_close(before[:, :12], after[:, :12])
    assert not torch.allclose(before[:, 12], after[:, 12])
    for step, (one, other) in enumerate(zip(drafts_before, drafts_after, strict=True)):
        # Chain i has seen tokens up to i + 1 + step.
        first_changed = 12 - 1 - step
        torch.testing.assert_close(one[:, :first_changed], other[:, :first_changed])
        assert not torch.allclose(one[:, first_changed], other[:, first_changed])


def test_attention_equals_pytorch_fused_attention(
    small_model: MiMoModel, token_ids: torch.Tensor
) -> None:
    attention = small_model.mtp_layer.self_attn
    with torch.no_grad():
        qkv = attention.project(small_model.embed(token_ids), torch.arange(20))
        fused = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)

        torch.testing.assert_close(attention.causal(qkv), attention.merge(fused))


@pytest.mark.parametrize("chain", [0, 1, 7, 16])
def test_unrolled_steps_equal_a_chain_with_a_kv_cache(
    chain: int, small_model: MiMoModel, token_ids: torch.Tensor
) -> None:
    layer = small_model.mtp_layer
    with torch.no_grad():
        embeddings = small_model.embed(token_ids)
        hidden = small_model.trunk_hidden(embeddings)
        unrolled = layer.unroll(hidden, embeddings, NUM_STEPS)

        # As an engine does it: committed slots hold the trunk's hidden states,
        # and each draft step appends its own output.
        inputs = [hidden[:, slot] for slot in range(chain + 1)]
        for step in range(NUM_STEPS):
            positions = torch.arange(len(inputs))
            tokens = embeddings[:, 1 : len(inputs) + 1]
            combined = layer.combine(torch.stack(inputs, 1), tokens, positions)
            output = layer.final_layernorm(layer(combined, positions))[:, -1]
            torch.testing.assert_close(unrolled[step][:, chain], output)
            inputs.append(output)


def test_the_embedding_at_position_zero_is_masked(
    small_model: MiMoModel, token_ids: torch.Tensor
) -> None:
    with torch.no_grad():
        embeddings = small_model.embed(token_ids)
        positions = torch.arange(20)
        combined = small_model.mtp_layer.combine(embeddings, embeddings, positions)
        other = small_model.mtp_layer.combine(embeddings, -embeddings, positions)

    torch.testing.assert_close(combined[:, 0], other[:, 0])
    assert not torch.allclose(combined[:, 1], other[:, 1])


def test_rotation_depends_on_the_distance_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, generator=generator)

    def score(query_position: int, key_position: int) -> float:
        rotated_query = rotate(query, torch.tensor([query_position]), 10_000.0)
        rotated_key = rotate(key, torch.tensor([key_position]), 10_000.0)
        return float((rotated_query * rotated_key).sum())

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 33}, "hidden_size: 33 is not a multiple of num_heads"),
        ({"num_heads": 3, "hidden_size": 33}, "num_heads: 3 is not a multiple"),
        ({"hidden_size": 12}, "odd head size"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"heads": 4}, "heads"),
    ],
)
def test_impossible_shapes_are_refused(
    changes: dict[str, int], message: str, small_shape: ModelShape
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape(**(small_shape.model_dump() | changes))


def test_initial_weights_depend_on_the_seed(small_shape: ModelShape) -> None:
    models = [MiMoModel(small_shape) for _ in range(3)]
    for model, seed in zip(models, (5, 5, 6), strict=True):
        model.initialize(seed)
    first, same, other = (model.lm_head.weight for model in models)

    assert torch.equal(first, same)
    assert not torch.equal(first, other)
