"""Counts add up, travel as plain data, and read as words."""

import json

from tests.unit.metrics.speculation_samples import some
from vllm_mtp.metrics.log_line import describe
from vllm_mtp.metrics.stats import (
    COVERAGE,
    DRAFT,
    EXPLORATION,
    HAS_DRIFTED,
    PREFILL,
    TARGET,
    UNPROFITABLE,
    VERIFY,
    SpeculationStats,
)


def test_counts_add_and_the_last_levels_count() -> None:
    total, more = some(), some()
    more.levels = {COVERAGE: 0.5, HAS_DRIFTED: 1.0}
    more.without_draft = {EXPLORATION: 5}
    total.add(more)
    assert total.draft_lengths == [10, 0, 20, 0]
    assert total.accepted == [16, 12, 0]
    assert total.without_draft == {UNPROFITABLE: 4, EXPLORATION: 6}
    assert total.seconds[PREFILL] == 4.0
    assert (total.num_tokens, total.num_rejected_slots) == (58, 12)
    assert total.saved_seconds == 0.8
    assert total.levels == {COVERAGE: 0.5, HAS_DRIFTED: 1.0}
    assert more.accepted == [8, 6, 0], "what is added stays as it is"


def test_they_survive_the_journey_between_processes() -> None:
    travelled = json.loads(json.dumps(some().to_dict()))
    assert SpeculationStats.from_dict(travelled) == some()


def test_means_are_those_of_request_steps_and_drafts() -> None:
    stats = some()
    assert stats.num_request_steps == 15
    assert stats.num_drafts == 10
    assert stats.mean_draft_length == 20 / 15
    assert stats.acceptance_length == 2.4
    assert stats.decode_seconds == 1.0
    nothing = SpeculationStats.empty(3)
    assert nothing.mean_draft_length is None
    assert nothing.acceptance_length is None


def test_the_log_says_what_was_drafted_why_not_and_what_it_brought() -> None:
    assert describe(some()) == (
        "K 1.3 on average over 15 request-steps; no draft in 27 % because drafting "
        "would cost more time than it saves and 7 % because drafting is being tried on "
        "other requests; a draft brings 2.40 tokens (80/60 % accepted by position); "
        "29 tokens/s in decode (30 planned); time 60 % target, 10 % verify, 30 % "
        "draft; about 0.4 s saved; the draft vocabulary covers 98.0 %"
    )


def test_the_log_says_nothing_of_an_idle_interval_and_little_of_what_is_unknown() -> (
    None
):
    assert describe(SpeculationStats.empty(3)) is None
    bare = SpeculationStats.empty(3)
    bare.draft_lengths[0] = 7
    assert describe(bare) == "K 0.0 on average over 7 request-steps"
    bare.levels[HAS_DRIFTED] = 1.0
    bare.saved_seconds, bare.seconds = -2.0, {TARGET: 1.0, VERIFY: 1.0, DRAFT: 2.0}
    line = describe(bare)
    assert line is not None
    assert "about 2.0 s lost" in line
    assert line.endswith("acceptance lies below what it used to be")
