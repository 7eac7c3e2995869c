"""Greedy output of hybrid models is the target's, with their states rolled back.

Their layers keep a recurrent state of each draft token, of which the next step needs
that of the last accepted one: in steps of any draft length, 0 included, beside prompts
in chunks, after a preemption, from the prefix cache and in a streaming session. The
kernels are those of a GPU, under Triton's interpreter, on both model runners.
"""

import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_jobs import JobResult, Jobs, run_jobs
from tests.support.families import HYBRID_FAMILIES
from tests.support.families.family import VOCAB_SIZE
from tests.support.random_checkpoints import write_checkpoint

SMALL = {
    # Of more than these, prompts are read in chunks.
    "max_num_batched_tokens": 40,
    "enable_prefix_caching": True,
}
RANDOM = {
    "speculative_config": {
        "method": "mtp_plus",
        "num_speculative_tokens": 3,
        "controller": "random",
    },
    # Too few blocks for all requests that run.
    "kv_cache_memory_bytes": 540_000,
}
RUNNERS: dict[str, dict[str, Any]] = {
    "v1": {"interpreted": True},
    "v2": {"v2": True},
}
MAX_TOKENS = 10


def prompts() -> list[list[int]]:
    """Some end shortly before a block of 32 is full: states are cached in decode."""
    numbers = random.Random(5)
    lengths = (30, 24, 44, 29, 5)
    drawn = [[numbers.randrange(VOCAB_SIZE) for _ in range(n)] for n in lengths]
    # The last one has to wait and begins with a block of one that runs.
    return [*drawn[:4], drawn[2][:36] + drawn[4]]


Run = Callable[..., JobResult]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What an engine for a family does with ``prompts()``, twice, and a session."""

    @cache
    def checkpoint(family: str) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp(family), family)

    def decode(
        family: str, engine: dict[str, Any], runner: str = "v1", **settings: Any
    ) -> JobResult:
        jobs = Jobs(
            model=str(checkpoint(family)),
            prompts=prompts(),
            max_tokens=MAX_TOKENS,
            engines=[SMALL | engine],
            num_turns=2,
            session=[prompts()[0], [1, 2, 3]],
            **RUNNERS[runner],
            **settings,
        )
        (result,) = run_jobs(jobs)
        return result

    return decode


@pytest.fixture(scope="module")
def expected(run: Run) -> Callable[[str], list[list[int]]]:
    """Without speculation, of whichever runner it is asked."""
    return cache(lambda family: run(family, {}).continuations)


@pytest.mark.parametrize(
    ("family", "runner"),
    # The runners differ in what they do with states, not with whose.
    [
        *((family, "v2") for family in HYBRID_FAMILIES if family != "qwen3_5"),
        ("qwen3_next", "v1"),
        # Its recurrent layers are Qwen3-Next's.
        pytest.param("qwen3_5", "v2", marks=pytest.mark.long),
    ],
)
def test_greedy_output_equals_no_speculation(
    family: str, runner: str, run: Run, expected: Callable[[str], list[list[int]]]
) -> None:
    result = run(family, RANDOM | {"async_scheduling": runner == "v2"}, runner)
    plain = expected(family)
    # Not only "the current token plus one".
    steps = [b - a for answer in plain for a, b in pairwise(answer)]
    assert steps.count(1) < 0.9 * len(steps)
    counters = result.counters
    assert 0.2 < counters["accepted_tokens"] / counters["draft_tokens"] < 0.9
    assert result.num_preemptions > 0
    assert result.num_cached_tokens > 0
    assert result.continuations == plain


@pytest.mark.parametrize(
    ("fault", "runner"),
    [
        ("accepted_drafts_are_forgotten", "v1"),
        ("one_rejected_draft_counts", "v2"),
        pytest.param(
            "states_stay_behind_at_the_end_of_a_block", "v2", marks=pytest.mark.long
        ),
    ],
)
def test_a_wrong_state_changes_the_output(
    fault: str, runner: str, run: Run, expected: Callable[[str], list[list[int]]]
) -> None:
    result = run("qwen3_next", RANDOM, runner, fault=fault)
    assert result.continuations != expected("qwen3_next")
