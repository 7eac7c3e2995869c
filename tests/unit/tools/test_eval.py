"""Evaluations without an engine: prompts, counts, the journal, wrong input."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from examples.tiny_model import TINY_MODEL
from vllm_mtp.cli.main import app
from vllm_mtp.config import ConfigError
from vllm_mtp.tools.eval_file import EvalFile, record_of
from vllm_mtp.tools.eval_journal import EvalJournal
from vllm_mtp.tools.eval_report import acceptance_length, position_shares, print_eval
from vllm_mtp.tools.prompts import Prompt, load_prompts

PROMPT = Prompt(id="a", category="code", text="x")


def summary(histogram: list[int], num_draft_tokens: int) -> dict[str, Any]:
    return {
        "acceptance_histogram": histogram,
        "num_spec_steps": sum(histogram),
        "num_draft_tokens": num_draft_tokens,
    }


def test_a_histogram_of_equal_drafts_gives_every_position() -> None:
    record = record_of(PROMPT, summary([4, 3, 2, 1, 0], 30), 3, 20, 1.5)
    assert record.tested == (10, 6, 3)
    assert record.accepted == (6, 3, 1)
    assert record.num_drafts == 10


def test_listed_steps_count_what_was_drafted() -> None:
    steps = {"per_step_drafted": [3, 1, 2, 4], "per_step_accepted": [1, 1, 0, 4]}
    record = record_of(PROMPT, summary([1, 2, 0, 0, 1], 10) | steps, None, 9, 1.0)
    # Position 2: drafted by the first and the last, whose first tokens were accepted.
    assert record.tested == (4, 2, 1, 1)
    assert record.accepted == (3, 1, 1, 1)
    assert record.num_draft_tokens == 10


@pytest.mark.parametrize(
    ("metrics", "draft_length", "words"),
    [
        (None, 3, "server: its responses do not say"),
        (summary([1, 1], 2), None, "k: with auto drafts differ in length"),
        (
            summary([4, 3, 2, 1], 30) | {"synthetic_acceptance": True},
            3,
            "server: it accepts drafts by chance",
        ),
        (summary([4, 3, 2, 1], 25), 3, "k: 25 tokens in 10 drafts are not 3 each"),
    ],
)
def test_metrics_that_say_too_little_are_refused(
    metrics: Any, draft_length: int | None, words: str
) -> None:
    with pytest.raises(ConfigError) as error:
        record_of(PROMPT, metrics, draft_length, 1, 1.0)
    assert words in str(error.value)


def test_the_built_in_set_has_categories_of_equal_size() -> None:
    prompts = load_prompts(None, "some/model", None)
    counts: dict[str, int] = {}
    for prompt in prompts:
        assert prompt.messages
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
    assert len(counts) == 8
    assert set(counts.values()) == {12}


def test_texts_and_messages_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"id": 7, "category": "c", "prompt": "one"},
        {"messages": [{"role": "user", "content": "two"}]},
        {"text": "three"},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    prompts = load_prompts(path, "m", None)
    assert [prompt.id for prompt in prompts] == ["7", "2", "3"]
    assert prompts[0].text == "one"
    assert prompts[1].messages is not None
    assert prompts[1].messages[0].content == "two"
    assert len(load_prompts(path, "m", 2)) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no prompt"),
        ("{", ":1 is no JSON"),
        ("[1]", ":1 is no object"),
        ('{"id": "a"}', ":1: neither text nor messages"),
        ('{"text": 5}', ":1: text: Input should be a valid string"),
        ('{"messages": [{"role": "user"}]}', ":1: messages.0.content: Field required"),
        ('{"id":"a","text":"b"}\n{"id":"a","text":"c"}', "two prompts with the id 'a'"),
    ],
)
def test_prompts_that_are_none_are_named(
    content: str, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as error:
        load_prompts(path, "m", None)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_an_interrupted_journal_continues_without_its_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "eval.json.partial"
    prompts = [Prompt(id=name, text="x") for name in "abc"]
    with EvalJournal(path, {"model": "m"}) as journal:
        for prompt in prompts[:2]:
            journal.add(record_of(prompt, summary([1, 1], 2), 1, 4, 1.0), 2.0)
    with path.open("a") as file:
        file.write('{"record": {"id": "c", "num_tok')
    with EvalJournal(path, {"model": "m"}) as journal:
        assert [prompt.id for prompt in journal.missing(prompts)] == ["c"]
        assert journal.seconds == 4.0


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "eval.json.partial"
    with EvalJournal(path, {"model": "m", "max_tokens": 1}):
        pass
    with pytest.raises(ConfigError, match="something else \\(max_tokens differ\\)"):
        EvalJournal(path, {"model": "m", "max_tokens": 2})


def test_the_report_has_positions_categories_and_totals() -> None:
    records = tuple(
        record_of(
            Prompt(id=str(i), category="ab"[i % 2], text="x"),
            summary([4 + i % 3, 3, 2, 1], 3 * (10 + i % 3)),
            3,
            20,
            1.0,
        )
        for i in range(12)
    )
    shares = position_shares(records)
    assert [round(share.value, 3) for share in shares] == [0.545, 0.5, 0.333]
    assert all(share.low <= share.value <= share.high for share in shares)
    assert acceptance_length(records).value == pytest.approx(1 + 120 / 132)
    file = EvalFile(
        model="m",
        prompts_sha256="s",
        draft_length=3,
        temperature=0.0,
        max_tokens=20,
        seconds=10.0,
        records=records,
    )
    output = StringIO()
    print_eval(file, Console(file=output, width=100))
    assert "By category" in output.getvalue()
    assert "12 prompts, 132 drafts of 3.00 tokens, 24.0 tokens/s" in output.getvalue()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "model: name one, or a server that has one"),
        (["--k", "17"], "k: 17 is not allowed; must be a number from 1 to 16"),
        (["--k", "many"], "k: 'many' is not allowed; must be 'auto' or a whole number"),
        (["--temperature", "3"], "temperature: 3.0 is not allowed"),
        (["--max-tokens", "0"], "max-tokens: 0 is not allowed"),
        (["--concurrency", "0"], "concurrency: 0 is not allowed"),
        (["--num-prompts", "0"], "num-prompts: 0 is not allowed"),
        (["--server", "http://127.0.0.1:9/v1"], "server: nobody answers at http://127"),
        (["--prompts", "/nowhere.jsonl"], "prompts: /nowhere.jsonl cannot be read"),
        (["--speculative-config", "3"], "must be a JSON object"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    output = str(tmp_path / "eval.json")
    model = ("--model", str(TINY_MODEL)) if arguments else ()
    result = CliRunner().invoke(app, ["eval", output, *model, *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "eval.json"
    path.write_text("mine")
    result = CliRunner().invoke(app, ["eval", str(path), "--model", str(TINY_MODEL)])
    assert result.exit_code == 2
    assert "exists already" in result.stderr
    assert path.read_text() == "mine"
