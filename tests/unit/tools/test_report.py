"""``vllm-mtp report`` and ``python -m benchmarks report``: results as Markdown."""

import json
import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer import Typer
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app as benchmarks
from benchmarks.report import KINDS
from tests.unit.tools.report_samples import (
    COMMITTED,
    RESULTS,
    evaluation,
    sample,
    write_sample,
)
from vllm_mtp.cli.main import app
from vllm_mtp.config import ConfigError
from vllm_mtp.tools import report
from vllm_mtp.tools.report import (
    DamagedError,
    Kind,
    escaped,
    kind_of,
    make_report,
    short_names,
)

ALL_RESULTS = sorted(RESULTS.rglob("*.json"))
HOSTILE = "<script>alert('x')</script> | **bold** [a](b) `c` & $"
SAYS = {
    "eval": [
        "Acceptance of mimo-python, K = 3",
        "48 prompts, 4320 drafts",
        "translation",
    ],
    "compare": ["Worse: acceptance length, position 1.", "Compared: a.json."],
    "plan": ["8 x H200, MoE 671B, batch 1", "Assumed: a pass takes"],
    "doctor": ["Ready for mtp\\_plus.", "What a few prompts showed", "2.10"],
    "verify": ["Exact: the output is the target's", "chi-square", "804 of 1209"],
    "verify requests": ["Exact: none of 1767 requests differs", "async small cache"],
    "http-fuzz": ["Exact: 500 answers are those of no speculation", "accepted"],
    "soak": ["Sound: nothing held after", "rejected\\_slots"],
    "grid": ["mtp\\_plus", "Targets", "reached"],
    "rollback": ["Metadata rollback, us", "pass", "MB zeroed"],
    "steps": ["Engine step time", "0.994", "tokens/draft"],
    "crossing": ["A batch that keeps crossing", "1.21", "mtp with a table"],
    "drafting": ["8 requests at a time", "1.18", "accepted by position"],
    "host": ["CPU time of the scheduler", "beyond"],
    "launches": ["Launched in a decode step", "graphs"],
    "graphs": ["CUDA graphs", "128", "1400", "1.00"],
    "off": ["K pinned to 0", "0.997", "Greedy texts: the same"],
    "checkouts": ["code c=1 T=0 short", "0.900", "Geometric mean 0.974"],
    "held-out": ["threshold", "13.5"],
    "replay": ["h200-70b-64-kinds", "Targets"],
    "vocab build": ["1,024 of 16,384 tokens cover 97.09% of the 773,442"],
    "warm-start": ["over those of a settled engine", "warm", "cold"],
    "copying": ["edits, 1 requests at a time", "4.000", "equal from all", "0.50/0.00"],
    "adapting": ["1.250 (1.250 .. 1.250)", "without drafts: 1.010", "equal: 3 of 3"],
    "vocabulary": ["Acceptance length, 1024 rows", "after learning: auto / list"],
}
STRANGER = {
    "eval": "mimo-python",
    "compare": "position 1",
    "doctor": "rollback by reference",
    "verify": "mtp_plus, random K",
    "verify requests": "structured_outputs",
    "http-fuzz": "completions.max_tokens",
    "soak": "num_cut",
    "grid": "code c=1 T=0 short",
    "rollback": "mla",
    "steps": "mtp_plus scrub",
    "crossing": "mtp with a table",
    "drafting": "mtp_plus, full",
    "host": "32",
    "launches": "none",
    "graphs": "none",
    "off": "16",
    "checkouts": "code c=1 T=0 short",
    "replay": "cpu-1-good",
    "vocab build": "0.32.0+cpu",
    "vocabulary": "code",
    "copying": "ngram",
}
"""A text of each sample that somebody else could choose."""


def call(*arguments: str | Path, app: Typer = app) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


@cache
def contents(kind: str) -> str:
    with TemporaryDirectory() as folder:
        return json.dumps(sample(kind, Path(folder)))


def shown(kind: str, content: Any, folder: Path) -> str:
    path = folder / f"{kind.replace(' ', '-')}.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return make_report([path], KINDS)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_sample("plan", tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_known_and_shown_with_its_origin(kind: str, tmp_path: Path) -> None:
    assert kind_of(json.loads(contents(kind)), KINDS) == kind
    text = shown(kind, contents(kind), tmp_path)
    assert text.startswith(f"## {KINDS[kind].title}: ")
    for words in SAYS[kind]:
        assert words in text
    if kind not in ("compare", "grid"):  # of made-up origin
        assert "python 3." in text


@pytest.mark.parametrize("path", ALL_RESULTS, ids=lambda path: path.stem)
def test_every_committed_result_is_shown(path: Path) -> None:
    assert len(make_report([path], KINDS)) > 300


def test_the_committed_results_make_one_report() -> None:
    text = make_report(ALL_RESULTS, KINDS)
    assert text.count("\n## ") + 1 == len(ALL_RESULTS)


def test_users_see_the_results_of_their_commands_without_the_benchmarks() -> None:
    done = call(COMMITTED["verify requests"], RESULTS / "fuzz" / "v2.json")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("## Random requests: ") == 2


@pytest.mark.parametrize("kind", STRANGER)
def test_texts_of_strangers_are_shown_as_they_are(kind: str, tmp_path: Path) -> None:
    stranger = json.dumps(STRANGER[kind])
    assert stranger in contents(kind)
    hostile = contents(kind).replace(stranger, json.dumps(HOSTILE))
    text = shown(kind, hostile, tmp_path)
    assert escaped(HOSTILE) in text
    assert "<script" not in text
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in table)


def complaint(kind: str, imitation: Any, folder: Path) -> str | None:
    """Why it cannot be shown; None if it can."""
    try:
        shown(kind, imitation, folder)
    except DamagedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, {}, [], "x", 0, 1e308, [None], {"a": None}])
def test_what_only_looks_like_a_result_is_one_sentence(
    kind: str, value: Any, tmp_path: Path
) -> None:
    imitation = dict.fromkeys((*KINDS[kind].keys, "options"), value)
    sentence = complaint(kind, imitation, tmp_path)
    if sentence is None:
        assert value in (None, {}, [], 0), "nothing was measured, nothing is shown"
        return
    assert f"{kind.replace(' ', '-')}.json is damaged or of" in sentence
    assert "must be what `vllm-mtp eval`" in sentence
    assert "\n" not in sentence


def test_the_evaluation_that_contradicts_itself_is_named(tmp_path: Path) -> None:
    broken = evaluation(1).model_dump(mode="json")
    broken["records"][0]["accepted"] = [10**6, 0, 0]
    with pytest.raises(DamagedError) as error:
        shown("eval", broken, tmp_path)
    assert "eval.json is damaged or of another version" in str(error.value)
    assert "records.0: Value error, more accepted than tested" in str(error.value)


@pytest.mark.parametrize(
    "content", [None, 3, [], "x", {}, {"cells": []}, {"provenance": {}}]
)
def test_foreign_json_is_of_no_kind(content: object) -> None:
    assert kind_of(content, KINDS) is None


def test_names_are_as_long_as_they_must() -> None:
    paths = [Path("/r/a/steps.json"), Path("/r/b/steps.json"), Path("/r/b/off.json")]
    assert short_names(paths) == ["a/steps.json", "b/steps.json", "off.json"]


def test_a_file_that_is_named_twice_is_shown_once(tmp_path: Path, plan: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(plan)
    text = make_report([plan, tmp_path / "." / "plan.json", link])
    assert text.count("## ") == 1
    assert "plan.json" in text


def test_results_are_shown_in_their_order(tmp_path: Path, plan: Path) -> None:
    other = tmp_path / "eval.json"
    other.write_text(evaluation().model_dump_json())
    output = tmp_path / "report.md"
    done = call(other, COMMITTED["off"], plan, "--output", output, app=benchmarks)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"Written: {output}\n"
    text = output.read_text(encoding="utf-8")
    places = [text.index(f"## {title}: ") for title in ("Acceptance", "Off", "Plan")]
    assert places == sorted(places)


def test_an_older_report_is_replaced_only_by_a_whole_one(
    tmp_path: Path, plan: Path
) -> None:
    output = tmp_path / "report.md"
    output.write_text("old")
    broken = tmp_path / "broken.json"
    broken.write_text(plan.read_text().replace('"speedup"', '"slowdown"'))
    assert "broken.json is damaged" in refused(call(plan, broken, "--output", output))
    assert output.read_text() == "old"
    assert call(plan, "--output", output).exit_code == 0
    assert output.read_text().startswith("## Plan")


def test_a_link_stays_a_link(tmp_path: Path, plan: Path) -> None:
    link = tmp_path / "link.md"
    link.symlink_to(tmp_path / "report.md")
    assert call(plan, "--output", link).exit_code == 0
    assert link.is_symlink()
    assert (tmp_path / "report.md").read_text().startswith("## Plan")


def test_halves_of_characters_do_not_stop_it(tmp_path: Path) -> None:
    content = json.loads(write_sample("doctor", tmp_path).read_text())
    content["findings"][0]["text"] = "half \ud83d of a face"
    path = tmp_path / "half.json"
    path.write_text(json.dumps(content))
    output = tmp_path / "report.md"
    assert call(path, "--output", output).exit_code == 0
    assert "half ? of a face" in output.read_text(encoding="utf-8")
    assert "half ? of a face" in call(path).stdout


def test_a_result_of_a_benchmark_is_left_to_the_benchmarks(plan: Path) -> None:
    sentence = refused(call(plan, COMMITTED["off"]))
    assert "no result of these commands; of a benchmark" in sentence
    assert "`python -m benchmarks report` shows it" in sentence


def test_no_result_at_all_is_one_sentence() -> None:
    assert "result: no file is given; must be what" in refused(call())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.json", None, "missing.json cannot be read: No such file"),
        ("empty.json", b"", "empty.json is not JSON; must be what `vllm-mtp eval`"),
        ("open.json", b"{", "is not JSON"),
        ("deep.json", b"[" * 200_000, "is not JSON"),
        ("bytes.json", b"\xff\xfe\x00", "is not a text"),
        ("foreign.json", b'{"a": 1}', "foreign.json is JSON, but no result of"),
        ("list.json", b"[1, 2]", "is JSON, but no result of"),
        ("grid.jsonl", b"{}\n{}", "grid.jsonl is a journal, from which the same"),
    ],
)
def test_what_is_no_result_is_named(
    name: str, content: bytes | None, words: str, tmp_path: Path, plan: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    output = tmp_path / "report.md"
    assert words in refused(call(plan, path, "--output", output))
    assert not output.exists()


def test_a_folder_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        make_report([tmp_path])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.touch(mode=0)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        make_report([path])


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("/nowhere/report.md", "must be a file in a folder that exists"),
        ("/dev/null", "must be a file, not a folder or a device"),
        ("/", "must be a file, not a folder or a device"),
        ("/proc/report.md", "cannot be written: "),
    ],
)
def test_where_nothing_can_be_written_is_said_and_what_is_allowed(
    output: str, words: str, plan: Path
) -> None:
    sentence = refused(call(plan, "--output", output))
    assert sentence.startswith("error: output: ")
    assert output in sentence
    assert words in sentence


def test_no_result_is_replaced_by_its_report(plan: Path) -> None:
    before = plan.read_bytes()
    sentence = refused(call(plan, "--output", plan))
    assert "must be another file than the results" in sentence
    assert plan.read_bytes() == before


@pytest.mark.parametrize(
    ("printed_as", "expected"),
    [
        ("[green]reached[/]", "reached"),
        ("[bold red]MISSED[/] in x", "MISSED in x"),
        ("1.5 \\[1.4..1.6]", "1.5 \\[1.4..1.6\\]"),
        ("[magenta]a name[/nobody]", "\\[magenta\\]a name\\[/nobody\\]"),
        ("<b>[0]</b>", "&lt;b\\>\\[0\\]&lt;/b\\>"),
        ("a|b\nc", "a\\|b c"),
    ],
)
def test_only_our_own_markup_is_markup(
    printed_as: str, expected: str, tmp_path: Path
) -> None:
    def show(result: Any, console: Console) -> None:
        table = Table(title="A  title", caption="a\nnote")
        table.add_column("name")
        table.add_column("over\nK=0", justify="right")
        table.add_row("a", Text(printed_as) if "magenta" in printed_as else printed_as)
        console.print(table)
        console.print("[dim]aside[/]")

    path = tmp_path / "x.json"
    path.write_text('{"x": 1}')
    kinds = {"x": Kind("X", frozenset({"x"}), show)}
    assert report.make_report([path], kinds).splitlines() == [
        *("## X: x.json", "", "**A title**", ""),
        *("| name | over K=0 |", "| --- | ---: |", f"| a | {expected} |", ""),
        *("a note", "", "aside", ""),
    ]
