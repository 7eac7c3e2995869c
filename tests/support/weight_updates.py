"""New weights for running engines, brought as vLLM's users bring them."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SPECULATION = {"method": "mtp_plus", "controller": "fixed"}


def write_other(source: Path, folder: Path, has_noise: bool) -> Path:
    """The same model with other words in its head.

    Args:
        source: A checkpoint.
        folder: Where the other one goes.
        has_noise: Its MTP layers are noise, too.
    """
    shutil.copytree(source, folder)
    (file,) = folder.glob("*.safetensors")
    weights, random = load_file(file), torch.Generator().manual_seed(1)
    order = torch.randperm(len(weights["lm_head.weight"]), generator=random)
    weights["lm_head.weight"] = weights["lm_head.weight"][order].contiguous()
    layers = [name for name in weights if "mtp_layers" in name]
    assert layers
    for name in layers if has_noise else ():
        noise = torch.randn(weights[name].shape, generator=random)
        weights[name] = (0.05 * noise).to(weights[name].dtype)
    save_file(weights, file, metadata={"format": "pt"})
    return folder


class TransferFromFiles:
    """Stands for vLLM's transfer engines (NCCL, IPC), which take a GPU.

    The sessions are the worker's, and so is what it asks of an engine.
    """

    supports_draft_weight_update = True

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.reset_weight_update_target()

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        self._model, self._config = model, model_config

    def reset_weight_update_target(self) -> None:
        worker = self._worker
        self.set_weight_update_target(
            worker.get_model(), worker.vllm_config.model_config
        )

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self._model)

    def update_weights(self, info: dict[str, Any]) -> None:
        self._model.load_weights(_weights_of(Path(info["folder"])))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self._model, self._config)

    def shutdown(self) -> None:
        """Nothing is open."""


def _weights_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for file in folder.glob("*.safetensors"):
        yield from load_file(file).items()


def reload(llm: Any, folder: Path) -> None:
    """As verl does with a checkpoint."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})


def transfer(llm: Any, folder: Path) -> None:
    """As trainers do that send weights: the target's, then the MTP layers'."""
    from tests.support.engines import worker_of

    worker = worker_of(llm)
    worker.weight_transfer_engine = TransferFromFiles(worker)
    for start in ("start_weight_update", "start_draft_weight_update"):
        llm.collective_rpc(start)
        llm.collective_rpc("update_weights", args=({"folder": str(folder)},))
        llm.collective_rpc("finish_weight_update")


WAYS = {"reload": reload, "transfer": transfer}


def answers(llm: Any, prompts: Any, num_tokens: int) -> tuple[list[list[int]], float]:
    """Texts, and the share of their draft tokens that was accepted."""
    from tests.support.engines import draft_counts, greedy

    before = draft_counts(llm)
    texts = greedy(llm, prompts, num_tokens)
    after = draft_counts(llm)
    drafted = after.num_draft_tokens - before.num_draft_tokens
    return texts, (after.num_accepted_tokens - before.num_accepted_tokens) / drafted


def play(order: dict[str, Any]) -> None:
    """An engine before and after it gets other weights; in a fork of V2's."""
    from tests.support.engines import engine

    options = {"speculative_config": order["spec"]}
    options |= {"max_num_seqs": 4, "max_model_len": 128}
    with engine(Path(order["untrained"]), **options) as llm:
        found = {"before": answers(llm, order["prompts"], 20)}
        reload(llm, Path(order["good"]))
        llm.reset_prefix_cache()
        found["after"] = answers(llm, order["prompts"], 20)
    Path(order["result"]).write_text(json.dumps(found))
