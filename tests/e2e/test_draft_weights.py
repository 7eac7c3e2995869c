"""Drafts from weights in 8 bits: never another output, nearly the same drafts."""

from pathlib import Path
from typing import Any

import pytest

from examples.tiny_model.expand import Expansion
from examples.tiny_model.grow import expand_checkpoint
from tests.e2e.conftest import NUM_TOKENS, Reference
from tests.support.engines import counters, engine, greedy, model_runner
from tests.support.heldout import BUNDLED_CHECKPOINT
from vllm_mtp.integration.cpu.int8_drafts import has_kernel
from vllm_mtp.integration.cpu.int8_weights import FewRowsLinear, Int8Linear

pytestmark = pytest.mark.skipif(
    not has_kernel(), reason="no x86 CPU with AVX2 and without AMX"
)

ROUNDED = (FewRowsLinear, Int8Linear)
FIXED = {"method": "mtp_plus", "controller": "fixed"}
NUM_PROMPTS = 8
SIZES = Expansion(hidden_size=512, intermediate_size=1024)
"""All matrices of the MTP layer but those of its attention are large enough; the
expanded model computes what the bundled one does."""


@pytest.fixture(scope="module")
def expanded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "expanded"
    expand_checkpoint(BUNDLED_CHECKPOINT, folder, SIZES)
    return folder


def rounded_layers(llm: Any) -> set[str]:
    """Names of the draft model's modules whose products are in 8 bits."""
    model = model_runner(llm).drafter.model
    return {
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        for attribute in vars(module).values()
        if isinstance(attribute, ROUNDED)
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_output_is_the_targets_and_as_much_is_accepted(
    expanded: Path, dtype: str, reference: Reference
) -> None:
    prompts = reference.prompts[:NUM_PROMPTS]
    accepted, texts = {}, {}
    for draft_weights in ("same", "auto"):
        spec = FIXED | {"draft_weights": draft_weights}
        with engine(
            expanded, max_num_seqs=8, dtype=dtype, speculative_config=spec
        ) as llm:
            texts[draft_weights] = greedy(llm, prompts, NUM_TOKENS)
            accepted[draft_weights] = counters(llm)["accepted_tokens"]
            rounded = rounded_layers(llm)
            head = next(iter(model_runner(llm).drafter.draft_vocab._heads.values()))
        if draft_weights == "same":
            assert not rounded
            assert not isinstance(head.cpu_linear, ROUNDED)
        else:
            assert rounded == {"gate_up_proj"}
            assert isinstance(head.cpu_linear, ROUNDED)
    if dtype == "float32":
        assert texts["auto"] == reference.continuations[:NUM_PROMPTS]
        assert texts["same"] == texts["auto"]
    assert accepted["same"] > 300
    assert accepted["auto"] == pytest.approx(accepted["same"], rel=0.03)
