"""The crossing benchmark without engines: options, waves and the summary."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.crossing import (
    TABLE,
    CrossingBench,
)
from benchmarks.grid.cells import Prompts
from vllm_mtp.config import ConfigError

PROMPTS = Prompts(own={"code": [[1, 2], [3, 4], [5, 6]]}, contexts={}, vocab_size=9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"draft_length": 9},
            "draft-length: 9 is not allowed; must be a number from 1",
        ),
        ({"threshold": 8}, "threshold: 8 is not allowed; must be a number from 1 to 7"),
        ({"request_tokens": 0}, "request-tokens: 0 is not allowed"),
        ({"num_waves": 0}, "waves: 0 is not allowed"),
        ({"repeats": 101}, "repeats: 101 is not allowed"),
        ({"output": Path("/nowhere")}, "output: '/nowhere' is not allowed"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        CrossingBench(**({"output": tmp_path} | change))
    assert words in str(error.value)


def test_the_table_drafts_up_to_the_threshold_and_not_above(tmp_path: Path) -> None:
    options = CrossingBench(threshold=3, draft_length=2, output=tmp_path)
    config = options.contenders[TABLE]
    assert config is not None
    table = config["num_speculative_tokens_per_batch_size"]
    assert table == [(1, 3, 2), (4, 8, 0)]


def test_every_wave_crosses_the_threshold(tmp_path: Path) -> None:
    options = CrossingBench(request_tokens=5, num_waves=2, output=tmp_path)
    waves = next(options.waves(PROMPTS, 8))
    lengths = [[r["sampling"]["max_tokens"] for r in wave] for wave in waves]
    assert lengths == [[5, 10, 15, 20, 25, 30, 35, 40]] * 2
    assert waves[0][3]["prompt"] == [1, 2], "prompts are used over and over"


def figures(seconds: float, drafted: list[int]) -> dict[str, Any]:
    return {
        "decode_tokens": 100,
        "decode_seconds": seconds,
        "decode_request_steps": 50,
        "request_steps": 60,
        "drafted_per_position": drafted,
        "texts_sha256": "same",
    }


def test_ratios_are_paired_within_a_repeat(tmp_path: Path) -> None:
    options = CrossingBench(output=tmp_path)
    names = list(options.contenders)
    slow, fast = figures(4.0, []), figures(2.0, [50, 25])
    rounds = [
        dict(zip(names, (slow, fast, fast, fast), strict=True)),
        dict(zip(names, (fast, fast, slow, fast), strict=True)),
    ]
    result = options.summarise({8: rounds})
    assert result["contenders"]["mtp K=3"]["over_none"]["each"] == [2.0, 1.0]
    assert result["contenders"][TABLE]["over_none"]["each"] == [2.0, 0.5]
    assert result["contenders"]["mtp_plus"]["mean_draft_length"] == 1.25
    assert result["contenders"]["mtp_plus"]["acceptance_length"] == 2.0
    assert result["identical_texts"]
    rounds[1]["mtp_plus"] = fast | {"texts_sha256": "another"}
    assert not options.summarise({8: rounds})["identical_texts"]
