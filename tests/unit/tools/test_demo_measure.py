"""Taking turns, speeds and the comparison of texts."""

from collections import Counter

import pytest

from vllm_mtp.tools.demo_client import Completion, SpecCounters
from vllm_mtp.tools.demo_measure import (
    Difference,
    Spread,
    find_differences,
    plan_turns,
    run_pass,
    summarise,
)
from vllm_mtp.tools.demo_plan import Prompt

METHODS = ("none", "mtp", "mtp_plus")
PROMPTS = [Prompt("a.py", "a"), Prompt("b.py", "b")]
NO_COUNTERS = SpecCounters(0, 0, 0, (), 0, 0, 0)


def completion(text: str, seconds: float = 1.0) -> Completion:
    return Completion(text, tuple(map(ord, text)), seconds)


class Recorder:
    """Writes down who was asked for what."""

    def __init__(self, name: str, calls: list[tuple[str, str]]) -> None:
        self.name = name
        self.calls = calls

    def complete(self, prompt: str) -> Completion:
        self.calls.append((self.name, prompt))
        return completion(f"{self.name} {prompt}")


def test_every_method_gets_every_prompt_once() -> None:
    turns = plan_turns(METHODS, 4, shift=1)
    expected = {(method, index): 1 for method in METHODS for index in range(4)}
    assert Counter((turn.method, turn.prompt_index) for turn in turns) == expected


def test_each_method_goes_first_equally_often() -> None:
    firsts = [
        turn.method
        for shift in range(3)
        for turn in plan_turns(METHODS, 2, shift)[:: len(METHODS)]
    ]
    assert Counter(firsts) == dict.fromkeys(METHODS, 2)


def test_a_pass_files_answers_under_method_and_prompt() -> None:
    calls: list[tuple[str, str]] = []
    clients = {name: Recorder(name, calls) for name in METHODS}
    done = run_pass(clients, PROMPTS, 1, lambda text: None)
    assert [each.text for each in done["mtp"]] == ["mtp a", "mtp b"]
    assert calls[0] == ("mtp", "a")
    assert len(calls) == 6


def test_speedup_is_taken_within_each_pass() -> None:
    # The machine halves its speed in the second pass; the ratio must not notice.
    passes = [
        {"none": [completion("xxxx", slow)], "mtp": [completion("xxxx", slow / 2)]}
        for slow in (1.0, 2.0)
    ]
    results = summarise(passes, {"none": NO_COUNTERS, "mtp": NO_COUNTERS})
    assert results["none"].tokens_per_s == (4.0, 2.0)
    assert results["mtp"].tokens_per_s == (8.0, 4.0)
    assert results["mtp"].speedup == (2.0, 2.0)


def test_speed_of_a_pass_weighs_prompts_by_their_time() -> None:
    passes = [{"none": [completion("xx", 1.0), completion("xxxxxx", 3.0)]}]
    assert summarise(passes, {"none": NO_COUNTERS})["none"].tokens_per_s == (2.0,)


def test_equal_texts_leave_no_difference() -> None:
    same = {method: [completion("left"), completion("right")] for method in METHODS}
    assert find_differences([same, same], PROMPTS) == []


@pytest.mark.parametrize(
    ("text", "position"), [("riXht", 2), ("rig", 3), ("rightly", 5)]
)
def test_a_different_text_is_reported_where_it_begins(text: str, position: int) -> None:
    good = {"none": [completion("left"), completion("right")]}
    bad = good | {"mtp": [completion("left"), completion(text)]}
    assert find_differences([good, bad], PROMPTS) == [
        Difference("mtp", "b.py", position)
    ]


def test_no_speculation_that_changes_between_passes_is_a_difference_too() -> None:
    first = {"none": [completion("left"), completion("right")]}
    second = {"none": [completion("lift"), completion("right")]}
    assert find_differences([first, second], PROMPTS) == [Difference("none", "a.py", 1)]


def test_a_spread_names_median_and_extremes() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
