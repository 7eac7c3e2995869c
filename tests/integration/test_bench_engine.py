"""What a benchmark's engine makes of a request, what it counts, and where it runs."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.engine import BenchEngine, _allowed_token_ids
from tests.support.engines import ENGINE_ARGUMENTS
from tests.support.heldout import BUNDLED_CHECKPOINT

WAVE: list[dict[str, Any]] = [
    {"prompt": [5, 6, 7], "sampling": {"temperature": 0.0, "max_tokens": 24}}
]


@pytest.fixture(scope="module")
def bench() -> Iterator[BenchEngine]:
    cores = os.sched_getaffinity(0)
    speculation = {"method": "mtp_plus", "num_speculative_tokens": 2}
    arguments = {"model": str(BUNDLED_CHECKPOINT), "speculative_config": speculation}
    engine = BenchEngine(ENGINE_ARGUMENTS | arguments)
    try:
        yield engine
    finally:
        engine.engine.engine_core.shutdown()
        # It has moved this process.
        os.sched_setaffinity(0, cores)


def test_model_runner_v2_is_given_as_many_allowed_tokens_as_it_takes() -> None:
    half = list(range(8192, 16384))
    assert _allowed_token_ids(8192, 16383, is_v2=False) == half
    assert _allowed_token_ids(8192, 16383, is_v2=True) == half[:1024]
    assert _allowed_token_ids(50, 99, is_v2=True) == list(range(50, 100))


def test_an_engine_without_a_gpu_has_captured_no_graphs(bench: BenchEngine) -> None:
    facts = bench.facts()
    assert facts["num_graphs"] == facts["num_full_graphs"] == facts["graph_bytes"] == 0


def test_an_answer_can_be_put_into_words(bench: BenchEngine) -> None:
    text = "import os\n\ndef main():"
    (ids,) = bench.tokenize([text])["token_ids"]
    assert bench.detokenize([ids, ids[:0]]) == {"texts": [text, ""]}


@pytest.mark.parametrize(
    ("cached", "num_rows"),
    [(None, [1, 1]), ([], [129, 129]), ([[9] * 128], [1, 129])],
    ids=["as it is", "nothing", "one of two"],
)
def test_a_round_may_begin_with_a_prefix_cache_that_is_the_same_for_all(
    bench: BenchEngine,
    monkeypatch: pytest.MonkeyPatch,
    cached: list[list[int]] | None,
    num_rows: list[int],
) -> None:
    """Two prompts of a block and one token: how much of each is computed."""
    waves = [
        [{"prompt": [*[token] * 128, 5], "sampling": {"max_tokens": 4}}]
        for token in (9, 10)
    ]
    bench.round(waves, concurrency=1)
    scheduler = bench.engine.engine_core.engine_core.scheduler
    schedule, computed = scheduler.schedule, []

    def recorded(*args: Any) -> Any:
        output = schedule(*args)
        rows = output.num_scheduled_tokens
        computed.extend(rows[new.req_id] for new in output.scheduled_new_reqs)
        return output

    bench.begin(waves, concurrency=1, cached=cached)
    monkeypatch.setattr(scheduler, "schedule", recorded)
    bench.step(seconds=60.0)
    bench.result()
    assert computed == num_rows


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core")
def test_a_round_begins_on_the_shared_core_wherever_turns_have_been(
    bench: BenchEngine,
) -> None:
    first, *_, last = sorted(os.sched_getaffinity(0) | bench._cores)
    for _ in range(2):
        bench.begin([WAVE], concurrency=1)
        assert os.sched_getaffinity(0) == {last}
        bench.step(core=first)
        assert os.sched_getaffinity(0) == {first}
        bench.step(seconds=60.0)
        bench.result()
