"""Which memory is chosen, and what requests may do to what all have in common."""

import random
import statistics
from collections.abc import Callable

from vllm_mtp.acceptance import logistic
from vllm_mtp.control.request_memory import MEMORIES, MemoryChoice
from vllm_mtp.control.survival import SurvivalModel
from vllm_mtp.records import DecodeRequest, RequestOutcome

K_MAX = 4
SHORT, LONG = MEMORIES


def serve(
    model: SurvivalModel,
    shift_of: Callable[[random.Random, int, float], float],
    num_requests: int = 8,
    lasts_steps: int = 80,
    num_steps: int = 800,
    seed: int = 0,
) -> None:
    """Requests come and go.

    Args:
        model: Hears of all outcomes.
        shift_of: Log-odds of a request in its n-th step, from those in the step before.
        num_requests: Running at a time.
        lasts_steps: Of each request.
        num_steps: Of the engine.
        seed: Of shifts and outcomes.
    """
    rng = random.Random(seed)
    shifts = dict.fromkeys(range(num_requests), 0.0)
    for step in range(num_steps):
        outcomes = []
        for slot in range(num_requests):
            age = (step + slot * lasts_steps // num_requests) % lasts_steps
            number = (step + slot * lasts_steps // num_requests) // lasts_steps
            shifts[slot] = shift_of(rng, age, shifts[slot])
            name = f"{slot}-{number}"
            if age == 0 or step == 0:
                model.see(DecodeRequest(name, 100))
            accepted, probability = 0, logistic(0.5 + shifts[slot])
            while accepted < K_MAX and rng.random() < probability:
                accepted += 1
            outcomes.append(RequestOutcome(name, K_MAX, accepted))
        model.observe(outcomes)


def test_requests_that_keep_their_character_are_remembered_for_long() -> None:
    def kinds(rng: random.Random, age: int, shift: float) -> float:
        return rng.choice((-2.0, 2.0)) if age == 0 else shift

    model = SurvivalModel(K_MAX)
    serve(model, kinds)
    assert model.memory.current == LONG


def test_requests_whose_stretches_end_are_remembered_for_short() -> None:
    def stretches(rng: random.Random, age: int, shift: float) -> float:
        return rng.choice((-2.0, 2.0)) if age % 10 == 0 else shift

    model = SurvivalModel(K_MAX)
    model.memory.current = LONG
    serve(model, stretches)
    assert model.memory.current == SHORT


def test_a_single_memory_watches_nobody() -> None:
    choice = MemoryChoice((LONG,))
    assert not choice.begin_step([RequestOutcome("r", 1, 1)], ())
    assert choice.current == LONG


def test_watched_requests_that_have_gone_make_room() -> None:
    model = SurvivalModel(K_MAX)
    for number in range(40):
        for _ in range(20):
            model.observe([RequestOutcome(f"r{number}", 4, 2)])
    watched = model.memory.begin_step([RequestOutcome("r39", 4, 2)], ())
    assert [outcome.request_id for outcome in watched] == ["r39"]


def spread_of_first_guesses(seed: int) -> float:
    """One request at a time, easy or hard by chance, none of them changing."""
    model, rng, guesses = SurvivalModel(K_MAX), random.Random(seed), []
    for number in range(80):
        request = DecodeRequest(f"r{number}", 100)
        model.see(request)
        guesses.append(model.survival_of(request)[0])
        probability = rng.choice((0.95, 0.4))
        for _ in range(30):
            accepted = 0
            while accepted < K_MAX and rng.random() < probability:
                accepted += 1
            model.observe([RequestOutcome(request.request_id, K_MAX, accepted)])
    return statistics.stdev(guesses[20:])


def test_the_next_request_does_not_inherit_the_luck_of_the_last() -> None:
    """Without the request's own share taken out of the drift: 0.11."""
    assert statistics.fmean(map(spread_of_first_guesses, range(4))) < 0.085


def test_one_rejection_among_near_certain_tokens_is_no_alarm() -> None:
    model = SurvivalModel(K_MAX)
    for number in range(400):
        is_unlucky = number % 40 == 39
        model.observe([RequestOutcome("r", K_MAX, 2 if is_unlucky else K_MAX)])
        if number == 100:
            model.num_alarms = 0
    assert model.num_alarms == 0
