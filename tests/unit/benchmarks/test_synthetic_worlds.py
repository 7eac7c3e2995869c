"""Synthetic worlds: laws of acceptance, and requests that obey them."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.control.synthetic import SyntheticEngine, World
from benchmarks.control.synthetic_acceptance import AcceptanceLaw, decaying, geometric
from benchmarks.control.synthetic_cost import CPU_TABLE
from benchmarks.control.synthetic_worlds import WORLDS, describe
from vllm_mtp.control.fixed import FixedController
from vllm_mtp.records import DraftDecision, StepOutcome

GOOD = AcceptanceLaw((geometric(0.8),))


def probabilities(law: AcceptanceLaw, step: int = 0, **columns: float) -> list[float]:
    """Conditional acceptance of one request at three positions."""
    values = {"kinds": 0.0, "shifts": 0.0, "contexts": 100.0} | columns
    arrays = {name: np.array([value]) for name, value in values.items()}
    return [float(p) for p in law.conditional(step, 3, **arrays)[0]]


def test_the_last_probability_of_a_profile_repeats() -> None:
    assert probabilities(GOOD) == pytest.approx([0.8] * 3)
    law = AcceptanceLaw((decaying(0.9, 0.5),))
    assert probabilities(law) == pytest.approx([0.9, 0.5, 0.5])


def test_kinds_of_requests_have_profiles_of_their_own() -> None:
    law = AcceptanceLaw((geometric(0.9), geometric(0.2)))
    assert probabilities(law, kinds=0.49) == pytest.approx([0.9] * 3)
    assert probabilities(law, kinds=0.51) == pytest.approx([0.2] * 3)


def test_shifts_are_log_odds() -> None:
    assert probabilities(GOOD, shifts=-np.log(4.0)) == pytest.approx([0.5] * 3)


def test_acceptance_falls_with_each_doubling_of_the_context_beyond_1024() -> None:
    law = AcceptanceLaw((geometric(0.5),), context_decay=np.log(2.0))
    found = [probabilities(law, contexts=c)[0] for c in (10, 1024, 2048, 4096)]
    assert found == pytest.approx([1 / 2, 1 / 2, 1 / 3, 1 / 5])


def test_acceptance_drifts_and_comes_back() -> None:
    law = AcceptanceLaw((geometric(0.5),), drift=1.0, drift_period_steps=400)
    found = [probabilities(law, step)[0] for step in (0, 100, 200, 300, 400)]
    top = 1 / (1 + np.exp(-1))
    assert found == pytest.approx([0.5, top, 0.5, 1 - top, 0.5])


def test_phases_begin_at_their_steps() -> None:
    law = AcceptanceLaw(
        (geometric(0.8),), phases=((10, (geometric(0.1),)), (20, (geometric(0.7),)))
    )
    found = [probabilities(law, step)[0] for step in (0, 9, 10, 19, 20, 99)]
    assert found == pytest.approx([0.8, 0.8, 0.1, 0.1, 0.7, 0.7])


def run(world: World, draft_length: int, num_steps: int) -> list[StepOutcome]:
    engine, controller = SyntheticEngine(world, 0), FixedController(draft_length)
    return [engine.step(controller.decide(engine.begin()))[0] for _ in range(num_steps)]


@pytest.mark.parametrize(
    "law",
    [GOOD, AcceptanceLaw((decaying(0.7, 0.2),)), AcceptanceLaw((geometric(0.03),))],
)
def test_drafts_are_accepted_as_often_as_the_law_says(law: AcceptanceLaw) -> None:
    outcomes = run(World("w", law, CPU_TABLE, 16), 3, 600)
    accepted = Counter(
        request.num_accepted_tokens for each in outcomes for request in each.requests
    )
    total = sum(accepted.values())
    survived = [sum(accepted[n] for n in range(j, 4)) / total for j in (1, 2, 3)]
    truth = np.cumprod(probabilities(law))
    # Five standard deviations.
    bounds = 5 * np.sqrt(truth * (1 - truth) / total)
    assert total > 5000
    assert (np.abs(survived - truth) <= bounds).all()


def test_bursts_make_neighbouring_steps_alike() -> None:
    def likeness(bursts: float) -> float:
        law = AcceptanceLaw((geometric(0.5),), bursts=bursts, burst_steps=20)
        outcomes = run(World("w", law, CPU_TABLE, mean_tokens=10**6), 1, 4000)
        accepted = [r.num_accepted_tokens for o in outcomes for r in o.requests]
        return float(np.corrcoef(accepted[:-1], accepted[1:])[0, 1])

    assert likeness(2.0) > 0.3
    assert abs(likeness(0.0)) < 0.1


def test_concurrency_follows_the_load() -> None:
    world = World("w", GOOD, CPU_TABLE, 4, load=((50, 32), (100, 2)))
    running = [outcome.num_requests for outcome in run(world, 1, 150)]
    assert np.median(running[10:50]) == 4
    assert max(running[50:100]) == 32
    assert set(running[100:]) <= {1, 2}
    assert world.change_steps == (50, 100)


def test_drafts_are_verified_one_step_after_they_were_decided() -> None:
    engine = SyntheticEngine(World("w", GOOD, CPU_TABLE, mean_tokens=10**6), 0)
    drafted = []
    for length in (3, 0, 2, 1, 0):
        (request,) = engine.begin()
        decision = DraftDecision(length, {request.request_id: length})
        outcome, _ = engine.step(decision)
        assert outcome.draft_depth == length
        drafted.append(outcome.num_draft_tokens)
    assert drafted == [0, 3, 0, 2, 1]


def test_what_was_missed_while_off_is_caught_up_when_drafting_resumes() -> None:
    engine = SyntheticEngine(World("w", GOOD, CPU_TABLE, 2, mean_tokens=10**6), 0)
    caught_up, missed = [], 0
    for depth in (0, 0, 0, 1, 1, 0, 0, 0, 1):
        requests = engine.begin()
        pause_s = engine.resume_s(depth)
        lengths = {request.request_id: depth for request in requests}
        outcome, _ = engine.step(DraftDecision(depth, lengths))
        caught_up.append(outcome.num_backfill_tokens)
        assert outcome.num_backfill_tokens == (missed if depth else 0)
        assert (pause_s > 0) == (outcome.num_backfill_tokens > 0)
        # Steps with a prompt or with drafts to verify run the MTP layers, too.
        rests = not outcome.num_prefill_tokens and not outcome.num_draft_tokens
        missed = 0 if depth else missed + 2 * rests
    assert caught_up == [0, 0, 0, 4, 0, 0, 0, 0, 4]


def test_no_step_catches_up_on_many_requests() -> None:
    """As the engine does: those with the fewest first, the others get no drafts."""
    engine = SyntheticEngine(
        World("w", GOOD, CPU_TABLE, 4, mean_tokens=10**6, sees_shadow_drafts=True), 0
    )

    def step(depth: int) -> tuple[int, int, int]:
        lengths = {request.request_id: depth for request in engine.begin()}
        outcome, _ = engine.step(DraftDecision(depth, lengths))
        return (
            outcome.num_backfill_tokens,
            len(outcome.requests),
            len(outcome.shadow_drafts),
        )

    for _ in range(41):
        assert step(0)[0] == 0
    assert step(1)[0] == 40  # one request of four
    assert step(0) == (0, 1, 0)
    assert step(1)[0] == 40
    # Of the two that draft now only the new one was drafted for before.
    assert step(1) == (40, 2, 0)


def test_late_outcomes_arrive_in_order_and_as_late_as_the_world_says() -> None:
    engine = SyntheticEngine(World("w", GOOD, CPU_TABLE, outcome_delay_steps=2), 0)
    happened, heard = [], []
    for _ in range(10):
        engine.begin()
        outcome, late = engine.step(DraftDecision(0, {}))
        happened.append(outcome)
        heard.append(list(late))
    assert heard[:2] == [[], []]
    assert [each for late in heard for each in late] == happened[:-2]


def test_every_world_runs_and_describes_itself() -> None:
    for name, world in WORLDS.items():
        assert world.name == name
        assert world.max_draft_length == 8
        assert describe(world).startswith(f"{world.num_requests} request")
        engine = world.start(0)
        for _ in range(2):
            engine.begin()
            engine.step(DraftDecision(0, {}))
        assert engine.truth().survival.shape[1] == 8
        if world.change_steps:
            assert not world.is_stationary
