"""Random requests are answered as without speculation: Model Runner V2, float32.

Triton's kernels are interpreted, so the requests are few and short.
"""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support import v2_interpreter
from vllm_mtp.tools.fuzz_axes import AXES as ALL_AXES
from vllm_mtp.tools.fuzz_requests import KINDS, SESSION
from vllm_mtp.tools.fuzz_run import FuzzOptions, run_fuzzer

ROOT = Path(__file__).parents[2]
AXES = ("async", "small cache")
NUM_REQUESTS = 40


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """What the command reports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT / 'tests/support/interpreted'}:{ROOT}")
        # What a command that runs so leaves to its engines.
        for name, value in v2_interpreter.ENVIRONMENT.items():
            patch.setenv(name, value)
        options = FuzzOptions(
            num_requests=NUM_REQUESTS,
            seed=1,
            axes=AXES,
            without=("n", "prompt_logprobs"),
            engine_args={"max_model_len": 96},
        )
        return run_fuzzer(options, Console())


def test_the_requests_are_of_most_kinds(report: dict[str, Any]) -> None:
    assert report["kinds"][SESSION]
    assert len(report["kinds"]) > 0.6 * len(KINDS)


def test_random_requests_are_answered_as_without_speculation(
    report: dict[str, Any],
) -> None:
    assert not report["failures"]
    assert not report["reference_died"]
    assert report["num_requests"] == NUM_REQUESTS
    assert report["num_compared"] > 0.7 * NUM_REQUESTS
    for name in AXES:
        counts = report["engines"][name]
        assert counts["drafted"] > counts["accepted"] > 0
        assert counts[ALL_AXES[name].proof] > 0
