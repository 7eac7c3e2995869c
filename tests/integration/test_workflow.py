"""The workflow in ``configs/ci``: its commands, as a runner would run them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.shared_engines import sharing_engines

WORKFLOW = Path(__file__).parents[2] / "configs" / "ci" / "acceptance.yml"
OURS = (
    "Evaluate the base",
    "Examine the model",
    "Evaluate the pull request",
    "Compare",
)


def steps() -> list[dict[str, Any]]:
    loaded = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    return list(loaded["jobs"]["acceptance"]["steps"])


def test_every_command_of_ours_is_run_and_ends_well(tmp_path: Path) -> None:
    scripts = {step["name"]: step["run"] for step in steps() if "run" in step}
    using = [name for name, run in scripts.items() if "vllm-mtp " in run]
    assert tuple(using) == OURS
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = sharing_engines(os.environ) | {
        "PATH": path,
        "MODEL": str(BUNDLED_CHECKPOINT),
        "EVAL_OPTIONS": "--dtype float32 --max-tokens 32 --num-prompts 8",
    }
    for name in OURS:
        done = subprocess.run(
            ["bash", "-e", "-c", scripts[name]],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, (name, done.stdout, done.stderr)
    assert "Not worse" in (tmp_path / "comment.md").read_text()
    uploaded = next(
        step["with"] for step in steps() if step.get("with", {}).get("name")
    )
    for file in uploaded["path"].split():
        assert (tmp_path / file).is_file(), file
