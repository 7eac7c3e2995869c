"""The benchmark of K = 0 without engines: options, requests and the summary."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.grid.cells import Prompts
from benchmarks.off import OffBench
from vllm_mtp.config import ConfigError
from vllm_mtp.request_options import pinned_draft_length

PROMPTS = Prompts(own={"code": [[1, 2], [3, 4]]}, contexts={}, vocab_size=9)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"concurrency": (1, 0)},
            "concurrency: '1,0' is not allowed; must be",
        ),
        ({"request_tokens": 1}, "request-tokens: 1 is not allowed; must be a number"),
        ({"temperature": 3.0}, "temperature: 3.0 is not allowed; must be a number"),
        ({"dtype": "int8"}, "dtype: 'int8' is not allowed; must be"),
        ({"repeats": 0}, "repeats: 0 is not allowed"),
        ({"output": Path("/nowhere")}, "output: '/nowhere' is not allowed"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        OffBench(**({"output": tmp_path} | change))
    assert words in str(error.value)


def test_every_request_is_pinned_to_0(tmp_path: Path) -> None:
    bench = OffBench(output=tmp_path, temperature=1.0)
    ((wave,),) = islice(bench.waves(PROMPTS, 3), 1)
    assert {each["sampling"]["temperature"] for each in wave} == {1.0}
    assert [each["prompt"] for each in wave] == [[1, 2], [3, 4], [1, 2]]
    pins = {pinned_draft_length(each["sampling"]["extra_args"], 8) for each in wave}
    assert pins == {0}


def figures(seconds: float, texts: str = "same") -> dict[str, Any]:
    return {
        "full_tokens": 100,
        "full_seconds": seconds,
        "full_steps": 50,
        "texts_sha256": texts,
    }


def rounds(*seconds: tuple[float, float, float]) -> list[dict[str, dict[str, Any]]]:
    names = ("none", "none again", "mtp_plus")
    return [dict(zip(names, map(figures, each), strict=True)) for each in seconds]


def test_the_ratio_is_to_both_engines_without_speculation(tmp_path: Path) -> None:
    options = OffBench(output=tmp_path)
    cells = {1: rounds((2.0, 8.0, 4.0), (2.0, 2.0, 4.0))}
    result = options.summarise(cells)
    assert result["cells"]["1"]["over_none"]["each"] == pytest.approx([1.0, 0.5])
    assert result["cells"]["1"]["none_again"]["each"] == pytest.approx([0.25, 1.0])
    assert result["cells"]["1"]["step_ms"]["mtp_plus"] == pytest.approx(80.0)
    assert result["identical_texts"]
    cells[1][0]["mtp_plus"] = figures(1.0, "another")
    assert not options.summarise(cells)["identical_texts"]
    sampled = OffBench(output=tmp_path, temperature=1.0)
    assert sampled.summarise(cells)["identical_texts"] is None
