"""Random requests over HTTP: a few in each run, thousands by command.

`python -m benchmarks http-fuzz --seed S` and `python -m benchmarks soak` are the same
with more of them.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from rich.console import Console

from benchmarks.http_fuzz.bench import HttpFuzzOptions, run_http_fuzz
from benchmarks.http_fuzz.soak import SoakOptions, run_soak
from tests.support.engines import forking_servers


@pytest.fixture(autouse=True)
def environ() -> Iterator[None]:
    """Servers start sooner."""
    with mock.patch.dict(os.environ, forking_servers(os.environ)):
        yield


def test_random_requests_are_answered_as_without_speculation(tmp_path: Path) -> None:
    report = run_http_fuzz(
        HttpFuzzOptions(
            num_requests=28,
            seed=7,
            output=tmp_path / "report.json",
        ),
        Console(),
    )
    assert report["is_exact"], report["findings"]
    assert report["verified"]["accepted"] > 20
    assert not any(report["held"].values())


@pytest.mark.long
def test_a_while_of_everything_leaves_nothing_behind(tmp_path: Path) -> None:
    report = run_soak(
        SoakOptions(
            minutes=0.25,
            num_clients=6,
            # Drafts whatever a crowded machine makes of its worth.
            speculative_config={"method": "mtp_plus", "controller": "random"},
            output=tmp_path / "report.json",
        ),
        Console(),
    )
    assert report["is_sound"], report["failed"]
    assert report["requests"]["num_cut"] > 0
    assert report["requests"]["num_requests"] > 10
