"""Greedy output is the target's on Model Runner V2, async, and with parallel ranks.

Each runs in a fresh process: the interpreter, the runner and the process groups are
chosen once per process.
"""

import pytest

from tests.e2e.small_jobs import small_jobs
from tests.support.engine_jobs import JobResult, run_jobs
from tests.support.shown_rounds import check_rounds

FIXED = {"method": "mtp_plus", "controller": "fixed", "show_rounds": 8}
RANDOM = {
    "method": "mtp_plus",
    "num_speculative_tokens": 5,
    "controller": "random",
    "show_rounds": 8,
}
ASKS_MUCH = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "logit_bias": {i: 2.0 if i % 3 else -4.0 for i in range(300, 900)},
    "min_tokens": 5,
    "bad_words": ["def", "return"],
}
"""Of the logits, before the likeliest token is looked for."""
NUM_TOKENS = 96
NUM_V2_PROMPTS, NUM_V2_TOKENS = 4, 20
"""Under Triton's interpreter, which takes its time for each request."""


def expected_of_v2(plain: list[list[int]]) -> list[list[int]]:
    """Of its shorter job of fewer prompts."""
    return [text[:NUM_V2_TOKENS] for text in plain[:NUM_V2_PROMPTS]]


def check_speculated(result: JobResult, scheduler: str, drafter: str) -> None:
    assert result.scheduler == scheduler
    assert result.drafter == drafter
    counters = result.counters
    assert 0 < counters["accepted_tokens"] < counters["draft_tokens"]


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """What the target says, of whichever runner it is asked."""
    (result,) = run_jobs(small_jobs([{}], max_tokens=NUM_TOKENS))
    return result.continuations


@pytest.fixture(scope="module")
def v2() -> dict[str, JobResult]:
    engines = {
        "fixed": {"speculative_config": FIXED},
        # Last: from here on this process schedules async.
        "async": {"speculative_config": RANDOM, "async_scheduling": True},
    }
    settings = {"max_tokens": NUM_V2_TOKENS, "v2": True}
    results = run_jobs(small_jobs(list(engines.values()), NUM_V2_PROMPTS, **settings))
    return dict(zip(engines, results, strict=True))


def test_v2_equals(v2: dict[str, JobResult], plain: list[list[int]]) -> None:
    check_speculated(v2["fixed"], "MTPPlusScheduler", "MTPPlusSpeculator")
    assert v2["fixed"].continuations == expected_of_v2(plain)
    assert v2["fixed"].num_compared_steps >= NUM_V2_TOKENS / 4


@pytest.mark.parametrize("name", ["fixed", "async"])
def test_rounds_shown_of_v2_add_up_to_its_texts_and_its_counters(
    v2: dict[str, JobResult], name: str
) -> None:
    requests = check_rounds(v2[name])
    assert len(requests) == NUM_V2_PROMPTS, "each of so few is noted"
    assert v2[name].notes_rounds
    for counter, field in (
        ("draft_tokens", "num_draft_tokens"),
        ("accepted_tokens", "num_accepted_tokens"),
        ("drafts", "num_drafts"),
    ):
        total = sum(getattr(request.sums, field) for request in requests)
        assert total == v2[name].counters[counter], counter


def test_v2_equals_where_requests_ask_much_of_their_logits() -> None:
    settings = {"max_tokens": NUM_V2_TOKENS, "v2": True, "sampling": ASKS_MUCH}
    without_rounds = RANDOM | {"show_rounds": 0}
    engines = [{}, {"speculative_config": without_rounds}]
    plain, ours = run_jobs(small_jobs(engines, NUM_V2_PROMPTS, **settings))
    check_speculated(ours, "MTPPlusScheduler", "MTPPlusSpeculator")
    assert ours.num_compared_steps >= NUM_V2_TOKENS / 6
    assert plain.num_compared_steps == 0
    assert ours.continuations == plain.continuations
    assert not ours.notes_rounds, "unless somebody asks, no token is kept"


def test_v2_with_async_scheduling_equals(
    v2: dict[str, JobResult], plain: list[list[int]]
) -> None:
    check_speculated(v2["async"], "MTPPlusAsyncScheduler", "MTPPlusSpeculator")
    assert v2["async"].continuations == expected_of_v2(plain)


def test_v1_with_async_scheduling_equals(plain: list[list[int]]) -> None:
    config = {"speculative_config": RANDOM, "async_scheduling": True}
    (asynchronous,) = run_jobs(small_jobs([config], max_tokens=NUM_TOKENS))
    check_speculated(asynchronous, "MTPPlusAsyncScheduler", "MTPPlusProposer")
    assert asynchronous.continuations == plain
    check_rounds(asynchronous)


def test_tensor_parallel_2_equals(plain: list[list[int]]) -> None:
    parallel = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "speculative_config": RANDOM,
    }
    (randomized,) = run_jobs(
        small_jobs(
            [parallel],
            max_tokens=48,
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        )
    )
    check_speculated(randomized, "MTPPlusScheduler", "")
    assert randomized.continuations == [text[:48] for text in plain]
    check_rounds(randomized)


def test_v2_with_pipeline_parallel_2_equals(plain: list[list[int]]) -> None:
    """vLLM 0.32 wants async scheduling for drafts of pipeline-parallel ranks."""
    parallel = {
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "speculative_config": RANDOM,
        "async_scheduling": True,
    }
    settings = {
        "max_tokens": NUM_V2_TOKENS,
        "v2": True,
        "script": [3, 1, 0, 0, 0, 2],
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    }
    (result,) = run_jobs(small_jobs([parallel], NUM_V2_PROMPTS, **settings), 200)
    check_speculated(result, "MTPPlusAsyncScheduler", "")
    assert {drafted for step in result.accepted for _, drafted, _ in step} == {1, 2, 3}
    assert result.continuations == expected_of_v2(plain)
    check_rounds(result)
