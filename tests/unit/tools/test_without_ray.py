"""Ray is an extra: commands do without it, and its option says what is missing."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from examples.tiny_model import TINY_MODEL
from vllm_mtp.cli.main import app


def test_the_commands_do_not_import_it() -> None:
    code = (
        "import sys, vllm_mtp.cli.main, vllm_mtp.tools.ray_eval, "
        "vllm_mtp.tools.ray_train; print('ray' in sys.modules)"
    )
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.strip() == "False"


@pytest.mark.parametrize("command", ["eval", "tune"])
def test_one_sentence_names_the_extra(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_mtp.tools.ray_cluster.find_spec", lambda name: None)
    output = str(tmp_path / "output")
    arguments = {
        "eval": [output, "--model", str(TINY_MODEL)],
        "tune": [str(TINY_MODEL), "--output", output],
    }[command]
    result = CliRunner().invoke(app, [command, *arguments, "--ray", "2"])
    assert result.exit_code == 2
    wanted = "error: ray: it is not installed; pip install 'vllm-mtp[ray]'\n"
    assert result.stderr == wanted
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["eval", "tune"])
def test_no_engines_are_refused(command: str, tmp_path: Path) -> None:
    output = str(tmp_path / "output")
    arguments = {
        "eval": [output, "--model", str(TINY_MODEL)],
        "tune": [str(TINY_MODEL), "--output", output],
    }[command]
    result = CliRunner().invoke(app, [command, *arguments, "--ray", "0"])
    assert result.exit_code == 2
    assert "ray: 0 is not allowed; must be a number from 1 to 4096" in result.stderr


def test_a_server_and_ray_exclude_each_other(tmp_path: Path) -> None:
    arguments = ["eval", str(tmp_path / "e.json"), "--server", "http://localhost:9/v1"]
    result = CliRunner().invoke(app, [*arguments, "--ray", "2"])
    assert result.exit_code == 2
    assert "ray: a server has engines of its own; name one of both" in result.stderr


def test_a_cluster_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not replaced by one of this machine."""

    def init(**options: Any) -> None:
        raise ConnectionError

    ray = SimpleNamespace(is_initialized=lambda: False, init=init)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr("vllm_mtp.tools.ray_cluster.find_spec", lambda name: name)
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    output = str(tmp_path / "e.json")
    arguments = ["eval", output, "--model", str(TINY_MODEL), "--ray", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr == "error: ray: no cluster answers at head:6379\n"
