"""`vllm-mtp demo` for real: servers, requests, table, result file, and nothing left."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.engines import forking_servers
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
    command += ["--prompts", "4", "--tokens", "24"]
    command += ["--output", str(tmp_path / "result.json")]
    # Short, unlike tmp_path: vLLM puts sockets there, whose paths must be short.
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            command,
            env=forking_servers(os.environ) | {"TMPDIR": scratch},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert os.listdir(scratch) == []
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Same greedy text: yes, 8 of 8." in done.stdout
    methods = json.loads((tmp_path / "result.json").read_text())["methods"]
    assert list(methods) == ["none", "mtp", "mtp_plus"]
    for each in methods.values():
        assert (each["completed"], each["total_output_tokens"]) == (4, 4 * 24)
    assert "spec_decode_acceptance_length" not in methods["none"]
    assert methods["mtp"]["spec_decode_acceptance_length"] > 1.5
    assert methods["mtp_plus"]["speedup"] > 0
    assert not processes_mentioning(model.name)
