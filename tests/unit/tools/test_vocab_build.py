"""Counting tokens and choosing those of a draft vocabulary."""

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from examples.tiny_model import TINY_MODEL
from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.vocabulary import BUNDLED_TOKENIZER_SHA256
from vllm_mtp.cli.main import app
from vllm_mtp.config import ConfigError
from vllm_mtp.drafting.vocabulary_list import read_vocabulary_list
from vllm_mtp.tools.vocab_build import (
    VocabOptions,
    build_vocabulary,
    choose_token_ids,
)

HELDOUT = BUNDLED_CHECKPOINT / "heldout_prompts.jsonl"


def test_the_most_frequent_come_first_and_those_needed_are_there() -> None:
    counts = np.zeros(1000, np.int64)
    counts[[700, 800, 900]] = 5, 9, 7
    chosen = choose_token_ids(counts, {999}, 128, None)
    assert len(chosen) == 128
    assert list(chosen[:5]) == [800, 900, 700, 0, 1]
    assert chosen[-1] == 999
    assert len(set(chosen)) == 128


def test_a_coverage_decides_how_many_are_needed() -> None:
    counts = np.zeros(4096, np.int64)
    counts[1000:2000] = 1
    assert len(choose_token_ids(counts, set(), None, 0.5)) == 512
    assert len(choose_token_ids(counts, set(), None, 1.0)) == 1024
    assert len(choose_token_ids(counts, set(), None, None)) == 1024, "the usual"
    small = np.ones(50, np.int64)
    assert len(choose_token_ids(small, set(), None, None)) == 50, "no more than all"


def test_a_list_is_made_from_text(tmp_path: Path) -> None:
    text = StringIO()
    output = tmp_path / "list.json"
    options = VocabOptions(
        output, str(TINY_MODEL), text=[HELDOUT, Path(__file__)], coverage=0.95
    )
    build_vocabulary(options, Console(file=text, width=80))
    listed = read_vocabulary_list(output)
    assert listed.vocab_size == 16384
    assert listed.tokenizer_sha256 == BUNDLED_TOKENIZER_SHA256
    assert len(listed.token_ids) % 128 == 0
    assert 0.95 <= listed.coverage()[-1] < 1.0
    assert {0, 1, 2} <= set(listed.token_ids), "special tokens"
    assert list(listed.counts) == sorted(listed.counts, reverse=True)
    assert f"{len(listed.token_ids)}" in text.getvalue()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "text: give files with --text, or --prompts"),
        (["--text", "/nowhere"], "text: '/nowhere' is no file that can be read"),
        (["--text", str(HELDOUT), "--size", "99999"], "size: 99999 is not allowed"),
        (["--text", str(HELDOUT), "--size", "9", "--coverage", "1"], "not both"),
        (["--text", str(HELDOUT), "--coverage", "1.5"], "coverage: 1.5 is not allowed"),
        (["--text", "empty.txt"], "not a single token"),
        (["--text", "broken.jsonl"], "broken.jsonl:1 is no JSON object"),
        (["--text", "binary.txt"], "is no text in UTF-8"),
        (["--text", str(HELDOUT), "--model", "/nowhere"], "model: '/nowhere'"),
        (["--prompts", "empty.txt"], "holds no prompt"),
        (["--prompts", "other.jsonl"], "other.jsonl:1: neither text nor messages"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("broken.jsonl").write_text("no\n")
    Path("binary.txt").write_bytes(b"\xff\xfe\x80")
    Path("other.jsonl").write_text(json.dumps({"name": "x"}))
    model = () if "--model" in arguments else ("--model", str(TINY_MODEL))
    command = ["vocab", "build", "list.json", *model, *arguments]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert not Path("list.json").exists()


def test_an_output_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"output: .* a file in a folder that exists"):
        VocabOptions(tmp_path / "no" / "list.json", "m/m", text=[HELDOUT])
