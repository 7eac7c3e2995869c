"""When a tuned head may be called better."""

import random

from vllm_mtp.tools.compare import Figure
from vllm_mtp.tools.tune_verdict import Cell, Verdict, repeats_itself


def cell(low: float, high: float) -> Cell:
    return Cell(0.0, 3, 48, Figure("length", 2.0, 2 + (low + high) / 2, (low, high), 0))


def test_better_only_if_every_interval_says_so() -> None:
    better, unclear, worse = cell(0.1, 0.3), cell(-0.1, 0.3), cell(-0.3, -0.1)
    assert Verdict([better, better]).is_better
    assert not Verdict([better, unclear]).is_better
    assert not Verdict([better, unclear]).is_worse
    assert Verdict([better, worse]).is_worse


def test_a_loop_is_told_from_text() -> None:
    numbers = random.Random(0)
    text = [numbers.randrange(100) for _ in range(128)]
    assert not repeats_itself(text)
    assert not repeats_itself([*text, *text[:20]])  # a phrase that comes again
    assert repeats_itself([*text[:40], *text[40:52] * 8])
    assert not repeats_itself([])
