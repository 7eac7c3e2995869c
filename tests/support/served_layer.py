"""Passes of vLLM's draft model, kept to be compared with."""

import os
from pathlib import Path
from typing import Any

import torch

from tests.support.engine_jobs import V1, V2

DRAFT_LENGTH = 3


def served_passes(
    model: Path,
    prompt: list[int],
    folder: Path,
    *,
    is_interpreted: bool = False,
    is_v2: bool = False,
) -> dict[str, Any]:
    """What the draft model is given and makes of it, after a prompt.

    Args:
        model: Folder of a checkpoint.
        prompt: Token ids.
        folder: For files.
        is_interpreted: Triton's interpreter runs the kernels of a GPU.
        is_v2: On Model Runner V2, which needs that.

    Returns:
        ``passes``: dictionaries of ``token_ids``, ``positions``, ``previous``,
        ``output``, what the next step is given, and ``logits``; ``target_logits`` of
        the first one's rows.
    """
    order = {
        "model": str(model),
        "prompt": prompt,
        "is_v2": is_v2,
        "result": str(folder / "passes.pt"),
    }
    server = V2 if is_interpreted or is_v2 else V1
    server.run(f"{__name__}:run_in_fork", order, folder / "log", 300)
    found: dict[str, Any] = torch.load(folder / "passes.pt")
    return found


def run_in_fork(order: dict[str, Any]) -> None:
    """Draft once after a prompt."""
    from tests.support import absent_torchvision
    from tests.support.drafter_passes import drafter_of
    from tests.support.engines import family_engine, greedy, worker_of

    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(order["is_v2"]))
    model = Path(order["model"])
    speculation = {
        "method": "mtp_plus",
        "controller": "fixed",
        # Unset on V2: as many as there are layers.
        **({} if order["is_v2"] else {"num_speculative_tokens": DRAFT_LENGTH}),
        "draft_weights": "same",
        "draft_vocab": "full",
    }
    with (
        absent_torchvision.stand_in(),
        family_engine(model, model.name, speculation) as llm,
    ):
        passes = _watch(drafter_of(llm))
        greedy(llm, [order["prompt"]], 2)
        passes = passes[:DRAFT_LENGTH]
        rows = passes[0]["previous"][: len(order["prompt"])]
        target_logits = worker_of(llm).get_model().compute_logits(rows)
    found = {"passes": passes, "target_logits": target_logits}
    torch.save(found, order["result"])


def _watch(drafter: Any) -> list[dict[str, torch.Tensor]]:
    passes: list[dict[str, torch.Tensor]] = []
    forward = drafter.model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        kept = {
            "token_ids": kwargs["input_ids"].clone(),
            "positions": kwargs["positions"].clone(),
            "previous": kwargs["hidden_states"].clone(),
        }
        output = forward(*args, **kwargs)
        read, fed_back = output if isinstance(output, tuple) else (output, output)
        step = kwargs.get("spec_step_idx", 0)
        logits = drafter.model.compute_logits(read, spec_step_idx=step)
        passes.append(kept | {"output": fed_back.clone(), "logits": logits.clone()})
        return output

    drafter.model.forward = watched
    return passes
