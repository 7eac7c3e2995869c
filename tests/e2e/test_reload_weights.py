"""New weights under a running server: its drafts are the new weights', too."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines import draft_counts, engine, greedy, model_runner
from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts

SPECULATION = {"method": "mtp_plus", "controller": "fixed"}


@pytest.fixture
def other_head(tmp_path: Path) -> Path:
    """The same model, but its head names other tokens."""
    folder = tmp_path / "other"
    shutil.copytree(BUNDLED_CHECKPOINT, folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    (name,) = [name for name in weights if name == "lm_head.weight"]
    order = torch.randperm(
        len(weights[name]), generator=torch.Generator().manual_seed(1)
    )
    weights[name] = weights[name][order].contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def answers(llm: Any, prompts: Any) -> tuple[list[list[int]], float]:
    """Texts, and the share of their draft tokens that was accepted."""
    before = draft_counts(llm)
    texts = greedy(llm, prompts, 40)
    after = draft_counts(llm)
    drafted = after.num_draft_tokens - before.num_draft_tokens
    return texts, (after.num_accepted_tokens - before.num_accepted_tokens) / drafted


@pytest.mark.parametrize("draft_vocab", ["auto", "full"])
def test_after_a_reload_drafts_are_accepted_as_from_the_start(
    draft_vocab: str, other_head: Path
) -> None:
    prompts = heldout_prompts(8, max_tokens=48)
    speculation = SPECULATION | {"draft_vocab": draft_vocab}
    with engine(other_head, speculative_config=speculation) as llm:
        wanted, accepted = answers(llm, prompts)
    with engine(BUNDLED_CHECKPOINT, speculative_config=speculation) as llm:
        for _ in range(3):  # until the vocabulary is in use, where there is one
            assert answers(llm, prompts)[0] != wanted
        assert model_runner(llm).drafter.draft_vocab.is_active == (
            draft_vocab == "auto"
        )
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other_head)})
        llm.reset_prefix_cache()
        # At once: later a learned vocabulary has read rows of the new head anyhow.
        found, accepted_now = answers(llm, prompts)
    assert found == wanted
    assert accepted > 0.1
    assert accepted_now == pytest.approx(accepted, abs=0.03)
