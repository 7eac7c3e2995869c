"""Faults that are planted into an engine are found within 500 random requests.

Each is of a kind that has been in an engine, vLLM's or ours. The right answers come
from an engine without speculation that is asked before anything is planted.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest

from tests.support.fuzzing import prepare
from vllm_mtp.lab.fuzz import Prepared, find_differences

NUM_REQUESTS = 500

Plant = Callable[[], AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def ready() -> Prepared:
    """What an engine without speculation answers."""
    return prepare(NUM_REQUESTS, seed=2)


def rows_of_the_first_draft_token_only() -> AbstractContextManager[Any]:
    """``allowed_token_ids`` hold for a request's first row alone."""
    import torch
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    right = RejectionSampler.apply_logits_processors

    def wrong(self: Any, logits: Any, sampling_metadata: Any, metadata: Any) -> Any:
        mask = sampling_metadata.allowed_token_ids_mask
        if mask is None:
            return right(self, logits, sampling_metadata, metadata)
        before = logits.clone()
        logits = right(self, logits, sampling_metadata, metadata)
        row = 0
        for length in metadata.num_draft_tokens:
            later = slice(row + 1, row + length)
            was_masked = torch.isneginf(logits[later])
            logits[later] = torch.where(was_masked, before[later], logits[later])
            row += length
        return logits

    return mock.patch.object(RejectionSampler, "apply_logits_processors", wrong)


def penalties_count_all_drafts() -> AbstractContextManager[Any]:
    """Penalties of every row count all draft tokens, the rejected ones, too."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    def wrong(output_token_ids: Any, spec_token_ids: Any = None) -> Any:
        if spec_token_ids is None:
            return output_token_ids
        pairs = zip(output_token_ids, spec_token_ids, strict=False)
        return [[*out, *spec] for out, spec in pairs for _ in spec]

    return mock.patch.object(
        RejectionSampler, "_combine_outputs_with_spec_tokens", staticmethod(wrong)
    )


def logprobs_of_the_next_row() -> AbstractContextManager[Any]:
    """Logarithmic probabilities come from the row after the token's own."""
    from vllm.v1.sample.rejection_sampler import RejectionSampler

    right = RejectionSampler._get_logprobs_tensors

    def wrong(
        self: Any,
        count: int,
        metadata: Any,
        logits: Any,
        target_logits: Any,
        *rest: Any,
    ) -> Any:
        return right(self, count, metadata, logits, target_logits.roll(-1, 0), *rest)

    return mock.patch.object(RejectionSampler, "_get_logprobs_tensors", wrong)


def biases_of_drafts_are_missing() -> AbstractContextManager[Any]:
    """``logit_bias`` holds for the bonus token alone."""
    from vllm_mtp.integration import verification_v1

    return mock.patch.object(verification_v1, "add_bias", mock.Mock())


def a_rejected_token_is_committed() -> AbstractContextManager[Any]:
    """Of every seventh draft one token more is kept than agrees."""
    from vllm_mtp.integration.verification_v1 import MTPPlusRejectionSampler

    right = MTPPlusRejectionSampler._verify
    calls = iter(range(10**9))

    def wrong(self: Any, drafts: Any, lengths: Any, *args: Any, **options: Any) -> Any:
        output = right(self, drafts, lengths, *args, **options)
        if next(calls) % 7 == 0:
            row = 0
            for number, length in enumerate(lengths):
                kept = int((output[number] >= 0).sum())
                if 0 < kept <= length:
                    output[number, kept - 1] = drafts[row + kept - 1]
                row += length
        return output

    return mock.patch.object(MTPPlusRejectionSampler, "_verify", wrong)


def seeded_requests_are_drafted_for() -> AbstractContextManager[Any]:
    """A seed does not keep a sampled request from being drafted for."""
    from vllm_mtp.integration import controlled_scheduler

    right = controlled_scheduler.RequestTraits

    def wrong(request: Any, max_draft_length: int) -> Any:
        traits = right(request, max_draft_length)
        if not traits.is_greedy and traits.pinned_draft_length == 0:
            traits.pinned_draft_length = None
        return traits

    return mock.patch.object(controlled_scheduler, "RequestTraits", wrong)


def bad_words_do_not_see_drafts() -> AbstractContextManager[Any]:
    """What a bad word begins with is looked for before the draft alone."""
    from vllm.v1.sample import rejection_sampler

    right = rejection_sampler.apply_bad_words_with_drafts

    def wrong(logits: Any, words: Any, past: Any, lengths: Any) -> None:
        rows, row = [], 0
        for length in lengths:
            rows += [past[row]] * length if length else []
            row += length
        right(logits, words, rows, lengths)

    return mock.patch.object(rejection_sampler, "apply_bad_words_with_drafts", wrong)


@contextmanager
def a_placeholder_is_kept() -> Iterator[None]:
    """Async: what a rejected draft token left stays in the scheduler's count."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    right = AsyncScheduler._update_request_with_output
    calls = iter(range(1, 10**9))

    def wrong(self: Any, request: Any, *args: Any, **options: Any) -> Any:
        result = right(self, request, *args, **options)
        if next(calls) % 50 == 0 and not request.is_finished():
            request.num_output_placeholders += 1
        return result

    with mock.patch.object(AsyncScheduler, "_update_request_with_output", wrong):
        yield


class Fault(NamedTuple):
    """What is planted, and what it does."""

    plant: Plant
    shows_as: str
    """Kind of difference."""
    axis: str = "sync"


FAULTS = {
    "allowed tokens on the first row": Fault(
        rows_of_the_first_draft_token_only, "token"
    ),
    "penalties count rejected drafts": Fault(penalties_count_all_drafts, "token"),
    "logprobs of the wrong row": Fault(logprobs_of_the_next_row, "logprobs"),
    "logit_bias missing": Fault(biases_of_drafts_are_missing, "token"),
    "rejected token committed": Fault(a_rejected_token_is_committed, "token"),
    "stale traits": Fault(seeded_requests_are_drafted_for, "token", "fixed K"),
    "bad words without drafts": Fault(bad_words_do_not_see_drafts, "token"),
    "placeholder kept": Fault(a_placeholder_is_kept, "engine died", "async"),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_planted_fault_is_found(name: str, ready: Prepared) -> None:
    fault = FAULTS[name]
    with fault.plant():
        # More than one: another fault may be there that nobody planted.
        findings = find_differences(ready, fault.axis, ready.plays, max_failures=4)
    found = [failure.difference.what for failure in findings.failures]
    assert fault.shows_as in found, (findings.num_compared, findings.failures)


def test_nothing_is_found_where_nothing_is_planted(ready: Prepared) -> None:
    findings = find_differences(ready, "sync", ready.plays[:4], max_failures=1)
    assert not findings.failures
