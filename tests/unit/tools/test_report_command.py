"""``vllm-mtp report``: the page it writes, and one sentence about wrong input."""

import json
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner, Result

from benchmarks.__main__ import app as benchmarks
from tests.unit.tools.page_reader import Page
from tests.unit.tools.report_samples import COMMITTED, evaluation, write_sample
from vllm_mtp.cli.main import app


def call(*arguments: str | Path, app: Typer = app) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return write_sample("plan", tmp_path)


def test_results_of_many_kinds_become_one_page(tmp_path: Path, plan: Path) -> None:
    for name, seed in (("base", 0), ("new", 1)):
        (tmp_path / f"{name}.json").write_text(evaluation(seed).model_dump_json())
    files = [tmp_path / "base.json", COMMITTED["off"], plan, tmp_path / "new.json"]
    output = tmp_path / "report.html"
    result = call(*files, "--output", output, app=benchmarks)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"Written: {output}\n"
    read = Page(output.read_text(encoding="utf-8"))
    titles = ["Acceptance of mimo-python", "Off", "Plan"]
    text = read.text.partition("In short")[2]
    places = [text.index(f" {title} ") for title in titles]
    assert places == sorted(places)
    assert read.values("href").count("#result-3") == 1
    assert "#result-4" not in read.values("href"), "evaluations share a section"
    assert "from 4 file(s)" in read.text
    assert {each.name for each in tmp_path.iterdir()} == {
        "base.json", "new.json", "plan.json", "report.html",
    }  # fmt: skip


def test_two_results_of_a_kind_are_told_apart_by_their_files(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    files = [write_sample("plan", folder) for folder in folders]
    output = tmp_path / "report.html"
    files.append(COMMITTED["off"])
    assert call(*files, "--output", output, app=benchmarks).exit_code == 0
    texts = Page(output.read_text()).texts
    for title in ("Plan: a/plan.json", "Plan: b/plan.json", "Off"):
        assert texts.count(title) == 2, "in short, and above its section"


def test_a_comparison_says_what_was_compared_and_where(tmp_path: Path) -> None:
    names = ["base.json", "new.json"]
    for seed, name in enumerate(names):
        (tmp_path / name).write_text(evaluation(seed).model_dump_json())
    pair = [str(tmp_path / name) for name in names]
    compared, output = tmp_path / "compared.json", tmp_path / "report.html"
    CliRunner().invoke(app, ["compare", *pair, "--output", str(compared)])
    assert call(compared, "--output", output).exit_code == 0
    text = Page(output.read_text()).text
    assert "mimo-python: Not worse, on 48 prompts." in text
    assert "Compared: base.json and new.json." in text
    assert "python 3." in text


def test_an_older_page_is_replaced_only_by_a_whole_one(
    tmp_path: Path, plan: Path
) -> None:
    output = tmp_path / "report.html"
    output.write_text("old")
    broken = tmp_path / "broken.json"
    broken.write_text(plan.read_text().replace('"speedup"', '"slowdown"'))
    assert "broken.json is damaged" in refused(call(plan, broken, "--output", output))
    assert output.read_text() == "old"
    assert call(plan, "--output", output).exit_code == 0
    assert output.read_text().startswith("<!DOCTYPE html>")


def test_a_link_stays_a_link(tmp_path: Path, plan: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "report.html")
    assert call(plan, "--output", link).exit_code == 0
    assert link.is_symlink()
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")


def test_halves_of_characters_do_not_stop_it(tmp_path: Path) -> None:
    content = json.loads(write_sample("doctor", tmp_path).read_text())
    content["findings"][0]["text"] = "half \ud83d of a face"
    path = tmp_path / "half.json"
    path.write_text(json.dumps(content))
    output = tmp_path / "report.html"
    assert call(path, "--output", output).exit_code == 0
    assert "half ? of a face" in output.read_text(encoding="utf-8")


def test_a_result_of_a_benchmark_is_left_to_the_benchmarks(
    plan: Path, tmp_path: Path
) -> None:
    output = tmp_path / "report.html"
    sentence = refused(call(plan, COMMITTED["off"], "--output", output))
    assert f"result: {COMMITTED['off']} is of a benchmark;" in sentence
    assert "`python -m benchmarks report` makes its page" in sentence
    assert not output.exists()


def test_no_result_at_all_is_one_sentence() -> None:
    assert "result: no file is given; must be what" in refused(call())


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.json", None, "missing.json cannot be read: No such file"),
        ("empty.json", "", "empty.json is not JSON; must be what `vllm-mtp eval`"),
        ("foreign.json", '{"a": 1}', "foreign.json is JSON, but no result of ours"),
        ("grid.jsonl", "{}\n{}", "grid.jsonl is a journal"),
    ],
)
def test_what_is_no_result_is_named(
    name: str, content: str | None, words: str, tmp_path: Path, plan: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    output = tmp_path / "report.html"
    assert words in refused(call(plan, path, "--output", output))
    assert not output.exists()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("/nowhere/report.html", "must be a file in a folder that exists"),
        ("/dev/null", "must be a file, not a folder or a device"),
        ("/", "must be a file, not a folder or a device"),
        ("/proc/report.html", "cannot be written: "),
    ],
)
def test_where_nothing_can_be_written_is_said_and_what_is_allowed(
    output: str, words: str, plan: Path
) -> None:
    sentence = refused(call(plan, "--output", output))
    assert sentence.startswith("error: output: ")
    assert output in sentence
    assert words in sentence


def test_no_result_is_replaced_by_its_page(plan: Path) -> None:
    before = plan.read_bytes()
    sentence = refused(call(plan, "--output", plan))
    assert "must be another file than the results" in sentence
    assert plan.read_bytes() == before
