"""What ``vllm-mtp verify`` concludes from answers, and the options that it refuses."""

import random
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from examples.tiny_model import TINY_MODEL
from vllm_mtp.cli.main import app
from vllm_mtp.tools.verify import ITSELF, print_report, summarise, verdict
from vllm_mtp.tools.verify_compare import Difference, greedy_differences
from vllm_mtp.tools.verify_options import HOSTILE, SAMPLED_SETTINGS, VerifyOptions

OPTIONS = VerifyOptions("owner/name", num_samples=400)


def answer(token_ids: list[int], likeliest: dict[int, float] | None = None) -> Any:
    logprobs = [list((likeliest or {}).items())] * len(token_ids)
    return {"token_ids": token_ids, "logprobs": logprobs}


def sampled(seed: int, weights: tuple[int, ...]) -> dict[str, Any]:
    rng = random.Random(seed)
    return {
        "answers": [
            answer(rng.choices(range(6), weights, k=OPTIONS.sampled_tokens + 1))
            for _ in range(OPTIONS.num_samples)
        ],
        "drafted": 300,
        "accepted": 200,
    }


EVEN, SHIFTED = (6, 5, 4, 3, 2, 1), (9, 2, 4, 3, 2, 1)


def engine(
    seed: int, greedy: list[int], weights: tuple[int, ...] = EVEN
) -> dict[str, Any]:
    found = {
        setting: sampled(seed + number, weights)
        for number, setting in enumerate(SAMPLED_SETTINGS)
    }
    target = answer(greedy, {7: -0.5, 8: -0.5005, 9: -4.0})
    return {"greedy": {"answers": [target], "drafted": 9, "accepted": 4}, **found}


def target() -> dict[str, Any]:
    return engine(0, [7, 7, 7]) | {ITSELF: engine(100, [])}


def report(ours: dict[str, Any]) -> dict[str, Any]:
    answers = {"none": target(), "mtp_plus": ours, HOSTILE: engine(300, [7, 7, 7])}
    return summarise(answers, OPTIONS)


def test_equal_answers_are_exact() -> None:
    found = report(engine(200, [7, 7, 7]))
    assert found["is_exact"]
    assert verdict(found) == "Exact: the output is the target's."
    assert set(found["sampled"]) == {ITSELF, "mtp_plus", HOSTILE}


def test_a_near_tie_is_no_defect_and_is_named() -> None:
    found = report(engine(200, [7, 8, 1]))
    assert found["is_exact"]
    assert "1 near-ties" in verdict(found)
    (tie,) = found["greedy"]["mtp_plus"]["ties"]
    assert (tie["position"], tie["expected"], tie["found"]) == (1, 7, 8)


@pytest.mark.parametrize("wrong", [9, 1234])
def test_another_greedy_token_is_a_defect(wrong: int) -> None:
    found = report(engine(200, [7, 7, wrong]))
    assert not found["is_exact"]
    assert verdict(found).startswith("NOT EXACT")
    assert len(found["greedy"]["mtp_plus"]["defects"]) == 1


def test_another_distribution_is_a_defect() -> None:
    found = report(engine(200, [7, 7, 7], SHIFTED))
    assert not found["is_exact"]
    assert verdict(found).startswith("NOT EXACT")
    ours = found["sampled"]["mtp_plus"]
    assert (
        ours["min_p_value"] < ours["alpha"] < found["sampled"][HOSTILE]["min_p_value"]
    )


def test_without_accepted_tokens_nothing_is_shown() -> None:
    answers = {name: engine(200, [7]) for name in ("mtp_plus", HOSTILE)}
    for found in answers.values():
        for each in found.values():
            each["accepted"] = 0
    one_token = engine(0, [7]) | {ITSELF: engine(100, [])}
    found = summarise({"none": one_token, **answers}, OPTIONS)
    assert not found["is_exact"]
    assert verdict(found).startswith("NOT SHOWN")


def test_only_the_first_difference_of_a_text_counts() -> None:
    expected = [answer([1, 2, 3], {2: -0.1, 5: -0.2}), answer([4, 4])]
    found = [answer([1, 5, 9]), answer([4, 4])]
    (difference,) = greedy_differences(expected, found)
    assert difference[:4] == (0, 1, 2, 5)
    assert difference.gap == pytest.approx(0.1)


def test_a_token_that_is_not_among_the_likeliest_is_no_tie() -> None:
    assert not Difference(0, 0, 1, 2, None).is_tie(10.0)


def test_the_tables_name_every_engine_and_setting() -> None:
    output = StringIO()
    print_report(
        report(engine(200, [7, 7, 7])), OPTIONS, Console(file=output, width=120)
    )
    for word in (*SAMPLED_SETTINGS, HOSTILE, ITSELF, "804 of 1209"):
        assert word in output.getvalue()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--samples", "10"], "samples: 10 is not allowed; must be a number from 100"),
        (["--num-prompts", "0"], "prompts: 0 is not allowed"),
        (["--max-tokens", "0"], "max-tokens: 0 is not allowed"),
        (["--sampled-tokens", "9"], "sampled-tokens: 9 is not allowed"),
        (["--dtype", "int8"], "dtype: 'int8' is not allowed; must be one of float32"),
        (["--tie-tolerance", "-1"], "tie-tolerance: -1.0 is not allowed"),
        (["--false-alarm-rate", "1"], "false-alarm-rate: 1.0 is not allowed"),
        (["--speculative-config", "{"], "speculative-config: '{' is not allowed"),
        (["--speculative-config", '{"method":"mtp"}'], "must be of method 'mtp_plus'"),
        (["--engine-args", "[]"], "engine-args: '[]' is not allowed; must be a JSON"),
        (["--output", "/nowhere/report.json"], "must be a file in a folder that"),
        (["--prompts", "/nowhere.jsonl"], "prompts: /nowhere.jsonl cannot be read"),
        ([], "is neither a folder with a checkpoint nor a name"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: list[str], words: str) -> None:
    model = str(TINY_MODEL) if arguments else "no/such/model"
    result = CliRunner().invoke(app, ["verify", model, *arguments])
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_line_that_is_no_prompt_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "a"}\n{"txt": "b"}\n')
    result = CliRunner().invoke(
        app, ["verify", str(TINY_MODEL), "--prompts", str(path)]
    )
    assert result.exit_code == 2
    assert f"prompts: {path}:2: neither text nor messages" in result.stderr
