"""Model Runner V2, interpreted: the same joint distribution with and without drafts.

A tiny vocabulary and few samples, since Triton's interpreter is slow; drawn drafts
only, since it cannot run vLLM's kernel for chosen ones (a pointer that is None). The
random MTP layer is another model than the target: its proposals are often rejected.
"""

from typing import Any

import pytest

from tests.e2e.exactness.samples import ALPHA, p_values
from tests.support.engine_jobs import JobResult, Jobs, run_jobs
from tests.support.families.family import VOCAB_SIZE
from tests.support.random_checkpoints import random_prompts, write_checkpoint
from tests.support.vocabulary import write_list
from vllm_mtp.drafting.vocabulary_list import fingerprint

NUM_SAMPLES, NUM_TOKENS = 150, 3
SETTINGS = {
    "plain": {"temperature": 1.0},
    "cool, top-k": {"temperature": 0.7, "top_k": 8},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.5, "top_k": 12},
}
SEATS = {"max_num_seqs": 48, "max_model_len": 64}
DRAWN = {
    "method": "mtp_plus",
    "num_speculative_tokens": 3,
    "draft_sample_method": "probabilistic",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, JobResult]:
    folder = tmp_path_factory.mktemp("v2")
    model = write_checkpoint(folder / "mimo", "mimo")
    few = write_list(
        folder / "few.json",
        list(range(0, VOCAB_SIZE, 2)),
        fingerprint({f"t{token}": token for token in range(VOCAB_SIZE)}),
        VOCAB_SIZE,
    )
    engines: dict[str, dict[str, Any]] = {
        "target": {},
        "again": {"seed": 1},
        "standard": DRAWN | {"controller": "random", "draft_vocab": "full"},
        "block": DRAWN
        | {
            "controller": "fixed",
            "draft_vocab": few,
            "rejection_sample_method": "block",
        },
    }
    jobs = Jobs(
        model=str(model),
        prompts=random_prompts(1),
        max_tokens=NUM_TOKENS,
        engines=[
            SEATS | ({"speculative_config": each} if "method" in each else each)
            for each in engines.values()
        ],
        v2=True,
        sampled=SETTINGS,
        num_samples=NUM_SAMPLES,
    )
    return dict(zip(engines, run_jobs(jobs), strict=True))


def compared(first: JobResult, second: JobResult) -> dict[tuple[str, int], float]:
    pair = [
        {name: [tuple(t) for t in texts] for name, texts in each.samples.items()}
        for each in (first, second)
    ]
    return p_values(*pair)


@pytest.mark.parametrize("name", ["standard", "block"])
def test_the_output_follows_the_target(
    name: str, results: dict[str, JobResult]
) -> None:
    result = results[name]
    assert result.drafter == "MTPPlusSpeculator"
    accepted = result.counters["accepted_tokens"]
    assert accepted > 100
    assert result.counters["draft_tokens"] - accepted > 100
    found = compared(result, results["target"])
    assert min(found.values()) > ALPHA, {k: p for k, p in found.items() if p < 0.01}


def test_two_engines_without_speculation_agree(results: dict[str, JobResult]) -> None:
    assert min(compared(results["again"], results["target"]).values()) > ALPHA
