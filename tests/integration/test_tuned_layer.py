"""The layer that is trained is the one that vLLM serves, in every draft step."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests.support.drafter_passes import drafter_of
from tests.support.engines import family_engine, greedy
from tests.support.random_checkpoints import random_prompts, write_checkpoint
from vllm_mtp.tune.attention import Chain
from vllm_mtp.tune.families import family_of
from vllm_mtp.tune.layer import MTPLayer

DEPTH = 3


class Pass(NamedTuple):
    """Of vLLM's draft model."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    previous: torch.Tensor
    output: Any


def watch(drafter: Any) -> list[Pass]:
    passes: list[Pass] = []
    forward = drafter.model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        given = [kwargs[n].clone() for n in ("input_ids", "positions", "hidden_states")]
        output = forward(*args, **kwargs)
        passes.append(Pass(*given, output))
        return output

    drafter.model.forward = watched
    return passes


@pytest.mark.parametrize("family", ["mimo", "deepseek_v3", "glm4_moe"])
def test_every_draft_step_is_that_of_the_served_layer(
    family: str, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path, family)
    (prompt,) = random_prompts(1)
    speculation = {
        "method": "mtp_plus",
        "controller": "fixed",
        "num_speculative_tokens": DEPTH,
        "draft_weights": "same",
    }
    with family_engine(model, family, speculation) as llm:
        passes = watch(drafter_of(llm))
        greedy(llm, [prompt], 2)
    config = json.loads((model / "config.json").read_text())
    weights = load_file(model / "model.safetensors")
    layer = MTPLayer(family_of(config), config, 0)
    layer.load(weights.__getitem__)
    embeddings = weights["model.embed_tokens.weight"]
    first, num_rows = passes[0], len(prompt)
    chain, previous = Chain(), first.previous[None, :num_rows]
    token_ids, positions = first.token_ids[:num_rows], first.positions[:num_rows]
    for step, served in enumerate(passes[:DEPTH]):
        if step:  # of the draft that begins at the last row
            token_ids = token_ids.clone()
            token_ids[-1] = served.token_ids[0]
            assert served.positions[0] == positions[-1] + step
        _, previous = layer(
            previous, embeddings[token_ids][None], positions[None] + step, chain
        )
        output = served.output
        wanted_previous = output[1] if isinstance(output, tuple) else output
        rows = slice(num_rows) if step == 0 else slice(1)
        torch.testing.assert_close(
            previous[0, rows if step == 0 else slice(-1, None)],
            wanted_previous[rows],
            rtol=1e-4,
            atol=1e-4,
        )
