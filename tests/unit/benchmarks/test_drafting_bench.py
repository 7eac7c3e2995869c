"""The benchmark of drafts without engines: options, requests and the summary."""

from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.drafting import (
    DraftingBench,
)
from benchmarks.grid.cells import Prompts
from vllm_mtp.config import ConfigError

PROMPTS = Prompts(own={"code": [[i] for i in range(20)]}, contexts={}, vocab_size=99)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"concurrency": (1, 0)},
            "concurrency: '1,0' is not allowed; must be",
        ),
        ({"draft_length": 9}, "draft-length: 9 is not allowed; must be a number from"),
        ({"temperature": -1.0}, "temperature: -1.0 is not allowed"),
        ({"top_p": 0.0}, "top-p: 0.0 is not allowed; must be a number above 0"),
        ({"request_tokens": 1}, "request-tokens: 1 is not allowed"),
        ({"warm_ups": -1}, "warm-ups: -1 is not allowed"),
        ({"repeats": 0}, "repeats: 0 is not allowed"),
        ({"dtype": "int8"}, "dtype: 'int8' is not allowed; must be one of float32"),
        ({"output": Path("/nowhere")}, "output: '/nowhere' is not allowed"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        DraftingBench(**({"output": tmp_path} | change))
    assert words in str(error.value)


def test_contenders_differ_in_their_drafts_alone(tmp_path: Path) -> None:
    greedy = DraftingBench(output=tmp_path, draft_vocab=Path("list.json"))
    assert list(greedy.contenders) == [
        "none",
        "mtp",
        "mtp_plus, full",
        "mtp_plus, list",
        "mtp_plus, same weights",
        "mtp_plus, whole head",
        "mtp_plus",
        "mtp_plus, free",
    ]
    free = greedy.contenders["mtp_plus, free"]
    assert free == {"method": "mtp_plus", "num_speculative_tokens": 3}
    few = DraftingBench(output=tmp_path, ablations=False)
    assert list(few.contenders) == ["none", "mtp", "mtp_plus", "mtp_plus, free"]
    sampled = DraftingBench(output=tmp_path, temperature=1.0)
    assert {"mtp, drawn", "mtp_plus, tested singly"} <= set(sampled.contenders)
    for config in (*greedy.contenders.values(), *sampled.contenders.values()):
        assert config is None or config["num_speculative_tokens"] == 3


def test_every_round_has_other_prompts(tmp_path: Path) -> None:
    options = DraftingBench(output=tmp_path, temperature=0.5, request_tokens=7)
    rounds = islice(options.waves(PROMPTS, 1), 3)
    (first,), (second,), (third,) = rounds
    assert [each["prompt"][0] for each in first] == list(range(8))
    assert [each["prompt"][0] for each in second] == list(range(8, 16))
    assert [each["prompt"][0] for each in third] == [16, 17, 18, 19, 0, 1, 2, 3]
    assert first[0]["sampling"] == {"temperature": 0.5, "top_p": 1.0, "max_tokens": 7}


def figures(seconds: float, accepted: list[int], text: str = "same") -> dict[str, Any]:
    return {
        "full_tokens": 100,
        "full_seconds": seconds,
        "decode_tokens": 100,
        "decode_request_steps": 40,
        "drafted_per_position": [40, 40, 40] if accepted else [],
        "accepted_per_position": accepted,
        "texts_sha256": text,
        "draft_columns": 4096 if accepted else None,
    }


def test_ratios_are_to_vllms_mtp_and_paired(tmp_path: Path) -> None:
    options = DraftingBench(output=tmp_path, concurrency=(1,))
    names = list(options.contenders)
    rounds = [
        dict(
            zip(
                names,
                [
                    figures(4.0, []),
                    *(figures(scale, [36, 20, 4]) for _ in range(4)),
                    figures(scale / 1.25, [36, 16, 4]),
                    # In one round it chose not to draft.
                    figures(scale, [36, 16, 4] if scale == 1.0 else []),
                ],
                strict=True,
            )
        )
        for scale in (1.0, 2.0)
    ]
    result = options.summarise({1: rounds})
    cell = result["cells"]["1"]
    assert cell["mtp_plus"]["over_mtp"]["each"] == pytest.approx([1.25, 1.25])
    for name in ("mtp_plus", "mtp_plus, free"):
        assert cell[name]["acceptance_per_position"] == [0.9, 0.4, 0.1]
    assert cell["none"]["acceptance_per_position"] == []
    assert cell["mtp"]["acceptance_length"] == 2.5
    assert cell["mtp_plus"]["draft_columns"] == 4096
    assert cell["none"]["draft_columns"] is None
    assert result["identical_texts"]
    text = StringIO()
    DraftingBench.show(result, Console(file=text, width=100))
    assert "0.90 0.40 0.10" in text.getvalue()
    assert "4096" in text.getvalue()


@pytest.mark.parametrize(
    ("change", "verdict"),
    [({}, False), ({"temperature": 1.0}, None), ({"dtype": "bfloat16"}, None)],
)
def test_texts_must_agree_where_nothing_is_random_or_rounded(
    change: dict[str, Any], verdict: bool | None, tmp_path: Path
) -> None:
    options = DraftingBench(**({"output": tmp_path, "concurrency": (1,)} | change))
    texts = dict.fromkeys(options.contenders, figures(1.0, [36, 20, 4]))
    texts["mtp_plus"] = figures(1.0, [36, 20, 4], "another")
    assert options.summarise({1: [texts]})["identical_texts"] is verdict
