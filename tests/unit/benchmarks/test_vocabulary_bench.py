"""The comparison of draft vocabularies without engines: options and summary."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.vocabulary import (
    VocabularyBench,
    draw_vocabulary,
)
from vllm_mtp.config import ConfigError


def options(tmp_path: Path, **change: Any) -> VocabularyBench:
    return VocabularyBench(output=tmp_path, **change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"draft_length": 0}, "draft-length: 0 is not allowed; must be a number from"),
        ({"concurrency": 65}, "concurrency: 65 is not allowed"),
        ({"request_tokens": 1}, "request-tokens: 1 is not allowed"),
        ({"learning_tokens": -1}, "learning-tokens: -1 is not allowed"),
        ({"num_rounds": 0}, "rounds: 0 is not allowed"),
        ({"output": Path("/nowhere")}, "output: '/nowhere' is not allowed"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        VocabularyBench(**({"output": tmp_path} | change))
    assert words in str(error.value)


def test_prose_comes_unannounced_after_the_learning(tmp_path: Path) -> None:
    chosen = options(tmp_path, concurrency=10, request_tokens=100, num_rounds=2)
    assert chosen.num_learning_rounds == 20
    assert chosen.domains == ["code"] * 22 + ["prose"] * 2


def test_ratios_are_of_the_rounds_that_they_name(tmp_path: Path) -> None:
    chosen = options(
        tmp_path, concurrency=1, request_tokens=10, learning_tokens=10, num_rounds=2
    )
    lengths = {
        "full": [2.0, 2.0, 2.0, 2.0, 2.0],
        "auto": [1.0, 1.5, 1.9, 1.2, 1.8],
        "list": [2.0, 2.0, 2.0, 1.0, 1.0],
    }
    result = chosen.summarise(lengths, 128)
    assert result["in_domain"]["auto_over_list"] == pytest.approx(1.7 / 2.0)
    assert result["other_domain"]["first"]["auto_over_list"] == pytest.approx(1.2)
    assert result["other_domain"]["last"]["auto_over_full"] == pytest.approx(0.9)
    learning = [each["is_learning"] for each in result["rounds"]]
    assert learning == [True, False, False, False, False]
    axes = draw_vocabulary(result).axes[0]
    assert len(axes.get_lines()) == 4
    output = StringIO()
    VocabularyBench.show(result, Console(file=output, width=100))
    assert "auto / list 0.850" in output.getvalue()
    assert "code (learning)" in output.getvalue()
