"""Files that are given to the report: which kind they are, and which are refused."""

import json
import os
from pathlib import Path

import pytest

from benchmarks.report import KINDS
from tests.unit.tools.report_samples import COMMITTED, RESULTS, sample
from vllm_mtp.config import ConfigError
from vllm_mtp.tools.report_source import KEYS, kind_of, read_sources, short_names


def test_every_kind_has_a_renderer() -> None:
    assert set(KINDS) == set(KEYS)


@pytest.mark.parametrize("kind", KEYS)
def test_a_result_is_known_by_its_keys(kind: str, tmp_path: Path) -> None:
    assert kind_of(sample(kind, tmp_path)) == kind


def test_every_committed_result_is_known() -> None:
    kinds = {kind_of(json.loads(p.read_text())) for p in RESULTS.rglob("*.json")}
    assert kinds >= set(COMMITTED)
    assert None not in kinds


@pytest.mark.parametrize(
    "content", [None, 3, [], "x", {}, {"cells": []}, {"provenance": {}}]
)
def test_foreign_json_is_of_no_kind(content: object) -> None:
    assert kind_of(content) is None


def test_names_are_as_long_as_they_must() -> None:
    paths = [Path("/r/a/steps.json"), Path("/r/b/steps.json"), Path("/r/b/off.json")]
    assert short_names(paths) == ["a/steps.json", "b/steps.json", "off.json"]


def test_a_file_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(sample("plan", tmp_path)))
    link = tmp_path / "link.json"
    link.symlink_to(path)
    (only,) = read_sources([path, tmp_path / "." / "plan.json", link])
    assert only.name == "plan.json"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"\xff\xfe\x00", "is not a text"),
        (b'{"a": 1}', "is JSON, but no result of ours"),
        (b"[1, 2]", "is JSON, but no result of ours"),
    ],
)
def test_what_is_no_result_is_one_sentence(
    content: bytes | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        read_sources([path])
    assert f"result: {path} {words}" in str(error.value)
    assert "must be what `vllm-mtp eval`, `compare`" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_sources([tmp_path])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.touch(mode=0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        read_sources([path])


def test_a_journal_is_told_from_its_result(tmp_path: Path) -> None:
    path = tmp_path / "grid-test.jsonl"
    path.write_text('{"kind": "header"}\n{"kind": "round"}\n')
    with pytest.raises(ConfigError, match=r"is a journal, from which the same command"):
        read_sources([path])


def test_no_file_at_all_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="result: no file is given; must be what"):
        read_sources([])
