"""Drafters of Model Runner V1: vLLM's own, with rollback in one launch.

Between verification and drafting vLLM runs a chain of small steps: gather a backup
token of every request, count sampled tokens, count rejected ones, copy the slot
mapping, subtract from the sequence lengths. Here ``rollback_metadata`` gives all of
it at once, and each of vLLM's hooks below hands out its part:

    rejection sampler              -> one launch: RolledBack, padded slot mapping
    prepare_next_token_ids_padded  <- next_token_ids, num_sampled_tokens
    prepare_inputs_padded          <- last_valid_rows, num_rejected_tokens, slot mapping
    the second draft step          <- seq_lens
"""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.gemma4 import Gemma4Proposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.step3p5 import Step3p5MTPProposer

from vllm_mtp.config import METHOD
from vllm_mtp.drafting.temperature import DraftTemperature
from vllm_mtp.integration.cpu.prefiltered_head import (
    PREFILTER_ATTRIBUTES,
    prefilter_head,
    prefilters_head,
)
from vllm_mtp.integration.extra_heads.registration import has_extra_heads
from vllm_mtp.integration.load.compat import CompatibilityError, check_attributes
from vllm_mtp.integration.load.extend import extend
from vllm_mtp.integration.load.settings import layout_of
from vllm_mtp.integration.scheduler.messages import stop_rule_of
from vllm_mtp.integration.v1.context_copies import ContinuesFromContexts
from vllm_mtp.integration.v1.cpu_sampling import sample_fast_on_cpu
from vllm_mtp.integration.v1.draft_sampling import DrawsLikeTarget
from vllm_mtp.integration.v1.draft_vocab import DraftsFromVocabulary
from vllm_mtp.integration.v1.early_stop import StopsEarly
from vllm_mtp.integration.v1.extra_heads import HEADS_ATTRIBUTES, DraftsInOnePass
from vllm_mtp.integration.v1.kv_backfill import BACKFILL_ATTRIBUTES, BackfillsKV
from vllm_mtp.integration.v1.listed_logprobs import answer_each_request
from vllm_mtp.integration.v1.passes import PASS_ATTRIBUTES
from vllm_mtp.integration.v1.rejection_sampler import MTPPlusRejectionSampler
from vllm_mtp.integration.v1.runner import RUNNER_ATTRIBUTES, MTPPlusRunner
from vllm_mtp.integration.v1.shadow_drafts import ShadowTest, show_sampled_rows
from vllm_mtp.integration.worker.adapting import Adapts
from vllm_mtp.integration.worker.draft_model_gate import DraftModelGate, gate_of
from vllm_mtp.integration.worker.draft_models import (
    complete_decoder_layers,
    returns_two,
)
from vllm_mtp.integration.worker.draft_sampling import (
    tests_shadow_drafts,
    verifies_blocks,
)
from vllm_mtp.integration.worker.hidden_states import StepRows
from vllm_mtp.integration.worker.loaded_weights import checked_loading
from vllm_mtp.integration.worker.rejected_slots import AnnouncesRejectedSlots
from vllm_mtp.integration.worker.rollback import Rollback
from vllm_mtp.kernels.reference import PADDING_SLOT
from vllm_mtp.records import RejectedSlots, RollbackPlan, RolledBack


class _DraftSlots:
    """The slots that draft steps wrote, kept because vLLM reuses its buffer for all."""

    def __init__(self, max_slots: int, device: torch.device) -> None:
        self.slots = torch.empty(max_slots, dtype=torch.int64, device=device)
        self.num_slots = 0
        # Every row is a request of its own, with one token to undo.
        self._starts = torch.arange(max_slots + 1, dtype=torch.int32, device=device)
        self._ones = torch.ones(max_slots, dtype=torch.int32, device=device)

    def add(
        self,
        # [num_reqs] int64
        slots: torch.Tensor,
    ) -> None:
        end = self.num_slots + slots.shape[0]
        self.slots[self.num_slots : end] = slots
        self.num_slots = end

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """First row and number of rows of each request; begins anew."""
        num_slots, self.num_slots = self.num_slots, 0
        return self._starts[: num_slots + 1], self._ones[:num_slots]


class _MTPPlusDrafter(
    Adapts,
    BackfillsKV,
    AnnouncesRejectedSlots,
    StopsEarly,
    SpecDecodeBaseProposer,
):
    """The stages of drafting; `propose` has them in their order."""

    can_scrub = True
    gate: DraftModelGate | None = None
    """None where passes of the MTP layers are always whole, and before loading."""
    rollback: Rollback
    model_runner: Any
    _step: Any = None
    """vLLM's ``ExecuteModelState`` while its tokens are sampled."""
    _rolled_back: RolledBack | None = None
    _draft_slots: "_DraftSlots | None" = None
    """In scrub mode."""

    @property
    def mtp_layers(self) -> Collection[str]:
        """Attention layers that only drafting writes; none where the target's are."""
        return () if self.constant_draft_positions else self._draft_attn_layer_names

    def _get_model(self) -> Any:
        config = self.speculative_config.draft_model_config
        with checked_loading(config, layout_of(self.vllm_config)):
            model = super()._get_model()
        complete_decoder_layers(model)
        return model

    def model_returns_tuple(self) -> bool:
        return super().model_returns_tuple() or returns_two(self.draft_model_config)

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        self.gate = gate_of(self.vllm_config, self.model, self._draft_attn_layer_names)
        self.prepare_to_stop_early()
        if prefilters_head(self.vllm_config):
            prefilter_head(self.model_runner, target_model)

    def expect(self, scheduler_output: Any) -> None:
        """A step is about to run, some requests of it for the first time."""

    def sampling(self, spec_decode_metadata: Any) -> AbstractContextManager[None]:
        """The tokens of a step are sampled in here."""
        return nullcontext()

    def commit(
        self,
        # [num_reqs, max_sampled], -1 where there is none
        sampled_token_ids: torch.Tensor,
    ) -> None:
        """A step has sampled these tokens."""

    def rows_of_step(
        self,
        # [num_reqs, max_sampled], -1 where there is none
        sampled_token_ids: torch.Tensor,
    ) -> StepRows:
        """Of the step whose tokens have just been sampled."""
        runner, hidden = self.model_runner, self._step.hidden_states
        batch, verified = runner.input_batch, self._step.spec_decode_metadata
        starts = runner.query_start_loc.cpu[: batch.num_reqs + 1].clone()
        num_valid = starts.diff()
        if verified is not None:
            num_drafts = torch.tensor(verified.num_draft_tokens)
            num_kept = (sampled_token_ids >= 0).sum(dim=1).cpu()
            num_valid -= (num_drafts > 0) * (num_drafts + 1 - num_kept)
        num_rows = int(starts[-1])
        return StepRows(
            batch.req_ids[: batch.num_reqs],
            starts,
            num_valid,
            runner.input_ids.gpu[:num_rows],
            runner._get_positions(num_rows),
            hidden[:num_rows],
        )

    def draft_pass(self, given: dict[str, Any]) -> AbstractContextManager[None]:
        """Drafts of a step are made in here, with these arguments of ``propose``."""
        return nullcontext()

    def begin_step(self, state: Any) -> None:
        """Take note of the target's pass whose tokens are about to be sampled."""
        self._step = state
        self._rolled_back = self.stop_rule = None
        if state is not None:
            self.forget_pending(state.scheduler_output)
            if self.stops_early:
                self.stop_rule = stop_rule_of(state.scheduler_output)

    def end_step(self) -> None:
        self._step = self._rolled_back = None

    def after_verification(
        self,
        # [num_reqs, max_sampled] int32
        sampled_token_ids: torch.Tensor,
    ) -> None:
        """Drafts were verified: roll back at once, before anything reads the KV."""
        if self._step is not None:
            self._roll_back(sampled_token_ids)

    def prepare_next_token_ids_padded(
        self,
        # [num_reqs, max_sampled] int32
        sampled_token_ids: torch.Tensor,
        requests: Any,
        gpu_input_batch: Any,
        # [max_num_reqs] bool
        discard_request_mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rolled_back = self._rolled_back or self._roll_back(sampled_token_ids)
        return rolled_back.next_token_ids, rolled_back.num_sampled_tokens

    def prepare_inputs_padded(
        self,
        common_attn_metadata: Any,
        spec_decode_metadata: Any,
        # [num_reqs] int32
        valid_sampled_tokens_count: torch.Tensor,
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        rolled_back = self._rolled_back
        assert rolled_back is not None, "verification comes first"
        given = common_attn_metadata
        num_rows = given.num_actual_tokens
        # What else the target's metadata holds was made for the target's layers.
        metadata = CommonAttentionMetadata(
            query_start_loc=given.query_start_loc,
            query_start_loc_cpu=given.query_start_loc_cpu,
            seq_lens=given.seq_lens,
            seq_lens_cpu_upper_bound=given.seq_lens_cpu_upper_bound,
            num_reqs=given.num_reqs,
            num_actual_tokens=num_rows,
            max_query_len=given.max_query_len,
            max_seq_len=given.max_seq_len,
            block_table_tensor=given.block_table_tensor,
            slot_mapping=self._slot_mapping_buffer[:num_rows],
            causal=True,
            dcp_local_seq_lens=given.dcp_local_seq_lens,
        )
        return metadata, rolled_back.last_valid_rows, rolled_back.num_rejected_tokens

    def propose(self, num_speculative_tokens: int, **given: Any) -> torch.Tensor:
        """``[num_reqs, num_speculative_tokens]`` int64, or fewer under a stop rule.

        Args:
            num_speculative_tokens: The draft depth of the step.
            **given: vLLM's other arguments.
        """
        if not self.has_failed:
            with self.surviving():
                return self._propose(num_speculative_tokens, given)
        self._last_draft_probs = self._drafts = None
        return _no_tokens(given).new_zeros(
            (given["common_attn_metadata"].num_reqs, num_speculative_tokens)
        )

    def _propose(self, depth: int, given: dict[str, Any]) -> torch.Tensor:
        metadata: CommonAttentionMetadata = given["common_attn_metadata"]
        if not depth and self.skips_mtp_layers(metadata):
            self.keep_pending(given)
            return _no_tokens(given)
        if depth:
            self.backfill(metadata)
        with self.draft_pass(given):
            draft_token_ids = self._run_passes(depth, given)
        self._scrub_drafted()
        return draft_token_ids

    def _run_passes(self, depth: int, given: dict[str, Any]) -> torch.Tensor:
        splits = depth and self.gate is not None and self.gate.can_be_kv_only
        if not depth or (splits and self.pays_two_passes(given)):
            self.run_kv_pass(given)
            if not depth:
                return _no_tokens(given)
            given = self.of_last_rows(given)
        self.begin_drafts(self.model_runner.input_batch.req_ids)
        return self.end_drafts(self.run_pass(depth, given))

    def run_kv_pass(self, given: dict[str, Any]) -> None:
        """A pass of the MTP layers for their keys and values alone, if it may be."""
        with nullcontext() if self.gate is None else self.gate.kv_only():
            self.run_pass(0, given)

    def run_pass(self, depth: int, given: dict[str, Any]) -> torch.Tensor:
        """vLLM's ``propose``."""
        return super().propose(depth, **given)

    def _scrub_drafted(self) -> None:
        if self._draft_slots is not None and self._draft_slots.num_slots:
            self.rollback.scrub_drafted(
                dict.fromkeys(self.mtp_layers, self._draft_slots.slots),
                *self._draft_slots.take(),
            )

    def _update_positions_dependent_metadata(
        self, positions: torch.Tensor, common_attn_metadata: Any, *args: Any
    ) -> torch.Tensor:
        positions = super()._update_positions_dependent_metadata(
            positions, common_attn_metadata, *args
        )
        if self.rollback.scrubs and not self.has_stopped:
            if self._draft_slots is None:
                num_steps = self.speculative_config.num_speculative_tokens - 1
                num_slots = num_steps * self.max_batch_size
                self._draft_slots = _DraftSlots(num_slots, self.device)
            self._draft_slots.add(common_attn_metadata.slot_mapping)
        return positions

    def _roll_back(
        self,
        # [num_reqs, max_sampled] int32
        sampled_token_ids: torch.Tensor,
    ) -> RolledBack:
        """Roll this step back, metadata and payload, and announce the slots."""
        verified = self._step.spec_decode_metadata
        metadata = self._step.spec_decode_common_attn_metadata
        num_reqs, num_rows = metadata.num_reqs, metadata.num_actual_tokens
        plan = RollbackPlan(
            sampled_token_ids,
            None if verified is None else verified.cu_num_draft_tokens,
            self.model_runner.discard_request_mask.gpu[:num_reqs],
            self._next_prompt_tokens(num_reqs),
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.slot_mapping[:num_rows],
            self.model_runner.input_batch.vocab_size,
        )
        rolled_back = self.rollback.metadata(plan, self._slot_mapping_buffer[:num_rows])
        if self.on_rejected_slots is not None:
            self.on_rejected_slots(
                RejectedSlots(
                    rolled_back.num_rejected_tokens,
                    plan.query_start_loc,
                    plan.slot_mapping,
                )
            )
        if self.rollback.scrubs:
            self.rollback.scrub_rejected(
                self._step.slot_mappings,
                plan.query_start_loc,
                rolled_back.num_rejected_tokens,
            )
        self._rolled_back = rolled_back
        return rolled_back

    def _next_prompt_tokens(self, num_reqs: int) -> torch.Tensor:
        """``[num_reqs]`` int32: of discarded requests, the token after this step's.

        vLLM takes the last token of the prompt there, which is the next one only if
        one token is left: the MTP layers then saw a wrong token at every chunk border.
        """
        discarded = np.nonzero(self.model_runner.discard_request_mask.np[:num_reqs])[0]
        if discarded.size:
            lengths = self.model_runner.optimistic_seq_lens_cpu.numpy()[discarded]
            tokens = self.model_runner.input_batch.token_ids_cpu[discarded, lengths]
            # A prompt of embeddings has no token ids.
            self.backup_next_token_ids.np[discarded] = np.maximum(tokens, 0)
            self.backup_next_token_ids.copy_to_gpu(num_reqs)
        return self.backup_next_token_ids.gpu[:num_reqs]


def _no_tokens(given: dict[str, Any]) -> torch.Tensor:
    """``[num_reqs, 0]`` int64."""
    shape = (given["common_attn_metadata"].num_reqs, 0)
    return given["next_token_ids"].new_empty(shape, dtype=torch.int64)


class _OneLayerDrafter(
    DraftsFromVocabulary, _MTPPlusDrafter, DrawsLikeTarget, EagleProposer
):
    _next_seq_lens: torch.Tensor | None = None
    """Committed lengths, for the draft step after the first."""

    def begin_anew(self, changed: Collection[str]) -> None:
        super().begin_anew(changed)
        self.draft_temperature = DraftTemperature()

    def run_pass(self, depth: int, given: dict[str, Any]) -> torch.Tensor:
        self._next_seq_lens = None
        if given.get("num_rejected_tokens_gpu") is not None:
            assert self._rolled_back is not None
            self._next_seq_lens = self._rolled_back.seq_lens
        # None: vLLM need not subtract what is subtracted already.
        return super().run_pass(depth, given | {"num_rejected_tokens_gpu": None})

    def _update_positions_dependent_metadata(
        self, positions: torch.Tensor, common_attn_metadata: Any, *args: Any
    ) -> torch.Tensor:
        if self._next_seq_lens is not None:
            common_attn_metadata.seq_lens = self._next_seq_lens
            self._next_seq_lens = None
        return super()._update_positions_dependent_metadata(
            positions, common_attn_metadata, *args
        )

    def _get_slot_mapping(
        self, num_tokens: int, slot_mapping: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        buffer = self._slot_mapping_buffer
        if slot_mapping is None or slot_mapping.data_ptr() != buffer.data_ptr():
            return super()._get_slot_mapping(num_tokens, slot_mapping)
        # Written in place by the rollback: only a CUDA graph's padding is missing.
        buffer[slot_mapping.shape[0] : num_tokens].fill_(PADDING_SLOT)
        return super()._get_slot_mapping(num_tokens)


class MTPPlusProposer(ContinuesFromContexts, _OneLayerDrafter):
    """Most families: one MTP layer, run K times."""


class MTPPlusHeadsProposer(DraftsInOnePass, MTPPlusProposer):
    """Extra heads: one for each draft token."""


class MTPPlusGemma4Proposer(_MTPPlusDrafter, Gemma4Proposer):
    """Gemma 4: the drafter reads the target's KV and keeps its position."""


class MTPPlusStep3p5Proposer(_MTPPlusDrafter, Step3p5MTPProposer):
    """Step 3.5: several MTP layers, run in turn."""

    can_scrub = False  # its layers lie in several cache groups
    can_disable = False


DRAFTER_ATTRIBUTES = (
    "_enable_probabilistic_draft_probs",
    "_last_draft_probs",
    "_slot_mapping_buffer",
    *HEADS_ATTRIBUTES,
    "backup_next_token_ids",
    "constant_draft_positions",
    "max_batch_size",
)

OURS_BY_THEIRS: dict[type, type[_MTPPlusDrafter]] = {
    EagleProposer: MTPPlusProposer,
    Gemma4Proposer: MTPPlusGemma4Proposer,
    Step3p5MTPProposer: MTPPlusStep3p5Proposer,
}


def replace_drafter(runner: Any, rollback: Rollback) -> None:
    """Put our drafter where vLLM's was built; neither has loaded weights yet.

    Args:
        runner: vLLM's V1 model runner. Only the last pipeline rank has a drafter.
        rollback: of the runner's worker.
    """
    theirs = getattr(runner, "drafter", None)
    if theirs is None:
        return
    ours = OURS_BY_THEIRS.get(type(theirs))
    if ours is MTPPlusProposer and has_extra_heads(runner.speculative_config):
        ours, runner.use_aux_hidden_state_outputs = MTPPlusHeadsProposer, True
    if ours is None:
        raise CompatibilityError(
            f"method {METHOD!r} has no drafter to put in the place of {type(theirs)}: "
            "it knows vLLM's own classes, and not what others made of them."
        )
    runner.drafter = None  # free its buffers before ours are made
    del theirs
    runner.drafter = ours(runner.vllm_config, runner.device, runner)
    check_attributes(runner, (*RUNNER_ATTRIBUTES, *PREFILTER_ATTRIBUTES))
    check_attributes(
        runner.drafter,
        (*DRAFTER_ATTRIBUTES, *PASS_ATTRIBUTES, *BACKFILL_ATTRIBUTES),
    )
    extend(runner, MTPPlusRunner)
    runner.drafter.rollback = rollback
    runner.drafter.model_runner = runner
    runner.drafter.prepare_to_disable()
    _replace_samplers(runner)
    # vLLM stops drafting for the whole batch when one request nears the model's end,
    # and then has zeros verified. Draft steps beyond the end are harmless: each
    # request's positions are clamped and its slots masked on the way.
    runner.effective_drafter_max_model_len += runner.num_spec_tokens


def _replace_samplers(runner: Any) -> None:
    sample_fast_on_cpu(runner.sampler)
    answer_each_request(runner)
    sampler = MTPPlusRejectionSampler(
        runner.sampler, runner.speculative_config, runner.device
    )
    sampler.tests_blocks = verifies_blocks(runner.vllm_config)
    sampler.after_verification = runner.drafter.after_verification
    if isinstance(runner.drafter, MTPPlusProposer):
        runner.drafter.prepare_to_draw()
        runner.drafter.prepare_to_copy()
        sampler.drafter = runner.drafter
        if tests_shadow_drafts(runner.vllm_config):
            runner.drafter.shadow_test = ShadowTest(runner.device)
            show_sampled_rows(runner, runner.drafter.shadow_test)
    runner.rejection_sampler = sampler
