"""Drafts that end early on Model Runner V1: same output, fewer draft steps.

The random controller gives half of its steps a stop rule that makes no sense; the
goodput controller gives its own.
"""

from typing import Any

import pytest

from tests.e2e.conftest import NUM_TOKENS, Reference
from tests.support.engines import draft_counts, engine, greedy, model_runner
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.watch import RecordingController, record_outcomes
from vllm_mtp.records import StepOutcome
from vllm_mtp.tools.verify_compare import homogeneity_p_value

RANDOM = {"method": "mtp_plus", "num_speculative_tokens": 5, "controller": "random"}
ALPHA = 1e-4
"""False alarms of the comparison of distributions: one in 10,000 draws of seeds."""
NUM_SAMPLES = 800


def stopped_early(recorder: RecordingController) -> int:
    """Steps that drafted less deep than they might have."""
    deepest = [d.draft_depth for d in recorder.decisions if d.stop_rule is not None]
    assert deepest, "no rule was given"
    return sum(
        outcome.draft_depth < decision.draft_depth
        for decision, outcome in zip(
            recorder.decisions, recorder.outcomes, strict=False
        )
        if decision.stop_rule is not None
    )


def as_on_a_quiet_machine(controller: Any) -> None:
    """Step times by a rule under which drafting pays: a busy one decides otherwise."""
    observe = controller.observe

    def observe_steady(outcome: StepOutcome) -> None:
        num_drafted = outcome.num_scheduled_tokens - outcome.num_decode_requests
        seconds = 0.010 + 0.0002 * num_drafted + 0.001 * outcome.draft_depth
        observe(outcome._replace(step_time_s=seconds))

    controller.observe = observe_steady


def test_greedy_tokens_equal_whatever_the_rule(reference: Reference) -> None:
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=8, speculative_config=RANDOM) as llm:
        recorder = record_outcomes(llm)
        outputs = greedy(llm, reference.prompts, NUM_TOKENS)
        counts = draft_counts(llm)
    assert outputs == reference.continuations
    assert counts.num_accepted_tokens > 100
    assert counts.num_rejected_tokens > 100
    assert stopped_early(recorder) > 50


def test_the_default_stops_early_and_learns_what_confidence_means(
    reference: Reference,
) -> None:
    spec = {"method": "mtp_plus"}
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=4, speculative_config=spec) as llm:
        recorder = record_outcomes(llm)
        as_on_a_quiet_machine(recorder.controller)
        outputs = greedy(llm, reference.prompts, NUM_TOKENS)
        survival = recorder.controller.survival  # type: ignore[attr-defined]
    assert outputs == reference.continuations
    assert stopped_early(recorder) > 50
    assert 0.3 < survival.confidences[0].slope < 4.0
    drafts = [r for o in recorder.outcomes for r in o.requests]
    assert all(len(r.confidences) >= r.num_draft_tokens - r.num_copied for r in drafts)
    # Others are nothing but copies.
    drafts = [r for r in drafts if r.confidences]
    sure = [r.num_accepted_tokens > 0 for r in drafts if r.confidences[0] > 2.0]
    unsure = [r.num_accepted_tokens > 0 for r in drafts if r.confidences[0] < 0.5]
    assert min(len(sure), len(unsure)) > 30
    assert sum(sure) / len(sure) > sum(unsure) / len(unsure) + 0.2


def test_switched_off_every_step_is_as_deep_as_decided(reference: Reference) -> None:
    spec = RANDOM | {"early_stop": False}
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=8, speculative_config=spec) as llm:
        assert not model_runner(llm).drafter.stops_early
        recorder = record_outcomes(llm)
        outputs = greedy(llm, reference.prompts[:8], 32)
    assert outputs == [tokens[:32] for tokens in reference.continuations[:8]]
    assert all(decision.stop_rule is None for decision in recorder.decisions)
    assert not any(r.confidences for o in recorder.outcomes for r in o.requests)


def sample(llm: Any, temperature: float) -> list[tuple[int, ...]]:
    """The first three tokens of many requests with one prompt, without seeds."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=list(heldout_prompts(8, max_tokens=24)[3]))
    params = SamplingParams(max_tokens=3, temperature=temperature, ignore_eos=True)
    outputs = llm.generate([prompt] * NUM_SAMPLES, params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("draft_sample_method", ["greedy", "probabilistic"])
def test_sampled_tokens_follow_the_target_whatever_the_rule(
    draft_sample_method: str,
) -> None:
    plain_engine = {"max_num_seqs": 64, "max_num_batched_tokens": 16384}
    with engine(BUNDLED_CHECKPOINT, **plain_engine) as llm:
        plain = sample(llm, 1.0)
    spec = RANDOM | {"draft_sample_method": draft_sample_method}
    with engine(BUNDLED_CHECKPOINT, max_num_seqs=16, speculative_config=spec) as llm:
        recorder = record_outcomes(llm)
        ours = sample(llm, 1.0)
        counts = draft_counts(llm)
    assert counts.num_accepted_tokens > 100
    assert counts.num_rejected_tokens > 100
    assert stopped_early(recorder) > 20
    for num_tokens in (2, 3):
        first, second = ([t[:num_tokens] for t in tokens] for tokens in (ours, plain))
        assert homogeneity_p_value(first, second) > ALPHA
