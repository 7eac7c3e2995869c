"""Whose rounds the scheduler notes, and what of them reaches the front end."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_mtp.integration.observe.stat_logger import take_stats
from vllm_mtp.integration.observe.step_metrics import ROUNDS_KEY, STATS_KEY
from vllm_mtp.integration.scheduler.messages import (
    NOTHING,
    Choice,
    DraftedTokens,
    WorkerReport,
)
from vllm_mtp.integration.scheduler.rounds import MAX_AT_ONCE, RoundNotes
from vllm_mtp.metrics.stats import SpeculationStats
from vllm_mtp.page.rounds import (
    MAX_PROMPT_TOKENS,
    MAX_ROUNDS,
    RecentRequests,
)

REQUEST = "cmpl-1-0123abcd"


class Request:
    """What is read of vLLM's."""

    def __init__(self, name: str, **extra_args: Any) -> None:
        self.request_id = name
        self.sampling_params = SimpleNamespace(extra_args=extra_args)
        self.prompt_token_ids = list(range(300))
        self.num_prompt_tokens = 300
        self.num_output_tokens = 0
        self.has_finished = False

    def is_finished(self) -> bool:
        return self.has_finished


def step(
    notes: RoundNotes,
    request: Request,
    draft: list[int],
    sampled: list[int],
    num_taken: int | None = None,
    report: WorkerReport = NOTHING,
    num_forbidden: int = 0,
) -> None:
    """A step of one request, of whose tokens vLLM takes some."""
    name = request.request_id
    scheduled = SimpleNamespace(
        scheduled_spec_decode_tokens={name: draft} if draft else {},
        num_invalid_spec_tokens={name: num_forbidden} if num_forbidden else None,
    )
    output = SimpleNamespace(req_id_to_index={name: 0}, sampled_token_ids=[sampled])
    notes.verified(scheduled, output, report)
    num_taken = len(sampled) if num_taken is None else num_taken
    request.num_output_tokens += num_taken
    del sampled[num_taken:]  # as vLLM does


def shown(*batches: Any, max_requests: int = 8) -> list[Any]:
    recent = RecentRequests(max_requests)
    for batch in batches:
        recent.add(0, batch)
    return list(recent.newest_first().values())


def test_a_round_has_its_draft_and_the_token_after_the_accepted_ones() -> None:
    notes, request = RoundNotes(8), Request(REQUEST)
    notes.begin(request)
    step(notes, request, [], [10])
    step(notes, request, [11, 12, 13], [11, 12, 99])
    first = notes.take()
    step(notes, request, [14], [14, 15])
    (found,) = shown(first, notes.take())
    assert found.name == "cmpl-1"
    assert found.prompt == list(range(300))[-MAX_PROMPT_TOKENS:]
    assert found.num_prompt_tokens == 300
    assert found.rounds == [
        ([], 0, 10, 1),
        ([11, 12, 13], 2, 99, 3),
        ([14], 1, 15, 2),
    ]
    assert found.sums == (2, 4, 3, 6)
    assert not found.has_ended


def test_what_lies_beyond_the_end_is_counted_and_not_committed() -> None:
    notes, request = RoundNotes(8), Request(REQUEST)
    notes.begin(request)
    request.has_finished = True
    step(notes, request, [11, 12, 13], [11, 12, 13, 14], num_taken=2)
    (found,) = shown(notes.take())
    assert found.rounds == [([11, 12, 13], 3, 14, 2)]
    assert found.has_ended
    assert notes.take() == []


def test_output_that_vllm_drops_is_no_round() -> None:
    notes, request = RoundNotes(8), Request(REQUEST)
    notes.begin(request)
    step(notes, request, [11], [11, 12], num_taken=0)
    assert notes.take() == []


def test_tokens_that_were_forbidden_or_left_out_are_not_verified() -> None:
    notes, request = RoundNotes(8), Request(REQUEST)
    notes.begin(request)
    step(notes, request, [11, 12, 13], [11, 9], num_forbidden=1)
    report = WorkerReport(choices={REQUEST: Choice(1, 0)})
    step(notes, request, [21, 22], [8], report=report)
    (found,) = shown(notes.take())
    assert [each.draft for each in found.rounds] == [[11, 12], [21]]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_drafts_that_stay_on_the_worker_are_found_in_its_rows(place: int) -> None:
    """Rows: one and two drafts, a prompt of two, one and three drafts."""
    drafted = DraftedTokens([2, 0, 3], np.arange(100, 109), np.array([1, 2, 1]))
    drafts = [[101, 102], [], [106, 107, 108]]
    assert drafted.of(place, len(drafts[place])) == drafts[place]


def test_the_workers_ids_take_the_place_of_placeholders() -> None:
    notes, request = RoundNotes(8), Request(REQUEST)
    notes.begin(request)
    drafted = DraftedTokens([2], np.array([7, 8]))
    step(notes, request, [-1, -1], [7, 9], report=WorkerReport(drafted=drafted))
    step(notes, request, [-1], [9])
    (found,) = shown(notes.take())
    assert [each.draft for each in found.rounds] == [[7, 8], [-1]], "-1: unknown"


def test_a_few_requests_are_noted_at_a_time_and_none_that_refuses() -> None:
    notes = RoundNotes(8)
    requests = [Request(f"r{i}") for i in range(MAX_AT_ONCE + 1)]
    for request in (Request("no", mtp_plus_record=0), *requests):
        notes.begin(request)
    for request in requests:
        step(notes, request, [], [1])
    assert [each["name"] for each in notes.take()] == ["r0", "r1", "r2", "r3"]
    notes.end("r0")
    late = Request("late")
    notes.begin(late)
    step(notes, late, [], [1])
    changes = notes.take()
    assert [(each["number"], each["has_ended"]) for each in changes] == [
        (0, True),
        (4, False),
    ]


def test_a_request_may_end_while_anothers_output_is_next() -> None:
    """A session's turn ends within a step, whose output others have not had yet."""
    notes, first, second = RoundNotes(8), Request("first"), Request("second")
    for request in (first, second):
        notes.begin(request)
    scheduled = SimpleNamespace(
        scheduled_spec_decode_tokens={}, num_invalid_spec_tokens=None
    )
    output = SimpleNamespace(
        req_id_to_index={"first": 0, "second": 1}, sampled_token_ids=[[1], [2]]
    )
    notes.verified(scheduled, output, NOTHING)
    first.num_output_tokens += 1
    notes.end("first")
    first.num_output_tokens = 0  # the next turn
    second.num_output_tokens += 1
    found = {each.name: each for each in shown(notes.take())}
    assert found["first"].rounds == [([], 0, 1, 1)]
    assert found["first"].has_ended
    assert found["second"].rounds == [([], 0, 2, 1)]


def test_memory_is_bounded_in_rounds_and_in_requests() -> None:
    notes, request = RoundNotes(8), Request(REQUEST)
    notes.begin(request)
    for _ in range(MAX_ROUNDS + 3):
        step(notes, request, [], [1])
    (found,) = shown(notes.take())
    assert (len(found.rounds), found.num_left_out) == (MAX_ROUNDS, 3)
    notes = RoundNotes(3)
    for i in range(5):
        request = Request(f"r{i}")
        notes.begin(request)
        step(notes, request, [], [i])
        notes.end(request.request_id)
    assert [each["name"] for each in notes.take()] == ["r2", "r3", "r4"]
    batches = []
    for i in range(5):
        request = Request(f"r{i}")
        notes.begin(request)
        step(notes, request, [], [i])
        notes.end(request.request_id)
        batches.append(notes.take())
    kept = shown(*batches, max_requests=2)
    assert [each.name for each in kept] == ["r4", "r3"]
    late = [{"number": 6, "rounds": [], "num_left_out": 0, "has_ended": True}]
    assert len(shown(*batches, late, max_requests=2)) == 2


def test_changes_travel_beside_the_counts_and_are_taken_out() -> None:
    counts = SpeculationStats.empty(1)
    changes = [{"number": 0}]
    stats = SimpleNamespace(
        kv_connector_stats={STATS_KEY: counts.to_dict(), ROUNDS_KEY: changes, "b": 1}
    )
    assert take_stats(stats) == (counts, changes)
    assert stats.kv_connector_stats == {"b": 1}
