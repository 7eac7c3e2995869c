"""``vllm-mtp verify`` with real engines: one that is right and one that is not."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.shared_engines import sharing_engines

SIZE = (
    *("--num-prompts", "4", "--max-tokens", "24"),
    *("--samples", "200", "--sampled-tokens", "2"),
)

BUG = """
import functools


def register():
    from vllm_mtp.integration.v1 import rejection_sampler

    theirs = rejection_sampler.MTPPlusRejectionSampler

    right = theirs.forward

    @functools.wraps(right)
    def wrong(self, metadata, draft_probs, logits, sampling_metadata):
        if metadata.max_spec_len:
            # The target's rows, each one place too late.
            logits = logits.roll(1, 0)
        return right(self, metadata, draft_probs, logits, sampling_metadata)

    theirs.forward = wrong
"""


def verify(
    report: Path, plugins: Path | None = None
) -> subprocess.CompletedProcess[str]:
    command = str(Path(sys.executable).with_name("vllm-mtp"))
    environ = sharing_engines(os.environ) | {"COLUMNS": "160"}
    if plugins is not None:
        paths = [str(plugins), environ["PYTHONPATH"]]
        environ["PYTHONPATH"] = os.pathsep.join(paths)
    return subprocess.run(
        [command, "verify", str(BUNDLED_CHECKPOINT), *SIZE, "--output", str(report)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=400,
    )


def test_a_correct_server_is_exact(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    ended = verify(path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Exact: the output is the target's" in ended.stdout
    report = json.loads(path.read_text())
    assert report["is_exact"]
    for name, each in report["greedy"].items():
        assert each["num_tokens"] == 4 * 24
        assert each["defects"] == []
        counts = report["verified"][name]
        assert 0 < counts["accepted"] < counts["drafted"]


@pytest.mark.long
def test_a_bug_in_the_server_is_found(tmp_path: Path) -> None:
    """Put in as a plugin of vLLM, which its engines load by themselves."""
    info = tmp_path / "plugins" / "bug-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bug\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nbug = seeded_bug:register\n"
    )
    (info.parent / "seeded_bug.py").write_text(BUG)
    path = tmp_path / "report.json"
    ended = verify(path, info.parent)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "NOT EXACT" in ended.stdout
    report = json.loads(path.read_text())
    assert report["greedy"]["mtp_plus, random K"]["defects"]
    hostile = report["sampled"]["mtp_plus, random K"]
    assert hostile["min_p_value"] < hostile["alpha"]
    itself = report["sampled"]["none, again"]
    assert itself["min_p_value"] > itself["alpha"]
