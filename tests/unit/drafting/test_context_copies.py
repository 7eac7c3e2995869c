"""Copies from contexts: found as by trying all places, and as by vLLM."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.context_matches import find_continuation
from vllm_mtp.drafting.context_copies import (
    MAX_MATCH,
    MIN_MATCH,
    MIN_MATCH_ALONE,
    Offer,
    continuation,
)

LIMIT = 8


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=80),
    st.integers(0, 4),
    st.integers(1, 3),
)
def test_the_first_of_the_longest_matches_is_found(
    values: list[int], num_draft_tokens: int, repeats: int
) -> None:
    given_tokens = tokens(*values * repeats)
    least = MIN_MATCH + num_draft_tokens if num_draft_tokens else MIN_MATCH_ALONE
    most = max(MAX_MATCH, least)
    expected = find_continuation(given_tokens.tolist(), least, most, 1000, LIMIT)
    found = continuation(given_tokens, num_draft_tokens, LIMIT)
    assert found.tolist() == expected


def test_the_draft_says_which_way_the_text_goes() -> None:
    before = (1, 2, 3, 4, 10, 11, 12, 1, 2, 3, 4, 20, 21, 22, 1, 2, 3, 4)
    assert continuation(tokens(*before, 10), 1, 2).tolist() == [11, 12]
    assert continuation(tokens(*before, 20), 1, 2).tolist() == [21, 22]
    assert not len(continuation(tokens(*before, 30), 1, 2))


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        ([], (0, 0)),
        ([4], (0, 0)),  # a part of the draft: who knows
        ([4, 5], (1, 1)),  # the draft, and nothing after it
        ([4, 9, 6], (1, 0)),  # another one: what would have followed nobody knows
        ([4, 5, 6], (2, 2)),
        ([4, 5, 6, 7, 8], (3, 3)),
        ([4, 5, 9, 7], (2, 1)),
        ([4, 5, 6, 9], (3, 2)),
    ],
)
def test_what_was_offered_is_compared_with_what_came(
    committed: list[int], expected: tuple[int, int]
) -> None:
    offer = Offer(tokens(4, 5), tokens(6, 7))
    assert offer.compared(tokens(*committed)) == expected


@pytest.mark.parametrize(
    ("committed", "expected"),
    [([], (0, 0)), ([6], (1, 1)), ([9], (1, 0)), ([6, 9], (2, 1)), ([6, 7, 8], (2, 2))],
)
def test_a_draft_that_is_a_copy_is_compared_token_by_token(
    committed: list[int], expected: tuple[int, int]
) -> None:
    offer = Offer(tokens(), tokens(6, 7))
    assert offer.compared(tokens(*committed)) == expected


def test_vllm_finds_the_same() -> None:
    command = [sys.executable, "-m", "tests.support.context_matches"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
