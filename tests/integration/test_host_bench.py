"""The benchmark of scheduling alone: options, and a run of few steps."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.host import OFF, PARTS, HostBench
from vllm_mtp.config import ConfigError


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"concurrency": (1, 0)}, "concurrency: '1,0' is not allowed; must be"),
        ({"draft_length": 0}, "draft-length: 0 is not allowed; must be a number"),
        ({"request_tokens": 1}, "request-tokens: 1 is not allowed; must be a number"),
        ({"acceptance": 1.5}, "acceptance: 1.5 is not allowed; must be a number"),
        ({"output": Path("/nowhere")}, "output: '/nowhere' is not allowed"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        HostBench(**({"output": tmp_path} | change))
    assert words in str(error.value)


def test_every_scheduler_serves_and_is_timed(tmp_path: Path) -> None:
    bench = HostBench(
        output=tmp_path, concurrency=(3,), request_tokens=64, steps=30, repeats=2
    )
    (cell,) = bench.measure(Console(quiet=True))["cells"].values()
    assert all(
        each[f"{part}_us"]["median"] > 0 for each in cell.values() for part in PARTS
    )
    lengths = {name: each["acceptance_length"] for name, each in cell.items()}
    assert lengths["none"] == pytest.approx(1.0, abs=0.05)
    # 1 + 0.85 + 0.85 ** 2 + ...
    assert 2.5 < lengths["mtp"] <= 4.0
    assert lengths["mtp_plus"] > 1.5
    assert lengths[OFF] == pytest.approx(1.0, abs=0.05)
    beyond = cell["mtp_plus"]["beyond_us"]["each"]
    totals = {
        name: [a + b for a, b in zip(*_parts(each), strict=True)]
        for name, each in cell.items()
    }
    assert beyond == pytest.approx(
        [a - b for a, b in zip(totals["mtp_plus"], totals["mtp"], strict=True)]
    )


def _parts(figures: dict[str, Any]) -> list[list[float]]:
    return [figures[f"{part}_us"]["each"] for part in PARTS]
