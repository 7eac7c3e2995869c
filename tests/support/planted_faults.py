"""Faults of request state, to be planted into engines on Model Runner V1.

Each is of a kind that has been in an engine, vLLM's or ours. Nothing crashes, most
requests are answered as ever: the fuzzer must find the one that is not.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

Plant = Callable[[], AbstractContextManager[Any]]


def _around(owner: Any, name: str, wrong: Callable[..., Any]) -> Any:
    """``owner.name`` becomes ``wrong``, which is given the original first."""
    right = owner.__dict__[name]
    return mock.patch.object(
        owner, name, lambda *args, **options: wrong(right, *args, **options)
    )


def _rows() -> Any:
    from vllm_mtp.integration.v1 import verified_rows

    return verified_rows


def _sampler() -> Any:
    from vllm_mtp.integration.v1.rejection_sampler import MTPPlusRejectionSampler

    return MTPPlusRejectionSampler


# -- what a row is told of the tokens before it --------------------------------------


def _wrong_outputs(
    before: Callable[[list[int], list[int]], list[int]],
) -> AbstractContextManager[Any]:
    """Every row of a request is told the same tokens."""

    def wrong(right: Any, committed: Any, drafts: Any) -> list[list[int]]:
        return [
            before(tokens, draft)
            for tokens, draft in zip(committed, drafts, strict=bool(committed))
            for _ in range(len(draft) + 1)
        ]

    return _around(_rows(), "_outputs", wrong)


def rejected_drafts_count() -> AbstractContextManager[Any]:
    """Penalties of every row count all draft tokens, the rejected ones, too."""
    return _wrong_outputs(lambda tokens, draft: [*tokens, *draft])


def drafts_do_not_count() -> AbstractContextManager[Any]:
    """Bad words and penalties of every row see committed tokens alone."""
    return _wrong_outputs(lambda tokens, draft: tokens)


def stop_tokens_are_masked_one_row_late() -> AbstractContextManager[Any]:
    """``min_tokens`` counts one token less than there is."""
    from vllm_mtp.integration.v1.logits_processors import BatchRequests

    def wrong(
        right: Any, self: Any, requests: Any, outputs: Sequence[Sequence[int]]
    ) -> Any:
        return right(self, requests, [output[:-1] for output in outputs])

    return _around(BatchRequests, "processors", wrong)


def biases_miss_the_bonus_row() -> AbstractContextManager[Any]:
    """``logit_bias`` holds for draft tokens alone."""
    from vllm_mtp.integration.v1.logits_processors import BatchRequests

    def wrong(right: Any, self: Any, requests: Sequence[int], outputs: Any) -> Any:
        processors = right(self, requests, outputs)
        for processor in processors[1:]:
            rows, _ = processor.logits_slice
            last = [
                row for row, r in enumerate(requests) if r not in requests[row + 1 :]
            ]
            is_bonus = [int(row) in last for row in rows]
            for place, drop in enumerate(is_bonus):
                if drop:
                    processor.bias_tensor[place] = 0.0
        return processors

    return _around(BatchRequests, "processors", wrong)


def allowed_tokens_hold_for_first_rows_alone() -> AbstractContextManager[Any]:
    """``allowed_token_ids`` are forgotten from a request's second row on."""
    from vllm_mtp.integration.v1 import rejection_sampler

    def wrong(right: Any, metadata: Any, sampling: Any) -> Any:
        found = right(metadata, sampling)
        mask = found.sampling.allowed_token_ids_mask
        if mask is None:
            return found
        mask = mask.clone()
        for start, length in zip(found.starts, metadata.num_draft_tokens, strict=False):
            mask[start + 1 : start + 1 + length] = False
        return found._replace(
            sampling=replace(found.sampling, allowed_token_ids_mask=mask)
        )

    return _around(rejection_sampler, "verified_rows", wrong)


# -- thinking budgets -----------------------------------------------------------------


def _budgets() -> Any:
    from vllm_mtp.integration.v1.thinking_budgets import ThinkingBudgets

    return ThinkingBudgets


def budgets_count_steps() -> AbstractContextManager[Any]:
    """A thinking budget takes the tokens of a step for one."""

    def wrong(right: Any, self: Any, states: Any, index: int, output: Any) -> None:
        state = states[index]
        if state.get("length") != len(output):
            state["length"] = len(output)
            right(self, states, index, output[: state.get("num_seen", -1) + 2])

    return _around(_budgets(), "_take", wrong)


def budgets_stay_where_a_request_was() -> AbstractContextManager[Any]:
    """Who moves to the place of a request with a thinking budget inherits it."""
    from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

    theirs = ThinkingBudgetStateHolder.sync_batch
    return mock.patch.object(_budgets(), "sync_batch", theirs)


# -- what is kept of a step ------------------------------------------------------------


def logprobs_of_the_next_row() -> AbstractContextManager[Any]:
    """Logprobs come from the row after the token's own."""

    def wrong(right: Any, self: Any, logits: Any, *args: Any) -> Any:
        return right(self, logits.roll(-1, 0), *args)

    return _around(_sampler(), "_logprobs", wrong)


def a_rejected_token_is_committed() -> AbstractContextManager[Any]:
    """Of every seventh draft one token more is kept than agrees."""
    calls = iter(range(10**9))

    def wrong(
        right: Any, self: Any, drafts: Any, lengths: Any, *args: Any, **options: Any
    ) -> Any:
        output = right(self, drafts, lengths, *args, **options)
        if next(calls) % 7 == 0:
            row = 0
            for number, length in enumerate(lengths):
                kept = int((output[number] >= 0).sum())
                if 0 < kept <= length:
                    output[number, kept - 1] = drafts[row + kept - 1]
                row += length
        return output

    return _around(_sampler(), "_verify", wrong)


def tokens_behind_a_stop_are_kept() -> AbstractContextManager[Any]:
    """Of the tokens of a step only the last one may end a request."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def wrong(right: Any, self: Any, request: Any, tokens: Any, *args: Any) -> Any:
        request.append_output_token_ids(list(tokens[:-1]))
        kept, stopped = right(self, request, list(tokens[-1:]), *args)
        return [*tokens[:-1], *kept], stopped

    return _around(Scheduler, "_update_request_with_output", wrong)


def grammars_are_not_rolled_back() -> AbstractContextManager[Any]:
    """A grammar that has followed a draft stays there."""
    from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

    return _around(XgrammarGrammar, "rollback", lambda *args: None)


def seeded_requests_are_drafted_for() -> AbstractContextManager[Any]:
    """A seed does not keep a sampled request from being drafted for."""
    from vllm_mtp.integration.scheduler import request_traits

    def wrong(right: Any, request: Any, max_draft_length: int) -> Any:
        traits = right(request, max_draft_length)
        if not traits.is_greedy and traits.pinned_draft_length == 0:
            traits.pinned_draft_length = None
        return traits

    return _around(request_traits, "RequestTraits", wrong)


def sessions_keep_accepted_drafts() -> AbstractContextManager[Any]:
    """A session's turn keeps the KV of draft tokens behind its last token."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_mtp.integration.scheduler.controlled_scheduler import ControlledScheduler

    def wrong(right: Any, self: Any, session: Any, update: Any) -> None:
        Scheduler._update_request_as_session(self, session, update)

    return _around(ControlledScheduler, "_update_request_as_session", wrong)


def a_placeholder_is_kept() -> AbstractContextManager[Any]:
    """Async: what a rejected draft token left stays in the scheduler's count."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    calls = iter(range(1, 10**9))

    def wrong(right: Any, self: Any, request: Any, *args: Any, **options: Any) -> Any:
        result = right(self, request, *args, **options)
        if next(calls) % 50 == 0 and not request.is_finished():
            request.num_output_placeholders += 1
        return result

    return _around(AsyncScheduler, "_update_request_with_output", wrong)


class Fault(NamedTuple):
    """What is planted, and where it shows.

    Attributes:
        plant: Plants it for a while.
        kinds: Of requests, see ``tools/fuzz_requests.py``; plays without any of them
            cannot show it and are left out.
        axis: Engine of the fuzzer.
        is_like_another: Whether another one shows in the same kind of requests.
    """

    plant: Plant
    kinds: tuple[str, ...]
    axis: str = "sync"
    is_like_another: bool = False


_BY_TOKENS = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_BUDGET = ("thinking_token_budget",)

FAULTS = (
    Fault(rejected_drafts_count, _BY_TOKENS),
    Fault(drafts_do_not_count, ("bad_words", *_BY_TOKENS)),
    Fault(stop_tokens_are_masked_one_row_late, ("min_tokens",)),
    Fault(biases_miss_the_bonus_row, ("logit_bias",)),
    Fault(allowed_tokens_hold_for_first_rows_alone, ("allowed_token_ids",)),
    Fault(budgets_count_steps, _BUDGET, is_like_another=True),
    Fault(budgets_stay_where_a_request_was, _BUDGET),
    Fault(logprobs_of_the_next_row, ("logprobs", "logprob_token_ids")),
    Fault(a_rejected_token_is_committed, ("max_tokens",)),
    Fault(tokens_behind_a_stop_are_kept, ("stop_token_ids",)),
    Fault(grammars_are_not_rolled_back, ("structured_outputs",)),
    Fault(seeded_requests_are_drafted_for, ("seed",), "fixed K"),
    Fault(sessions_keep_accepted_drafts, ("session",)),
    Fault(a_placeholder_is_kept, ("max_tokens",), "async"),
)
