"""While drafting is off the MTP layers rest; when it resumes nothing was missed.

The same script of draft depths runs twice: with MTP layers that rest and catch up, and
with MTP layers that see every token at once, as vLLM's do. Every draft of every step
must be accepted as far in the one as in the other, so the KV that the catch-up writes
is that which would have been there.
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
from vllm_mtp.drafting.unseen_tokens import UnseenTokens
from vllm_mtp.integration.v1.draft_vocab import DraftsFromVocabulary
from vllm_mtp.integration.v1.drafting_disabled import MAX_STEPS
from vllm_mtp.integration.worker import drafting_disabled
from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome

SPECULATION = {"method": "mtp_plus", "num_speculative_tokens": 3}
ENGINE: dict[str, Any] = {"max_num_seqs": 3, "max_model_len": 192}
ASYNC = {"async_scheduling": True}
SCRIPT = [0] * 9 + [2] * 2 + [0] * 2 + [3] + [0] * 5 + [1] * 4
"""Long and short pauses, in and out of step with requests that come and go."""


def run_twice(**settings: Any) -> tuple[JobResult, JobResult]:
    """With MTP layers that rest, and with MTP layers that never do."""
    is_async = ASYNC if settings.pop("is_async", False) else {}
    options, script = settings.pop("engine", {}), settings.pop("script", SCRIPT)
    ours = ENGINE | is_async | options | {"speculative_config": SPECULATION}
    resting, never = run_jobs(
        Jobs(
            model=str(BUNDLED_CHECKPOINT),
            prompts=[list(p) for p in heldout_prompts(7, max_tokens=48)],
            engines=[ours, ours | {"never_rest": True}],
            script=script,
            **settings,
        )
    )
    return resting, never


CASES = {
    "v1": {"max_tokens": 70},
    # One at a time, since several would not catch up on so much in one step.
    "v1-long-pauses": {
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
def test_after_a_pause_drafts_are_accepted_as_if_there_had_been_none(case: str) -> None:
    resting, never = run_twice(**CASES[case])
    assert resting.continuations == never.continuations
    assert resting.num_catch_up_tokens > 50
    assert never.num_catch_up_tokens == 0
    assert resting.accepted == never.accepted
    assert (resting.num_resting_steps > 20) == ("v2" in case)
    assert never.num_resting_steps == 0
    # Of V1: test_key_value_passes.py.
    assert (resting.num_cut_passes > 5) == ("v2" in case)
    assert never.num_cut_passes == 0
    accepted = [a for step in resting.accepted for _, _, a in step]
    assert len(accepted) > 30
    assert sum(accepted) > len(accepted)


def test_a_step_at_rest_takes_the_path_of_a_target_alone() -> None:
    """Nothing of vLLM's speculative path runs but where there is a prompt."""
    with engine(BUNDLED_CHECKPOINT, **ENGINE, speculative_config=SPECULATION) as llm:
        recorder = play_script(llm, [0])
        runner = model_runner(llm)
        proposed = []
        propose = runner.propose_draft_token_ids

        def counted(*args: Any, **kwargs: Any) -> Any:
            proposed.append(1)
            return propose(*args, **kwargs)

        runner.propose_draft_token_ids = counted
        greedy(llm, heldout_prompts(7, max_tokens=48), 30)
        assert runner.speculative_config is not None
        with_prompt = [o for o in recorder.outcomes if o.num_prefill_tokens]
    assert 0 < len(proposed) == len(with_prompt) < len(recorder.outcomes) / 4


def test_tokens_of_steps_at_rest_are_heard_of_when_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By those who count tokens or follow grammars: each once, and in order."""
    heard: dict[str, list[int]] = defaultdict(list)
    lasts = []
    hear = DraftsFromVocabulary.hear

    def recorded(self: Any, request_ids: Sequence[str], committed: Any) -> None:
        lasts.append(committed.shape[1])
        for request_id, tokens in zip(request_ids, committed.tolist(), strict=True):
            heard[request_id] += [token for token in tokens if token >= 0]
        hear(self, request_ids, committed)

    monkeypatch.setattr(DraftsFromVocabulary, "hear", recorded)
    with engine(BUNDLED_CHECKPOINT, **ENGINE, speculative_config=SPECULATION) as llm:
        play_script(llm, [0] * 45 + [2])
        texts = greedy(llm, heldout_prompts(2, max_tokens=48), 100)
    assert max(lasts) == MAX_STEPS - 1  # and the last of them apart
    # The last steps at rest wait for another one.
    for text, tokens in zip(texts, heard.values(), strict=True):
        assert len(text) - MAX_STEPS <= len(tokens) <= len(text)
        assert tokens == text[: len(tokens)]


def test_where_steps_overlap_most_at_rest_need_no_decision_either() -> None:
    """Those that are under way when the others are told of are not heard of."""
    (result,) = run_jobs(
        Jobs(
            model=str(BUNDLED_CHECKPOINT),
            prompts=[list(p) for p in heldout_prompts(1, max_tokens=48)],
            max_tokens=60,
            engines=[ENGINE | ASYNC | {"speculative_config": SPECULATION}],
            script=[0] * 20,
        )
    )
    assert 59 / 9 <= result.num_decisions < 14
    assert 59 - 2 * result.num_decisions <= result.num_outcomes <= 60


def test_steps_at_rest_need_a_decision_now_and_then_and_all_are_heard_of() -> None:
    with engine(BUNDLED_CHECKPOINT, **ENGINE, speculative_config=SPECULATION) as llm:
        recorder = play_script(llm, [0] * 20)
        greedy(llm, heldout_prompts(1, max_tokens=48), 60)
    decoded = [o for o in recorder.outcomes if not o.num_prefill_tokens]
    # The prompt's pass brings the first token.
    assert len(decoded) == 59
    assert 59 / 9 <= len(recorder.decisions) < 12
    contexts = [o.num_context_tokens for o in decoded]
    assert contexts == list(range(contexts[0], contexts[0] + 59))


def test_without_the_catch_up_fewer_drafts_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The test above can fail: what it compares does depend on the catch-up."""
    monkeypatch.setattr(UnseenTokens, "take", lambda *args, **kwargs: None)
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
    """Room for 16 tokens: long pauses catch up several times before they end."""
    prompts = heldout_prompts(6, max_tokens=48)
    accepted = []
    for max_bytes in (drafting_disabled.MAX_UNSEEN_BYTES, 1):
        monkeypatch.setattr(drafting_disabled, "MAX_UNSEEN_BYTES", max_bytes)
        with engine(BUNDLED_CHECKPOINT, speculative_config=SPECULATION) as llm:
            unseen = model_runner(llm).drafter.unseen
            recorder = play_script(llm, SCRIPT)
            greedy(llm, prompts, 70)
            accepted.append(accepted_by_step(recorder.outcomes))
    assert unseen.max_rows == 16
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
    """Drafts one token in every step; it is verified, or only compared."""

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
        examined = outcome.requests if draft_length else outcome.compared
        assert not (outcome.compared if draft_length else outcome.requests)
        for request in examined:
            number = int(request.request_id.split("-")[0])
            accepted[number].append(request.num_accepted_tokens)
    return accepted


def test_a_draft_that_is_only_compared_tells_what_its_verification_would() -> None:
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
