"""A small tuning run: texts, a target and MTP layers, all of them random."""

import os
import socket
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vllm_mtp.tune.families import FAMILIES
from vllm_mtp.tune.layer import MTPLayer
from vllm_mtp.tune.losses import Head
from vllm_mtp.tune.plan import TuningPlan
from vllm_mtp.tune.ranks import on_ranks
from vllm_mtp.tune.shards import Text, Texts, write_shard
from vllm_mtp.tune.train import Progress, Trainer
from vllm_mtp.tune.unroll import Batch, Drafter, Target

VOCAB_SIZE, WIDTH = 20, 16
CONFIG = {
    "architectures": ["MiMoForCausalLM"],
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
}
PLAN = TuningPlan(
    num_steps=3,
    epochs=2,
    learning_rate=1e-2,
    window_tokens=24,
    batch_tokens=64,
    held_out_share=0.2,
)


def random_drafter(num_layers: int = 1, checkpoints: bool = False) -> Drafter:
    torch.manual_seed(0)
    family = FAMILIES["MiMoForCausalLM"]
    layers = [MTPLayer(family, CONFIG, index) for index in range(num_layers)]
    for each in layers:
        for parameter in each.parameters():
            nn.init.normal_(parameter, std=0.3)
    return Drafter(layers, checkpoints)


def random_target() -> Target:
    torch.manual_seed(1)
    return Target(
        torch.randn(VOCAB_SIZE, WIDTH), Head(torch.randn(VOCAB_SIZE, WIDTH)), None
    )


def write_texts(folder: Path, num_texts: int = 24) -> Texts:
    """Texts that count, in two shards; hidden states tell the token that follows."""
    torch.manual_seed(2)
    weight = random_target().head.weight
    texts = []
    for number in range(num_texts):
        token_ids = (number * 7 + torch.arange(10 + number % 20)) % VOCAB_SIZE
        hidden = weight[token_ids.roll(-1)] + 0.3 * torch.randn(len(token_ids), WIDTH)
        texts.append(Text(f"text-{number}", token_ids, hidden))
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate((texts[::2], texts[1::2])):
        write_shard(folder, number, part)
    return Texts(folder)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def train_on_rank(rank: int, num_ranks: int, folder: str, port: int) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    run_folder = Path(folder) / f"of-{num_ranks}"
    run_folder.mkdir(exist_ok=True)
    with on_ranks("cpu") as ranks:
        drafter = ranks.shard(random_drafter())
        run = Trainer(
            drafter, random_target(), Texts(Path(folder) / "texts"), PLAN, run_folder
        )
        losses: list[float] = []
        run.run(lambda update, loss: losses.append(loss), save_every=2)
        gathered = ranks.gather(drafter)
        if ranks.is_first:
            found: dict[str, Any] = {"weights": gathered, "losses": losses}
            torch.save(found, run_folder / "found.pt")


class BothRanks(Trainer):
    """One process that does what two ranks do."""

    def run_both(self, num_updates: int) -> list[float]:
        losses = []
        self.num_ranks, self.num_updates = 2, num_updates
        parts = []
        for self.rank in range(2):
            self.progress = Progress()
            parts.append(self._counted())
        self.num_ranks, self.progress = 1, Progress()
        for batches in zip(*parts, strict=True):
            placed = map(self.updates.place, batches)
            found = [self.updates.backward(batch) for batch in placed]
            for parameter in self.drafter.parameters():
                assert parameter.grad is not None
                parameter.grad /= 2
            self.updates.step(self._rate_share())
            every = torch.cat([each.found for each in found], -1)
            self.updates.remember(every, self.progress.update)
            self.progress.update += 1
            losses.append(float(found[0].total))
        return losses

    def _counted(self) -> list[Batch]:
        found = []
        for batch in self._rest():
            found.append(batch)
            self.progress.update += 1
            self.progress.batch += 1
        return found
