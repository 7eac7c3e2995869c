"""What tuning begins with: prompts, and an MTP layer that was trained for one step.

Published MTP layers foretell one token. That of the bundled model was trained for
several, so it is of no use to show what ``vllm-mtp tune`` does.
"""

import json
import random
from pathlib import Path

import torch
from torch import nn

from examples.tiny_model.corpus import (
    collect_sources,
    split_by_file,
    standard_library_root,
)
from vllm_mtp.tune.checkpoint import Checkpoint, write_head
from vllm_mtp.tune.plan import TuningPlan
from vllm_mtp.tune.shards import Texts, count_tokens
from vllm_mtp.tune.train import Trainer
from vllm_mtp.tune.unroll import Drafter

MIN_CHARACTERS, MAX_CHARACTERS = 100, 1200
_ZERO_AT_FIRST = ("o_proj.weight", "down_proj.weight", "bias")


def write_training_prompts(output: Path, num_prompts: int, seed: int = 5) -> None:
    """Cut prompts of some lines from files that the bundled model was trained on."""
    files = split_by_file(collect_sources(standard_library_root())).train
    numbers = random.Random(seed)
    rows: list[dict[str, str]] = []
    while len(rows) < num_prompts:
        lines = files[numbers.randrange(len(files))].text.splitlines(keepends=True)
        start = numbers.randrange(len(lines))
        text = "".join(lines[start : start + numbers.randint(6, 40)])
        if len(text) >= MIN_CHARACTERS:
            name = f"train-{len(rows):05d}"
            rows.append({"id": name, "text": text[:MAX_CHARACTERS]})
    output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def train_one_step_head(
    model: Path, texts: Path, output: Path, num_rows: int = 4096, epochs: float = 0.5
) -> None:
    """Train an MTP layer from nothing to foretell one token, and write it as a head.

    Args:
        model: Folder of the model.
        texts: Folder of texts that ``vllm-mtp tune`` has collected.
        output: Folder for the head.
        num_rows: Commonest tokens that are compared.
        epochs: Passes over the texts.
    """
    checkpoint = Checkpoint(model)
    drafter = checkpoint.drafter(checkpoints=False, loads=False)
    _initialize(drafter)
    vocab_size = int(checkpoint.text_config["vocab_size"])
    drafted = count_tokens(texts, vocab_size).topk(num_rows).indices.sort().values
    plan = TuningPlan(
        num_steps=1,
        loss="kl",
        learning_rate=0.004,
        batch_tokens=2048,
        window_tokens=512,
        epochs=epochs,
    )
    run = output / "run"
    run.mkdir(parents=True, exist_ok=True)
    target = checkpoint.target(torch.device("cpu"), drafted)
    trainer = Trainer(drafter, target, Texts(texts), plan, run)
    trainer.run(lambda update, loss: trainer.note(loss=loss))
    weights: dict[str, torch.Tensor] = {}
    for layer in drafter.layers:
        weights |= layer.stored(layer.state_dict())  # type: ignore[operator]
    stored = {name: weight.bfloat16() for name, weight in weights.items()}
    measured = trainer.measure()._asdict()
    write_head(output, checkpoint, stored, {"plan": plan.model_dump(), **measured})


def _initialize(drafter: Drafter) -> None:
    torch.manual_seed(0)
    for name, parameter in drafter.named_parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        if name.endswith(_ZERO_AT_FIRST):
            nn.init.zeros_(parameter)
