"""Recordings as worlds: what is known of the recorded one is found again."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.control.synthetic import World
from benchmarks.control.synthetic_acceptance import AcceptanceLaw, decaying, geometric
from benchmarks.control.synthetic_cost import CPU_TABLE
from benchmarks.control.synthetic_worlds import H200_70B, WORLDS
from benchmarks.control.trace_measured_acceptance import (
    RequestHistory,
    acceptance_tables,
)
from benchmarks.control.trace_recorded import RecordedWorld, load_world
from benchmarks.control.trace_replay import make_named_controller, replay
from benchmarks.control.trace_world import ReplayWorld
from vllm_mtp.config import ConfigError
from vllm_mtp.control.controller import Controller
from vllm_mtp.control.fixed import FixedController
from vllm_mtp.control.randomized import RandomController
from vllm_mtp.integration.observe.tracing import TracingController
from vllm_mtp.records import DraftDecision

K_MAX = 8


def record(
    path: Path, world: World, num_steps: int, controller: Controller | None = None
) -> Path:
    """A recording of a synthetic world."""
    wrapped = controller or RandomController(K_MAX, 5)
    traced = TracingController(wrapped, path, {"world": world.name}, K_MAX)
    replay(world, traced, num_steps, seed=9)
    traced.close()
    return path


def recorded(
    folder: Path, world: World, num_steps: int, controller: Controller | None = None
) -> RecordedWorld:
    return load_world(record(folder / "t.jsonl", world, num_steps, controller))


@pytest.mark.parametrize("name", ["cpu-1-untuned", "h100-32-tuned"])
def test_what_steps_cost_is_found_again_despite_noise_and_spikes(
    tmp_path: Path, name: str
) -> None:
    world = WORLDS[name]
    found = recorded(tmp_path, world, 1600)
    num_requests = world.num_requests
    context = float(found.cost.buckets[-1].context)
    lengths = np.arange(5)
    true_s, found_s = (
        cost.verify_s(num_requests, num_requests * (1 + lengths), context, False)
        + [cost.draft_s(num_requests, int(k), context) for k in lengths]
        for cost in (world.cost, found.cost)
    )
    if num_requests > 1:
        # Unequal draft lengths cost more there; the recording has hardly any others.
        found_s, true_s = found_s[1:], true_s[1:]
    assert found_s == pytest.approx(true_s, rel=0.05)
    assert np.median(found.noise) == pytest.approx(1.0, abs=0.01)
    assert found.noise.max() > 8  # the spikes


def test_context_is_paid_for(tmp_path: Path) -> None:
    world = World(
        "w", AcceptanceLaw((geometric(0.8),)), H200_70B, 4, prompt_tokens=30_000
    )
    found = recorded(tmp_path, world, 1500)
    true_s = H200_70B.model.kv_bytes_per_token / (0.7 * 4 * 4.8e12)
    assert found.cost.context_token_s == pytest.approx(true_s, rel=0.2)


def history(
    probabilities: list[float], draft_length: int = 3, seed: int = 0
) -> RequestHistory:
    """A request whose drafts are accepted with a probability that changes."""
    random, found = np.random.default_rng(seed), RequestHistory(True, 0)
    place = 0
    for step, probability in enumerate(probabilities):
        passed = random.random(draft_length) < probability
        accepted = draft_length if passed.all() else int(np.argmin(passed))
        found.places.append(place)
        found.steps.append(step)
        found.drafted.append(draft_length)
        found.accepted.append(accepted)
        place += accepted + 1
    return found


def test_acceptance_is_found_again_for_requests_that_differ() -> None:
    truth = [0.3, 0.5, 0.7, 0.9] * 4
    histories = [history([p] * 200, seed=i) for i, p in enumerate(truth)]
    tables = acceptance_tables(histories, 200, K_MAX)
    for probability, table in zip(truth, tables, strict=True):
        assert table[:, 0].mean() == pytest.approx(probability, abs=0.1)
    # The third position of a request at 0.3 is tested in 9 % of the drafts.
    assert tables[3][:, 2].mean() > tables[0][:, 2].mean() + 0.3


def test_acceptance_follows_a_request_that_changes() -> None:
    halves = [[0.9] * 150 + [0.1] * 150, [0.1] * 150 + [0.9] * 150]
    histories = [history(halves[i % 2], seed=i) for i in range(8)]
    for i, table in enumerate(acceptance_tables(histories, 300, K_MAX)):
        first, last = table[:5, 0].mean(), table[-5:, 0].mean()
        assert abs(first - last) > 0.5
        assert (first > last) == (i % 2 == 0)


def test_chance_alone_makes_no_difference_between_requests() -> None:
    histories = [history([0.6] * 60, seed=i) for i in range(30)]
    tables = acceptance_tables(histories, 60, K_MAX)
    means = [table[:, 0].mean() for table in tables]
    shares = [np.mean(np.array(h.accepted) > 0) for h in histories]
    assert np.std(means) < 0.5 * np.std(shares)


def test_constrained_requests_have_a_mean_of_their_own() -> None:
    """With few drafts each, a request is mostly what its kind is."""
    histories = [history([0.9 if i % 2 else 0.2] * 6, seed=i) for i in range(40)]
    for found in histories[::2]:
        found.is_constrained = True
    tables = acceptance_tables(histories, 6, K_MAX)
    assert max(table[0, 0] for table in tables[::2]) < 0.5
    assert min(table[0, 0] for table in tables[1::2]) > 0.6


def test_what_was_never_drafted_is_like_what_was() -> None:
    drafted = [history([0.8] * 100, seed=i) for i in range(6)]
    tables = acceptance_tables([*drafted, RequestHistory(True, 50)], 100, K_MAX)
    silent = tables[-1]
    assert silent.shape == (1, K_MAX)
    assert silent[0, 0] == pytest.approx(0.8, abs=0.1)
    # Positions 4 .. 8 were drafted by nobody.
    assert silent[0, 3:] == pytest.approx([silent[0, 2]] * 5, abs=0.05)


def test_requests_begin_and_end_as_recorded(tmp_path: Path) -> None:
    law = AcceptanceLaw((decaying(0.8, 0.5),))
    world = World("w", law, CPU_TABLE, 4, mean_tokens=60, sampled_share=0.5)
    found = recorded(tmp_path, world, 1500)
    tokens = [request.num_tokens for request in found.requests]
    assert len(tokens) > 100
    assert np.mean(tokens) == pytest.approx(60, rel=0.2)
    sampled = np.mean([not request.is_greedy for request in found.requests])
    assert sampled == pytest.approx(0.5, abs=0.15)

    engine = found.start(0)
    spans: dict[str, list[int]] = {}
    running = []
    for _ in range(400):
        requests = engine.begin()
        running.append(len(requests))
        for request in requests:
            context = request.num_context_tokens
            first, _ = spans.setdefault(request.request_id, [context, 0])
            spans[request.request_id][1] = context - first
        engine.step(DraftDecision(0, {}))
    assert np.median(running) == 4
    still_running = {request.request_id for request in engine.begin()}
    num_ended = 0
    for request_id, expected in zip(spans, found.requests, strict=False):
        first, grown = spans[request_id]
        assert first == expected.num_context_tokens
        if request_id not in still_running:
            assert grown == expected.num_tokens - 1
            num_ended += 1
    assert num_ended > 10


def test_a_recording_begins_anew_when_all_requests_were_served(tmp_path: Path) -> None:
    world = WORLDS["cpu-4-tuned"].changed(mean_tokens=20)
    found = recorded(tmp_path, world, 100)
    engine = found.start(0)
    seen = set()
    for _ in range(2000):
        seen.update(request.request_id for request in engine.begin())
        engine.step(DraftDecision(0, {}))
    assert len(seen) > 2 * len(found.requests)


@pytest.mark.parametrize("delay", [0, 1])
def test_how_late_outcomes_arrive_is_found_again(tmp_path: Path, delay: int) -> None:
    world = WORLDS["cpu-4-tuned"].changed(outcome_delay_steps=delay)
    assert recorded(tmp_path, world, 200).outcome_delay_steps == delay


@pytest.mark.parametrize(
    ("controller", "num_steps", "reason"),
    [
        (None, 20, "steps that only decode"),
        (FixedController(3), 200, "all steps of the trace draft 3 deep"),
        (FixedController(0), 200, "all steps of the trace draft 0 deep"),
    ],
)
def test_a_recording_that_says_too_little_is_refused(
    tmp_path: Path, controller: Controller | None, num_steps: int, reason: str
) -> None:
    path = record(tmp_path / "t.jsonl", WORLDS["cpu-1-good"], num_steps, controller)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_world(path)
    assert str(path) in str(caught.value)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> RecordedWorld:
    """A recording of ``cpu-4-tuned``."""
    return recorded(tmp_path_factory.mktemp("known"), WORLDS["cpu-4-tuned"], 2500)


@pytest.mark.parametrize("controller", ["goodput", "threshold", "fixed-1"])
def test_a_controller_does_in_the_recording_as_in_the_world_itself(
    known: RecordedWorld, controller: str
) -> None:
    def regret(world: ReplayWorld) -> float:
        fresh = make_named_controller(controller, K_MAX, world.sees_shadow_drafts)
        return replay(world, fresh, 1200).regret()

    in_world = regret(WORLDS["cpu-4-tuned"])
    assert regret(known) == pytest.approx(in_world, abs=0.01 + 0.15 * in_world)
