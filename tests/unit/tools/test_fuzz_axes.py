"""Which requests an engine of the fuzzer gets, and what disturbs it."""

import json
from random import Random

import pytest

from tests.unit.tools.fuzz_samples import corpus, request
from vllm_mtp.tools.fuzz_axes import (
    AXES,
    KINDS,
    NUM_ADAPTERS,
    RESET,
    RESET_PROMPT,
    RESET_SEED,
    disturb,
    is_reset,
    on_axis,
)
from vllm_mtp.tools.fuzz_engines import COUNTS
from vllm_mtp.tools.fuzz_options import V2_ONLY
from vllm_mtp.tools.fuzz_requests import make_plays

PLAYS = make_plays(corpus(), 2000, seed=0)


def test_every_disturbance_is_drawn_in_most_plays() -> None:
    events = [[r["disturbs"] for r in play if "disturbs" in r] for play in PLAYS]
    assert all(events)
    assert {event["what"] for each in events for event in each} == set(KINDS)
    assert json.loads(json.dumps(PLAYS)) == PLAYS


def test_the_same_seed_disturbs_the_same() -> None:
    play = [request(str(i)) for i in range(8)]
    assert disturb(play, Random(1)) == disturb(play, Random(1))
    assert disturb(play, Random(1)) != disturb(play, Random(2))


@pytest.mark.parametrize("name", AXES)
def test_an_engine_is_disturbed_only_where_its_axis_says_so(name: str) -> None:
    axis = AXES[name]
    play = on_axis(axis, PLAYS[0])
    assert any("disturbs" in r for r in play) is axis.is_disturbed
    assert any("adapter" in r for r in play) is axis.has_adapters
    assert on_axis(axis, play) == play
    assert axis.proof in COUNTS


def test_adapters_are_mixed_with_requests_without() -> None:
    numbers = [
        r.get("adapter") for play in PLAYS for r in on_axis(AXES["adapters"], play)
    ]
    assert set(numbers) == {None, *range(1, NUM_ADAPTERS + 1)}
    names = [r["name"] for play in PLAYS for r in on_axis(AXES["adapters"], play)]
    assert len(set(names)) == len(names)


def test_a_request_that_lost_its_adapter_gets_none_again() -> None:
    (adapted,) = (r for r in on_axis(AXES["adapters"], [request("r1")]))
    bare = {k: v for k, v in adapted.items() if k != "adapter"}
    assert on_axis(AXES["adapters"], [bare]) == [bare]


def test_an_async_reset_leaves_sampled_requests_without_comparison() -> None:
    sampled, greedy = request("s", temperature=1.0, seed=3), request("g")
    event = {"step": 1, "what": RESET, "lasts": 0}
    play = [sampled, greedy | {"disturbs": event}]
    assert is_reset(play)
    assert AXES["async disturbed"].exclusion(play, sampled) == RESET_SEED
    assert AXES["async disturbed"].exclusion(play, greedy) is None
    assert AXES["async disturbed"].exclusion([sampled], sampled) is None
    assert AXES["disturbed"].exclusion(play, sampled) is None


def test_an_async_reset_leaves_prompt_logprobs_without_comparison() -> None:
    event = {"step": 1, "what": RESET, "lasts": 0}
    scored = request("s", prompt_logprobs=0)
    play = [scored | {"disturbs": event}]
    assert AXES["async disturbed"].exclusion(play, scored) == RESET_PROMPT
    assert AXES["async disturbed"].exclusion([scored], scored) is None
    assert AXES["disturbed"].exclusion(play, scored) is None


def test_what_is_refused_anyway_is_asked_rarely() -> None:
    def share(refused: tuple[str, ...]) -> float:
        plays = make_plays(corpus()._replace(refused=refused), 1000, seed=4)
        fields = [{*r["chunks"][0]["sampling"]} for play in plays for r in play]
        return sum(bool(each & {*V2_ONLY}) for each in fields) / len(fields)

    assert share(V2_ONLY) < 0.02 < 0.08 < share(())


def test_prompts_and_answers_reach_the_longest_that_is_allowed() -> None:
    most = corpus().max_model_len
    reach = [
        len(chunk["prompt"]) + (chunk["sampling"]["max_tokens"] or most) >= most
        for play in PLAYS
        for r in play
        for chunk in r["chunks"]
    ]
    assert sum(reach) > 0.05 * len(reach)
