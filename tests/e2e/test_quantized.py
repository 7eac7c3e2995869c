"""Quantized checkpoints: MTP layers like the trunk, or left as they were."""

from pathlib import Path

import pytest

from tests.support.engine_jobs import Jobs, run_jobs
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.quantized_checkpoints import MTP_LAYERS, write_int8
from vllm_mtp.integration.load.doctor import weight_facts

PROMPTS = [list(prompt) for prompt in heldout_prompts(8, max_tokens=48)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("int8")
    return {
        "whole": write_int8(folder / "whole", True, []),
        "trunk": write_int8(folder / "trunk", False, [f"re:.*{MTP_LAYERS}.*"]),
    }


def accepted(model: Path, v2: bool = False) -> float:
    """Share of draft tokens; in bfloat16, which vLLM's int8 kernels want."""
    speculation = {
        "method": "mtp_plus",
        "controller": "fixed",
        "num_speculative_tokens": 3,
    }
    engine = {"speculative_config": speculation, "dtype": "bfloat16"}
    num_prompts, num_tokens = (2, 12) if v2 else (8, 40)
    jobs = Jobs(
        model=str(model),
        prompts=PROMPTS[:num_prompts],
        max_tokens=num_tokens,
        engines=[engine | {"max_num_seqs": 8, "max_model_len": 128}],
        v2=v2,
    )
    (result,) = run_jobs(jobs)
    counts = result.counters
    return float(counts["accepted_tokens"] / counts["draft_tokens"])


@pytest.fixture(scope="module")
def unquantized() -> float:
    return accepted(BUNDLED_CHECKPOINT)


@pytest.mark.parametrize("kind", ["whole", "trunk"])
def test_drafts_are_accepted_as_often(
    kind: str, checkpoints: dict[str, Path], unquantized: float
) -> None:
    assert accepted(checkpoints[kind]) > unquantized - 0.05 > 0.3
    facts = weight_facts(str(checkpoints[kind]), 1)
    assert not isinstance(facts, str)
    assert not facts.problems


def test_v2_drafts_with_layers_that_are_not_quantized(
    checkpoints: dict[str, Path],
) -> None:
    assert accepted(checkpoints["trunk"], v2=True) > 0.2
