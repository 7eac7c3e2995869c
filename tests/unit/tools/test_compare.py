"""False alarms and power of the comparison of acceptance, by simulation."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from vllm_mtp.cli.main import app
from vllm_mtp.config import ConfigError
from vllm_mtp.tools.compare import LENGTH, CompareOptions, compare
from vllm_mtp.tools.eval_file import EvalFile, PromptRecord, read_eval_file

NUM_PROMPTS, DRAFTS_PER_PROMPT = 96, 90
"""Of the built-in set: 96 prompts with 256 tokens each, at about 2.8 tokens a step."""
DRAFT_LENGTH = 3
ACCEPTANCE = (0.80, 0.72, 0.66)


def evaluation(
    rng: np.random.Generator,
    ease: np.ndarray,
    acceptance: tuple[float, ...] = ACCEPTANCE,
    **change: Any,
) -> EvalFile:
    """Drafts of prompts that are easier or harder, the same ones each time."""
    records = []
    for number, each in enumerate(ease):
        tested, accepted, reached = [], [], DRAFTS_PER_PROMPT
        for probability in acceptance:
            odds = probability / (1 - probability) * np.exp(each)
            tested.append(reached)
            reached = int(rng.binomial(reached, odds / (1 + odds)))
            accepted.append(reached)
        records.append(
            PromptRecord(
                id=f"p{number}",
                num_tokens=256,
                num_drafts=DRAFTS_PER_PROMPT,
                num_draft_tokens=DRAFT_LENGTH * DRAFTS_PER_PROMPT,
                tested=tuple(tested),
                accepted=tuple(accepted),
                seconds=1.0,
            )
        )
    fields = {
        "model": "m",
        "prompts_sha256": "s",
        "draft_length": DRAFT_LENGTH,
        "temperature": 1.0,
        "max_tokens": 256,
    }
    return EvalFile(records=tuple(records), **(fields | change))


def eases(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(0.0, 0.6, NUM_PROMPTS)


def only_significance() -> CompareOptions:
    return CompareOptions(length_floor=0.0, position_floor=0.0)


def test_equal_runs_raise_next_to_no_false_alarm() -> None:
    rng, alarms, trials = np.random.default_rng(0), 0, 300
    for _ in range(trials):
        ease = eases(rng)
        pair = evaluation(rng, ease), evaluation(rng, ease)
        alarms += compare(*pair, CompareOptions()).is_failure
    # Of a rate of 1 % at least 4 of 300 would be seen four times in five.
    assert alarms <= 3


def test_a_drop_of_three_points_at_the_first_position_is_found() -> None:
    rng, found, trials = np.random.default_rng(1), 0, 100
    for _ in range(trials):
        ease = eases(rng)
        base = evaluation(rng, ease)
        share = sum(r.accepted[0] for r in base.records) / sum(
            r.tested[0] for r in base.records
        )
        dropped = ACCEPTANCE[0] - 0.03 * ACCEPTANCE[0] / share
        new = evaluation(rng, ease, (dropped, *ACCEPTANCE[1:]))
        found += compare(base, new, only_significance()).is_failure
    assert found >= 0.95 * trials


def test_the_same_file_is_not_worse() -> None:
    rng = np.random.default_rng(2)
    file = evaluation(rng, eases(rng))
    comparison = compare(file, file, CompareOptions())
    assert not comparison.is_failure
    assert {f.interval for f in comparison.figures} == {(0.0, 0.0)}
    names = [figure.name for figure in comparison.figures]
    assert names == [LENGTH, "position 1", "position 2", "position 3"]


def test_a_floor_stops_what_is_too_uncertain() -> None:
    rng = np.random.default_rng(3)
    ease = rng.normal(0.0, 0.6, 4)
    base = evaluation(rng, ease)
    new = evaluation(rng, ease, (0.70, *ACCEPTANCE[1:]))
    comparison = compare(base, new, CompareOptions())
    first = next(f for f in comparison.figures if f.name == "position 1")
    assert first.is_below_floor
    assert comparison.is_failure


def test_positions_that_were_hardly_tested_are_left_out() -> None:
    rng = np.random.default_rng(4)
    file = evaluation(rng, np.zeros(2), (0.8, 0.1, 0.5))
    names = [figure.name for figure in compare(file, file, CompareOptions()).figures]
    assert names == [LENGTH]
    file = evaluation(rng, np.zeros(4), (0.8, 0.1, 0.5))
    names = [figure.name for figure in compare(file, file, CompareOptions()).figures]
    assert names == [LENGTH, "position 1", "position 2"]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"prompts_sha256": "other"},
        {"draft_length": "auto"},
        {"temperature": 0.5},
        {"max_tokens": 64},
    ],
)
def test_evaluations_of_other_things_are_refused(change: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    ease = eases(rng)
    with pytest.raises(ConfigError, match=f"{next(iter(change))}: .* differ; evaluate"):
        compare(
            evaluation(rng, ease), evaluation(rng, ease, **change), CompareOptions()
        )


def test_an_unfinished_evaluation_is_refused() -> None:
    rng = np.random.default_rng(6)
    ease = eases(rng)
    with pytest.raises(ConfigError, match="96 prompts of the base and 95 of the new"):
        compare(evaluation(rng, ease), evaluation(rng, ease[1:]), CompareOptions())


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    file = evaluation(rng, eases(rng))
    path = tmp_path / "eval.json"
    path.write_text(file.model_dump_json())
    assert read_eval_file(path) == file


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is no evaluation of this version: Invalid JSON"),
        ("[]", "is no evaluation of this version"),
        ('{"format": 2}', "format: Input should be 1"),
    ],
)
def test_a_foreign_file_is_one_sentence(
    content: str | None, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "eval.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as error:
        read_eval_file(path)
    assert words in str(error.value)


def test_counts_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(8)
    written = json.loads(evaluation(rng, np.zeros(1)).model_dump_json())
    written["records"][0]["accepted"][0] = 10**6
    path = tmp_path / "eval.json"
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="more accepted than tested"):
        read_eval_file(path)


def write(path: Path, file: EvalFile) -> str:
    path.write_text(file.model_dump_json())
    return str(path)


def test_the_command_writes_for_people_and_for_ci(tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    ease = eases(rng)
    base = write(tmp_path / "base.json", evaluation(rng, ease))
    worse = evaluation(rng, ease, (0.72, *ACCEPTANCE[1:]))
    new = write(tmp_path / "new.json", worse)
    markdown, junit = tmp_path / "report.md", tmp_path / "report.xml"
    files = ["--markdown", str(markdown), "--junit", str(junit)]
    result = CliRunner().invoke(app, ["compare", base, new, *files])
    assert result.exit_code == 1, result.output
    assert "Worse: acceptance length, position 1" in result.stdout
    assert "| position 1 |" in markdown.read_text()
    suite = ElementTree.parse(junit).getroot()
    assert suite.get("tests") == "4"
    failed = [case.get("name") for case in suite if case.find("failure") is not None]
    assert failed == ["acceptance length", "position 1"]

    result = CliRunner().invoke(app, ["compare", base, base])
    assert result.exit_code == 0
    assert "Not worse, on 96 prompts." in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--false-alarm-rate", "0"], "false-alarm-rate: 0.0 is not allowed"),
        (["--length-floor", "2"], "length-floor: 2.0 is not allowed"),
        (["--junit", "/nowhere/x.xml"], "must be a file in a folder that exists"),
        ([], "cannot be read"),
    ],
)
def test_wrong_input_is_one_sentence(arguments: list[str], words: str) -> None:
    files = ["/nowhere/base.json", "/nowhere/new.json"]
    result = CliRunner().invoke(app, ["compare", *files, *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
