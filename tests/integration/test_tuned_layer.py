"""The layer that is trained is the one that vLLM serves, in every draft step."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.quantized_checkpoints import write_quantized
from tests.support.random_checkpoints import random_prompts, write_checkpoint
from tests.support.served_layer import DRAFT_LENGTH, served_passes
from vllm_mtp.config import ConfigError
from vllm_mtp.tune.attention import Chain
from vllm_mtp.tune.checkpoint import Checkpoint, stored_weights, write_head
from vllm_mtp.tune.families import family_of

HYBRID = ("qwen3_next", "qwen3_5")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("name", ["mimo", "deepseek_v3", "glm4_moe", *HYBRID])
def test_every_draft_step_is_that_of_the_served_layer(
    name: str, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path / name, name)
    (prompt,) = random_prompts(1)
    found = served_passes(model, prompt, tmp_path, is_interpreted=name in HYBRID)
    checkpoint = Checkpoint(model)
    target = checkpoint.target(torch.device("cpu"))
    (layer,) = checkpoint.drafter(False).layers
    assert compare(found, len(prompt), layer, target) == []
    # A frame that is not the family's is noticed.
    other = dataclasses.replace(
        layer.family, embedding_first=not layer.family.embedding_first
    )
    layer.family = other
    assert compare(found, len(prompt), layer, target)


def compare(found: dict[str, Any], num_rows: int, layer: Any, target: Any) -> list[str]:
    """What is not that of the served layer."""
    wrong = []
    first = found["passes"][0]
    teacher = target.head.weight @ target.read(first["previous"][:num_rows]).T
    if not torch.allclose(teacher.T, found["target_logits"], **CLOSE):
        wrong.append("target")
    chain, previous = Chain(), first["previous"][None, :num_rows]
    token_ids, positions = (first[n][:num_rows] for n in ("token_ids", "positions"))
    for step in range(DRAFT_LENGTH):
        served = found["passes"][step]
        if step:  # of the draft that begins at the last row
            token_ids = token_ids.clone()
            token_ids[-1] = served["token_ids"][0]
            assert served["positions"][0] == positions[-1] + step
        normed, previous = layer(
            previous, target.embed(token_ids)[None], positions[None] + step, chain
        )
        logits = normed[0] @ target.head.weight.T
        ours, theirs = (
            (slice(num_rows), slice(num_rows)) if step == 0 else (slice(-1, None), [0])
        )
        for part, made in (("output", previous[0]), ("logits", logits)):
            if not torch.allclose(made[ours], served[part][theirs], **CLOSE):
                wrong.append(f"{part} of step {step + 1}")
    return wrong


def test_each_of_several_layers_is_the_served_one(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "glm4_moe", "glm4_moe", num_mtp_layers=2)
    (prompt,) = random_prompts(1)
    found = served_passes(model, prompt, tmp_path, is_v2=True)
    checkpoint, rows = Checkpoint(model), slice(len(prompt))
    target = checkpoint.target(torch.device("cpu"))
    layers = checkpoint.drafter(False).layers
    previous = found["passes"][0]["previous"][None, rows]
    for layer, served in zip(layers, found["passes"][:2], strict=True):
        normed, previous = layer(
            previous,
            target.embed(served["token_ids"][rows])[None],
            served["positions"][None, rows],
            Chain(),
        )
        logits = normed[0] @ target.head.weight.T
        torch.testing.assert_close(previous[0], served["output"][rows], **CLOSE)
        torch.testing.assert_close(logits, served["logits"][rows], **CLOSE)
        # Of the same text: the first rows' tokens move on by one.
        assert served["positions"][rows].tolist() == list(range(len(prompt)))


def test_layers_beyond_the_checkpoints_own_begin_as_copies(tmp_path: Path) -> None:
    one = Checkpoint(write_checkpoint(tmp_path / "one", "glm4_moe", num_mtp_layers=1))
    drafter = one.drafter(False, num_layers=3)
    weights, dtypes = stored_weights(drafter), one.dtypes(drafter)
    assert set(weights) == set(dtypes)
    stored = {name: weight.to(dtypes[name]) for name, weight in weights.items()}
    write_head(tmp_path / "three", one, stored, {}, num_layers=3)
    written = Checkpoint(tmp_path / "three")
    assert written.num_mtp_layers == 3
    layers = written.drafter(False).layers
    assert len({layer.block_prefix for layer in layers}) == 3
    first = one.drafter(False).layers[0].state_dict()
    for layer in layers:
        for name, weight in layer.state_dict().items():
            assert torch.equal(weight, first[name])


def test_numbers_of_layers_that_are_not_possible_are_refused(tmp_path: Path) -> None:
    two = Checkpoint(write_checkpoint(tmp_path / "two", "glm4_moe", num_mtp_layers=2))
    with pytest.raises(ConfigError, match=r"mtp_layers=1 is not allowed: .* has 2$"):
        two.drafter(False, num_layers=1)
    bundled = Checkpoint(BUNDLED_CHECKPOINT)
    with pytest.raises(ConfigError, match=r"has 1, and vLLM runs no more of its fam"):
        bundled.drafter(False, num_layers=2)


def test_other_families_are_refused_in_a_sentence() -> None:
    with pytest.raises(
        ConfigError, match="model: Ernie4_5_MoeForCausalLM is not a fam"
    ):
        family_of({"architectures": ["Ernie4_5_MoeForCausalLM"]})


def test_quantized_layers_are_refused_in_a_sentence(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write_quantized(tmp_path / "model", "int8"))
    with pytest.raises(
        ConfigError, match=r"is quantized .*: tune the model that it was"
    ):
        checkpoint.drafter(False)
