"""Model Runner V1: drafts continued from requests' contexts.

Drafts are returned as wide as the longest, and cut to the length of each request on
their way to the scheduler (`scored`). Probabilities that copied tokens were proposed
with are 1: their rows are marked (`COPIED`), since the draft vocabulary need not have
the token.
"""

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
    ScoredDraftTokenIds,
    WorkerReport,
    copying_of,
)
from vllm_mtp.integration.v1.copied_rows import COPIED
from vllm_mtp.integration.v1.early_stop import StopsEarly
from vllm_mtp.integration.worker.copying import MAX_COPYING, may_copy


def _on_host(token_ids: torch.Tensor) -> Tokens:
    """As contexts are: int32."""
    found: Tokens = token_ids.cpu().numpy().astype(np.int32, copy=False)
    return found


class ContinuesFromContexts(StopsEarly, SpecDecodeBaseProposer):
    """Mixin of drafters, in front of those that draft."""

    copies = False
    """Whether this engine's drafts may be continued."""
    model_runner: Any
    _directions: CopyDirections | None = None
    """Of the step that is under way."""
    _contexts: list[Tokens] | None = None
    """Of its requests, with the tokens that it has sampled."""
    _offers: dict[str, Offer]
    """After drafts that are not verified yet, by request id."""
    _copy_reports: dict[str, CopyReport]
    _lengths: list[int] | None = None
    """Of the drafts made last; None where they are as long as they are wide."""
    _are_copied: list[bool]
    """Whether some of their tokens are."""

    def prepare_to_copy(self) -> None:
        """The runner is known."""
        self.copies = may_copy(self.vllm_config)
        self._offers, self._copy_reports = {}, {}

    def begin_step(self, state: Any) -> None:
        """Take note of the target's pass whose tokens are about to be sampled."""
        super().begin_step(state)
        self._directions = self._contexts = self._lengths = None
        if self.copies and state is not None:
            self._directions = copying_of(state.scheduler_output)
            self._scheduled = state.scheduler_output.scheduled_spec_decode_tokens

    def commit(
        self,
        # [num_reqs, max_sampled], -1 where there is none
        sampled_token_ids: torch.Tensor,
    ) -> None:
        """A step has sampled these tokens."""
        super().commit(sampled_token_ids)
        if not self.copies or not (self._offers or self._directions):
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
        self._offers.clear()
        self._contexts = contexts if searches else None

    def _compare(self, request_id: str, committed: Tokens) -> None:
        offer = self._offers.get(request_id)
        if offer is None:
            return
        num_scheduled = len(self._scheduled.get(request_id, ()))
        self._copy_reports[request_id] = CopyReport(
            0, *offer.compared(committed), max(num_scheduled - len(offer.draft), 0)
        )

    def drafted(
        self,
        # [num_reqs]
        draft_token_ids: torch.Tensor,
        stop: EarlyStop,
    ) -> None:
        """A draft step under a rule: whose context goes on needs no further one."""
        super().drafted(draft_token_ids, stop)
        contexts = self._contexts
        if contexts is None or self._directions is None or stop.num_drafted > 1:
            return
        tokens = _on_host(draft_token_ids)
        lengths = stop.continued_lengths()
        stop.continue_from_contexts(
            [
                place
                for place in stop.may_continue()
                if lengths[place]
                and len(self._continuation(contexts[place], tokens[place : place + 1]))
            ]
        )

    def _continuation(self, context: Tokens, draft: Tokens) -> Tokens:
        if not len(context):
            return context
        room = self.num_speculative_tokens - len(draft)
        tokens = np.concatenate((context, draft))
        return continuation(tokens, len(draft), room)

    def continued(
        self,
        # [num_reqs, depth] int64
        draft_token_ids: torch.Tensor,
    ) -> torch.Tensor:
        """The same drafts, and what contexts offer after them: ``[num_reqs, width]``.

        ``scored`` gives each request as many as it shall have.
        """
        if self._contexts is None or self._directions is None:
            return draft_token_ids
        chains, wanted = self._chain_lengths()
        kept = chains if self._stop is None else self._stop.lengths()
        drafts, depth = _on_host(draft_token_ids), draft_token_ids.shape[1]
        request_ids = self.model_runner.input_batch.req_ids
        rows, lengths = [], []
        for place, context in enumerate(self._contexts):
            # Of who has no draft verified it says all the same what a text is like.
            chain = chains[place] or depth
            request_id, draft = request_ids[place], drafts[place, :chain]
            offered = self._continuation(context, draft)
            if len(offered):
                self._offer(request_id, Offer(draft, offered))
            copied = offered[: max(wanted[place] - chain, 0) if chains[place] else 0]
            rows.append(np.concatenate((draft, copied)) if len(copied) else None)
            lengths.append(chain + len(copied) if len(copied) else kept[place] or depth)
        self._lengths = lengths
        self._are_copied = [row is not None for row in rows]
        if not any(self._are_copied):
            return draft_token_ids
        self._mark_copied(chains, rows, max(*lengths, depth))
        return self._widened(draft_token_ids, rows, max(*lengths, depth))

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

    def _offer(self, request_id: str, offer: Offer) -> None:
        self._offers[request_id] = offer
        known = self._copy_reports.get(request_id, CopyReport(0, 0, 0))
        number = len(offer.continuation)
        self._copy_reports[request_id] = known._replace(num_offered=number)

    def _widened(
        self,
        # [num_reqs, depth] int64
        draft_token_ids: torch.Tensor,
        rows: list[Tokens | None],
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
        if lengths is None or not isinstance(scored, ScoredDraftTokenIds):
            return scored
        if scored.lengths is not None:
            # 0 is the rule's word, whatever there is to compare.
            known = zip(scored.lengths, lengths, self._are_copied, strict=True)
            scored.lengths = [n if c else k and n for k, n, c in known]
        return scored

    def take_report(self) -> WorkerReport:
        reports, self._copy_reports = self._copy_reports, {}
        report: WorkerReport = super().take_report()
        return report._replace(copies=reports)
