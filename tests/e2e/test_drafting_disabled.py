"""Drafting disabled: no MTP layers run, and the KV backfill makes up for it.

The same script of draft depths runs twice: with MTP layers that do not run and a KV
backfill, and with MTP layers that read every token at once, as vLLM's do. Every draft
of every step must be accepted as far in the one as in the other, so the KV that the
backfill writes is that which would have been there.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.engine_jobs import JobResult, Jobs, accepted_by_step, run_jobs
from tests.support.engines import engine, greedy, model_runner
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.watch import play_script, record_outcomes, scheduler_of
from vllm_mtp.control.controller import DecidesEveryStep
from vllm_mtp.drafting.pending_tokens import PendingTokens
from vllm_mtp.integration.worker import drafting_disabled
from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome

SPECULATION = {"method": "mtp_plus", "num_speculative_tokens": 3}
ENGINE: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 192}
ASYNC = {"async_scheduling": True}
SCRIPT = [0] * 9 + [2] * 2 + [0] * 2 + [3] + [0] * 5 + [1] * 4
"""Long and short stretches at depth 0; requests come and go within them."""


def run_twice(**settings: Any) -> tuple[JobResult, JobResult]:
    """With MTP layers that do not run at depth 0, and with such that always do."""
    is_async = ASYNC if settings.pop("is_async", False) else {}
    options, script = settings.pop("engine", {}), settings.pop("script", SCRIPT)
    ours = ENGINE | is_async | options | {"speculative_config": SPECULATION}
    disabled, never = run_jobs(
        Jobs(
            model=str(BUNDLED_CHECKPOINT),
            prompts=[list(p) for p in heldout_prompts(7, max_tokens=48)],
            engines=[ours, ours | {"never_disable": True}],
            script=script,
            **settings,
        )
    )
    return disabled, never


CASES = {
    "v1": {"max_tokens": 70},
    # One at a time, since one step would not backfill so much of several.
    "v1-long-stretches": {
        "max_tokens": 120,
        "script": [0] * 50 + [3] * 3,
        "engine": {"max_num_seqs": 1},
    },
    # Two requests decode and a third one's prompt comes in rows of one.
    "v1-chunks": {"max_tokens": 70, "engine": {"max_num_batched_tokens": 3}},
    "v1-async": {"max_tokens": 70, "is_async": True},
    "v2-async": {"max_tokens": 30, "v2": True, "is_async": True},
}


@pytest.mark.parametrize("case", CASES)
def test_after_a_backfill_drafts_are_accepted_as_without_it(
    case: str,
) -> None:
    disabled, never = run_twice(**CASES[case])
    assert disabled.continuations == never.continuations
    assert disabled.num_backfill_tokens > 50
    assert never.num_backfill_tokens == 0
    assert disabled.accepted == never.accepted
    assert (disabled.num_disabled_steps > 20) == ("v2" in case)
    assert never.num_disabled_steps == 0
    # Of V1: test_kv_only_passes.py.
    assert (disabled.num_cut_passes > 5) == ("v2" in case)
    assert never.num_cut_passes == 0
    accepted = [a for step in disabled.accepted for _, _, a in step]
    assert len(accepted) > 30
    assert sum(accepted) > len(accepted)


def test_where_steps_overlap_disabled_ones_need_few_decisions_either() -> None:
    """Those that are under way when others are delivered come later, and all come."""
    (result,) = run_jobs(
        Jobs(
            model=str(BUNDLED_CHECKPOINT),
            prompts=[list(p) for p in heldout_prompts(1, max_tokens=48)],
            max_tokens=60,
            engines=[ENGINE | ASYNC | {"speculative_config": SPECULATION}],
            script=[0] * 20,
        )
    )
    assert 0 < result.num_decisions < 5
    assert result.num_outcomes == 60


def test_disabled_steps_need_few_decisions_and_all_are_delivered() -> None:
    # Who copies is decided about in every step.
    spec = SPECULATION | {"copy_from_context": False}
    with engine(BUNDLED_CHECKPOINT, **ENGINE, speculative_config=spec) as llm:
        recorder = play_script(llm, [0] * 20)
        greedy(llm, heldout_prompts(1, max_tokens=48), 60)
    decoded = [o for o in recorder.outcomes if not o.num_prefill_tokens]
    # The prompt's pass brings the first token.
    assert len(decoded) == 59
    assert 0 < len(recorder.decisions) < 5
    contexts = [o.num_context_tokens for o in decoded]
    assert contexts == list(range(contexts[0], contexts[0] + 59))


def test_without_the_backfill_fewer_drafts_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above can fail: what it compares does depend on the backfill."""
    monkeypatch.setattr(PendingTokens, "take", lambda *args, **kwargs: None)
    accepted = {}
    for name, monkey in (("missing", True), ("there", False)):
        if not monkey:
            monkeypatch.undo()
        with engine(BUNDLED_CHECKPOINT, speculative_config=SPECULATION) as llm:
            recorder = play_script(llm, SCRIPT)
            greedy(llm, heldout_prompts(7, max_tokens=48), 70)
            accepted[name] = accepted_by_step(recorder.outcomes)
    assert accepted["missing"] != accepted["there"]


def test_a_full_store_is_emptied_on_the_way_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Room for 16 tokens: long stretches are backfilled several times."""
    prompts = heldout_prompts(6, max_tokens=48)
    accepted = []
    for max_bytes in (drafting_disabled.MAX_PENDING_BYTES, 1):
        monkeypatch.setattr(drafting_disabled, "MAX_PENDING_BYTES", max_bytes)
        with engine(BUNDLED_CHECKPOINT, speculative_config=SPECULATION) as llm:
            pending = model_runner(llm).drafter.pending
            recorder = play_script(llm, SCRIPT)
            greedy(llm, prompts, 70)
            accepted.append(accepted_by_step(recorder.outcomes))
    assert pending.max_rows == 16
    assert accepted[0] == accepted[1]


def test_the_last_tokens_before_the_models_end_are_drafted_like_any_other() -> None:
    """vLLM stops drafting for all when one request comes near; its output is ours."""
    (prompt,) = heldout_prompts(1, max_tokens=48)
    room = 64 - len(prompt)
    with engine(BUNDLED_CHECKPOINT, max_model_len=64) as llm:
        plain = greedy(llm, [prompt], room)
    with engine(
        BUNDLED_CHECKPOINT, max_model_len=64, speculative_config=SPECULATION
    ) as llm:
        recorder = play_script(llm, [3])
        assert greedy(llm, [prompt], room) == plain
        drafted = [r for step in recorder.outcomes for r in step.requests]
    wanted = sum(r.acceptance_length for r in drafted)
    # The first token comes from the prompt's pass, the last may find no room.
    assert room - 2 <= wanted + 1 <= room + 3


class OneDeepController(DecidesEveryStep):
    """Drafts one token in every step; it is verified, or a shadow draft."""

    def __init__(self, draft_length: int) -> None:
        self.draft_length = draft_length

    def may_draft(self) -> bool:
        return True

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        lengths = {request.request_id: self.draft_length for request in requests}
        return DraftDecision(1, lengths, "test")

    def observe(self, outcome: StepOutcome) -> None:
        """Recorded around it."""


def accepted_of_each(
    draft_length: int, prompts: Sequence[Sequence[int]]
) -> dict[int, list[int]]:
    """Whether each draft token was accepted, in order, by request."""
    with engine(BUNDLED_CHECKPOINT, **ENGINE, speculative_config=SPECULATION) as llm:
        scheduler_of(llm).controller = OneDeepController(draft_length)
        recorder = record_outcomes(llm)
        greedy(llm, prompts, 60)
    accepted: dict[int, list[int]] = defaultdict(list)
    for outcome in recorder.outcomes:
        examined = outcome.requests if draft_length else outcome.shadow_drafts
        assert not (outcome.shadow_drafts if draft_length else outcome.requests)
        for request in examined:
            number = int(request.request_id.split("-")[0])
            accepted[number].append(request.num_accepted_tokens)
    return accepted


def test_a_shadow_draft_tells_what_its_verification_would() -> None:
    prompts = heldout_prompts(5, max_tokens=48)
    verified, compared = (accepted_of_each(k, prompts) for k in (1, 0))
    assert verified.keys() == compared.keys()
    for request, outcomes in verified.items():
        # An accepted token takes its own position's comparison with it.
        place = 0
        for accepted in outcomes[:-1]:
            assert accepted == compared[request][place]
            place += 1 + accepted
    flags = [flag for flags in compared.values() for flag in flags]
    assert 0.3 < sum(flags) / len(flags) < 0.95
