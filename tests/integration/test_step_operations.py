"""Model Runner V2 with drafting disabled: the step of an engine without speculation.

Operations and launches are counted under Triton's interpreter, so that this is seen
where there is no GPU.
"""

import json
from collections import Counter
from typing import NamedTuple

import pytest

from tests.support.engine_jobs import V2
from tests.support.step_operations import WAITS
from vllm_mtp.integration.worker.copying import LOOK_STEPS

SPECULATION = {"method": "mtp_plus", "num_speculative_tokens": 3}
SAMPLINGS = {
    "greedy": {"temperature": 0.0, "extra_args": {"mtp_plus_k": 0}},
    "sampled": {"temperature": 1.0, "extra_args": {"mtp_plus_k": 0}},
    "drafting": {"temperature": 1.0, "top_k": 3, "extra_args": {"mtp_plus_k": 1}},
}


class Usual(NamedTuple):
    """The most frequent kind of step."""

    plain: Counter[str]
    ours: Counter[str]
    share: float
    """Of the steps of either engine, those that look for long matches aside. Not all:
    where a block of KV begins its table is written."""
    looking: float
    """Share of our steps that do."""


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Usual]:
    """Of an engine without speculation, and of ours, by kind of request."""
    folder = tmp_path_factory.mktemp("steps")
    order = {
        "engines": [{}, {"speculative_config": SPECULATION}],
        "samplings": list(SAMPLINGS.values()),
        "result": str(folder / "result.json"),
    }
    V2.run("tests.support.step_operations:count", order, folder / "log", 300)
    plain, ours = json.loads((folder / "result.json").read_text())
    return {
        name: Usual(Counter(a), Counter(b), min(of_a, of_b), looking)
        for name, (a, of_a, _), (b, of_b, looking) in zip(
            SAMPLINGS, plain, ours, strict=True
        )
    }


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_at_k_0_a_step_launches_one_copy_more_at_most(
    kind: str, usual: dict[str, Usual]
) -> None:
    plain, ours, share, looking = usual[kind]
    assert looking == pytest.approx(1 / LOOK_STEPS, abs=0.04)
    assert share > 0.8
    more = ours - plain
    # Greedy steps are verified in our way, with fewer launches than vLLM's.
    assert more.keys() <= {"keep_rows", "vllm_mtp::accept_greedily"}
    assert more["keep_rows"] == 1
    assert ours.total() <= plain.total() + 1


def test_where_it_drafts_there_is_more(usual: dict[str, Usual]) -> None:
    """The comparison can fail."""
    assert usual["drafting"].ours.total() > usual["drafting"].plain.total() + 10
    assert usual["drafting"].ours["truncate_rows"] == 1


def test_a_step_that_drafts_searches_texts_in_two_launches(
    usual: dict[str, Usual],
) -> None:
    ours = usual["drafting"].ours
    assert ours["score_matches"] == ours["continue_drafts"] == 1


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_no_step_waits_for_the_device(kind: str, usual: dict[str, Usual]) -> None:
    """Not more often than one of an engine without speculation, which never does."""
    for operations in usual[kind]:
        if isinstance(operations, Counter):
            assert not [name for name in operations if name.startswith(WAITS)]
