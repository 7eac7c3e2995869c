"""The benchmark of the host's time without engines: options and the summary."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.host import HostBench
from tests.unit.benchmarks.host_rounds import host_round
from vllm_mtp.config import ConfigError


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"concurrency": (1, 0)},
            "concurrency: '1,0' is not allowed; must be",
        ),
        ({"draft_length": 0}, "draft-length: 0 is not allowed; must be a number"),
        ({"request_tokens": 1}, "request-tokens: 1 is not allowed; must be a number"),
        ({"repeats": 0}, "repeats: 0 is not allowed"),
        ({"output": Path("/nowhere")}, "output: '/nowhere' is not allowed"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        HostBench(**({"output": tmp_path} | change))
    assert words in str(error.value)


def test_all_that_speculate_may_draft_equally_many(tmp_path: Path) -> None:
    none, *others = HostBench(output=tmp_path, draft_length=7).contenders.values()
    assert none is None
    assert {each and each["num_speculative_tokens"] for each in others} == {7}


def test_what_is_beyond_mtp_is_paired_within_a_repeat(tmp_path: Path) -> None:
    options = HostBench(output=tmp_path)
    cells = {1: [host_round(0.0125), host_round(0.020), host_round(0.015)]}
    result = options.summarise(cells)["cells"]["1"]
    assert result["mtp"]["over_mtp_us"]["each"] == pytest.approx([0.0] * 3)
    assert result["mtp_plus"]["over_mtp_us"]["each"] == pytest.approx([50, 200, 100])
    assert result["mtp_plus"]["update_us"]["median"] == pytest.approx(300.0)
    assert result["none"]["over_mtp_us"]["median"] == pytest.approx(-100.0)
    assert result["mtp_plus"]["step_ms"] == pytest.approx(5.0)
    assert result["mtp_plus"]["acceptance_length"] == pytest.approx(3.0)
