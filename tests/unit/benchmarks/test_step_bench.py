"""What the step bench makes of its rounds; the engines are in tests/integration."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.steps import StepBench, parse_contender
from vllm_mtp.config import ConfigError

BENCH = StepBench(contender=['mtp={"method": "mtp"}', 'ours={"method": "mtp_plus"}'])


def figures(step_ms: float, text: str = "same") -> dict[str, Any]:
    return {
        "full_seconds": step_ms * 10 / 1e3,
        "full_steps": 10,
        "num_steps": 12,
        "num_drafts": 10,
        "accepted_per_position": [8, 7, 5],
        "texts_sha256": text,
    }


def test_a_ratio_is_taken_within_its_repeat() -> None:
    # The machine becomes four times slower: within a repeat ours stays twice as fast.
    rounds = [{"mtp": figures(2 * t), "ours": figures(t)} for t in (1.0, 2.0, 4.0)]
    result = BENCH.summarise({1: rounds})
    assert result["contenders"]["ours"]["ratio"]["each"] == pytest.approx([0.5] * 3)
    assert result["contenders"]["mtp"]["ratio"]["median"] == 1.0
    assert result["contenders"]["mtp"]["step_ms"]["median"] == pytest.approx(4.0)
    assert result["contenders"]["mtp"]["acceptance_length"] == 3.0
    assert result["identical_texts"]


def test_texts_that_differ_are_noticed() -> None:
    rounds = [{"mtp": figures(1.0), "ours": figures(1.0, "other")}]
    assert not BENCH.summarise({1: rounds})["identical_texts"]


@pytest.mark.parametrize("contender", [["a=none"], ["a=none", "a=none"]])
def test_at_least_two_contenders_of_different_names(contender: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"contender: .*expected at least two"):
        StepBench(contender=contender)


def test_unset_contenders_draft_equally_long() -> None:
    configs = StepBench(draft_length=4).contenders.values()
    assert {each["num_speculative_tokens"] for each in configs if each} == {4}


def test_contenders_are_read_from_the_command_line() -> None:
    assert parse_contender("plain=none") == ("plain", None)
    assert parse_contender('a={"method": "mtp"}') == ("a", {"method": "mtp"})


@pytest.mark.parametrize("text", ["", "mtp", '={"method": "mtp"}', "a=[1]", "a={x"])
def test_a_wrong_contender_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"contender: .* expected NAME=none or"):
        parse_contender(text)


def test_the_plot_is_written(tmp_path: Path) -> None:
    rounds = [{"mtp": figures(t), "ours": figures(1.0)} for t in (1.0, 1.1, 0.9)]
    hardware = {"gpus": [], "cpu": "a processor", "num_cores": 2}
    result = BENCH.summarise({1: rounds})
    result |= {"provenance": {"hardware": hardware}, "options": BENCH.as_json()}
    StepBench.draw(result, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
