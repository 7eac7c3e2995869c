"""Spec-Bench and SPEED-Bench: their lines, their turns, and what is wrong with a line.

The excerpts are in the sets' format; the questions are ours.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from examples.tiny_model import TINY_MODEL
from vllm_mtp.cli.main import app
from vllm_mtp.config import ConfigError
from vllm_mtp.tools.compare import CompareOptions, compare
from vllm_mtp.tools.eval import EvalOptions, _ask, _finish, _journal_of
from vllm_mtp.tools.eval_backends import Answer, EngineBackend, Sampling
from vllm_mtp.tools.eval_file import EvalFile, read_eval_file
from vllm_mtp.tools.eval_turns import answers_to_turns
from vllm_mtp.tools.prompt_sets import load_set
from vllm_mtp.tools.prompts import Prompt, fingerprint_of

SPEC_BENCH: list[dict[str, Any]] = [
    {"question_id": 81, "category": "writing", "turns": ["A poem.", "Now in prose."]},
    {"question_id": 105, "category": "math", "turns": ["1 + 1?", "And 2 more?"]},
    {"question_id": 161, "category": "translation", "turns": ["Into English: ja"]},
    {"question_id": 400, "category": "qa", "turns": ["Who?"], "reference": ["me"]},
]
SPEED_BENCH: list[dict[str, Any]] = [
    {
        "question_id": "c-1",
        "category": "coding",
        "sub_category": None,
        "source": "ours",
        "multiturn": True,
        "messages": [
            {"role": "user", "content": "Write a loop."},
            {"role": "user", "content": "Shorter."},
        ],
    },
    {"question_id": "m-1", "category": "math", "turns": ["2 * 3?"]},
]


def file_of(lines: Sequence[Mapping[str, Any]], folder: Path) -> Path:
    path = folder / "set.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def contents(prompt: Prompt) -> list[str]:
    return [message.content for message in prompt.messages or ()]


def test_spec_benchs_questions_have_the_categories_of_the_paper(tmp_path: Path) -> None:
    prompts = load_set("spec-bench", file_of(SPEC_BENCH, tmp_path), None)
    assert [(each.id, each.category) for each in prompts] == [
        ("81", "multi-turn conversation"),
        ("105", "multi-turn conversation"),
        ("161", "translation"),
        ("400", "question answering"),
    ]
    assert contents(prompts[0]) == ["A poem."]
    assert prompts[0].follow_ups == ("Now in prose.",)
    assert prompts[2].follow_ups == ()


def test_speed_benchs_turns_are_messages_or_turns(tmp_path: Path) -> None:
    path = file_of(SPEED_BENCH, tmp_path)
    first, second = load_set("speed-bench", path, None)
    assert (first.category, contents(first)) == ("coding", ["Write a loop."])
    assert first.follow_ups == ("Shorter.",)
    assert (second.id, contents(second)) == ("m-1", ["2 * 3?"])
    assert load_set("speed-bench", path, 1) == [first]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("spec-bench", {"question_id": None}, ":2: question_id"),
        ("spec-bench", {"category": "poetry"}, ":2: category: 'poetry' is none of"),
        ("spec-bench", {"turns": "one"}, ":2: turns: Input should be a valid"),
        ("spec-bench", {"turns": []}, ":2: turns: "),
        ("spec-bench", {"turns": ["a", ""]}, ":2: turns.1: "),
        ("spec-bench", {"question_id": 81}, "two prompts with the id '81'"),
        ("speed-bench", {"turns": None}, ":2: neither messages nor turns"),
        (
            "speed-bench",
            {"messages": [{"role": "assistant", "content": "a"}]},
            ":2: messages: all must be of the user",
        ),
        (
            "speed-bench",
            {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM ELSEWHERE"]},
            ":2: turns: the text is missing; prepare the set first",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_field(
    name: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = file_of([SPEC_BENCH[0], SPEC_BENCH[1] | change], tmp_path)
    with pytest.raises(ConfigError) as error:
        load_set(name, path, None)
    assert f"prompts: {path}" in str(error.value)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "mt-bench"], "set: 'mt-bench' is not allowed; must be one of spec-"),
        (["--set", "spec-bench"], "prompts: name the file of spec-bench"),
    ],
)
def test_a_set_has_a_name_that_is_known_and_a_file(
    arguments: list[str], words: str, tmp_path: Path
) -> None:
    command = ["eval", str(tmp_path / "eval.json"), "--model", str(TINY_MODEL)]
    result = CliRunner().invoke(app, [*command, *arguments])
    assert result.exit_code == 2
    assert words in result.stderr


class Echo:
    """Answers with what was said so far; the second turn accepts one token less."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def answers(self, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, Answer]]:
        for prompt in prompts[::-1]:
            said = contents(prompt)
            self.asked.append(said)
            accepted = 3 - len(said) // 2
            metrics = {"per_step_drafted": [3, 3], "per_step_accepted": [accepted, 0]}
            yield prompt, Answer(metrics, 4 + accepted, 1.0, text=f"<{said[-1]}>")


def test_a_turn_follows_the_answer_before_it(tmp_path: Path) -> None:
    prompts = load_set("spec-bench", file_of(SPEC_BENCH, tmp_path), None)
    echo = Echo()
    found = list(answers_to_turns(echo, prompts))
    assert [prompt.id for prompt, _ in found] == ["400", "161", "81", "105"]
    assert {prompt.id for prompt, _ in found} == {prompt.id for prompt in prompts}
    assert [len(answers) for _, answers in found] == [1, 1, 2, 2]
    assert ["A poem.", "<A poem.>", "Now in prose."] in echo.asked
    assert len(echo.asked) == 6
    assert found[2][0] == prompts[0]


class Engine:
    """Speaks in bytes."""

    def ask(self, command: str, **order: Any) -> dict[str, Any]:
        if command == "tokenize":
            return {"token_ids": [list(text.encode()) for text in order["texts"]]}
        if command == "tokenize_chats":
            chats = order["conversations"]
            texts = ["|".join(each["content"] for each in chat) for chat in chats]
            return {"token_ids": [list(text.encode()) for text in texts]}
        if command == "detokenize":
            return {"texts": [bytes(ids).decode() for ids in order["token_ids"]]}
        answers = [
            {"token_ids": [*request["prompt"][:3]], "metrics": None, "seconds": 0.0}
            for request in order["requests"]
        ]
        return {"answers": answers}


def test_an_engines_answer_is_put_into_words_for_the_next_turn() -> None:
    prompts = [
        Prompt(id="a", text="text"),
        Prompt(
            id="b",
            messages=({"role": "user", "content": "abcdef"},),
            follow_ups=("next",),
        ),
    ]
    backend = EngineBackend(Engine(), Sampling(3, 0.0, 4), 8, 100)
    found = {each.id: answers for each, answers in answers_to_turns(backend, prompts)}
    assert [answer.text for answer in found["a"]] == [""]
    assert [answer.text for answer in found["b"]] == ["abc", ""]


def evaluation(folder: Path, name: str, console: Console) -> EvalFile:
    """Of the excerpt of Spec-Bench, with every part but an engine."""
    options = EvalOptions(
        output=folder / name,
        model="m",
        prompts=file_of(SPEC_BENCH, folder),
        prompt_set="spec-bench",
    )
    prompts = load_set("spec-bench", options.prompts, None)
    with _journal_of(options, "m", prompts) as journal:
        _ask(Echo(), journal.missing(prompts), journal, options, console)
        return _finish(journal, prompts, options, console)


def test_an_evaluation_of_a_set_reports_by_category_and_can_be_compared(
    tmp_path: Path,
) -> None:
    output = StringIO()
    console = Console(file=output, width=120)
    evaluation(tmp_path, "base.json", console)
    evaluation(tmp_path, "new.json", console)
    base, new = (read_eval_file(tmp_path / f"{name}.json") for name in ("base", "new"))
    assert [record.id for record in base.records] == ["81", "105", "161", "400"]
    conversation = base.records[0]
    # Turns of 3 and of 2 accepted tokens, each with a second draft of none.
    assert (conversation.num_drafts, conversation.num_draft_tokens) == (4, 12)
    assert conversation.tested == (4, 2, 2)
    assert conversation.accepted == (2, 2, 1)
    rows = [line.split("│")[1:5] for line in output.getvalue().splitlines()]
    by_category = {row[0].strip(): row[1:] for row in rows if len(row) == 4}
    assert by_category["multi-turn conversation"][0].strip() == "2"
    assert by_category["multi-turn conversation"][1].split()[0] == "2.25"
    assert by_category["all"][1].split()[0] == "2.33"
    assert by_category["all"][2].strip() == "2.38"
    assert not compare(base, new, CompareOptions()).is_failure


def test_prompts_of_a_single_turn_keep_their_fingerprint() -> None:
    """Older evaluations can be compared with newer ones."""
    prompt = Prompt(id="a", text="x")
    known = "a77e86075de19b3e"
    assert fingerprint_of([prompt]).startswith(known)
    assert fingerprint_of([prompt]) != fingerprint_of(
        [prompt.model_copy(update={"follow_ups": ("y",)})]
    )
