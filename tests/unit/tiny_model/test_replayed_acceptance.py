"""Replayed acceptance against speculation really run, token by token."""

import pytest
import torch

from examples.tiny_model.evaluate import (
    AcceptanceCount,
    generate,
    replay_acceptance,
    teacher_forced_agreement,
)
from examples.tiny_model.model import MiMoModel

K = 3
PROMPTS = [[5, 17, 230, 4], [9, 8], [250] * 7]


def speculate_greedily(
    model: MiMoModel, prompt: list[int], max_tokens: int
) -> tuple[list[int], AcceptanceCount]:
    """Drafts and verifies as an engine does, with no shortcut."""
    ids = [*prompt, int(model(torch.tensor([prompt]))[0, -1].argmax())]
    num_drafts, accepted = 0, [0] * K
    while len(ids) + K <= max_tokens:
        drafts = []
        for step in range(K):
            # Only the chain that starts at the last committed token counts; the
            # padding is beyond what any of its steps has seen.
            known = torch.tensor([[*ids, *drafts, *[0] * (K - step)]])
            logits = model.draft_logits(known, K)[step][0, len(ids) - 2]
            drafts.append(int(logits.argmax()))
        choices = model(torch.tensor([[*ids, *drafts]]))[0].argmax(-1).tolist()
        targets = choices[len(ids) - 1 :]
        survived = 0
        while survived < K and drafts[survived] == targets[survived]:
            accepted[survived] += 1
            survived += 1
        num_drafts += 1
        ids += targets[: survived + 1]
    return ids, AcceptanceCount(num_drafts, tuple(accepted))


@torch.no_grad()
def make_mtp_layer_right_sometimes(model: MiMoModel) -> MiMoModel:
    """A trunk of one token's memory, and an MTP layer that mostly knows it.

    With silent layers the trunk's next token depends on the last one alone,
    and an MTP layer that passes the embedding on drafts the same.
    """
    copy = MiMoModel(model.shape)
    copy.load_state_dict(model.state_dict())
    size = model.shape.hidden_size
    for layer in copy.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    layer = copy.mtp_layer
    noise = layer.input_proj.weight[:, size:].clone()
    layer.input_proj.weight.zero_()
    layer.input_proj.weight[:, size:] = torch.eye(size) + 0.25 * noise
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    layer.token_layernorm.weight.fill_(1)
    layer.final_layernorm.weight.copy_(copy.model.norm.weight)
    return copy.eval()


@pytest.fixture(scope="module")
def model(small_model: MiMoModel) -> MiMoModel:
    return make_mtp_layer_right_sometimes(small_model)


@torch.no_grad()
def test_generation_equals_one_prompt_at_a_time(model: MiMoModel) -> None:
    together = generate(model, PROMPTS, max_new_tokens=8, temperature=0, seed=0)

    for prompt, text in zip(PROMPTS, together, strict=True):
        ids = list(prompt)
        for _ in range(8):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        assert text == ids


@torch.no_grad()
def test_replay_counts_what_real_speculation_accepts(model: MiMoModel) -> None:
    texts = generate(model, PROMPTS, max_new_tokens=24, temperature=0, seed=0)

    num_drafts, accepted = 0, torch.zeros(K, dtype=torch.long)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        ids, count = speculate_greedily(model, prompt, len(text))
        assert ids == text[: len(ids)]
        num_drafts += count.num_drafts
        accepted += torch.tensor(count.num_accepted_per_pos)
    replayed = replay_acceptance(
        model,
        texts,
        [len(prompt) for prompt in PROMPTS],
        num_steps=K,
        method="greedy",
        temperature=0,
    )

    assert replayed == AcceptanceCount(num_drafts, tuple(accepted.tolist()))
    assert 0 < sum(replayed.num_accepted_per_pos) < K * replayed.num_drafts


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_probabilistic_drafts_are_accepted_as_often_as_the_overlap_says(
    model: MiMoModel, temperature: float
) -> None:
    prompts = [[5, 17, 230, token] for token in range(150)]
    texts = generate(model, prompts, max_new_tokens=16, temperature=temperature, seed=3)

    count = replay_acceptance(
        model,
        texts,
        [4] * len(prompts),
        num_steps=1,
        method="probabilistic",
        temperature=temperature,
    )

    expected = mean_overlap(model, texts, temperature)
    # About 1,500 drafts: a standard error of at most 0.013.
    assert count.acceptance_per_pos[0] == pytest.approx(expected, abs=0.05)


@torch.no_grad()
def mean_overlap(model: MiMoModel, texts: list[list[int]], temperature: float) -> float:
    """Mean of sum_x min(p(x), q(x)) over the continued part of the texts."""
    ids = torch.tensor(texts)
    target = (model(ids) / temperature).softmax(-1)[:, 1:]
    (logits,) = model.draft_logits(ids, 1)
    draft = (logits / temperature).softmax(-1)
    return float(torch.minimum(target, draft).sum(-1)[:, 3:-1].mean())


def test_acceptance_length_is_one_plus_the_survival_probabilities() -> None:
    count = AcceptanceCount(10, (8, 4, 2))

    assert count.acceptance_per_pos == [0.8, 0.4, 0.2]
    assert count.acceptance_length == pytest.approx(2.4)


def test_probabilistic_drafts_at_temperature_zero_are_refused(
    model: MiMoModel,
) -> None:
    with pytest.raises(ValueError, match="temperature above 0"):
        replay_acceptance(
            model, [], [], num_steps=K, method="probabilistic", temperature=0
        )


@torch.no_grad()
def test_agreement_is_one_for_a_layer_that_copies_the_trunk(
    small_model: MiMoModel, token_ids: torch.Tensor
) -> None:
    model = make_mtp_layer_right_sometimes(small_model)
    size = model.shape.hidden_size
    partial = teacher_forced_agreement(model, token_ids, K)
    model.mtp_layer.input_proj.weight[:, size:] = torch.eye(size)

    # Slot 0's embedding is masked, so the first chain's first step may miss.
    perfect = teacher_forced_agreement(model, token_ids, K)

    assert perfect[1:] == [1.0, 1.0]
    assert perfect[0] >= 16 / 17
    assert 0 < partial[0] < perfect[0]
