"""Result files and where their figures come from."""

import json
import subprocess
from pathlib import Path

import pytest

from vllm_mtp.tools.provenance import collect_provenance, git_state, write_json


def test_a_result_file_that_cannot_be_written_whole_leaves_the_old_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_provenance_names_command_versions_and_machine() -> None:
    facts = collect_provenance(["/somewhere/bin/vllm-mtp", "demo"])
    assert facts["command"] == ["vllm-mtp", "demo"]
    assert facts["versions"]["torch"]
    assert facts["hardware"]["num_cores"] >= 1
    assert json.loads(json.dumps(facts)) == facts


def test_the_state_of_git_is_commit_and_dirt(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *identity, *arguments],
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.strip()

    assert git_state(tmp_path) is None
    git("init", "-q")
    assert git_state(tmp_path) == {"commit": None, "is_dirty": False}
    git("commit", "-q", "--allow-empty", "-m", "empty")
    commit = git("rev-parse", "HEAD")
    assert git_state(tmp_path) == {"commit": commit, "is_dirty": False}
    (tmp_path / "new").touch()
    assert git_state(tmp_path) == {"commit": commit, "is_dirty": True}
