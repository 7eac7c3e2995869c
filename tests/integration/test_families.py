"""Every family of models with MTP layers decodes the same with and without drafts.

Greedy, float32, token by token, on random checkpoints whose drafts are sometimes
accepted and sometimes rejected (``tests/support/random_checkpoints.py``).
"""

import itertools
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from vllm.distributed import cleanup_dist_env_and_memory

from tests.support.engines import (
    DraftCounts,
    draft_counts,
    family_engine,
    greedy,
)
from tests.support.families import ATTENTION_FAMILIES
from tests.support.kv_cache import SlotWatch, generate_watched
from tests.support.random_checkpoints import random_prompts, write_checkpoint
from vllm_mtp.config import DEFAULT_FIXED_DRAFT_LENGTH, ConfigError
from vllm_mtp.integration.cpu import int8_weights

MAX_TOKENS = 28
NO_SPECULATION = "none"
FIXED = {"method": "mtp_plus", "controller": "fixed"}
RANDOM = {"method": "mtp_plus", "controller": "random"}
MAX_RANDOM_DRAFTS = 5


class Run(NamedTuple):
    """What an engine wrote, how its drafts fared, and what lay in its KV cache."""

    outputs: list[list[int]]
    counts: DraftCounts
    watch: SlotWatch | None


Runner = Callable[[str, str], Run]


SHARED_PREFIX = list(range(100, 180))
"""Fills two blocks of the KV cache, so the last prompt finds them there."""

PROMPTS = [[*SHARED_PREFIX, 1], *random_prompts(8), [*SHARED_PREFIX, 2]]


def can_scrub(family: str) -> bool:
    """Not what several MTP layers have written."""
    return ATTENTION_FAMILIES[family].num_mtp_layers == 1


def random_options(family: str) -> dict[str, Any]:
    """K is random in each step, 0 as well; rejected slots are scrubbed."""
    if not can_scrub(family):
        return RANDOM
    return RANDOM | {
        "num_speculative_tokens": MAX_RANDOM_DRAFTS,
        "kv_rollback": "scrub",
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Decodes ``PROMPTS`` with a family and a speculation, once for all tests."""

    @cache
    def checkpoint(family: str) -> Path:
        return write_checkpoint(tmp_path_factory.mktemp(family), family)

    @cache
    def decode(family: str, speculation: str) -> Run:
        if speculation == "random_k":
            return decode_watched(checkpoint(family), family)
        options = None if speculation == NO_SPECULATION else FIXED
        with family_engine(checkpoint(family), family, options) as llm:
            return Run(greedy(llm, PROMPTS, MAX_TOKENS), draft_counts(llm), None)

    return decode


def decode_watched(model: Path, family: str) -> Run:
    """With a random K, looking after every step at what is in the KV cache."""
    memory = {"kv_cache_memory_bytes": 4 * 2**20}  # the watch reads all of it
    with pytest.MonkeyPatch.context() as patch:
        # These models are small: drafts from weights in 8 bits all the same.
        patch.setattr(int8_weights, "MIN_WEIGHTS", 1)
        with family_engine(model, family, random_options(family), **memory) as llm:
            watch = SlotWatch(llm) if can_scrub(family) else None
            outputs = generate_watched(llm, PROMPTS, MAX_TOKENS, watch)
            return Run(list(outputs.values()), draft_counts(llm), watch)


families = pytest.mark.parametrize("family", ATTENTION_FAMILIES)
FIXED_TOO = ("mimo", "step3p5", "gemma4")
"""A fixed K takes another way through vLLM's drafters, of which these are all."""
speculations = pytest.mark.parametrize(
    ("family", "speculation"),
    [
        *((family, "random_k") for family in ATTENTION_FAMILIES),
        *((family, "fixed") for family in FIXED_TOO),
    ],
)


@families
def test_random_checkpoint_answers_differ_between_prompts_and_vary(
    family: str, run: Runner
) -> None:
    outputs = run(family, NO_SPECULATION).outputs
    assert len({tuple(output) for output in outputs}) == len(PROMPTS)
    assert all(len(set(output)) >= 8 for output in outputs)
    # Not only "the current token plus one", which any broken KV cache would write.
    steps = [b - a for output in outputs for a, b in pairwise(output)]
    assert steps.count(1) < 0.9 * len(steps)


@speculations
def test_greedy_output_equals_no_speculation(
    family: str, speculation: str, run: Runner
) -> None:
    expected = run(family, NO_SPECULATION).outputs
    assert [len(output) for output in expected] == [MAX_TOKENS] * len(PROMPTS)
    assert run(family, speculation).outputs == expected


@speculations
def test_some_drafts_are_accepted_and_some_rejected(
    family: str, speculation: str, run: Runner
) -> None:
    counts = run(family, speculation).counts
    assert counts.num_drafts >= len(PROMPTS)
    assert 0.2 <= counts.acceptance_rate <= 0.95, counts


@pytest.mark.parametrize("family", FIXED_TOO)
def test_fixed_draft_length_is_three(family: str, run: Runner) -> None:
    counts = run(family, "fixed").counts
    assert counts.num_draft_tokens == DEFAULT_FIXED_DRAFT_LENGTH * counts.num_drafts


@families
def test_random_controller_varies_the_draft_length(family: str, run: Runner) -> None:
    counts = run(family, "random_k").counts
    assert counts.num_drafts < counts.num_draft_tokens < 4 * counts.num_drafts


@pytest.mark.parametrize("family", filter(can_scrub, ATTENTION_FAMILIES))
def test_scrub_mode_leaves_no_rejected_slot_in_any_cache_layout(
    family: str, run: Runner
) -> None:
    _, counts, watch = run(family, "random_k")
    assert counts.num_rejected_tokens > 20
    assert watch.num_checked_slots > 500
    assert watch.violations == []


@pytest.mark.parametrize("family", itertools.filterfalse(can_scrub, ATTENTION_FAMILIES))
def test_scrub_mode_of_several_mtp_layers_is_refused(
    family: str, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path, family)
    try:
        with (
            pytest.raises(ConfigError, match=r"kv_rollback='scrub' is not allowed"),
            family_engine(model, family, FIXED | {"kv_rollback": "scrub"}),
        ):
            pass
    finally:
        cleanup_dist_env_and_memory()  # of a worker that has begun to start


def test_worthless_mtp_weights_change_the_speed_and_not_the_output(
    run: Runner, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path, "mimo", mtp_weights="shuffled")
    with family_engine(model, "mimo", FIXED) as llm:
        outputs, counts = greedy(llm, PROMPTS, MAX_TOKENS), draft_counts(llm)
    assert counts.num_drafts > 0
    assert counts.acceptance_rate < 0.05, counts
    assert outputs == run("mimo", NO_SPECULATION).outputs


@pytest.mark.parametrize(
    "family",
    [name for name, each in ATTENTION_FAMILIES.items() if not each.assistant_config],
)
def test_missing_mtp_weights_are_refused_by_name(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, family, mtp_weights="missing")
    with (
        pytest.raises(ConfigError, match=r"files: missing: [a-z]+\."),
        family_engine(model, family, FIXED),
    ):
        pass


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h"])
def test_hybrid_models_are_refused_on_a_cpu(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, family)
    with (
        pytest.raises(ConfigError, match="recurrent layers, whose states"),
        family_engine(model, family, FIXED),
    ):
        pass


@pytest.mark.parametrize(
    "family",
    [name for name, each in ATTENTION_FAMILIES.items() if each.counts_mtp_layers],
)
def test_model_without_mtp_layers_is_refused(family: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, family, num_mtp_layers=0)
    with (
        pytest.raises(ConfigError, match="has no MTP layers"),
        family_engine(model, family, FIXED),
    ):
        pass
