"""What ``auto`` means for sampled requests, by runner, model and memory.

Model Runner V2 needs a GPU, so its configs are stubs with as much as is looked at.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_mtp.config import MTPPlusConfig
from vllm_mtp.integration.load.settings import SETTINGS_KEY
from vllm_mtp.integration.worker import draft_sampling
from vllm_mtp.integration.worker.draft_sampling import (
    choose_methods,
    draws_drafts,
    verifies_blocks,
)

GIB = 2**30


def config(
    method: str = "auto",
    test: str = "auto",
    *,
    v2: bool,
    max_num_seqs: int = 256,
    watermarks: bool = False,
    **own: Any,
) -> Any:
    """Of a model with 152k tokens in bfloat16 at K = 8."""
    flags = {
        "use_gemma4_mtp": False,
        "use_step3p5_mtp": False,
        "use_local_argmax_reduction": False,
    } | own
    reduces = flags.pop("use_local_argmax_reduction")
    vocabulary = flags.pop("draft_vocab", "auto")
    settings = MTPPlusConfig(
        draft_sample_method=method,
        rejection_sample_method=test,
        draft_vocab=vocabulary,
    )
    speculation = SimpleNamespace(
        draft_sample_method="greedy" if method == "auto" else method,
        rejection_sample_method="standard" if test == "auto" else test,
        use_local_argmax_reduction=reduces,
        **{name: (lambda value=value: value) for name, value in flags.items()},
    )
    return SimpleNamespace(
        additional_config={SETTINGS_KEY: settings.model_dump(mode="json")},
        speculative_config=speculation,
        use_v2_model_runner=v2,
        watermark_config="a key" if watermarks else None,
        num_speculative_tokens=8,
        scheduler_config=SimpleNamespace(
            max_num_seqs=max_num_seqs, async_scheduling=False
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        model_config=SimpleNamespace(
            head_dtype=torch.bfloat16, get_vocab_size=lambda: 152_064
        ),
    )


@pytest.mark.parametrize(
    ("given", "gib", "is_drawn"),
    [
        (config(v2=False), 16, True),
        (config(v2=False, use_gemma4_mtp=True), 16, False),
        # vLLM's defaults for 80 GB.
        (config(v2=True, max_num_seqs=1024), 80, True),
        (config(v2=True, max_num_seqs=1024), 16, False),
        (config(v2=True), 16, True),
        (config(v2=True, draft_vocab="full"), 80, True),
        (config(v2=True, draft_vocab="full"), 48, False),
        (config(v2=True, draft_vocab="full", max_num_seqs=1024), 141, False),
        (config(v2=True, use_step3p5_mtp=True), 80, False),
        (config(v2=True, use_local_argmax_reduction=True), 80, False),
        (config("greedy", v2=True), 80, False),
        (config("greedy", v2=False), 80, False),
        (config("probabilistic", v2=True, draft_vocab="full"), 16, True),
        (config("probabilistic", v2=True, watermarks=True), 80, True),
        (config("probabilistic", v2=True, use_gemma4_mtp=True), 80, True),
    ],
)
def test_drafts_are_drawn_where_the_memory_for_it_is_small(
    given: Any, gib: int, is_drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_sampling, "_device_bytes", lambda: gib * GIB)
    choose_methods(given)
    assert draws_drafts(given) == is_drawn
    vllm_draws = given.speculative_config.draft_sample_method == "probabilistic"
    # Else vLLM would keep proposals of its own.
    is_vllms = bool(given.watermark_config) or given.speculative_config.use_gemma4_mtp()
    if given.use_v2_model_runner:
        assert vllm_draws == (is_drawn and is_vllms)


def test_proposals_of_vllms_defaults_take_little() -> None:
    """1024 requests, K = 8, 152k tokens: 2.5 GB over the whole vocabulary."""
    assert draft_sampling._proposals_bytes(config(v2=True, max_num_seqs=1024)) < GIB / 2


@pytest.mark.parametrize(
    ("given", "is_cpu", "is_block"),
    [
        (config(v2=False), True, True),
        (config(v2=False), False, False),
        (config(v2=True), False, True),
        (config(v2=True, watermarks=True), False, False),
        (config(test="standard", v2=False), True, False),
        (config(test="standard", v2=True), False, False),
        (config(test="block", v2=False), False, True),
        (config(test="synthetic", v2=False), True, False),
    ],
)
def test_drafts_are_tested_jointly_where_that_is_cheap(
    given: Any, is_cpu: bool, is_block: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_sampling, "_device_bytes", lambda: 80 * GIB)
    monkeypatch.setattr(
        draft_sampling, "current_platform", SimpleNamespace(is_cpu=lambda: is_cpu)
    )
    choose_methods(given)
    assert verifies_blocks(given) == is_block
    if given.use_v2_model_runner:
        v2_test = given.speculative_config.rejection_sample_method
        assert v2_test == ("block" if is_block else "standard")


@pytest.mark.parametrize(("test", "is_so"), [("block", True), ("synthetic", False)])
def test_shadow_drafts_say_nothing_of_synthetic_acceptance(
    test: str, is_so: bool
) -> None:
    assert draft_sampling.tests_shadow_drafts(config(test=test, v2=False)) is is_so
