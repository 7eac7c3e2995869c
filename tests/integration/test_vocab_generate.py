"""``vllm-mtp vocab build --prompts`` as a user runs it: the target answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.shared_engines import sharing_engines

PROGRAM = Path(sys.executable).with_name("vllm-mtp")


def build(prompts: Path, output: Path, *more: str) -> subprocess.CompletedProcess[str]:
    arguments = ["--model", str(BUNDLED_CHECKPOINT), "--prompts", str(prompts)]
    return subprocess.run(
        [PROGRAM, "vocab", "build", str(output), *arguments, *more],
        env=sharing_engines(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_list_of_what_the_target_answers(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "list.json"
    texts = ["def add(a, b):", "import os\n", "class Stack:"]
    prompts.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    done = build(prompts, output, "--max-tokens", "24", "--temperature", "0")
    assert done.returncode == 0, done.stderr[-2000:]
    listed = json.loads(output.read_text())
    assert len(texts) <= listed["num_counted"] <= 24 * len(texts)


def test_an_engine_that_does_not_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "list.json"
    prompts.write_text(json.dumps({"text": "def add(a, b):"}) + "\n")
    done = build(prompts, output, "--dtype", "float8")
    assert done.returncode == 1
    assert "error: the engine of 'none' failed with" in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()
