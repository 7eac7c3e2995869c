"""What a soak makes of its figures."""

import os
import subprocess
import sys

import pytest

from benchmarks.http_fuzz.soak import (
    SoakOptions,
    contradictions,
    memory_report,
    session_rss_mib,
)
from vllm_mtp.config import ConfigError

SOUND = {
    "drafted": 10,
    "accepted": 6,
    "rejected_slots": 4,
    "drafted_of_vllm": 10,
    "accepted_of_vllm": 6,
    "accepted_by_position_of_vllm": 6,
    "failures": 0,
}


def test_memory_counts_from_the_warm_up_on() -> None:
    warming = [500.0 + 50 * i for i in range(10)]
    assert memory_report([*warming, *[1000.0] * 15])["failed"] == []
    growing = [*warming, *(1000.0 + 20 * i for i in range(15))]
    (words,) = memory_report(growing)["failed"]
    assert "memory grew" in words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"accepted": 0, "accepted_of_vllm": 0}, "something was accepted"),
        ({"drafted_of_vllm": 11}, "drafted is vLLM's"),
        ({"accepted_by_position_of_vllm": 5}, "sum over positions"),
        ({"rejected_slots": 3}, "rejected slots"),
        ({"failures": 1}, "nothing broke"),
    ],
)
def test_counters_that_cannot_all_be_right_are_named(changes, words) -> None:
    assert contradictions(SOUND) == []
    assert any(words in each for each in contradictions(SOUND | changes))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_a_session_is_that_of_its_processes() -> None:
    hold = "import sys; b = bytearray(64 * 2**20); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", hold],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        assert 64 < session_rss_mib(child.pid) < 256
    finally:
        child.communicate()
    assert session_rss_mib(child.pid) == 0
    assert session_rss_mib(os.getsid(0)) >= 0


def test_wrong_options_are_refused() -> None:
    for wrong in ({"minutes": 0}, {"minutes": float("nan")}, {"num_clients": 0}):
        with pytest.raises(ConfigError):
            SoakOptions(**wrong)
