"""The benchmark of warm starts without engines: options and summary."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.warm_start import WarmStartBench
from vllm_mtp.config import ConfigError


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"repeats": 0}, "repeats: 0 is not allowed; must be a number from 1 to 100"),
        ({"requests": 65}, "requests: 65 is not allowed"),
        ({"settling_rounds": 0}, "settling-rounds: 0 is not allowed"),
        ({"teaching_rounds": 1}, "teaching-rounds: 1 is not allowed"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        WarmStartBench(**({"output": tmp_path} | change))
    assert words in str(error.value)


def played(seconds: float, steps: int, drafted: int) -> dict[str, Any]:
    """What an engine counts in a round of 100 tokens."""
    return {
        "decode_tokens": 100,
        "decode_seconds": seconds,
        "decode_steps": steps,
        "drafted_per_position": [drafted // 2, drafted - drafted // 2],
    }


def test_figures_are_those_of_the_settled_engine_in_the_same_repeat() -> None:
    repeats = [
        {
            "settled": played(2.0 * slower, 40, 80),
            "warm": played(2.5 * slower, 50, 90),
            "cold": played(4.0 * slower, 80, 16),
        }
        for slower in (1.0, 3.0)
    ]
    result = WarmStartBench.summarise(repeats)
    assert result["warm"]["tokens_per_s"]["each"] == pytest.approx([0.8, 0.8])
    assert result["cold"]["tokens_per_s"]["median"] == pytest.approx(0.5)
    assert result["warm"]["tokens_per_step"]["median"] == pytest.approx(0.8)
    assert result["cold"]["draft_tokens_per_step"]["median"] == pytest.approx(0.1)
    assert result["cold"]["num_steps"] == [80, 80]
    output = StringIO()
    WarmStartBench.show(result, Console(file=output, width=120))
    assert "0.800 (0.800 - 0.800)" in output.getvalue()
