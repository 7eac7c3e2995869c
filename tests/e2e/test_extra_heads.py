"""Extra heads: exact output, one pass for all drafts, heads in their order.

What the heads should draft is said by a model of theirs in plain torch.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.exactness.samples import ALPHA, p_values, sample
from tests.support.engine_jobs import Jobs, run_jobs
from tests.support.engines import (
    Samples,
    counters,
    draft_counts,
    engine,
    greedy,
    model_runner,
)
from tests.support.extra_heads import (
    NUM_HEADS,
    HeadPasses,
    torch_model,
    write_as_llama,
    write_model,
)
from tests.support.heldout import heldout_prompts
from tests.support.watch import play_script, record_outcomes

SPEC = {"method": "mtp_plus", "controller": "random"}
PROMPTS = heldout_prompts(8)
SHORT = [list(prompt) for prompt in heldout_prompts(3, max_tokens=24)]
NUM_TOKENS = 48
SETTINGS = ("plain", "top-p")
SEATS = {"max_num_seqs": 48, "max_num_batched_tokens": 8192}
Texts = list[list[int]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("heads") / "model")


@pytest.fixture(scope="module")
def plain(model: Path) -> tuple[Texts, Texts, Samples]:
    """Texts and samples of the target alone, which passes over the heads."""
    with engine(model, **SEATS) as llm:
        return (
            greedy(llm, PROMPTS, NUM_TOKENS),
            greedy(llm, SHORT, 20),
            sample(llm, SETTINGS, 450),
        )


@pytest.fixture(params=["qwen2", "llama"])
def family_model(request: pytest.FixtureRequest, model: Path, tmp_path: Path) -> Path:
    return model if request.param == "qwen2" else write_as_llama(model, tmp_path / "m")


def test_greedy_texts_equal_and_one_pass_makes_all_drafts(
    family_model: Path, plain: tuple[Texts, Texts, Samples]
) -> None:
    with engine(family_model, speculative_config=SPEC) as llm:
        recorder = record_outcomes(llm)
        drafter = model_runner(llm).drafter
        passes, steps = HeadPasses(drafter.model), [0]
        propose = drafter._run_passes

        def counted(depth: int, given: Any) -> Any:
            steps[0] += 1
            return propose(depth, given)

        drafter._run_passes = counted
        texts = greedy(llm, PROMPTS, NUM_TOKENS)
        found = counters(llm)
    assert type(drafter).__name__ == "MTPPlusHeadsProposer"
    assert texts == plain[0]
    depths = {step.draft_depth for step in recorder.outcomes}
    assert depths == set(range(NUM_HEADS + 1))
    backfills = sum(step.num_backfill_tokens > 0 for step in recorder.outcomes)
    assert backfills
    assert steps[0] <= len(passes.outputs) <= steps[0] + backfills
    accepted = found["accepted_tokens_per_pos"]
    assert found["drafts"] > accepted[0] > accepted[1] > 10


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_greedy_texts_equal_on_v2(
    is_async: bool, model: Path, plain: tuple[Texts, Texts, Samples]
) -> None:
    arguments = {
        "speculative_config": {"method": "mtp_plus"},
        "async_scheduling": is_async,
        "max_model_len": 64,
    }
    jobs = Jobs(str(model), SHORT, 20, [arguments], v2=True, script=[3, 0, 2, 0, 0, 1])
    [found] = run_jobs(jobs)
    assert found.drafter == "MTPPlusHeadsSpeculator"
    assert found.continuations == plain[1]
    assert found.num_disabled_steps > 0
    assert found.num_backfill_tokens > 0
    assert found.counters["accepted_tokens_per_pos"][2] > 0


def test_samples_follow_the_target(
    model: Path, plain: tuple[Texts, Texts, Samples]
) -> None:
    with engine(model, speculative_config=SPEC, **SEATS) as llm:
        samples = sample(llm, SETTINGS)
        counts = draft_counts(llm)
    assert counts.num_accepted_tokens > 100
    assert counts.num_rejected_tokens > 100
    found = p_values(samples, plain[2])
    assert min(found.values()) > ALPHA, found


def drafts_of(llm: Any, prompts: Any) -> Texts:
    """What is drafted behind each prompt and one token more."""
    drafter, drafted = model_runner(llm).drafter, []
    propose = drafter.propose

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = propose(*args, **kwargs)
        drafted.append(drafts[0].tolist())
        return drafts

    drafter.propose = watched
    try:
        for prompt in prompts:
            greedy(llm, [prompt], 1)
    finally:
        drafter.propose = propose
    return drafted


def expected_drafts(prompts: Any) -> Texts:
    """The same, by the model in torch: heads at the last position of each prompt."""
    heads, found = torch_model(), []
    for prompt in prompts:
        # Chains begin at all positions but the last ones, which need tokens to check.
        ids = torch.tensor([[*prompt, *[0] * NUM_HEADS]])
        with torch.no_grad():
            logits = heads.draft_logits(ids, NUM_HEADS)
        found.append([int(each[0, -1].argmax()) for each in logits])
    return found


def test_heads_draft_in_their_order_at_the_last_position(model: Path) -> None:
    spec = {"method": "mtp_plus", "controller": "fixed", "draft_vocab": "full"}
    with engine(model, speculative_config=spec) as llm:
        play_script(llm, [NUM_HEADS])
        expected = expected_drafts(PROMPTS)
        assert drafts_of(llm, PROMPTS) == expected
        # The comparison finds heads that are shifted by one.
        heads = model_runner(llm).drafter.model.model
        first, *others = heads.extra_heads
        heads.extra_heads = torch.nn.ModuleList([*others, first])
        shifted = drafts_of(llm, PROMPTS)
    assert sum(a[0] != b[0] for a, b in zip(shifted, expected, strict=True)) > 3


def test_a_head_sees_no_token_behind_its_position(model: Path) -> None:
    spec = {"method": "mtp_plus", "controller": "fixed"}
    text = list(PROMPTS[0])
    changed = [*text[:-1], (text[-1] + 7) % 1000]
    arguments = {"speculative_config": spec, "enable_prefix_caching": False}
    with engine(model, **arguments) as llm:
        passes = HeadPasses(model_runner(llm).drafter.model)
        for prompt in (text, changed):
            greedy(llm, [prompt], 1)
    before, after = (each[: len(text)] for each in passes.outputs)
    difference = (before - after).abs().amax(dim=(1, 2))
    assert difference[:-1].max() < 1e-4
    assert difference[-1] > 0.1
