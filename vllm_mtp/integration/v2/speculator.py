"""Drafters of Model Runner V2: vLLM's own, which also roll back rejected slots.

V2 fuses the metadata rollback into its own kernels (``prepare_prefill_inputs`` and
``prepare_decode_inputs``: counts arrive ready), so those stay. What is added is the
payload rollback, between verification and the MTP layers' pass.
"""

from collections.abc import Collection
from typing import Any

import torch
from vllm.v1.worker.gpu.attn_utils import build_slot_mappings_by_layer
from vllm.v1.worker.gpu.spec_decode.gemma4.speculator import Gemma4Speculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.multi_module_mtp.speculator import (
    MultiModuleMTPSpeculator,
)
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_mtp.integration.extra_heads.registration import has_extra_heads
from vllm_mtp.integration.load.compat import check_attributes
from vllm_mtp.integration.load.extend import extend
from vllm_mtp.integration.load.settings import layout_of
from vllm_mtp.integration.scheduler.messages import OfferedCopies
from vllm_mtp.integration.v2 import adaptive_verification
from vllm_mtp.integration.v2.context_copies import CopiesFromContext
from vllm_mtp.integration.v2.decode_graphs import (
    keep_few_sizes,
    may_choose_graphs,
    may_mix,
    mix_draft_lengths,
)
from vllm_mtp.integration.v2.draft_vocab import DraftsFromVocabulary
from vllm_mtp.integration.v2.extra_heads import DraftsInOnePass
from vllm_mtp.integration.v2.kv_backfill import BACKFILL_ATTRIBUTES, BackfillsKV
from vllm_mtp.integration.v2.proposals import Proposals
from vllm_mtp.integration.v2.runner import RUNNER_ATTRIBUTES, MTPPlusRunner
from vllm_mtp.integration.worker.adapting import Adapts
from vllm_mtp.integration.worker.draft_models import complete_decoder_layers
from vllm_mtp.integration.worker.loaded_weights import checked_loading
from vllm_mtp.integration.worker.rejected_slots import AnnouncesRejectedSlots
from vllm_mtp.integration.worker.rollback import Rollback
from vllm_mtp.records import RejectedSlots

_LARGEST = 1e4
"""In the place of a draft logit that is infinite; float16 holds it, too."""


class _MTPPlusSpeculator(
    Adapts,
    BackfillsKV,
    AnnouncesRejectedSlots,
    DraftModelSpeculator,
):
    """The stages of drafting; `propose` has them in their order."""

    can_scrub = True
    can_mix_draft_lengths = True
    rollback: Rollback
    model_runner: Any
    _step: Any = None
    """vLLM's ``ExecuteModelState`` while its tokens are sampled."""
    _num_rejected: torch.Tensor | None = None
    """``[num_reqs]``, from verification to drafting, in scrub mode."""
    _draft_slots_buffer: torch.Tensor | None = None
    proposals: Proposals | None = None
    acceptance_estimator: Any = None

    @property
    def enable_adaptive_verification(self) -> bool:
        """vLLM asks once the target's attention backends are there."""
        return self.acceptance_estimator is not None and (
            adaptive_verification.is_supported(self.model_runner)
        )

    @enable_adaptive_verification.setter
    def enable_adaptive_verification(self, is_asked_for: bool) -> None:
        """What the user wrote, which decides nothing."""

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        runner = self.model_runner
        if not self.can_mix_draft_lengths or not may_choose_graphs(runner):
            return
        managers = (
            runner.cudagraph_manager,
            self.prefill_cudagraph_manager,
            self.decode_cudagraph_manager,
        )
        self.mixes_draft_lengths = may_mix(runner)
        choose = mix_draft_lengths if self.mixes_draft_lengths else keep_few_sizes
        choose(*managers, self._draft_step)

    def _draft_step(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """One of the steps of vLLM's ``_generate_fused_drafts``, in a graph.

        Which one it is the device counts. What the last one prepares for another that
        does not come nobody reads.
        """
        if attn_metadata is not None:
            self.block_tables.compute_slot_mappings(
                self.idx_mapping[:num_reqs],
                self.input_buffers.query_start_loc[: num_reqs + 1],
                self.input_buffers.positions[:num_reqs],
                num_tokens_padded,
            )
            self._update_draft_decode_metadata(attn_metadata, num_reqs)
        self.current_draft_step.add_(1)
        self._generate_draft(
            num_reqs, num_tokens_padded, attn_metadata, *args, **kwargs
        )

    def load_draft_model(self, *args: Any, **kwargs: Any) -> Any:
        layout = layout_of(self.vllm_config)
        with checked_loading(self.draft_model_config, layout):
            model = super().load_draft_model(*args, **kwargs)
        complete_decoder_layers(model)
        return model

    def begin_step(self, state: Any) -> None:
        """Take note of the target's pass whose tokens are about to be sampled."""
        self._step = state

    def end_step(self) -> None:
        self._step = None

    def expect(self, scheduler_output: Any) -> None:
        """A step is about to run, some requests of it for the first time."""

    def commit(
        self,
        # [num_reqs, max_sampled]
        sampled_token_ids: torch.Tensor,
        # [num_reqs or more]
        num_sampled: torch.Tensor,
    ) -> None:
        """A step has sampled these tokens."""

    def look(self, state: Any) -> None:
        """A step is over that went without the MTP layers."""

    def take_copies(self, state: Any) -> OfferedCopies | None:
        """What texts have offered, to be reported with the output of a step."""
        return None

    def begin_drafts(self, batch: Any) -> None:
        """A step drafts.

        Args:
            batch: vLLM's ``InputBatch``.
        """

    @property
    def mtp_layers(self) -> Collection[str]:
        """Attention layers that only drafting writes; none where the target's are."""
        return self.draft_attn_layer_names if self.advance_draft_positions else ()

    def propose(
        self, input_batch: Any, *args: Any, dummy_run: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        """``[num_reqs, num_speculative_steps]`` int64, as vLLM's.

        Args:
            input_batch: vLLM's ``InputBatch``.
            *args: vLLM's other arguments.
            dummy_run: At the start, which must not pass over what is broken.
            **kwargs: vLLM's, the draft depth of the step among them.
        """
        if dummy_run:
            self._expect_graph(input_batch)
            return super().propose(input_batch, *args, dummy_run=True, **kwargs)
        if not self.has_failed:
            with self.surviving():
                return self._propose(input_batch, *args, **kwargs)
        return self._first_tokens(input_batch)

    def _propose(
        self,
        input_batch: Any,
        *args: Any,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        # Without a depth it drafts as deep as it can.
        self.drafts_nothing = num_speculative_tokens == 0
        self.begin_drafts(input_batch)
        self._expect_graph(input_batch)
        if not self.drafts_nothing:
            self.backfill(input_batch)
        draft_tokens = super().propose(
            input_batch,
            *args,
            num_speculative_tokens=num_speculative_tokens,
            **kwargs,
        )
        # The scheduler reserves no slots for drafts where there are none.
        has_drafted = num_speculative_tokens and self.mtp_layers
        if has_drafted and self._num_rejected is not None:
            self._scrub_drafted(input_batch, self._num_rejected)
        self._num_rejected = None
        return draft_tokens

    def _expect_graph(self, input_batch: Any) -> None:
        if self.mixes_draft_lengths:
            self.prefill_cudagraph_manager.expect(input_batch)

    def _first_tokens(self, input_batch: Any) -> torch.Tensor:
        """One token for all drafts that are still owed, certain to be proposed, and so
        accepted as often as the target says it."""
        token_id, requests = 0, input_batch.idx_mapping
        if self.proposals is not None:
            token_id = self.proposals.propose_first(input_batch)
        elif self.draft_logits is not None:
            self.draft_logits[requests] = -torch.inf
            self.draft_logits[requests, :, 0] = 0.0
        shape = (input_batch.num_reqs, self.num_speculative_steps)
        drafts = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return drafts.add_(token_id)

    def compute_draft_logits(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        logits: torch.Tensor = super().compute_draft_logits(*args, **kwargs)
        if self.draft_logits is not None:
            # Broken weights: whatever is proposed must be a distribution, because the
            # acceptance test takes it out of the target's. Rows may be -inf in part.
            logits = logits.nan_to_num(nan=0.0, posinf=_LARGEST, neginf=-torch.inf)
        return logits

    def _scrub_drafted(
        self,
        input_batch: Any,
        # [num_reqs]
        num_rejected: torch.Tensor,
    ) -> None:
        """Zero what draft steps wrote, K_max - 1 slots from each committed length.

        Where a CUDA graph replays all steps their slots cannot be noted on the way, so
        they are computed again. The scheduler reserves them for every request.
        """
        num_reqs, num_steps = num_rejected.shape[0], self.num_speculative_steps - 1
        if num_steps == 0:
            return
        lengths = input_batch.seq_lens[:num_reqs] - num_rejected
        # Rows to zero are the last of each request: nearest positions come last, so
        # that a request near the model's end has fewer rows, not slots of committed
        # tokens.
        backwards = torch.arange(num_steps - 1, -1, -1, device=self.device)
        positions = (lengths[:, None] + backwards).clamp(max=self.max_model_len - 1)
        num_rows = (self.max_model_len - lengths).clamp(0, num_steps)
        starts = torch.arange(num_reqs + 1, device=self.device) * num_steps
        starts = starts.to(torch.int32)
        slots = self.block_tables.compute_slot_mappings(
            input_batch.idx_mapping[:num_reqs],
            starts,
            positions.flatten(),
            num_reqs * num_steps,
            out=self._draft_slots(num_steps),
        )
        by_layer = build_slot_mappings_by_layer(slots, self.kv_cache_config)
        self.rollback.scrub_drafted(by_layer, starts, num_rows.to(torch.int32))

    def _draft_slots(self, num_steps: int) -> torch.Tensor:
        """``[num_groups, max_num_reqs * num_steps]`` int64, the same each step."""
        if self._draft_slots_buffer is None:
            shape = (
                self.block_tables.num_kv_cache_groups,
                self.max_num_reqs * num_steps,
            )
            self._draft_slots_buffer = torch.empty(
                shape, dtype=torch.int64, device=self.device
            )
        return self._draft_slots_buffer

    def drawn_part(
        self,
        # [num_reqs] each
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two counts, of draft tokens that the acceptance estimator has seen."""
        return num_sampled, num_rejected

    def observe_verification(
        self,
        # [num_reqs] each, on the device
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
    ) -> None:
        super().observe_verification(
            idx_mapping, *self.drawn_part(idx_mapping, num_sampled, num_rejected)
        )
        if self.on_rejected_slots is not None:
            self.on_rejected_slots(
                RejectedSlots(num_rejected, query_start_loc=None, slot_mapping=None)
            )
        if self.rollback.scrubs and self._step.slot_mappings_by_layer is not None:
            self._num_rejected = num_rejected
            self.rollback.scrub_rejected(
                self._step.slot_mappings_by_layer,
                self._step.input_batch.query_start_loc,
                num_rejected,
            )


class MTPPlusSpeculator(
    CopiesFromContext, DraftsFromVocabulary, _MTPPlusSpeculator, MTPSpeculator
):
    """Most families: one MTP layer, run K times."""


class MTPPlusHeadsSpeculator(  # type: ignore[misc]  # names what it exchanges
    DraftsInOnePass, MTPPlusSpeculator
):
    """Extra heads: one for each draft token."""

    can_mix_draft_lengths = False


class MTPPlusMultiModuleSpeculator(
    DraftsFromVocabulary, _MTPPlusSpeculator, MultiModuleMTPSpeculator
):
    """Several MTP layers, run in turn."""

    can_scrub = False  # each layer drafts from other positions
    can_mix_draft_lengths = False
    can_disable = False
    mtp_layers = ()


class MTPPlusGemma4Speculator(_MTPPlusSpeculator, Gemma4Speculator):
    """Gemma 4: the drafter reads the target's KV and keeps its position."""


SPECULATOR_ATTRIBUTES = ("max_model_len", "max_num_reqs", "num_speculative_steps")

OURS_BY_THEIRS: dict[type, type[_MTPPlusSpeculator]] = {
    MTPSpeculator: MTPPlusSpeculator,
    MultiModuleMTPSpeculator: MTPPlusMultiModuleSpeculator,
    Gemma4Speculator: MTPPlusGemma4Speculator,
}


def replace_speculator(runner: Any, rollback: Rollback) -> None:
    """Put our speculator where vLLM's was built; neither has loaded weights yet.

    Args:
        runner: vLLM's V2 model runner. Only the last pipeline rank has a speculator.
        rollback: of the runner's worker.
    """
    has_heads = has_extra_heads(runner.speculative_config)
    if has_heads:
        runner.use_aux_hidden_state_outputs = True
    theirs = runner.speculator
    if theirs is None:
        return
    ours = OURS_BY_THEIRS[type(theirs)]
    if has_heads:
        ours = MTPPlusHeadsSpeculator
    # The cached draft logits alone can be gigabytes: free them before ours are made.
    runner.speculator = None
    del theirs
    runner.speculator = ours(runner.vllm_config, runner.device)
    check_attributes(runner, RUNNER_ATTRIBUTES)
    check_attributes(runner.speculator, (*SPECULATOR_ATTRIBUTES, *BACKFILL_ATTRIBUTES))
    runner.speculator.rollback = rollback
    runner.speculator.model_runner = runner
    runner.speculator.use_acceptance_estimator = (
        runner.speculator.can_mix_draft_lengths
        and adaptive_verification.goes_with(runner.vllm_config)
    )
    runner.speculator.prepare_to_disable()
    _extend(runner)


def _extend(runner: Any) -> None:
    # The property of our class takes the place of vLLM's attribute.
    speculator = vars(runner).pop("speculator")
    extend(runner, MTPPlusRunner)
    runner.speculator = speculator
