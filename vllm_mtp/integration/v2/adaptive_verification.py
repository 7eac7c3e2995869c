"""Model Runner V2: which draft tokens of a step are verified is chosen on the device.

vLLM's adaptive verification, made for DSpark, in the place it has for MTP: how likely
each draft token is to be accepted is estimated from its logits within the draft graph;
the host reads that a step late and chooses how many rows the step has, by what rows
cost; the device ranks the draft tokens of all requests by survival and admits the best.

vLLM leaves it to users to ask for it, and then picks attention backends by it and
refuses what does not go with it. Here it is switched on late, wherever it works with
what is there. Added are these:

- A step in which leaving drafts out could hardly pay goes as it was scheduled, without
  a launch for it: up to some dozens of rows, rows cost nothing.
- Graphs are timed as steps with drafts replay them (`decode_graphs`).
- Confidences are kept away from 0 and 1, so that survival falls with every draft
  token. Were two of a request equal, the ranking could take the second for the first,
  and whether a token is verified could depend on the token itself.

What is left out still counts for the controller, which would otherwise see only what
was promising, or take for rejected what was not tried: whether it would have been
accepted is drawn by its confidence. So drafts are as deep as if all were verified.

A draft token's place depends on those before it and on other requests, never on itself
or on later ones: so the output is the target's, whatever is left out.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker.gpu.attn_utils import (
    get_query_lens_mismatch_unsupported_backend,
    get_varlen_cudagraph_unsupported_backend,
)
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import (
    AdaptiveVerificationManager,
)

from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.integration.v2.decode_graphs import any_mix

logger = init_logger("vllm.mtp_plus")

MIN_SAVING = 0.03
"""Share of a step's time. Choosing takes the device a dozen small launches."""
CONFIDENCES = 2.0**-6, 1.0 - 2.0**-10
"""Least and most: products of up to 20 such numbers differ in float32."""


def goes_with(vllm_config: Any) -> bool:
    """Whether an engine's features allow it; its attention backends are asked later.

    Args:
        vllm_config: Finished.
    """
    speculation, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    return bool(
        # Who fixes K compares acceptance by it.
        settings_of(vllm_config).controller != "fixed"
        and vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        # Ranks would have to agree on a step's rows.
        and parallel.data_parallel_size == parallel.pipeline_parallel_size == 1
        and parallel.prefill_context_parallel_size == 1
        and parallel.decode_context_parallel_size == 1
        and not parallel.enable_batch_sharded_sampling
        and vllm_config.lora_config is None
        and not vllm_config.model_config.return_sampling_mask
        and not vllm_config.aux_output_config.enabled
        and vllm_config.watermark_config is None
        and speculation.rejection_sample_method != "synthetic"
    )


def announce(runner: Any) -> None:
    """Before attention metadata builders exist, some of which must know.

    Args:
        runner: vLLM's V2 model runner with its weights.
    """
    speculator = runner.speculator

    def backends() -> Iterator[Any]:
        layers = get_layers_from_vllm_config(runner.vllm_config, AttentionLayerBase)
        for name, layer in layers.items():
            if name not in speculator.draft_attn_layer_names:
                yield layer.get_attn_backend()

    runner.speculative_config.enable_adaptive_verification = (
        speculator.acceptance_estimator is not None
        # There drafts' logits are not gathered.
        and not speculator.use_local_argmax_reduction
        and all(each.supports_device_cpu_query_lens_mismatch() for each in backends())
    )


def is_supported(runner: Any) -> bool:
    """Whether the attention backends can, which are known now; settles it.

    Args:
        runner: vLLM's V2 model runner with its attention groups.
    """
    speculator, speculation = runner.speculator, runner.speculative_config
    target_layers = {
        name
        for groups in runner.attn_groups
        for group in groups
        for name in group.layer_names
    } - set(speculator.draft_attn_layer_names)
    is_so = (
        speculation.enable_adaptive_verification
        and get_query_lens_mismatch_unsupported_backend(
            runner.attn_groups, target_layers
        )
        is None
        and get_varlen_cudagraph_unsupported_backend(
            runner.attn_groups,
            runner.vllm_config,
            runner.decode_query_len,
            target_layers,
        )
        is None
    )
    speculation.enable_adaptive_verification = is_so
    if not is_so:
        # Draft graphs go without it.
        speculator.acceptance_estimator = None
    return is_so


class VerifiesWhatPays(AdaptiveVerificationManager):
    """Mixin for vLLM's manager."""

    model_runner: Any
    leaves_out = False
    """Whether the step that is prepared has fewer rows than were scheduled."""
    _may_leave_out = False
    """Whether it could pay in that step."""

    def get_num_tokens(
        self,
        num_tokens_per_req: dict[str, int],
        draft_tokens: dict[str, list[int]],
    ) -> int:
        num_rows = sum(num_tokens_per_req.values())
        num_drafts = sum(map(len, draft_tokens.values()))
        self.leaves_out = False
        self._may_leave_out = self._may_pay(
            len(num_tokens_per_req), num_rows, num_drafts
        )
        if not self._may_leave_out:
            return num_rows
        num_kept = int(super().get_num_tokens(num_tokens_per_req, draft_tokens))
        self.leaves_out = num_kept < num_rows
        return num_kept

    def _may_pay(self, num_reqs: int, num_rows: int, num_drafts: int) -> bool:
        if self.cost_tables is None:
            return False
        draft_cost, verify_cost = self.cost_tables
        least = draft_cost[num_reqs] + verify_cost[num_rows - num_drafts]
        most = draft_cost[num_reqs] + verify_cost[num_rows]
        return bool(most - least >= MIN_SAVING * most)

    def choice(self, batch: Any) -> torch.Tensor:
        """``[2, num_reqs]`` int64 of the step whose tokens are sampled.

        Draft tokens of each request that are verified, and how many of the next ones
        would have been accepted if all of those are.

        Args:
            batch: vLLM's ``InputBatch``.
        """
        verified = (batch.cu_num_logits.diff() - 1).long()
        confidences = self._confidence_probs[batch.idx_mapping]
        accepted = torch.rand_like(confidences) < confidences
        steps = torch.arange(confidences.shape[1], device=confidences.device)
        accepted |= steps < verified[:, None]
        would_be_accepted = accepted.long().cumprod(dim=1).sum(dim=1) - verified
        return torch.stack([verified, would_be_accepted])

    def record_confidences(
        self,
        # [num_reqs or more, K_max]
        confidence_probs: torch.Tensor,
        input_batch: Any,
    ) -> None:
        if self._may_leave_out:
            confidence_probs = confidence_probs.clamp(*CONFIDENCES)
            super().record_confidences(confidence_probs, input_batch)
        else:
            # Small batches go without; the first step of a large one ranks by what is
            # there. What would begin with the next copy begins now.
            for slot in self._stale_confidences:
                slot.np[self._pending_resets] = 1.0
            self._pending_resets.clear()

    def batches_to_profile(self, capture_sizes: list[int]) -> Iterator[dict[str, Any]]:
        longest = self.model_runner.decode_query_len
        sizes = {size - size % longest for size in self._sizes if size >= longest}
        for batch in super().batches_to_profile(sorted(sizes)):
            num_reqs = batch["num_tokens"] // longest
            if num_reqs > self.req_states.max_num_reqs:
                yield batch  # far beyond any graph
            else:
                yield batch | {"num_tokens": num_reqs * longest, "uniform_decode": True}

    @property
    def _sizes(self) -> list[int]:
        """Rows of the graphs that steps with drafts are padded to."""
        kinds = any_mix(self.model_runner.cudagraph_manager)
        return sorted({graph.num_tokens for kind in kinds for graph in kind})

    def set_cost_curves(
        self,
        draft_curve: list[tuple[int, float]],
        verify_curve: list[tuple[int, float]],
    ) -> None:
        try:
            super().set_cost_curves(draft_curve, verify_curve)
        except RuntimeError as error:
            logger.warning("mtp_plus verifies all draft tokens: %s", error)
            return
        self._compile()

    def _compile(self) -> None:
        """Before requests come, which vLLM leaves to the first step that ranks."""
        for num_reqs in (2, 3):
            capacities = self._batch_draft_capacity[:num_reqs]
            adaptive_verification._assign_draft_token_budget_compiled(
                self._confidence_probs,
                torch.arange(num_reqs, device=capacities.device),
                capacities.fill_(self.num_speculative_steps),
                num_reqs - 1,
                self.num_speculative_steps,
            )
