"""Passes of the MTP layer that only fill its KV cache compute nothing else.

Real engines: what is in the cache then, what ran, and that drafts fare as they would.
"""

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.drafter_passes import Passes, drafter_of, watch_passes
from tests.support.engine_jobs import accepted_by_step
from tests.support.engines import engine, family_engine, greedy
from tests.support.families import ATTENTION_FAMILIES
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.random_checkpoints import random_prompts, write_checkpoint
from tests.support.watch import play_script
from vllm_mtp.integration.worker import draft_model_gate

SPECULATION = {"method": "mtp_plus", "num_speculative_tokens": 3}


def run_passes_to_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, as vLLM does."""
    monkeypatch.setattr(draft_model_gate, "kv_only_layer", lambda *args: None)


def cache_of_drafter(llm: Any) -> torch.Tensor:
    drafter = drafter_of(llm)
    (name,) = drafter.mtp_layers
    layers = drafter.vllm_config.compilation_config.static_forward_context
    return layers[name].kv_cache.clone()


@pytest.mark.parametrize("family", ATTENTION_FAMILIES)
def test_a_prompt_leaves_the_same_cache_without_the_rest_of_the_layer(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = write_checkpoint(tmp_path, family)
    caches = []
    for are_whole in (False, True):
        if are_whole:
            run_passes_to_their_end(monkeypatch)
        with family_engine(checkpoint, family, SPECULATION) as llm:
            play_script(llm, [0])
            passes = watch_passes(llm)
            greedy(llm, random_prompts(3), 1)
            assert sum(passes.begun) == sum(map(len, random_prompts(3)))
            assert passes.whole == (passes.begun if are_whole else [])
            caches.append(cache_of_drafter(llm))
    assert caches[0].count_nonzero() > 100
    assert torch.equal(caches[0], caches[1])


class Run(NamedTuple):
    """What an engine did with six prompts, three at a time."""

    texts: list[list[int]]
    accepted: list[list[list[int]]]
    passes: Passes
    backfilled: list[int]
    """Rows of the steps with a KV backfill."""


def run_bundled(script: list[int], prompt_tokens: int = 48) -> Run:
    with engine(
        BUNDLED_CHECKPOINT, max_num_seqs=3, speculative_config=SPECULATION
    ) as llm:
        recorder = play_script(llm, script)
        passes = watch_passes(llm)
        texts = greedy(llm, heldout_prompts(6, max_tokens=prompt_tokens), 40)
        outcomes = recorder.outcomes
        backfilled = [o.num_backfill_tokens for o in outcomes if o.num_backfill_tokens]
        return Run(texts, accepted_by_step(outcomes), passes, backfilled)


def test_steps_with_prompts_draft_from_one_row_of_each_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of all others keys and values are written; drafts fare as they would."""
    cut = run_bundled([2])
    run_passes_to_their_end(monkeypatch)
    whole = run_bundled([2])
    assert cut.texts == whole.texts
    assert cut.accepted == whole.accepted
    assert sum(a for step in cut.accepted for _, _, a in step) > 50
    # Three prompts come first, and only they have many rows.
    assert whole.passes.begun[:2] == whole.passes.whole[:2] == [144, 3]
    assert cut.passes.begun[:3] == [144, 3, 3]
    assert cut.passes.whole[:2] == [3, 3]
    left = [rows for rows in cut.passes.begun if rows not in cut.passes.whole]
    assert left
    assert min(left) >= 48
    assert max(cut.passes.whole) < 48 + 3


def test_a_step_with_few_rows_has_one_pass() -> None:
    run = run_bundled([2], prompt_tokens=15)
    assert run.passes.begun[:2] == [45, 3]
    assert run.passes.begun == run.passes.whole


def test_a_kv_backfill_writes_keys_and_values_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = [0] * 6 + [2] * 2
    cut = run_bundled(script)
    run_passes_to_their_end(monkeypatch)
    whole = run_bundled(script)
    assert whole.passes.begun == whole.passes.whole
    assert cut.passes.begun == whole.passes.begun
    assert len(cut.passes.whole) < len(cut.passes.begun)
    # Not only prompts: each of these is among the passes that did not end.
    left = Counter(cut.passes.begun) - Counter(cut.passes.whole)
    assert len(cut.backfilled) > 5
    assert Counter(cut.backfilled) <= left
    assert (cut.texts, cut.accepted) == (whole.texts, whole.accepted)
