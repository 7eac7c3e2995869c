"""Timers around a runner's methods are gone after the split, and nothing else is."""

from types import SimpleNamespace
from typing import Any

from benchmarks.step_split import DRAFT, VERIFY, timed_parts


class Runner:
    """What of vLLM's model runner is timed."""

    def __init__(self) -> None:
        self.model = SimpleNamespace(compute_logits=len)
        self.drafter = SimpleNamespace(propose=len)
        self.num_told = 0

    def _model_forward(self) -> str:
        return "hidden states"

    def _sample(self) -> str:
        return "tokens"


def wrap_as_our_plugin_does(runner: Any) -> None:
    sample = runner._sample

    def sample_and_tell() -> str:
        runner.num_told += 1
        return str(sample())

    runner._sample = sample_and_tell


def test_wrappers_of_the_plugin_survive() -> None:
    runner = Runner()
    wrap_as_our_plugin_does(runner)
    before = dict(vars(runner)), dict(vars(runner.model)), dict(vars(runner.drafter))

    with timed_parts(runner) as parts:
        assert runner._sample() == "tokens"
        assert runner._model_forward() == "hidden states"
        assert runner.drafter.propose([1]) == 1

    assert parts is not None
    assert parts.seconds[VERIFY] > 0
    assert parts.seconds[DRAFT] > 0
    assert runner.num_told == 1
    assert runner._sample() == "tokens"
    assert runner.num_told == 2, "the plugin is still told"
    after = dict(vars(runner)), dict(vars(runner.model)), dict(vars(runner.drafter))
    assert after[0] == before[0] | {"num_told": 2}
    assert after[1:] == before[1:]


def test_a_runner_that_cannot_be_timed_has_no_split() -> None:
    with timed_parts(object()) as parts:
        assert parts is None
