"""Model Runner V2: drafts drawn from columns of a draft vocabulary are lossless.

vLLM's kernels under Triton's interpreter, `tests.support.proposal_runs`: what they say
of columns is, token by token, what they say of the whole vocabulary. With
``EXACTNESS_SAMPLES`` texts are counted, too; false alarms then: once in 100,000.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import chisquare

from tests.e2e.exactness.samples import ALPHA, IS_LONG
from tests.support.engine_jobs import V2
from tests.support.proposal_runs import (
    BUGS,
    COPIES_UNSEEN,
    LISTED,
    MOVED,
    TOP_K,
    complete,
    exact,
)

METHODS = ("standard", "block")
NUM_REQUESTS, NUM_TOKENS = 600, 2

Texts = list[list[int]]

needs_time = pytest.mark.skipif(not IS_LONG, reason="45 seconds each")


def obeyed(command: str, order: dict[str, Any], folder: Path) -> Any:
    result = folder / "result.json"
    order = order | {"result": str(result)}
    V2.run(f"tests.support.proposal_runs:{command}", order, folder / "log", 300)
    return json.loads(result.read_text())


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one batch."""
    found: dict[str, Any] = obeyed("compare", {}, tmp_path_factory.mktemp("texts"))
    return found


@pytest.fixture(scope="module")
def texts(compared: dict[str, Any]) -> dict[str, Texts]:
    """By sampler and bug."""
    found: dict[str, Texts] = compared["texts"]
    return found


def test_sampled_requests_are_drafted_for_within_their_top_k(
    compared: dict[str, Any],
) -> None:
    columns = compared["num_columns"]
    assert set(columns["sampled"]) == {TOP_K}
    assert set(columns["greedy"]) == {len(LISTED)}


@pytest.mark.parametrize("method", METHODS)
def test_columns_say_what_the_whole_vocabulary_says(
    method: str, texts: dict[str, Texts]
) -> None:
    ours = texts[method]
    assert ours == texts[f"{method} theirs"]
    assert {len(text) for text in ours} == {1, 2, 3}


@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug != MOVED])
def test_a_bug_changes_texts(bug: str, texts: dict[str, Texts]) -> None:
    assert texts[f"block {bug}"] != texts["block"]


@pytest.mark.parametrize("method", METHODS)
def test_copies_are_verified_as_certain_proposals(
    method: str, texts: dict[str, Texts]
) -> None:
    ours = texts[f"{method} copied"]
    assert ours == texts[f"{method} copied theirs"]
    assert {len(text) for text in ours} == {1, 2, 3}


def test_a_text_changes_where_copies_are_taken_for_drawn_ones(
    texts: dict[str, Texts],
) -> None:
    assert texts["block copied"] != texts[f"block copied {COPIES_UNSEEN}"]


def test_drafts_of_rows_that_have_moved_are_rejected_unseen(
    texts: dict[str, Texts],
) -> None:
    assert {len(text) for text in texts[f"block {MOVED}"]} == {1}


@needs_time
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("change", ["", MOVED, "copied"])
def test_texts_follow_the_target(method: str, change: str, tmp_path: Path) -> None:
    order: dict[str, Any] = {"method": method, "num_requests": NUM_REQUESTS}
    order |= {"num_drawn": 1, "bug": ""} if change == "copied" else {"bug": change}
    assert p_value(obeyed("sample", order, tmp_path)) > ALPHA


@needs_time
@pytest.mark.parametrize("method", METHODS)
def test_texts_do_not_where_copies_are_taken_for_drawn_ones(
    method: str, tmp_path: Path
) -> None:
    order = {"method": method, "num_requests": NUM_REQUESTS, "num_drawn": 1}
    texts = obeyed("sample", order | {"bug": COPIES_UNSEEN}, tmp_path)
    assert p_value(texts) < ALPHA


@needs_time
@pytest.mark.parametrize("bug", [b for b in BUGS if "another request" not in b][:-1])
def test_texts_with_a_bug_do_not(bug: str, tmp_path: Path) -> None:
    order = {"method": "standard", "bug": bug, "num_requests": NUM_REQUESTS}
    assert p_value(obeyed("sample", order, tmp_path)) < ALPHA


def p_value(texts: Texts) -> float:
    """Of the hypothesis that texts are the target's; rare ones count together."""
    seen = Counter(complete(texts, NUM_TOKENS))
    expected = {text: NUM_REQUESTS * p for text, p in exact(NUM_TOKENS).items()}
    often = [text for text, number in expected.items() if number >= 5]
    counts = [seen[text] for text in often]
    wanted = [expected[text] for text in often]
    return float(
        chisquare(
            [*counts, NUM_REQUESTS - sum(counts)], [*wanted, NUM_REQUESTS - sum(wanted)]
        ).pvalue
    )
