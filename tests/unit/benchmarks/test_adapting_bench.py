"""Figures of a head that adapts, beside one that does not."""

from typing import Any

import pytest

from benchmarks.adapting import ADAPTING, FROZEN, prose_paragraphs, summary


def a_round(
    domain: str,
    number: int,
    gain: float,
    is_plain: bool = False,
    is_trained: bool = True,
) -> Any:
    lengths = [] if is_plain else [1.5, 2.0]
    cost = (1.02 if is_trained else 1.01) if is_plain else 0.8
    return {
        "domain": domain,
        "is_plain": is_plain,
        "is_trained": is_trained,
        "num_tokens": number * 100,
        "is_equal": number != 1,
        "seconds": {FROZEN: 2.0, ADAPTING: 2.0 * cost},
        "lengths": {FROZEN: lengths, ADAPTING: [gain * each for each in lengths]},
    }


def test_gains_are_those_of_the_last_rounds_and_costs_of_plain_ones() -> None:
    rounds = [a_round("prose", number, 1 + number / 100) for number in range(16)]
    rounds += [a_round("prose", 16, 1.0, is_plain=True)]
    assert summary(rounds)["cost_of_serving"] is None
    rounds += [a_round("prose", 17, 1.0, is_plain=True, is_trained=False)]
    rounds += [a_round("code again", 0, 1.0) for _ in range(3)]
    found = summary(rounds)
    # Of sixteen the last four.
    assert found["gain"]["prose"]["1"]["median"] == pytest.approx(1.135)
    assert found["gain"]["prose"]["2"]["median"] == pytest.approx(1.135)
    assert found["gain"]["code again"]["2"]["median"] == pytest.approx(1.0)
    assert found["cost"]["median"] == pytest.approx(1.02)
    assert found["cost_of_serving"]["median"] == pytest.approx(1.01)
    assert (found["num_equal"], found["num_greedy"]) == (20, 21)


def test_prose_is_prose() -> None:
    found = prose_paragraphs()
    assert len(found) == len(set(found)) > 300
    assert found == prose_paragraphs()
    assert all(text.count(" ") >= 10 for text in found)
