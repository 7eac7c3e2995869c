"""Random requests are answered as without speculation: Model Runner V1, float32."""

import pytest

from tests.support.fuzzing import learn, prepare, sort_out_ties
from vllm_mtp.lab.fuzz import Prepared, find_differences
from vllm_mtp.lab.fuzz_axes import AXES as ALL_AXES
from vllm_mtp.lab.fuzz_run import shares

AXES = [
    *("async", "chunks", "small cache", "async small cache", "auto"),
    *("async disturbed", "adapters", "KV connector"),
]
NUM_REQUESTS = 200
LEAST_COMPARED = 0.6
"""Share of the requests. After an async reset, sampled ones are not compared."""


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
    plays = shares(ready.plays, AXES)[axis]
    learn(ready, axis, plays)
    findings = find_differences(ready, axis, plays)
    sort_out_ties(ready, findings)
    assert not findings.failures
    assert findings.num_compared > LEAST_COMPARED * findings.num_requests
    # Drafts were kept and drafts were rejected, or nothing was put to the test.
    counts = findings.counts
    assert counts["drafted"] > counts["accepted"] > 0
    assert counts[ALL_AXES[axis].proof] > 0
