"""Random requests are answered as without speculation: Model Runner V1, float32."""

import pytest

from tests.support.fuzzing import prepare, sort_out_ties
from vllm_mtp.lab.fuzz import Prepared, find_differences
from vllm_mtp.lab.fuzz_axes import AXES as ALL_AXES
from vllm_mtp.lab.fuzz_run import shares

AXES = ["sync", "async", "chunks", "small cache", "async small cache", "auto"]
NUM_REQUESTS = 200


@pytest.fixture(scope="module")
def ready() -> Prepared:
    """What an engine without speculation answers."""
    return prepare(NUM_REQUESTS, seed=1)


def test_an_engine_without_speculation_survives_the_requests(ready: Prepared) -> None:
    assert not ready.reference.died
    assert len(ready.reference.answers) == NUM_REQUESTS


@pytest.mark.parametrize("axis", AXES)
def test_random_requests_are_answered_as_without_speculation(
    axis: str, ready: Prepared
) -> None:
    findings = find_differences(ready, axis, shares(ready.plays, AXES)[axis])
    sort_out_ties(ready, findings)
    assert not findings.failures
    assert findings.num_compared > 0.8 * findings.num_requests
    # Drafts were kept and drafts were rejected, or nothing was put to the test.
    counts = findings.counts
    assert counts["drafted"] > counts["accepted"] > 0
    if ALL_AXES[axis].may_preempt:
        assert counts["num_preempted"] > 0
