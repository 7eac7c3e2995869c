"""Faults that are planted into an engine are found within 500 random requests.

The right answers come from an engine without speculation that is asked before anything
is planted.
"""

import pytest

from tests.support.fuzzing import prepare
from tests.support.planted_faults import FAULTS, Fault
from vllm_mtp.lab.fuzz import Prepared, find_differences
from vllm_mtp.lab.fuzz_requests import kinds_of

NUM_REQUESTS = 500


@pytest.fixture(scope="module")
def ready() -> Prepared:
    """What an engine without speculation answers."""
    return prepare(NUM_REQUESTS, seed=2)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.__name__)
def test_a_planted_fault_is_found(fault: Fault, ready: Prepared) -> None:
    plays = [
        play
        for play in ready.plays
        if any(kind in kinds_of(request) for request in play for kind in fault.kinds)
    ]
    with fault.plant():
        findings = find_differences(ready, fault.axis, plays, max_failures=1)
    assert findings.failures, findings.num_compared


def test_nothing_is_found_where_nothing_is_planted(ready: Prepared) -> None:
    findings = find_differences(ready, "sync", ready.plays[:4], max_failures=1)
    assert not findings.failures
