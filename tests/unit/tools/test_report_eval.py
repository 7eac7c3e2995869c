"""Evaluations of one model, side by side."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.tools.report_samples import evaluation
from vllm_mtp.tools.eval_file import EvalFile, PromptRecord
from vllm_mtp.tools.eval_report import acceptance_length, position_shares
from vllm_mtp.tools.report import make_sections
from vllm_mtp.tools.report_eval import render_eval
from vllm_mtp.tools.report_page import Body, PageTable, draw_all
from vllm_mtp.tools.report_source import EVAL, DamagedError, Source


def source(name: str, file: EvalFile) -> Source:
    content = file.model_dump(mode="json")
    return Source(Path(f"/r/{name}.json"), f"{name}.json", EVAL, content)


def body(*files: EvalFile) -> Body:
    """Of files that are named a, b, c and so on."""
    return render_eval([source("abcdef"[i], each) for i, each in enumerate(files)])


def table(found: Body, caption: str) -> PageTable:
    (only,) = [each for each in found.tables if each.caption.startswith(caption)]
    return only


def texts(found: PageTable) -> list[list[str]]:
    return [[cell.text for cell in row] for row in found.rows]


def test_every_evaluation_has_a_column_with_intervals() -> None:
    files = evaluation(0), evaluation(1)
    shares = [position_shares(each.records) for each in files]
    found = table(body(*files), "Accepted if reached")
    assert found.headers == ("position", "a.json", "b.json")
    assert texts(found) == [
        [str(j + 1), str(shares[0][j]), str(shares[1][j])] for j in range(3)
    ]


def test_categories_are_in_the_order_of_the_file_and_counted() -> None:
    files = evaluation(0), evaluation(1, categories=("code", "poems"))
    found = table(body(*files), "Acceptance length by category")
    names = [row[0] for row in texts(found)]
    assert names == ["code", "math", "chat", "translation", "poems"]
    code, math, *_ = texts(found)
    assert code[1] == "12 / 24"
    length = acceptance_length([r for r in files[0].records if r.category == "code"])
    assert code[2].startswith(f"{length.value:.3f} ({length.low:.3f} ..")
    assert math[3] == "-", "the second has none of these"


def test_a_single_category_needs_no_table() -> None:
    found = body(evaluation(categories=("code",)))
    assert not any("category" in each.caption for each in found.tables)
    assert len(found.pictures) == 1


def test_equal_evaluations_are_good_news_and_worse_ones_bad() -> None:
    same = body(evaluation(0), evaluation(0))
    assert same.tone == "good"
    assert "b.json against a.json: Not worse, on 48 prompts." in same.summary
    assert all(row[5] == "ok" for row in texts(table(same, "b.json against a.json")))
    worse = body(evaluation(0), evaluation(0), evaluation(1, (0.7, 0.79, 0.72)))
    assert worse.tone == "bad"
    assert "c.json against a.json: Worse: acceptance length, position 1" in (
        worse.summary
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompts_sha256": "t"}, "prompts_sha256: 's' of the base and 't'"),
        ({"temperature": 1.0}, "temperature: 0.0 of the base and 1.0"),
        ({"draft_length": "auto"}, "draft_length: 3 of the base and 'auto'"),
    ],
)
def test_what_cannot_be_compared_is_shown_with_the_reason(
    change: dict[str, Any], words: str
) -> None:
    found = body(evaluation(0), evaluation(1, **change))
    assert found.tone == ""
    (remark,) = found.remarks
    assert "a.json and b.json cannot be compared" in remark.text
    assert words in remark.text
    assert len(table(found, "Accepted if reached").headers) == 3


def test_positions_that_only_one_has_are_left_open() -> None:
    found = body(evaluation(0), evaluation(1, (0.8, 0.7, 0.6, 0.5)))
    assert texts(table(found, "Accepted if reached"))[3][1] == "-"


@pytest.mark.parametrize("tested", [(), (0, 0)])
def test_without_a_single_draft_there_is_nothing_but_dashes(
    tested: tuple[int, ...],
) -> None:
    record = PromptRecord(
        id="p",
        num_tokens=9,
        num_drafts=0,
        num_draft_tokens=0,
        tested=tested,
        accepted=tested,
        seconds=1.0,
    )
    found = body(evaluation(0).model_copy(update={"records": (record,)}))
    assert texts(table(found, "What was evaluated"))[0][-1] == "-"
    assert [row[1] for row in texts(table(found, "Accepted if"))] == ["-"] * len(tested)
    assert len(draw_all(found.pictures, "x")) == 1
    assert found.summary == "a.json: there was no draft."


def test_models_have_sections_of_their_own() -> None:
    files = [evaluation(0), evaluation(1, model="other"), evaluation(2)]
    sources = [source("abc"[i], each) for i, each in enumerate(files)]
    first, second = make_sections(sources)
    assert [origin.name for origin in first.origins] == ["a.json", "c.json"]
    assert second.title == "Acceptance of other"
    assert first.anchor != second.anchor


def test_the_evaluation_that_contradicts_itself_is_named() -> None:
    good, bad = source("good", evaluation(0)), source("bad", evaluation(1))
    broken = evaluation(1).model_dump(mode="json")
    broken["records"][0]["accepted"] = [10**6, 0, 0]
    bad = Source(bad.path, bad.name, EVAL, broken)
    with pytest.raises(DamagedError) as error:
        make_sections([good, bad])
    assert "result: /r/bad.json is damaged or of another version" in str(error.value)
    assert "records.0: Value error, more accepted than tested" in str(error.value)
