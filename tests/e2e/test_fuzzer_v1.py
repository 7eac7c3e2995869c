"""Random requests are answered as without speculation: Model Runner V1, float32.

And faults that are planted into an engine are found by the same requests.
"""

from collections.abc import Collection

import pytest

from tests.support.fuzzing import learn, prepare, sort_out_ties, start_here
from tests.support.planted_faults import FAULTS, Fault
from vllm_mtp.tools.fuzz import Play, Prepared, find_differences
from vllm_mtp.tools.fuzz_axes import AXES as ALL_AXES
from vllm_mtp.tools.fuzz_requests import kinds_of
from vllm_mtp.tools.fuzz_run import shares

AXES = [
    *("async", "chunks", "small cache", "async small cache", "auto"),
    *("async disturbed", "adapters", "KV connector"),
]
NUM_REQUESTS = 200
LEAST_COMPARED = {"async disturbed": 0.4}
"""Share of the requests, where it is not 0.6: after an async reset sampled ones are not
compared (vLLM has drawn for them already)."""


@pytest.fixture(scope="module")
def ready() -> Prepared:
    """What an engine without speculation answers, asked before anything is planted."""
    return prepare(NUM_REQUESTS, seed=1)


def test_an_engine_without_speculation_survives_the_requests(ready: Prepared) -> None:
    assert not ready.reference.died
    assert len(ready.reference.answers) == NUM_REQUESTS


@pytest.mark.parametrize("axis", AXES)
def test_random_requests_are_answered_as_without_speculation(
    axis: str, ready: Prepared
) -> None:
    plays = shares(ready.plays, AXES)[axis]
    learn(ready, axis, plays)
    findings = find_differences(ready, axis, plays, start_here)
    sort_out_ties(ready, findings)
    assert not findings.failures
    num_left_out = findings.excluded.total()
    assert findings.num_compared + num_left_out == findings.num_requests
    least = LEAST_COMPARED.get(axis, 0.6)
    assert findings.num_compared > least * findings.num_requests
    # Drafts were kept and drafts were rejected, or nothing was put to the test.
    counts = findings.counts
    assert counts["drafted"] > counts["accepted"] > 0
    assert counts[ALL_AXES[axis].proof] > 0


def num_of_kinds(play: Play, kinds: Collection[str]) -> int:
    """Requests of a play that are of one of these kinds."""
    return sum(not kinds_of(request).isdisjoint(kinds) for request in play)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=pytest.mark.long) if fault.is_like_another else fault
        for fault in FAULTS
    ],
    ids=lambda fault: fault.plant.__name__,
)
def test_a_planted_fault_is_found(fault: Fault, ready: Prepared) -> None:
    # The first difference is enough: the likeliest plays come first.
    plays = [play for play in ready.plays if num_of_kinds(play, fault.kinds)]
    plays.sort(key=lambda play: num_of_kinds(play, fault.kinds), reverse=True)
    with fault.plant():
        findings = find_differences(
            ready, fault.axis, plays, start_here, max_failures=1
        )
    assert findings.failures, findings.num_compared
