"""Model Runner V2: draft tokens that the device leaves out of a step."""

import json
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
    _assign_draft_token_budget,
    build_cost_tables_from_curves,
)

from tests.support.draft_trees import VOCAB_SIZE, Prefix, Tree, distance
from tests.support.engine_jobs import V2
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from vllm_mtp.config import MTPPlusConfig
from vllm_mtp.integration.load.settings import SETTINGS_KEY
from vllm_mtp.integration.v2 import adaptive_verification
from vllm_mtp.integration.v2.adaptive_verification import (
    CONFIDENCES,
    VerifiesWhatPays,
    announce,
    goes_with,
    is_supported,
)
from vllm_mtp.verification.reference import (
    AcceptanceTest,
    Verified,
    block_test,
    ratio_test,
)

DEPTH = 2


def admitted(trees: tuple[Tree, Tree], drafts: tuple[Prefix, Prefix], k: int) -> int:
    """Draft tokens of the first request, if ``k`` of both are verified."""
    confidences = torch.tensor(
        [
            [tree.proposal[draft[:i]].max() for i in range(DEPTH)]
            for tree, draft in zip(trees, drafts, strict=True)
        ]
    ).clamp(*CONFIDENCES)
    lengths = torch.full((2,), DEPTH, dtype=torch.int32)
    _assign_draft_token_budget(confidences, torch.arange(2), lengths, k, DEPTH)
    assert lengths.sum() == k
    return int(lengths[0])


def cut_by(
    chosen: Any, trees: tuple[Tree, Tree], other: Prefix, k: int, test: AcceptanceTest
) -> AcceptanceTest:
    """A test of the first request's draft, of which the device leaves some out."""

    def cut(
        target: torch.Tensor, proposal: torch.Tensor, draft: torch.Tensor
    ) -> Verified:
        drafts = tuple(draft.tolist()), other
        length = chosen(trees, drafts, k)
        verdict = test(target[: length + 1], proposal[:length], draft[:length])
        return Verified(
            torch.cat([verdict.num_accepted, target.new_zeros(DEPTH - length)]),
            torch.cat([verdict.next_token, target[length + 1 :]]),
        )

    return cut


def worst(chosen: Any, test: AcceptanceTest) -> float:
    """Largest difference to the target's distribution, over drafts and budgets."""
    differences = []
    for seed in range(3):
        trees = Tree(seed, DEPTH, "full"), Tree(seed + 10, DEPTH, "full")
        for other in product(range(0, VOCAB_SIZE, 2), repeat=DEPTH):
            for k in range(1, 2 * DEPTH):
                cut = cut_by(chosen, trees, other, k, test)
                differences.append(distance(trees[0], cut, DEPTH))
    return max(differences)


@pytest.mark.parametrize("test", [ratio_test, block_test])
def test_the_output_is_the_targets_whatever_is_left_out(test: AcceptanceTest) -> None:
    """Enumerated over the drafts of two requests that compete for rows."""
    assert worst(admitted, test) < 1e-9


def test_it_would_not_be_if_a_token_chose_its_own_row() -> None:
    """The enumeration notices."""

    def by_the_tokens(trees: Any, drafts: Any, k: int) -> int:
        return 0 if trees[0].proposal[()][drafts[0][0]] < 0.5 else min(k, DEPTH)

    assert worst(by_the_tokens, ratio_test) > 1e-3


@pytest.mark.parametrize("confidence", [0.0, 1e-4, 0.5, 0.9999999, 1.0])
def test_survival_falls_with_every_draft_token(confidence: float) -> None:
    confidences = torch.full((20,), confidence).clamp(*CONFIDENCES)
    assert (confidences.cumprod(0).diff() < 0).all()


def manager(verify_curve: list[tuple[int, float]]) -> VerifiesWhatPays:
    """Ours, of a batch whose drafts were all equally sure, as far as costs go."""
    found = VerifiesWhatPays.__new__(VerifiesWhatPays)
    found.cost_tables = build_cost_tables_from_curves([(1, 1.0)], verify_curve, 64, 512)
    return found


@pytest.mark.parametrize(
    ("verify_curve", "pays"),
    [
        ([(1, 10.0), (512, 10.0)], False),
        ([(1, 10.0), (64, 10.0), (256, 20.0)], True),
    ],
)
def test_steps_whose_rows_cost_nothing_go_as_they_were_scheduled(
    verify_curve: list[tuple[int, float]], pays: bool
) -> None:
    assert manager(verify_curve)._may_pay(64, 256, 192) is pays


def test_without_costs_everything_is_verified() -> None:
    without = VerifiesWhatPays.__new__(VerifiesWhatPays)
    without.cost_tables = None
    assert without.get_num_tokens({"a": 4}, {"a": [1, 2, 3]}) == 4
    assert not without.leaves_out


def test_small_batches_copy_no_confidences() -> None:
    small = VerifiesWhatPays.__new__(VerifiesWhatPays)
    small.cost_tables = None
    small.get_num_tokens({"a": 4}, {"a": [1, 2, 3]})
    slots = [SimpleNamespace(np=np.full((4, 2), 0.5)) for _ in range(2)]
    small._stale_confidences, small._pending_resets = slots, [1, 3]
    small.record_confidences(torch.zeros(1, 2), None)
    # Of requests that are new nothing is known.
    for slot in slots:
        assert slot.np.tolist() == [[0.5] * 2, [1.0] * 2] * 2
    assert not small._pending_resets


def engine_config(controller: str = "goodput", **changes: Any) -> Any:
    parallel = {
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "enable_batch_sharded_sampling": False,
    }
    ours = {name: changes.pop(name) for name in list(changes) if name in parallel}
    config = {
        "speculative_config": SimpleNamespace(rejection_sample_method="block"),
        "compilation_config": SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
        ),
        "lora_config": None,
        "watermark_config": None,
        "model_config": SimpleNamespace(return_sampling_mask=False),
        "aux_output_config": SimpleNamespace(enabled=False),
        "parallel_config": SimpleNamespace(**parallel | ours),
        "additional_config": {
            SETTINGS_KEY: MTPPlusConfig(controller=controller).model_dump(mode="json")
        },
    }
    return SimpleNamespace(**config | changes)


def test_it_is_on_by_itself() -> None:
    assert goes_with(engine_config())


@pytest.mark.parametrize(
    "change",
    [
        {"controller": "fixed"},
        {"data_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"lora_config": object()},
        {"compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode.PIECEWISE)},
        {"speculative_config": SimpleNamespace(rejection_sample_method="synthetic")},
    ],
)
def test_it_stays_off_where_vllm_refuses_it_or_k_is_fixed(
    change: dict[str, Any],
) -> None:
    assert not goes_with(engine_config(**change))


class Backend:
    """An attention backend as its layers and groups know it."""

    def __init__(self, takes_device_lengths: bool, bound: int | None) -> None:
        self.__name__ = "Backend"
        self.takes_device_lengths, self.bound = takes_device_lengths, bound

    def supports_device_cpu_query_lens_mismatch(self) -> bool:
        return self.takes_device_lengths

    def get_cudagraph_support(self, *_: Any) -> AttentionCGSupport:
        return AttentionCGSupport.UNIFORM_BATCH

    def get_varlen_cudagraph_max_query_len(self, *_: Any) -> int | None:
        return self.bound


def runner_with(
    monkeypatch: pytest.MonkeyPatch, target: Backend, drafter: Backend
) -> Any:
    backends = {"target": target, "drafter": drafter}
    layers = {
        name: SimpleNamespace(get_attn_backend=lambda backend=backend: backend)
        for name, backend in backends.items()
    }
    monkeypatch.setattr(
        adaptive_verification, "get_layers_from_vllm_config", lambda *_: layers
    )
    groups = [
        SimpleNamespace(
            layer_names=[name],
            backend=backend,
            kv_cache_spec=None,
            get_metadata_builder=lambda _, backend=backend: backend,
        )
        for name, backend in backends.items()
    ]
    speculator = SimpleNamespace(
        draft_attn_layer_names={"drafter"},
        acceptance_estimator=object(),
        use_local_argmax_reduction=False,
    )
    return SimpleNamespace(
        speculator=speculator,
        speculative_config=SimpleNamespace(enable_adaptive_verification=False),
        vllm_config=None,
        attn_groups=[groups],
        decode_query_len=9,
    )


@pytest.mark.parametrize(
    ("target", "is_on"),
    [
        (Backend(True, 64), True),
        (Backend(True, 8), False),
        (Backend(True, None), False),
        (Backend(False, 64), False),
    ],
)
def test_it_is_on_where_the_targets_attention_can(
    target: Backend, is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_with(monkeypatch, target, Backend(False, None))
    announce(runner)
    # Builders of attention metadata see it.
    asked = runner.speculative_config.enable_adaptive_verification
    assert asked is target.takes_device_lengths
    assert is_supported(runner) is is_on
    assert runner.speculative_config.enable_adaptive_verification is is_on
    # Draft graphs estimate nothing that nobody reads.
    assert (runner.speculator.acceptance_estimator is not None) is is_on


def test_drafts_without_logits_are_not_ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_with(monkeypatch, Backend(True, 64), Backend(True, 64))
    runner.speculator.use_local_argmax_reduction = True
    announce(runner)
    assert not runner.speculative_config.enable_adaptive_verification


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of an engine without speculation, and of one whose rows are made dear."""
    folder = tmp_path_factory.mktemp("adaptive")
    order = {
        "model": str(BUNDLED_CHECKPOINT),
        "prompts": heldout_prompts(4, max_tokens=12),
        "max_tokens": 24,
        "engine": {"max_num_seqs": 4, "max_model_len": 64},
        "spec": {
            "method": "mtp_plus",
            "num_speculative_tokens": 3,
            "controller": "fixed",
        },
        "result": str(folder / "result.json"),
    }
    V2.run("tests.support.adaptive_verification:play", order, folder / "log", 300)
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def test_texts_are_those_without_speculation(played: dict[str, Any]) -> None:
    plain, ours = played["texts"]
    assert ours == plain


def test_the_scheduler_is_told_what_was_verified(played: dict[str, Any]) -> None:
    decoding = [step for step in played["steps"] if not step["num_prefill_tokens"]]
    left_out = [step for step in decoding if any(r[2] for r in step["requests"])]
    assert len(left_out) > 3
    for step in decoding:
        drafted = sum(verified for verified, _, _ in step["requests"])
        if len(step["requests"]) == step["num_requests"]:  # none has ended meanwhile
            assert step["num_rows"] == step["num_requests"] + drafted
        assert all(accepted <= verified for verified, accepted, _ in step["requests"])
    # All of them were made, but near the end of a text.
    assert max(r[0] + r[2] for step in left_out for r in step["requests"]) == 3
    assert sum(step["num_would_be_accepted"] for step in left_out) > 0
