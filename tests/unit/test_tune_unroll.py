"""Drafts from every position at once are the drafts made one by one."""

import pytest
import torch

from tests.support.tuning import random_drafter, random_target
from vllm_mtp.tune.attention import Chain
from vllm_mtp.tune.unroll import Batch, Drafter, draft_losses, step_weights

LENGTH, NUM_STEPS = 9, 3
NUM_LAYERS = pytest.mark.parametrize("num_layers", [1, 3])


def batch(lengths: tuple[int, ...] = (LENGTH,)) -> Batch:
    torch.manual_seed(2)
    size = (len(lengths), max(lengths))
    positions = torch.arange(size[1]).expand(size)
    return Batch(
        torch.randint(20, size),
        torch.randn(*size, 16),
        positions,
        torch.tensor(lengths),
    )


@NUM_LAYERS
def test_each_draft_is_as_if_it_were_alone(num_layers: int) -> None:
    made, trunk, texts = random_drafter(num_layers), random_target(), batch()
    whole = made(trunk, texts, NUM_STEPS)[:, 0]
    embeddings = trunk.embed(texts.token_ids)
    for start in range(LENGTH - NUM_STEPS):
        chains = [Chain() for _ in range(num_layers)]
        rows = slice(0, start + 1)
        previous = texts.hidden[:, rows]
        for step in range(NUM_STEPS):
            tokens = embeddings[:, step + 1 : step + start + 2]
            number, moved = (0, step) if num_layers == 1 else (step, 0)
            normed, previous = made.layers[number](
                previous, tokens, texts.positions[:, rows] + moved, chains[number]
            )
            torch.testing.assert_close(whole[step, start], normed[0, -1])


def test_a_draft_knows_nothing_of_what_follows() -> None:
    made, trunk, texts = random_drafter(), random_target(), batch()
    before = made(trunk, texts, NUM_STEPS)[:, 0]
    start = 3
    later = texts.token_ids.clone()
    later[:, start + NUM_STEPS + 1 :] = 0
    hidden = texts.hidden.clone()
    hidden[:, start + 1 :] = 0
    after = made(trunk, texts._replace(token_ids=later, hidden=hidden), NUM_STEPS)[:, 0]
    torch.testing.assert_close(after[:, : start + 1], before[:, : start + 1])
    assert not torch.allclose(after[:, start + 1], before[:, start + 1])


def losses_of(made: Drafter, texts: Batch) -> torch.Tensor:
    weights = step_weights(NUM_STEPS, 0.8)
    mean = torch.full((NUM_STEPS,), 0.5)
    return draft_losses(made, random_target(), texts, "lk", weights, mean).total


def test_padding_changes_nothing() -> None:
    short, long = batch((7,)), batch((7, LENGTH))
    padded = Batch(*(each.clone() for each in long))
    padded.token_ids[0, :7], padded.hidden[0, :7] = short.token_ids, short.hidden
    alone = Batch(*(each[1:] for each in padded))
    drafts = [7 - NUM_STEPS, LENGTH - NUM_STEPS]
    parts = [losses_of(random_drafter(), short), losses_of(random_drafter(), alone)]
    mean = sum(n * part for n, part in zip(drafts, parts, strict=True)) / sum(drafts)
    torch.testing.assert_close(losses_of(random_drafter(), padded), mean)


def test_only_mtp_layers_learn_and_all_of_them() -> None:
    made, trunk = random_drafter(3), random_target()
    weights, mean = step_weights(NUM_STEPS, 0.8), torch.full((NUM_STEPS,), 0.5)
    draft_losses(made, trunk, batch(), "lk", weights, mean).total.backward()
    assert all(p.grad is not None and p.grad.any() for p in made.parameters())
    assert not any(each.requires_grad for each in trunk.parameters())
    assert not any(each.requires_grad for each in (trunk.embedding, trunk.head.weight))


def test_activations_that_are_computed_again_have_the_same_gradients() -> None:
    gradients = []
    for checkpoints in (False, True):
        made = random_drafter(3, checkpoints)
        losses_of(made, batch((7, LENGTH))).backward()
        gradients.append([parameter.grad for parameter in made.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
