"""What the step bench makes of its rounds; the servers are in tests/integration."""

from pathlib import Path

import pytest

from benchmarks.steps import (
    Contender,
    Round,
    StepBenchOptions,
    parse_contender,
    plot,
    summarise,
)
from vllm_mtp.config import ConfigError
from vllm_mtp.tools.demo_client import SpecCounters

MTP = Contender("mtp", {"method": "mtp"})
OURS = Contender("ours", {"method": "mtp_plus"})
OPTIONS = StepBenchOptions((MTP, OURS))


def round_of(step_ms: float, num_steps: int = 10, token: int = 7) -> Round:
    counters = SpecCounters(10, 30, 20, (8, 7, 5), num_steps, 40, 2)
    return Round(step_ms * num_steps / 1e3, counters, ((token, token),))


def test_a_ratio_is_taken_within_its_repeat() -> None:
    # The machine becomes four times slower: within a repeat ours stays twice as fast.
    repeats = [{"mtp": round_of(2 * t), "ours": round_of(t)} for t in (1.0, 2.0, 4.0)]
    result = summarise(OPTIONS, repeats)
    assert result["contenders"]["ours"]["ratio"]["each"] == pytest.approx([0.5] * 3)
    assert result["contenders"]["mtp"]["ratio"]["median"] == 1.0
    assert result["contenders"]["mtp"]["step_ms"]["median"] == pytest.approx(4.0)
    assert result["contenders"]["mtp"]["acceptance_length"] == 3.0
    assert result["identical_texts"]


def test_texts_that_differ_are_noticed() -> None:
    repeats = [{"mtp": round_of(1.0), "ours": round_of(1.0, token=8)}]
    assert not summarise(OPTIONS, repeats)["identical_texts"]


@pytest.mark.parametrize("contenders", [(), (MTP,), (MTP, MTP)])
def test_at_least_two_contenders_of_different_names(
    contenders: tuple[Contender, ...],
) -> None:
    with pytest.raises(ConfigError, match=r"contender: .*expected at least two"):
        StepBenchOptions(contenders)


def test_contenders_are_read_from_the_command_line() -> None:
    assert parse_contender("plain=none") == Contender("plain", None)
    assert parse_contender('a={"method": "mtp"}') == Contender("a", {"method": "mtp"})


@pytest.mark.parametrize("text", ["", "mtp", '={"method": "mtp"}', "a=[1]", "a={x"])
def test_a_wrong_contender_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"contender: .* expected NAME=none or"):
        parse_contender(text)


def test_the_plot_is_written(tmp_path: Path) -> None:
    repeats = [{"mtp": round_of(t), "ours": round_of(1.0)} for t in (1.0, 1.1, 0.9)]
    hardware = {"gpus": [], "cpu": "a processor", "num_cores": 2}
    result = summarise(OPTIONS, repeats) | {"provenance": {"hardware": hardware}}
    plot(result, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
