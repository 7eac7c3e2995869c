"""Model Runner V2: drafts of an MTP layer, continued from the requests' own texts.

A step drafts `CopyDirections.draft_depth` tokens; behind those stand copied ones, or
fillers, up to K_max. They are certain to be proposed, so verification finds one-hot
proposals for them (`proposals`): whatever the text offers, the output is the target's.

Offers are made in every step that drafts less than K_max, because the scheduler only
schedules rows for them where it has heard of one. What it hears comes with the output
of the next step: the host waits for nothing. In steps without the MTP layers texts are
searched now and then, for long matches: a sign that it may pay to draft.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.async_utils import async_copy_to_np
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from vllm_mtp.drafting.context_copies import MAX_MATCH, MIN_MATCH, MIN_MATCH_ALONE
from vllm_mtp.integration.load.compat import check_attributes
from vllm_mtp.integration.scheduler.messages import (
    CopyDirections,
    OfferedCopies,
    copying_of,
)
from vllm_mtp.integration.v2.proposals import DrawnDrafts, Proposals
from vllm_mtp.integration.worker.copying import LOOK_STEPS, MAX_COPYING, may_copy
from vllm_mtp.integration.worker.weight_updates import FollowsWeights, tensors_of
from vllm_mtp.kernels.context_copies import ContextCopies, MatchLimits, Texts

STATE_ATTRIBUTES = ("all_token_ids", "total_len")
NO_OFFERS: tuple[list[str], np.ndarray] = [], np.zeros((3, 0), dtype=np.int32)


class CopiesFromContext(FollowsWeights, DraftModelSpeculator):
    """Mixin of speculators, in front of those that draft."""

    copies: ContextCopies | None = None
    """None before weights are loaded, and where texts may not continue drafts."""
    drawn: DrawnDrafts
    """Where they may."""
    proposals: Proposals | None
    model_runner: Any
    _step: Any
    _directions: CopyDirections | None = None
    """Of the step that is under way."""
    _num_sampled: torch.Tensor
    """``[num_reqs]``, from verification to drafting."""
    _offers: tuple[list[str], np.ndarray] = NO_OFFERS
    """Requests, and what `OfferedCopies` says of them, since the last report."""
    _steps_to_look = LOOK_STEPS
    _has_looked = False
    """Without drafts, since the last report."""

    def load_model(self, target_model: Any) -> None:
        super().load_model(target_model)
        if not may_copy(self.vllm_config):
            return
        check_attributes(self.model_runner.req_states, STATE_ATTRIBUTES)
        num_reqs, max_drafts = self.max_num_reqs, self.num_speculative_steps
        limits = MatchLimits(MIN_MATCH, MAX_MATCH, MIN_MATCH_ALONE)
        self.copies = ContextCopies(
            num_reqs, max_drafts, self.max_model_len, limits, self.device
        )
        on_host = np.full(num_reqs, max_drafts, dtype=np.int32)
        self.drawn = DrawnDrafts(on_host, self.copies.num_drawn)
        if self.proposals is not None:
            self.proposals.drawn = self.drawn

    def lasting_tensors(self) -> Iterator[torch.Tensor]:
        """Offers as well: garbage in their place would be taken for some."""
        yield from super().lasting_tensors()
        yield from tensors_of(self.copies)

    def expect(self, scheduler_output: Any) -> None:
        super().expect(scheduler_output)
        if self.copies is not None:
            self._directions = copying_of(scheduler_output)

    def _propose(
        self,
        input_batch: Any,
        *args: Any,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """All of the step's draft tokens; for the classes behind it ends with the MTP
        layer's."""
        depth, directions = num_speculative_tokens, self._directions
        if depth and directions is not None:
            depth = directions.draft_depth
        drafts: torch.Tensor = super()._propose(
            input_batch, *args, num_speculative_tokens=depth, **kwargs
        )
        if num_speculative_tokens and depth is not None and self.copies is not None:
            self._continue(self.copies, input_batch, drafts, depth)
        return drafts

    def _continue(
        self,
        copies: ContextCopies,
        batch: Any,
        # [num_reqs, K_max] int64, mutated
        drafts: torch.Tensor,
        depth: int,
    ) -> None:
        """Also where nothing is offered: rows may have been scheduled for fillers, and
        what was offered before has to be judged and forgotten."""
        is_searched = 0 < depth < self.num_speculative_steps
        counts = self._search(copies, batch, drafts, depth, is_searched)
        if self._directions is not None:
            if self.acceptance_estimator is not None:
                self._expect_acceptance(counts[0], depth, self._directions.acceptance)
            self._offers = batch.req_ids, async_copy_to_np(counts)

    def _search(
        self,
        copies: ContextCopies,
        batch: Any,
        # [num_reqs, K_max] int64, mutated
        drafts: torch.Tensor,
        depth: int,
        is_searched: bool,
    ) -> torch.Tensor:
        """``[3, num_reqs]`` int32, as `ContextCopies.continue_drafts` says."""
        states, longest_text = self.model_runner.req_states, 0
        if is_searched and batch.num_reqs <= MAX_COPYING:
            # The last token that was sampled has no row yet.
            longest_text = 1 + int(batch.seq_lens_cpu_upper_bound.numpy().max())
        texts = Texts(
            states.all_token_ids.gpu,
            states.total_len.gpu,
            batch.idx_mapping,
            self._num_sampled,
        )
        self.drawn.on_host[batch.idx_mapping_np] = depth
        return copies.continue_drafts(texts, drafts, depth, longest_text)

    def look(self, state: Any) -> None:
        """A step is over that went without the MTP layers.

        Args:
            state: vLLM's ``ExecuteModelState``.
        """
        batch = state.input_batch
        if self.copies is None or batch.num_reqs > MAX_COPYING:
            return
        self._steps_to_look = self._steps_to_look - 1 or LOOK_STEPS
        if self._steps_to_look == LOOK_STEPS:
            # Nobody reads what is drafted in such a step.
            drafts = self.draft_tokens[: batch.num_reqs]
            counts = self._search(self.copies, batch, drafts, 0, is_searched=True)
            self._offers = batch.req_ids, async_copy_to_np(counts)
            self._has_looked = True

    def _expect_acceptance(
        self,
        # [num_reqs]
        num_offered: torch.Tensor,
        depth: int,
        acceptance: float,
    ) -> None:
        """Rank copies among all draft tokens.

        Whether the text agrees with the draft depends on the draft's last token, which
        must not decide about its own row. It does not: confidences are below 1
        (`VerifiesWhatPays`), so the survival of copies is less than that of all tokens
        in front of them, and they take rows from others alone. How many rows there are
        is chosen by confidences of the step before.
        """
        num_columns = self.num_speculative_steps - depth
        columns = torch.arange(num_columns, device=num_offered.device)
        is_offered = columns < num_offered[:, None]
        confidences = self.draft_token_confidence_probs[: len(num_offered), depth:]
        confidences.copy_(is_offered * acceptance)

    def _first_tokens(self, input_batch: Any) -> torch.Tensor:
        if self.copies is not None:
            # None of them is a copy.
            self.copies.num_drawn[input_batch.idx_mapping] = self.num_speculative_steps
            self.drawn.on_host[input_batch.idx_mapping_np] = self.num_speculative_steps
        drafts: torch.Tensor = super()._first_tokens(input_batch)
        return drafts

    def commit(
        self,
        # [num_reqs, max_sampled]
        sampled_token_ids: torch.Tensor,
        # [num_reqs or more]
        num_sampled: torch.Tensor,
    ) -> None:
        super().commit(sampled_token_ids, num_sampled)
        self._num_sampled = num_sampled

    def drawn_part(
        self,
        # [num_reqs] each
        idx_mapping: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The two counts, of draft tokens of the MTP layer alone."""
        is_mixed = (
            self.copies is not None
            and self.acceptance_estimator is not None
            and self.drawn.num_copied(self._step.input_batch) is not None
        )
        if not is_mixed:
            return num_sampled, num_rejected
        num_drawn = self.drawn.on_device[idx_mapping]
        num_verified = (num_sampled - 1).clamp(min=0) + num_rejected
        sampled = torch.minimum(num_sampled, num_drawn + 1)
        verified = torch.minimum(num_verified, num_drawn)
        return sampled, verified - (sampled - 1).clamp(min=0)

    def take_copies(self, state: Any) -> OfferedCopies | None:
        """What is to be reported with the output of a step; asked once for each.

        Args:
            state: vLLM's ``ExecuteModelState``; None if there will be no output.
        """
        if self.copies is None or state is None:
            return None
        batch, offers, has_looked = state.input_batch, self._offers, self._has_looked
        self._offers, num_verified = NO_OFFERS, self.drawn.num_copied(batch)
        self._has_looked = False
        if num_verified is None and offers is NO_OFFERS:
            return None
        verified = () if num_verified is None else num_verified.tolist()
        by_request = dict(zip(batch.req_ids, verified, strict=False))
        return OfferedCopies(*offers, by_request, has_looked)
