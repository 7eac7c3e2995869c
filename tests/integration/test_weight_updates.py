"""Who has brought new weights, and what is kept while a worker sleeps."""

import pytest
import torch
from torch import nn

from vllm_mtp.integration.worker.weight_updates import (
    DRAFT,
    STEPS_BETWEEN_LOOKS,
    TARGET,
    SleepingState,
    WeightWatch,
    fingerprint,
    tensors_of,
)


class Model(nn.Module):
    """As far as loading goes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(40))

    def load_weights(self, weights: float) -> int:
        for parameter in self.parameters():
            parameter.data.fill_(weights)
        return 80


@pytest.fixture
def models() -> dict[str, Model]:
    return {TARGET: Model(), DRAFT: Model()}


@pytest.fixture
def watch(models: dict[str, Model]) -> WeightWatch:
    watch = WeightWatch()
    for part, model in models.items():
        watch.watch(part, model)
    return watch


def seen(watch: WeightWatch, num_steps: int) -> list[str]:
    return [part for _ in range(num_steps) for part in watch.take()]


@pytest.mark.parametrize("part", [TARGET, DRAFT])
def test_what_is_loaded_is_noticed_before_the_next_step(
    part: str, watch: WeightWatch, models: dict[str, Model]
) -> None:
    assert models[part].load_weights(1.0) == 80
    assert watch.take() == {part}
    assert not seen(watch, 3 * STEPS_BETWEEN_LOOKS)


@pytest.mark.parametrize("change", ["number", "order"])
def test_what_is_written_is_noticed_after_a_look(
    change: str, watch: WeightWatch, models: dict[str, Model]
) -> None:
    assert not seen(watch, 2 * STEPS_BETWEEN_LOOKS)
    for layer in models[DRAFT].layers:
        weight = layer.weight.data
        weight.copy_(weight.flip(0) if change == "order" else weight + 1e-3)
    assert seen(watch, 2 * STEPS_BETWEEN_LOOKS) == [DRAFT]
    assert not seen(watch, 3 * STEPS_BETWEEN_LOOKS)


def test_a_fingerprint_reads_a_few_numbers_of_a_few_parameters() -> None:
    found = fingerprint(Model())
    assert 10 <= len(found) <= 20
    assert len(found.unique()) == len(found)


def test_what_was_learned_survives_a_sleep() -> None:
    class Owner:
        def __init__(self) -> None:
            self.scores, self.rows = torch.rand(5), torch.arange(3)
            self.alias, self.name = self.scores, "no tensor"

    owner = Owner()
    tensors = list(tensors_of(owner, None))
    assert len(tensors) == 2
    wanted = [each.clone() for each in tensors]
    asleep = SleepingState(tensors)
    for each in tensors:
        each.fill_(7)
    asleep.restore()
    assert all(map(torch.equal, tensors, wanted))
