"""Model Runner V1: drafts continued from requests' contexts, or copied from them.

Drafts are returned as wide as the longest, and cut to the length of each request on
their way to the scheduler (`scored`). Probabilities that copied tokens were proposed
with are 1: their rows are marked (`COPIED`), since the draft vocabulary need not have
the token.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from vllm_mtp.drafting.context_copies import Offer, Tokens, continuation
from vllm_mtp.drafting.early_stop import EarlyStop
from vllm_mtp.integration.scheduler.messages import (
    CopyDirections,
    CopyReport,
    CopyReports,
    ScoredDraftTokenIds,
    WorkerReport,
    copying_of,
)
from vllm_mtp.integration.v1.copied_rows import COPIED
from vllm_mtp.integration.v1.early_stop import StopsEarly
from vllm_mtp.integration.worker.copying import LOOK_STEPS, MAX_COPYING, may_copy

LOOK = CopyDirections(0, {}, {}, 0.0)
"""For a step without any: contexts are searched, and nothing is proposed."""


def _on_host(token_ids: torch.Tensor) -> Tokens:
    """As contexts are: int32."""
    found: Tokens = token_ids.cpu().numpy().astype(np.int32, copy=False)
    return found


class _Offers:
    """Of one kind: behind drafts, or alone."""

    def __init__(self) -> None:
        self._offers: dict[str, Offer] = {}
        """Not compared yet."""
        self._reports: dict[str, CopyReport] = {}

    def __bool__(self) -> bool:
        return bool(self._offers)

    def add(self, request_id: str, offer: Offer) -> None:
        """A request's context offers this now."""
        self._offers[request_id] = offer
        known = self._reports.get(request_id, CopyReport())
        number = len(offer.continuation)
        self._reports[request_id] = known._replace(num_offered=number)

    def compare(self, request_id: str, committed: Tokens, num_drafts: int) -> None:
        """With what a request has committed since.

        Args:
            request_id: The request.
            committed: ``[number of tokens]``.
            num_drafts: Draft tokens of its step, if copies of this kind are among them.
        """
        offer = self._offers.pop(request_id, None)
        if offer is not None:
            num_copied = max(num_drafts - len(offer.draft), 0)
            examined = offer.compared(committed)
            self._reports[request_id] = CopyReport(0, *examined, num_copied)

    def forget(self) -> None:
        """Those whose requests were not in the step."""
        self._offers.clear()

    def take_reports(self) -> dict[str, CopyReport]:
        reports, self._reports = self._reports, {}
        return reports


class ContinuesFromContexts(StopsEarly, SpecDecodeBaseProposer):
    """Mixin of drafters, in front of those that draft."""

    copies = False
    """Whether this engine's drafts may be continued."""
    model_runner: Any
    _directions: CopyDirections | None = None
    """Of the step that is under way."""
    _steps_to_look = LOOK_STEPS
    _looks = False
    """Whether contexts are searched for drafts of their own."""
    _replaced: dict[int, Tokens]
    """Those that are taken instead of what would be drafted, by place in the batch."""
    _are_alone: set[str]
    """Their requests, until the drafts are verified."""
    _has_drafted = False
    """The MTP layers have, in this step."""
    _contexts: list[Tokens] | None = None
    """Of its requests, with the tokens that it has sampled."""
    _behind: _Offers
    _alone: _Offers
    _lengths: list[int] | None = None
    """Of the drafts made last; None where they are as long as they are wide."""
    _are_copied: list[bool]
    """Whether some of their tokens are."""

    def prepare_to_copy(self) -> None:
        """The runner is known."""
        self.copies = may_copy(self.vllm_config)
        self._behind, self._alone = _Offers(), _Offers()
        self._replaced, self._are_alone = {}, set()

    def begin_step(self, state: Any) -> None:
        """Take note of the target's pass whose tokens are about to be sampled."""
        super().begin_step(state)
        self._directions = self._contexts = self._lengths = None
        if self.copies and state is not None:
            output = state.scheduler_output
            self._scheduled = output.scheduled_spec_decode_tokens
            self._steps_to_look = self._steps_to_look - 1 or LOOK_STEPS
            is_due = self._steps_to_look == LOOK_STEPS
            directions = copying_of(output) or (LOOK if is_due else None)
            self._directions = directions
            self._looks = directions is not None and (
                is_due or bool(directions.copied_drafts)
            )

    def commit(
        self,
        # [num_reqs, max_sampled], -1 where there is none
        sampled_token_ids: torch.Tensor,
    ) -> None:
        """A step has sampled these tokens."""
        super().commit(sampled_token_ids)
        if not self.copies or not (self._behind or self._alone or self._directions):
            return
        batch, sampled = self.model_runner.input_batch, _on_host(sampled_token_ids)
        discarded = self.model_runner.discard_request_mask.np
        # Contexts are copied: only where somebody will look into them.
        searches = self._directions is not None and len(sampled) <= MAX_COPYING
        contexts = []
        for place, request_id in enumerate(batch.req_ids[: len(sampled)]):
            came = sampled[place][sampled[place] >= 0]
            if discarded[place]:
                came = came[:0]
            self._compare(request_id, came)
            if searches:
                before = batch.token_ids_cpu[place, : batch.num_tokens_no_spec[place]]
                contexts.append(np.concatenate((before, came)) if len(came) else came)
        self._behind.forget()
        self._alone.forget()
        self._contexts = contexts if searches else None

    def _compare(self, request_id: str, committed: Tokens) -> None:
        num_drafts = len(self._scheduled.get(request_id, ()))
        is_alone = request_id in self._are_alone
        self._behind.compare(request_id, committed, 0 if is_alone else num_drafts)
        self._alone.compare(request_id, committed, num_drafts if is_alone else 0)

    def drafted(
        self,
        # [num_reqs]
        draft_token_ids: torch.Tensor,
        stop: EarlyStop,
    ) -> None:
        """A draft step under a rule: whose context goes on needs no further one."""
        super().drafted(draft_token_ids, stop)
        if self._contexts is None or self._directions is None or stop.num_drafted > 1:
            return
        tokens = _on_host(draft_token_ids)
        lengths = stop.continued_lengths()
        stop.continue_from_contexts(
            [
                place
                for place in stop.may_continue()
                if place in self._replaced
                or (lengths[place] and self._agrees(place, tokens[place : place + 1]))
            ]
        )

    def _agrees(self, place: int, draft: Tokens) -> bool:
        assert self._contexts is not None
        return len(self._continuation(self._contexts[place], draft)) > 0

    def _continuation(self, context: Tokens, draft: Tokens) -> Tokens:
        if not len(context):
            return context
        room = self.model_runner.num_spec_tokens - len(draft)
        tokens = np.concatenate((context, draft))
        return continuation(tokens, len(draft), room)

    def _propose(self, depth: int, given: dict[str, Any]) -> torch.Tensor:
        """All draft tokens; for the classes behind it ends with the MTP layers'."""
        if self._directions is not None:
            depth = min(depth, self._directions.draft_depth)
        self._replaced = self._copied_drafts()
        return self._continued(super()._propose(depth, given))

    def _run_passes(self, depth: int, given: dict[str, Any]) -> torch.Tensor:
        """None for drafts, where all of them are copied."""
        is_needed = len(self._replaced) < given["common_attn_metadata"].num_reqs
        return super()._run_passes(depth if is_needed else 0, given)

    def _copied_drafts(self) -> dict[int, Tokens]:
        """What contexts offer that is taken, by place in the batch."""
        self._are_alone.clear()
        if self._contexts is None or self._directions is None or not self._looks:
            return {}
        nothing, found = np.zeros(0, np.int32), {}
        wanted = self._directions.copied_drafts
        request_ids = self.model_runner.input_batch.req_ids
        for place, context in enumerate(self._contexts):
            request_id = request_ids[place]
            offered = self._continuation(context, nothing)
            if len(offered):
                self._alone.add(request_id, Offer(nothing, offered))
                if wanted.get(request_id, 0):
                    self._are_alone.add(request_id)
                    found[place] = offered[: wanted[request_id]]
        return found

    def _continued(
        self,
        # [num_reqs, depth] int64
        draft_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """The same drafts, and what contexts offer after them or instead of them:
        ``[num_reqs, width]``.

        ``scored`` gives each request as many as it shall have.
        """
        depth = draft_token_ids.shape[1]
        self._has_drafted = depth > 0
        if not depth:
            # What is proposed without a draft step is certain.
            self._last_draft_probs = self._drafts = None
        if self._contexts is None or self._directions is None:
            return draft_token_ids
        if not depth and not self._replaced:
            return draft_token_ids
        chains, rows, lengths = self._rows(draft_token_ids)
        self._lengths = lengths
        self._are_copied = [row is not None for row in rows]
        if not any(self._are_copied):
            return draft_token_ids
        width = max(*lengths, depth)
        self._mark_copied(chains, rows, width)
        return self._widened(draft_token_ids, rows, width)

    def _rows(
        self, draft_token_ids: torch.Tensor
    ) -> tuple[list[int], list[Tokens | None], list[int]]:
        """Tokens of the MTP layers in front of copies, drafts with copies, and the
        length of each draft."""
        assert self._contexts is not None
        chains, wanted = self._chain_lengths()
        kept = chains if self._stop is None else self._stop.lengths()
        drafts, depth = _on_host(draft_token_ids), draft_token_ids.shape[1]
        request_ids = self.model_runner.input_batch.req_ids
        rows: list[Tokens | None] = []
        lengths = []
        for place, context in enumerate(self._contexts):
            row = self._replaced.get(place)
            if row is not None:
                chains[place] = 0
            elif depth:
                # Of who has no draft verified it says all the same what a text is like.
                chain = chains[place] or depth
                draft = drafts[place, :chain]
                offered = self._continuation(context, draft)
                if len(offered):
                    self._behind.add(request_ids[place], Offer(draft, offered))
                number = wanted[place] - chain if chains[place] else 0
                if number > 0 and len(offered):
                    row = np.concatenate((draft, offered[:number]))
            rows.append(row)
            lengths.append(len(row) if row is not None else kept[place] or depth)
        return chains, rows, lengths

    def _chain_lengths(self) -> tuple[list[int], list[int]]:
        """Draft tokens of the MTP layers in front of copies, and with copies."""
        assert self._directions is not None
        if self._stop is not None:
            return self._stop.continued_lengths(), self._stop.copy_lengths()
        request_ids = self.model_runner.input_batch.req_ids
        chains, copies = self._directions.chain_lengths, self._directions.copy_lengths
        return [chains.get(i, 0) for i in request_ids], [
            copies.get(i, 0) for i in request_ids
        ]

    @property
    def _stop(self) -> EarlyStop | None:
        return None if self._drafts is None else self._drafts.stop

    def _widened(
        self,
        # [num_reqs, depth] int64
        draft_token_ids: torch.Tensor,
        rows: Sequence[Tokens | None],
        width: int,
    ) -> torch.Tensor:
        depth = draft_token_ids.shape[1]
        wide = draft_token_ids.new_zeros(len(rows), width)
        wide[:, :depth] = draft_token_ids
        for place, row in enumerate(rows):
            if row is not None:
                wide[place, : len(row)] = torch.from_numpy(row)
        return wide

    def _mark_copied(
        self, chains: list[int], rows: list[Tokens | None], width: int
    ) -> None:
        probs = self._last_draft_probs
        if probs is None:
            return
        num_reqs, depth, num_columns = probs.shape
        more = probs.new_zeros(num_reqs, max(width - depth, 0), num_columns)
        self._last_draft_probs = probs = torch.cat((probs, more), dim=1)
        for place, row in enumerate(rows):
            if row is not None:
                copied = probs[place, chains[place] : len(row)]
                copied.zero_()
                copied[:, 0] = COPIED

    def scored(self, taken: DraftTokenIds | None) -> DraftTokenIds | None:
        """Drafts that go to the scheduler: each request's own."""
        lengths = self._lengths
        if taken is not None and lengths is not None:
            drafts = zip(taken.draft_token_ids, lengths, strict=True)
            taken.draft_token_ids = [draft[:length] for draft, length in drafts]
        scored = super().scored(taken)
        if lengths is None or scored is None:
            return scored
        if not isinstance(scored, ScoredDraftTokenIds):
            return ScoredDraftTokenIds(
                scored.req_ids,
                scored.draft_token_ids,
                [()] * len(lengths),
                None if self._has_drafted else lengths,
            )
        if scored.lengths is not None:
            # 0 is the rule's word, whatever there is to compare.
            known = zip(scored.lengths, lengths, self._are_copied, strict=True)
            scored.lengths = [n if c else k and n for k, n, c in known]
        return scored

    def take_report(self) -> WorkerReport:
        report: WorkerReport = super().take_report()
        if not self.copies:
            return report
        reports = self._behind.take_reports(), self._alone.take_reports()
        return report._replace(copies=CopyReports(*reports)) if any(reports) else report
