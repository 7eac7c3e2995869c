"""Random requests are answered as without speculation: Model Runner V2, float32.

Triton's kernels are interpreted, so the requests are few and short.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model import TINY_MODEL
from tests.support import adaptive_verification
from vllm_mtp.tools.fuzz_axes import AXES as ALL_AXES
from vllm_mtp.tools.fuzz_options import V2_ONLY
from vllm_mtp.tools.fuzz_requests import KINDS, SESSION

ROOT = Path(__file__).parents[2]
AXES = ("async small cache",)
NUM_REQUESTS = 32


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command reports, in a process whose engines are all interpreted."""
    output = tmp_path_factory.mktemp("fuzzer") / "report.json"
    command = [str(Path(sys.executable).with_name("vllm-mtp")), "verify"]
    command += [str(TINY_MODEL)]
    command += ["--requests", str(NUM_REQUESTS), "--seed", "1"]
    command += ["--engines", ",".join(AXES), "--without", "n,prompt_logprobs"]
    command += ["--engine-args", '{"max_model_len": 96}', "--output", str(output)]
    variables = {
        "PYTHONPATH": f"{ROOT / 'tests/support/interpreted'}:{ROOT}",
        # The device leaves draft tokens out, too.
        adaptive_verification.VARIABLE: "1",
    }
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=800
    )
    assert output.is_file(), done.stdout + done.stderr
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_the_requests_are_of_most_kinds(report: dict[str, Any]) -> None:
    assert report["kinds"][SESSION]
    # Model Runner V1 refuses it, and is hardly ever asked for it.
    assert report["kinds"][V2_ONLY[0]] > 1, "the engines are not V2's"
    assert len(report["kinds"]) > 0.6 * len(KINDS)


def test_random_requests_are_answered_as_without_speculation(
    report: dict[str, Any],
) -> None:
    assert not report["failures"]
    assert not report["reference_died"]
    # This axis leaves out sessions: vLLM loses those that it preempts.
    assert report["num_requests"] == NUM_REQUESTS - report["kinds"][SESSION]
    assert report["num_compared"] > 0.7 * NUM_REQUESTS
    for name in AXES:
        counts = report["engines"][name]
        assert counts["drafted"] > counts["accepted"] > 0
        assert counts[ALL_AXES[name].proof] > 0
