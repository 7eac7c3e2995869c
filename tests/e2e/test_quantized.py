"""Quantized checkpoints: MTP layers like the trunk, or left as they were."""

from pathlib import Path

import pytest

from tests.support.engine_jobs import Jobs, run_jobs
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.quantized_checkpoints import write_quantized
from vllm_mtp.integration.load.doctor import weight_facts

PROMPTS = [list(prompt) for prompt in heldout_prompts(8, max_tokens=48)]


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


@pytest.mark.parametrize(
    ("kind", "has_quantized_mtp", "loss"),
    [
        ("int8", True, 0.05),
        ("int8", False, 0.05),
        ("int4", True, 0.2),
        ("gptq", False, 0.2),
        ("awq", True, 0.2),
    ],
)
def test_drafts_are_accepted_as_often(
    kind: str, has_quantized_mtp: bool, loss: float, tmp_path: Path, unquantized: float
) -> None:
    model = write_quantized(tmp_path / "model", kind, has_quantized_mtp)
    assert accepted(model) > unquantized - loss > 0.2
    facts = weight_facts(str(model), 1)
    assert not isinstance(facts, str)
    assert not facts.problems


@pytest.mark.parametrize("has_quantized_mtp", [True, False])
def test_fp8_is_looked_at_where_no_kernel_runs_it(
    has_quantized_mtp: bool, tmp_path: Path
) -> None:
    model = write_quantized(tmp_path / "model", "fp8", has_quantized_mtp)
    facts = weight_facts(str(model), 1)
    assert not isinstance(facts, str)
    layout = "" if has_quantized_mtp else "not quantized, unlike the model"
    assert (facts.problems, facts.layout) == ([], layout)


def test_what_vllm_cannot_load_is_named(tmp_path: Path) -> None:
    """Of GPTQ it takes the quantized layers from their names, and numbers MTP layers
    otherwise."""
    facts = weight_facts(str(write_quantized(tmp_path / "model", "gptq")), 1)
    assert not isinstance(facts, str)
    assert {problem.kind for problem in facts.problems} == {"missing", "unknown"}


def test_v2_drafts_with_layers_that_are_not_quantized(tmp_path: Path) -> None:
    model = write_quantized(tmp_path / "model", "int8", has_quantized_mtp=False)
    assert accepted(model, v2=True) > 0.2
