"""Options of the grid benchmark, its cells, and the requests of a round."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.grid.cells import (
    MAX_REQUEST_TOKENS,
    MIN_PHASE_TOKENS,
    MIN_REQUEST_TOKENS,
    MIN_TEXTS_OF_BATCH,
    PROMPT_TOKENS,
    Cell,
    Prompts,
    make_prompts,
    make_waves,
    of_different_lengths,
    plan_cells,
)
from benchmarks.grid.options import WORKLOADS, GridOptions
from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.tools.option_checks import parse_list

VOCAB_SIZE = 100


@pytest.fixture
def options(tmp_path: Path) -> GridOptions:
    """The default ones, with a small context."""
    return GridOptions(output=tmp_path, long_context_tokens=128)


@pytest.fixture
def prompts(options: GridOptions) -> Prompts:
    """Three pieces of code, one of them too short, and a text."""
    code = [[1] * 80, [2] * 10, [3] * 80]
    return make_prompts(code, [*range(4, 100)] * 4, VOCAB_SIZE, options)


def test_the_grid_is_every_combination_each_with_a_name_of_its_own(
    options: GridOptions,
) -> None:
    cells = plan_cells(options)
    assert len(cells) == len(WORKLOADS) * 4 * 2 * 2
    assert len({cell.name for cell in cells}) == len(cells)


def test_contenders_are_none_then_every_static_k_then_ours(
    options: GridOptions,
) -> None:
    first, again, *static, ours_again, ours = options.contenders
    assert first.speculative_config is again.speculative_config is None
    assert first.name != again.name
    lengths = [c.speculative_config["num_speculative_tokens"] for c in static]  # type: ignore[index]
    assert lengths == [1, 2, 3, 4, 5, 6, 7, 8]
    assert ours.speculative_config == ours_again.speculative_config
    assert ours.speculative_config == {"method": METHOD}
    assert ours.name != ours_again.name


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"workloads": ("code", "poems")}, "workload: 'poems' is not allowed"),
        ({"workloads": ("code", "code")}, "workload: 'code,code' is not allowed"),
        ({"contexts": ()}, "context: '' is not allowed; must be of short, long"),
        ({"concurrencies": (0,)}, "concurrency: '0' is not allowed"),
        ({"temperatures": (-1.0,)}, "temperature: '-1' is not allowed"),
        ({"temperatures": (float("nan"),)}, "temperature: 'nan' is not allowed"),
        ({"draft_lengths": (1, 9)}, "draft-lengths: '1,9' is not allowed"),
        ({"draft_lengths": ()}, "draft-lengths: '' is not allowed"),
        ({"num_repeats": 0}, "repeats: 0 is not allowed"),
        ({"max_repeats": 101}, "max-repeats: 101 is not allowed"),
        ({"round_seconds": 0.0}, "round-seconds: 0.0 is not allowed"),
        ({"settle_seconds": -1.0}, "settle-seconds: -1.0 is not allowed"),
        ({"long_context_tokens": 1}, "long-context: 1 is not allowed"),
        ({"kv_cache_mib": 1}, "kv-cache-mib: 1 is not allowed"),
        ({"dtype": "int8"}, "dtype: 'int8' is not allowed; must be one of float32"),
        ({"output": Path("/nowhere")}, "output: '/nowhere' is not allowed"),
    ],
)
def test_a_wrong_option_is_named_with_its_value(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        GridOptions(**({"output": tmp_path} | change))
    assert words in str(error.value)


def test_a_list_that_is_none_is_refused() -> None:
    assert parse_list("concurrency", "1, 4", int) == (1, 4)
    with pytest.raises(ConfigError, match="concurrency: '1;4' is not allowed"):
        parse_list("concurrency", "1;4", int)


def test_prompts_of_a_long_cell_share_their_context(prompts: Prompts) -> None:
    (wave,) = make_waves(Cell("code", 4, 0.0, "long"), prompts, 48)
    assert [len(each["prompt"]) for each in wave] == [
        128 + PROMPT_TOKENS
    ] * MIN_TEXTS_OF_BATCH
    assert len({tuple(each["prompt"][:128]) for each in wave}) == 1
    own = [each["prompt"][128] for each in wave]
    # The short one is left out, then they come again.
    assert own == [1, 3] * (MIN_TEXTS_OF_BATCH // 2)


def test_a_short_cell_has_the_prompts_alone(prompts: Prompts) -> None:
    (wave,) = make_waves(Cell("prose", 4, 1.0, "short"), prompts, 48)
    assert all(len(each["prompt"]) == PROMPT_TOKENS for each in wave)
    assert wave[0]["sampling"] == {"temperature": 1.0, "max_tokens": 48}


def test_constrained_output_is_the_upper_half_of_the_vocabulary(
    prompts: Prompts,
) -> None:
    (wave,) = make_waves(Cell("constrained", 1, 0.0, "short"), prompts, 48)
    assert [each["sampling"]["allowed_range"] for each in wave] == [[50, 99]] * 2


@pytest.mark.parametrize(("concurrency", "num_waves"), [(1, 4), (4, 4), (16, 2)])
def test_phases_go_back_and_forth_with_new_prompts(
    prompts: Prompts, concurrency: int, num_waves: int
) -> None:
    cell = Cell("phases", concurrency, 0.0, "short")
    waves = make_waves(cell, prompts, 32)
    constrained = ["allowed_range" in wave[0]["sampling"] for wave in waves]
    assert constrained == [False, True] * (num_waves // 2)
    assert all(len(wave) == concurrency for wave in waves)
    assert cell.num_requests == num_waves * concurrency
    if concurrency == 1:
        assert waves[0][0]["prompt"] != waves[2][0]["prompt"]


def test_a_request_is_as_long_as_the_round_needs_within_limits() -> None:
    cell = Cell("constrained", 4, 0.0, "short")
    assert cell.request_tokens(200.0, 2.0) == 50
    assert cell.request_tokens(1.0, 2.0) == MIN_REQUEST_TOKENS
    assert cell.request_tokens(1e6, 2.0) == MAX_REQUEST_TOKENS
    phases = Cell("phases", 32, 0.0, "short")
    assert phases.request_tokens(1.0, 2.0) == MIN_PHASE_TOKENS


def test_a_tokenizer_that_leaves_no_prompt_is_refused(options: GridOptions) -> None:
    with pytest.raises(ConfigError, match="model: its tokenizer leaves no"):
        make_prompts([[1] * 5], [2] * 500, VOCAB_SIZE, options)


def test_whole_requests_are_not_equally_long_and_no_longer_in_all(
    prompts: Prompts,
) -> None:
    (wave,) = make_waves(Cell("code", 4, 0.0, "short"), prompts, 40)
    (uneven,) = of_different_lengths([wave])
    lengths = [each["sampling"]["max_tokens"] for each in uneven]
    assert min(lengths) >= 20
    assert max(lengths) <= 60
    assert len(set(lengths)) > len(wave) / 2
    assert sum(lengths) == pytest.approx(40 * len(wave), rel=0.03)
    without = [each["sampling"] | {"max_tokens": 0} for each in wave]
    assert [each["sampling"] | {"max_tokens": 0} for each in uneven] == without
    assert [each["prompt"] for each in uneven] == [each["prompt"] for each in wave]
    (long_wave,) = make_waves(Cell("code", 4, 0.0, "short"), prompts, 256)
    (uneven,) = of_different_lengths([long_wave])
    assert max(each["sampling"]["max_tokens"] for each in uneven) == 256


def test_every_round_has_prompts_of_its_own(tmp_path: Path) -> None:
    code = [list(range(100 * i, 100 * i + 80)) for i in range(3 * MIN_TEXTS_OF_BATCH)]
    prompts = make_prompts(code, list(range(500)), 4096, GridOptions(output=tmp_path))
    cell = Cell("code", 4, 0.0, "short")
    rounds = [make_waves(cell, prompts, 40, number)[0] for number in range(4)]
    first = [{request["prompt"][0] for request in wave} for wave in rounds]
    assert not first[0] & first[1] | first[1] & first[2]
    assert first[3] == first[0], "and begins anew when there are no more"
