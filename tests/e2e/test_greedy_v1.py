"""Greedy output is the target's, token for token, on Model Runner V1 (float32).

Each test states what disturbs the engine (draft lengths, caches, chunks, preemption,
arrivals and aborts, ends of requests) and compares every token with an engine that
does not speculate. Where the disturbance could fail to happen, it is asserted.
"""

from typing import Any

import pytest

from tests.e2e.conftest import (
    NUM_TOKENS,
    Reference,
    complete_restricted,
    complete_to_stop_string,
    complete_with_logprobs,
)
from tests.support.engines import counters, draft_counts, engine, greedy
from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.watch import (
    counter,
    record_outcomes,
    record_rejected_slots,
)

RANDOM = {"method": "mtp_plus", "num_speculative_tokens": 5, "controller": "random"}


def fixed(draft_length: int) -> dict[str, Any]:
    return {
        "method": "mtp_plus",
        "num_speculative_tokens": draft_length,
        "controller": "fixed",
    }


@pytest.mark.parametrize(
    "spec", [fixed(1), fixed(3), fixed(5), RANDOM], ids=["K1", "K3", "K5", "random"]
)
def test_every_token_equals_and_all_counters_agree(
    spec: dict[str, Any], reference: Reference
) -> None:
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=16, speculative_config=spec) as llm:
        recorder = record_outcomes(llm)
        announced = record_rejected_slots(llm)
        outputs = greedy(llm, reference.prompts, NUM_TOKENS)
        vllm_counters = counters(llm)

    assert outputs == reference.continuations
    _check_acceptance_is_counted_alike(recorder.outcomes, vllm_counters)
    num_draft = vllm_counters["draft_tokens"]
    num_accepted = vllm_counters["accepted_tokens"]
    assert 0 < num_accepted < num_draft, "both acceptance and rejection must occur"
    num_rejected = sum(int(slots.num_rejected_tokens.sum()) for slots in announced)
    # A request that ends inside an accepted run frees its slots as a whole: its last
    # verification is announced by the worker and still counted by the scheduler.
    assert num_rejected == num_draft - num_accepted
    depths = {decision.draft_depth for decision in recorder.decisions}
    wanted = set(range(6)) if spec is RANDOM else {spec["num_speculative_tokens"]}
    assert depths == wanted


def _check_acceptance_is_counted_alike(
    outcomes: list[Any], vllm_counters: dict[str, Any]
) -> None:
    requests = [request for outcome in outcomes for request in outcome.requests]
    assert vllm_counters["drafts"] == len(requests)
    assert vllm_counters["draft_tokens"] == sum(r.num_draft_tokens for r in requests)
    accepted = [r.num_accepted_tokens for r in requests]
    assert vllm_counters["accepted_tokens"] == sum(accepted)
    per_position = vllm_counters["accepted_tokens_per_pos"]
    assert per_position == [
        sum(count > position for count in accepted)
        for position in range(len(per_position))
    ]
    assert all(0 < outcome.step_time_s < 60 for outcome in outcomes)


def test_prefix_caching_hits_do_not_change_a_token(reference: Reference) -> None:
    prompts, wanted = reference.prompts, reference.continuations
    block_size = 32
    with engine(
        BUNDLED_CHECKPOINT,
        enable_prefix_caching=True,
        block_size=block_size,
        # Room for the blocks of all prompts, or their prefixes are gone when wanted.
        kv_cache_memory_bytes=128 * 2**20,
        speculative_config=RANDOM,
    ) as llm:
        # Long prompts: what was generated becomes the next prompt's cached prefix.
        first = greedy(llm, prompts, NUM_TOKENS)
        longer = [p + tuple(c[:64]) for p, c in zip(prompts, wanted, strict=True)]
        second = greedy(llm, longer, NUM_TOKENS - 64)
        num_hits = counter(llm, "vllm:prefix_cache_hits")
        assert num_hits > 0
        third = greedy(llm, longer, NUM_TOKENS - 64)
        num_hits = counter(llm, "vllm:prefix_cache_hits") - num_hits
    assert first == wanted
    assert second == third == [continuation[64:] for continuation in wanted]
    # As without speculation: all whole blocks, but for the one of the last token,
    # which is computed for its logits.
    assert num_hits == sum((len(p) - 1) // block_size * block_size for p in longer)


def test_without_prefix_caching_no_token_changes(reference: Reference) -> None:
    with engine(
        BUNDLED_CHECKPOINT, enable_prefix_caching=False, speculative_config=RANDOM
    ) as llm:
        outputs = greedy(llm, reference.prompts, NUM_TOKENS)
        assert counter(llm, "vllm:prefix_cache_hits") == 0
    assert outputs == reference.continuations


def test_chunked_prefill_does_not_change_a_token(reference: Reference) -> None:
    budget = 24
    assert sum(len(prompt) > budget for prompt in reference.prompts) > 16
    with engine(
        BUNDLED_CHECKPOINT,
        max_num_batched_tokens=budget,
        enable_chunked_prefill=True,
        enable_prefix_caching=False,
        speculative_config=RANDOM,
    ) as llm:
        outputs = greedy(llm, reference.prompts, NUM_TOKENS)
        assert draft_counts(llm).num_accepted_tokens > 0
    assert outputs == reference.continuations


def test_a_chunk_border_costs_no_acceptance(reference: Reference) -> None:
    """vLLM shows the MTP layer the prompt's last token at each border of a chunk,
    whatever the next one is: later drafts then attend to wrong keys and values."""
    counts = []
    for budget in (16, 512):
        with engine(
            BUNDLED_CHECKPOINT,
            max_num_batched_tokens=budget,
            enable_chunked_prefill=True,
            enable_prefix_caching=False,
            max_num_seqs=1,
            speculative_config=fixed(3),
        ) as llm:
            greedy(llm, reference.prompts[:32], 48)
            counts.append(counters(llm)["accepted_tokens_per_pos"])
    in_chunks, whole = counts
    # Sums have another order: on some CPUs a draft token flips at a near-tie.
    assert in_chunks == pytest.approx(whole, rel=0.01)


def test_preemption_does_not_change_a_token(reference: Reference) -> None:
    with engine(
        BUNDLED_CHECKPOINT,
        max_num_seqs=8,
        # Room for two full-length requests of 8 blocks and a bit: eight want in.
        num_gpu_blocks_override=20,
        speculative_config=RANDOM,
    ) as llm:
        outputs = greedy(llm, reference.prompts, NUM_TOKENS)
        assert counter(llm, "vllm:num_preemptions") > 0
    assert outputs == reference.continuations


@pytest.fixture(scope="module")
def random_k_engine() -> Any:
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=8, speculative_config=RANDOM) as llm:
        yield llm


STEPS_BETWEEN_ARRIVALS = 2
STEPS_BEFORE_ABORT = 5
ABORTED = (3, 8, 11, 20)
"""Requests long enough not to be done ``STEPS_BEFORE_ABORT`` steps after arrival."""


def test_arrivals_and_aborts_do_not_change_the_others(
    reference: Reference, random_k_engine: Any
) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    core = random_k_engine.llm_engine
    lengths = [8 + (7 * i) % (NUM_TOKENS - 8) for i in range(24)]
    outputs: dict[int, list[int]] = {}
    finished: set[int] = set()
    started_before_abort: list[int] = []
    for step in range(10_000):
        arriving, off_beat = divmod(step, STEPS_BETWEEN_ARRIVALS)
        if arriving < len(lengths) and not off_beat:
            core.add_request(
                str(arriving),
                TokensPrompt(prompt_token_ids=list(reference.prompts[arriving])),
                SamplingParams(
                    temperature=0, max_tokens=lengths[arriving], ignore_eos=True
                ),
            )
        for index in ABORTED:
            if step == index * STEPS_BETWEEN_ARRIVALS + STEPS_BEFORE_ABORT:
                assert index not in finished
                started_before_abort += [index] if outputs.get(index) else []
                core.abort_request([str(index)])
        for output in core.step():
            outputs[int(output.request_id)] = list(output.outputs[0].token_ids)
            finished |= {int(output.request_id)} if output.finished else set()
        if arriving >= len(lengths) and not core.has_unfinished_requests():
            break
    assert len(started_before_abort) >= 2, "some must be aborted while decoding"
    assert finished == set(range(24)) - set(ABORTED)
    for index, tokens in outputs.items():
        length = lengths[index] if index in finished else len(tokens)
        assert tokens == reference.continuations[index][:length], f"request {index}"


def test_max_tokens_inside_an_accepted_run_cuts_exactly_there(
    reference: Reference, random_k_engine: Any
) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [
        TokensPrompt(prompt_token_ids=list(reference.prompts[i % 8])) for i in range(80)
    ]
    params = [
        SamplingParams(temperature=0, max_tokens=1 + i // 8, ignore_eos=True)
        for i in range(80)
    ]
    outputs = random_k_engine.generate(prompts, params, use_tqdm=False)
    for i, output in enumerate(outputs):
        tokens = list(output.outputs[0].token_ids)
        assert tokens == reference.continuations[i % 8][: 1 + i // 8]


def test_a_stop_string_ends_where_it_does_without_speculation(
    reference: Reference, random_k_engine: Any
) -> None:
    outputs = complete_to_stop_string(random_k_engine, reference.prompts)
    reasons = [completion.finish_reason for completion in reference.stopped]
    assert reasons.count("stop") >= 32, "the stop strings must occur"
    for ours, theirs in zip(outputs, reference.stopped, strict=True):
        assert ours.text == theirs.text
        assert ours.finish_reason == theirs.finish_reason
        assert ours.stop_reason == theirs.stop_reason


def test_logprobs_equal_those_without_speculation(
    reference: Reference, random_k_engine: Any
) -> None:
    outputs = complete_with_logprobs(random_k_engine, reference.prompts[:16])
    for ours, theirs in zip(outputs, reference.with_logprobs, strict=True):
        assert ours.token_ids == theirs.token_ids
        for our_step, their_step in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert set(our_step) == set(their_step)
            for token, value in their_step.items():
                assert our_step[token].logprob == pytest.approx(value.logprob, abs=1e-4)


def test_penalties_word_lists_and_grammars_give_the_targets_tokens(
    reference: Reference, random_k_engine: Any
) -> None:
    outputs = complete_restricted(random_k_engine, reference.prompts)
    assert outputs == reference.restricted
    assert len({tuple(tokens) for tokens in outputs}) > len(outputs) // 2
