"""Sampled requests with a seed on Model Runner V1: distribution and repeatability.

Many requests with one prompt, each with its own seed; the joint distribution of the
first tokens is compared with an engine that does not speculate, by chi-square. False
alarms: each comparison fails a correct engine once in 10,000 draws of seeds
(``ALPHA``); the seeds are fixed, so a pass stays a pass. Requests without a seed, whose
drafts are drawn, are compared in ``exactness/``.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.engines import draft_counts, engine
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.watch import record_outcomes, scheduler_of
from vllm_mtp.control.controller import DecidesEveryStep
from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome
from vllm_mtp.tools.verify_compare import homogeneity_p_value


class OnlyComparing(DecidesEveryStep):
    """Drafts a token for everybody and has none verified."""

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        return DraftDecision(1, {r.request_id: 0 for r in requests}, "probe")

    def may_draft(self) -> bool:
        return True

    def observe(self, outcome: StepOutcome) -> None:
        pass


ALPHA = 1e-4
NUM_SAMPLES = 500
NUM_TOKENS = 3
SETTINGS = [
    {"temperature": 0.2, "top_p": 1.0},
    {"temperature": 1.0, "top_p": 0.9},
]
SPEC = {"method": "mtp_plus", "controller": "fixed"}
DRAFT_LENGTH = 3
PROMPT = 3


def sample(
    llm: Any, sampling: dict[str, float], first_seed: int
) -> list[tuple[int, ...]]:
    """The first tokens of ``NUM_SAMPLES`` requests, each with its own seed."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(
        prompt_token_ids=list(heldout_prompts(8, max_tokens=24)[PROMPT])
    )
    params = [
        SamplingParams(
            max_tokens=NUM_TOKENS,
            seed=first_seed + i,
            ignore_eos=True,
            # Seeded requests are not drafted for unless they ask for it.
            extra_args={"mtp_plus_k": DRAFT_LENGTH},
            **sampling,
        )
        for i in range(NUM_SAMPLES)
    ]
    outputs = llm.generate([prompt] * NUM_SAMPLES, params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


Samples = list[list[tuple[int, ...]]]


@pytest.fixture(scope="module")
def plain_samples() -> Samples:
    # A budget for 64 whole prompts: without our mend a chunked one ends the engine.
    with engine(
        BUNDLED_CHECKPOINT, max_num_seqs=64, max_num_batched_tokens=16384
    ) as llm:
        return [sample(llm, sampling, first_seed=10**6) for sampling in SETTINGS]


def speculative_samples(spec: dict[str, Any]) -> Samples:
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=64, speculative_config=spec) as llm:
        samples = [sample(llm, sampling, first_seed=0) for sampling in SETTINGS]
        counts = draft_counts(llm)
        assert counts.num_accepted_tokens > 100
        assert counts.num_rejected_tokens > 100
        return samples


def p_values(first: Samples, second: Samples, num_tokens: int) -> list[float]:
    return [
        homogeneity_p_value(
            [tokens[:num_tokens] for tokens in a], [tokens[:num_tokens] for tokens in b]
        )
        for a, b in zip(first, second, strict=True)
    ]


@pytest.mark.parametrize("rejection_sample_method", ["standard", "block"])
def test_sampled_tokens_follow_the_target(
    rejection_sample_method: str, plain_samples: Samples
) -> None:
    spec = SPEC | {"rejection_sample_method": rejection_sample_method}
    ours = speculative_samples(spec)
    for num_tokens in (2, 3):
        assert min(p_values(ours, plain_samples, num_tokens)) > ALPHA


@pytest.mark.parametrize("rejection_sample_method", ["standard", "block"])
def test_a_seed_means_the_same_text_whoever_else_is_served(
    rejection_sample_method: str,
) -> None:
    """At a draft length that the request fixes, which else would change with time."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=list(p)) for p in heldout_prompts(24)]
    seeded = [
        SamplingParams(
            temperature=1.0,
            top_p=0.9,
            seed=i,
            max_tokens=24,
            extra_args={"mtp_plus_k": DRAFT_LENGTH},
        )
        for i in range(8)
    ]
    others = [SamplingParams(temperature=1.0, max_tokens=16) for _ in range(16)]
    spec = {"method": "mtp_plus", "rejection_sample_method": rejection_sample_method}
    texts = []
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=12, speculative_config=spec) as llm:
        for params in ([*seeded, *others], [*others, *seeded], seeded):
            chosen = [prompts[p.seed if p.seed is not None else 8] for p in params]
            outputs = llm.generate(chosen, params, use_tqdm=False)
            by_seed = {
                p.seed: list(output.outputs[0].token_ids)
                for p, output in zip(params, outputs, strict=True)
                if p.seed is not None
            }
            texts.append(by_seed)
        assert draft_counts(llm).num_accepted_tokens > 50
    assert texts[0] == texts[1] == texts[2]


def test_a_seeded_request_with_chunked_prefill_is_answered_and_the_server_lives() -> (
    None
):
    """vLLM's CPU runner dies of it. Rewound exactly, chunks change no first token.

    Later tokens may differ between chunk sizes: what is drafted differs a little, and
    with it which uniform decides, though not the distribution.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    long_prompts = [list(p) for p in heldout_prompts(32) if len(p) > 48][:8]
    prompts = [TokensPrompt(prompt_token_ids=p) for p in long_prompts for _ in range(8)]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=8, ignore_eos=True)
        for i in range(len(prompts))
    ]
    answers = {}
    for budget in (16, 16384):
        with engine(
            BUNDLED_CHECKPOINT,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
            max_num_seqs=4,
            speculative_config=SPEC,
        ) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers[budget] = [list(o.outputs[0].token_ids) for o in outputs]
    assert all(len(tokens) == 8 for tokens in answers[16])
    first_tokens = {b: [tokens[0] for tokens in a] for b, a in answers.items()}
    assert first_tokens[16] == first_tokens[16384]
    assert len(set(first_tokens[16])) > 8, "the seeds must matter"


class AllVerified(OnlyComparing):
    """Drafts a token for everybody and has it verified."""

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        return DraftDecision(1, {r.request_id: 1 for r in requests}, "probe")


def accepted_shares(controller: DecidesEveryStep) -> list[float]:
    """Of first draft tokens: of greedy requests and of sampled ones, side by side."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompts = [TokensPrompt(prompt_token_ids=list(p)) for p in heldout_prompts(32)]
    kinds = [{"temperature": 0.0}, {"temperature": 1.0}]
    kinds += [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "top_k": 50}]
    params = [
        SamplingParams(**kinds[number % 4], max_tokens=64, ignore_eos=True)
        for number in range(len(prompts))
    ]
    spec = {"method": "mtp_plus", "early_stop": False}
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=6, speculative_config=spec) as llm:
        scheduler_of(llm).controller = controller
        recorder = record_outcomes(llm)
        llm.generate(prompts, params, use_tqdm=False)
        is_verified = isinstance(controller, AllVerified)
        assert (draft_counts(llm).num_draft_tokens > 0) == is_verified
    shares = []
    for is_sampled in (False, True):
        examined = [
            r
            for outcome in recorder.outcomes
            for r in (outcome.requests if is_verified else outcome.shadow_drafts)
            # Internal ids begin with the number of the request.
            if int(r.request_id.split("-")[0]) % 2 == is_sampled and r.num_draft_tokens
        ]
        assert len(examined) > 500
        shares.append(sum(r.num_accepted_tokens for r in examined) / len(examined))
    return shares


def test_drafts_that_are_not_verified_are_judged_as_if_they_were() -> None:
    judged = accepted_shares(OnlyComparing())
    verified = accepted_shares(AllVerified())
    assert all(0.3 < share < 0.95 for share in verified)
    # A thousand drafts each: deviations of 0.013; texts differ where tokens are drawn.
    assert judged == pytest.approx(verified, abs=0.06)
