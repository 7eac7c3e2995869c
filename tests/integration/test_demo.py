"""`vllm-mtp demo` for real: servers, requests, table, result file, and nothing left."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.heldout import BUNDLED_CHECKPOINT

TIMEOUT_S = 600


def processes_mentioning(text: str) -> list[str]:
    """Command lines of running processes that contain a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


def test_the_demo_compares_real_servers_and_leaves_none_behind(tmp_path: Path) -> None:
    # A name of its own for the model, so that its servers can be told from others.
    model = tmp_path / "mimo-of-this-test"
    model.mkdir()
    for file in BUNDLED_CHECKPOINT.iterdir():
        (model / file.name).symlink_to(file)
    program = Path(sys.executable).with_name("vllm-mtp")
    command = [str(program), "demo", str(model)]
    command += ["--methods", "none,mtp_plus", "--prompts", "2", "--tokens", "24"]
    command += ["--repeats", "2", "--json", str(tmp_path / "result.json")]
    # Short, unlike tmp_path: vLLM puts sockets there, whose paths must be short.
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            command,
            env={**os.environ, "TMPDIR": scratch},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert os.listdir(scratch) == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Same greedy text: yes, in all 12 continuations." in done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    plain, plus = result["methods"]["none"], result["methods"]["mtp_plus"]
    assert plain["tokens_per_step"] == 1.0
    assert plain["counters"]["num_drafts"] == 0
    assert plus["tokens_per_step"] > 1.0
    assert plus["counters"]["num_generated_tokens"] == 2 * 2 * 24
    assert 0.0 < plus["survival"][0] <= 1.0
    assert len(plus["speedup_of_each_pass"]) == 2
    assert not processes_mentioning(model.name)
