"""A small model that a head can be adapted to, and its traffic."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.tuning import CONFIG, VOCAB_SIZE, WIDTH, random_drafter
from vllm_mtp.tune.adapting import AdaptingPlan
from vllm_mtp.tune.checkpoint import Checkpoint, stored_weights, write_head
from vllm_mtp.tune.reservoir import INBOX
from vllm_mtp.tune.shards import Text, write_shard


def write_model(folder: Path) -> Checkpoint:
    """Of the config of ``tests/support/tuning.py``, all of it random."""
    torch.manual_seed(1)
    folder.mkdir(parents=True)
    words = {
        name: torch.randn(VOCAB_SIZE, WIDTH)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    words["model.norm.weight"] = torch.ones(WIDTH)
    save_file(words, folder / "target.safetensors")
    (folder / "config.json").write_text("{}")
    checkpoint = Checkpoint(folder)
    checkpoint.config = CONFIG | {"num_nextn_predict_layers": 1}
    write_head(folder, checkpoint, stored_weights(random_drafter()), {})
    return Checkpoint(folder)


def counting_texts(model: Checkpoint, num_texts: int, first: int = 0) -> list[Text]:
    """Texts that count; their hidden states tell the token that follows."""
    random = torch.Generator().manual_seed(first)
    words = model.tensor("lm_head.weight")
    texts = []
    for number in range(first, first + num_texts):
        token_ids = (number * 7 + torch.arange(12 + number % 9)) % VOCAB_SIZE
        noise = torch.randn(len(token_ids), WIDTH, generator=random)
        hidden = words[token_ids.roll(-1)] + 0.3 * noise
        texts.append(Text(f"text-{number}", token_ids, hidden))
    return texts


def put(folder: Path, number: int, texts: Sequence[Text]) -> None:
    """What a server does."""
    write_shard(folder / INBOX, number, texts)


def plan_of(folder: Path, model: Path, **more: Any) -> AdaptingPlan:
    """Of a trainer of this model."""
    given = {"num_steps": 3, "num_rows": 0, "max_bytes": 2**24} | more
    return AdaptingPlan(folder=folder, model=str(model), **given)
