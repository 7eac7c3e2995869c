"""The copying benchmark without engines: prompts, copied shares, options, summary."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.copying.bench import ALONE, COPYING, UNGATED, CopyingBench
from benchmarks.copying.copied import copied_share, count_copied
from benchmarks.copying.loads import (
    BEGUN_TOKENS,
    edit_prompt,
    make_edits,
    noise_prompts,
    prose_prompts,
)
from benchmarks.copying.summary import summarise_cell
from vllm_mtp.config import ConfigError

TEXTS = ["def first(value):\n    return value\n", "count = limit\n", "total = count\n"]


def test_a_repeated_prompt_is_copied_but_for_the_token_that_changed() -> None:
    before = list(range(10, 30))
    answer = [*before[6:10], 99, *before[11:20]]
    counted = count_copied([*before, *before[:6]], answer)
    # Six tokens match before it. After the change nothing does, until four, or eight,
    # tokens are the same again.
    assert counted.from_prompt == (4 + 5, 2 + 1)
    assert counted.from_context == counted.from_prompt


def test_what_an_answer_repeats_of_itself_is_not_of_the_prompt() -> None:
    answer = [5, 6, 7, 8] * 4
    counted = count_copied([1, 2, 3], answer)
    assert counted.from_prompt == (0, 0)
    assert counted.from_context == (8, 4)
    assert copied_share([counted])["from_context"] == {"4": 0.5, "8": 0.25}


def test_the_longest_match_counts_and_of_equals_the_latest() -> None:
    longer, shorter = [1, 2, 3, 4, 5, 60], [2, 3, 4, 5, 70]
    assert count_copied([*longer, *shorter, 1, 2, 3, 4, 5], [60]).from_context[0] == 1
    assert count_copied([*shorter, 2, 3, 4, 5, 80, 2, 3, 4, 5], [80])[0] == (1, 0)


def test_shares_are_over_the_tokens_of_all_answers() -> None:
    copied = count_copied([1, 2, 3, 4, 5, 1, 2, 3, 4], [5])
    other = count_copied([1, 2, 3], [4, 5, 6])
    assert copied_share([copied, other])["from_prompt"] == {"4": 0.25, "8": 0.0}


def test_an_edit_renames_one_identifier_everywhere() -> None:
    for edit in make_edits(TEXTS, 6, 30, seed=3):
        assert len(edit.before) >= 30
        assert edit.before != edit.after
        pairs = zip(edit.before.split(), edit.after.split(), strict=True)
        assert {(a.strip("():"), b) for a, b in pairs if a != b}


def test_edits_are_decided_by_the_seed() -> None:
    assert make_edits(TEXTS, 4, 30, seed=3) == make_edits(TEXTS, 4, 30, seed=3)
    assert make_edits(TEXTS, 4, 30, seed=3) != make_edits(TEXTS, 4, 30, seed=4)


def test_texts_without_an_identifier_are_refused() -> None:
    with pytest.raises(ConfigError, match="identifier"):
        make_edits(["1 + 1"], 1, 3, seed=0)


def test_the_prompt_of_an_edit_ends_within_the_changed_file() -> None:
    before, after = list(range(100)), list(range(100, 200))
    prompt = edit_prompt(before, [7, 8], after, 50)
    assert prompt == [*before[:50], 7, 8, *after[:BEGUN_TOKENS]]


def test_prose_and_noise_have_the_length_that_was_asked_for() -> None:
    prose = prose_prompts(range(100), 4, 60)
    assert [each[0] for each in prose] == [0, 25, 50, 75]
    assert {len(each) for each in prose} == {60}
    noise = noise_prompts(50, 3, 20, seed=1)
    assert {len(each) for each in noise} == {20}
    assert noise == noise_prompts(50, 3, 20, seed=1)
    assert all(0 <= token < 50 for each in noise for token in each)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loads": ("chat",)}, "loads: 'chat' is not allowed; must be"),
        ({"request_tokens": 4}, "request-tokens: 4 is not allowed"),
        ({"max_model_len": 256}, "max-model-len: 256 is not allowed; must be at least"),
        ({"output": Path("/nowhere")}, "output: '/nowhere' is not allowed"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        CopyingBench(**({"output": tmp_path} | change))
    assert words in str(error.value)


def test_engines_that_draft_have_equally_many_tokens(tmp_path: Path) -> None:
    engines = CopyingBench(output=tmp_path, draft_tokens=12).contenders
    drafting = [config for config in engines.values() if config]
    assert [each["num_speculative_tokens"] for each in drafting] == [12] * 3
    alone, copying = engines[ALONE], engines[COPYING]
    assert alone
    assert copying
    assert not alone["copy_from_context"]
    assert copying == alone | {"copy_from_context": True}


def test_the_engines_have_room_for_the_longest_request(tmp_path: Path) -> None:
    bench = CopyingBench(output=tmp_path, file_tokens=100, request_tokens=50)
    assert bench.room_tokens > 100 + BEGUN_TOKENS + 50
    assert CopyingBench(output=tmp_path, max_model_len=2048).room_tokens == 2048


def test_ratios_are_paired_within_a_repeat(tmp_path: Path) -> None:
    names = tuple(CopyingBench(output=tmp_path).contenders)

    def figures(seconds: float) -> dict[str, Any]:
        return {
            "full_tokens": 100,
            "full_seconds": seconds,
            "decode_tokens": 100,
            "decode_request_steps": 40,
            "request_steps": 50,
            "drafted_per_position": [60, 40],
        }

    rounds = [
        dict(zip(names, map(figures, seconds), strict=True))
        for seconds in ((4.0, 2.0, 1.0, 4.0), (2.0, 2.0, 2.0, 4.0))
    ]
    cell = summarise_cell(rounds, names)
    assert cell["ratios"][COPYING][ALONE]["each"] == [2.0, 1.0]
    assert cell["ratios"][UNGATED]["none"]["each"] == [1.0, 0.5]
    assert cell["ratios"][COPYING][ALONE]["interval"] == pytest.approx([1.0, 2.0])
    assert cell["engines"][COPYING]["acceptance_length"] == 2.5
    assert cell["engines"][COPYING]["mean_draft_length"] == 2.0
