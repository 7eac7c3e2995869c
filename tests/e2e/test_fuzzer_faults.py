"""Faults that are planted into an engine are found within 500 random requests.

The right answers come from an engine without speculation that is asked before anything
is planted.
"""

import pytest

from tests.support.fuzzing import prepare
from tests.support.planted_faults import FAULTS, Fault
from vllm_mtp.lab.fuzz import Prepared, find_differences

NUM_REQUESTS = 500


@pytest.fixture(scope="module")
def ready() -> Prepared:
    """What an engine without speculation answers."""
    return prepare(NUM_REQUESTS, seed=2)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.plant.__name__)
def test_a_planted_fault_is_found(fault: Fault, ready: Prepared) -> None:
    with fault.plant():
        # More than one: a fault may show in several ways.
        findings = find_differences(ready, fault.axis, ready.plays, max_failures=4)
    found = [failure.difference.what for failure in findings.failures]
    assert fault.shows_as in found, (findings.num_compared, findings.failures)


def test_nothing_is_found_where_nothing_is_planted(ready: Prepared) -> None:
    findings = find_differences(ready, "sync", ready.plays[:4], max_failures=1)
    assert not findings.failures
