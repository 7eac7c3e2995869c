"""Heads that a trainer would have found, for engines that adapt."""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.heldout import BUNDLED_CHECKPOINT, heldout_prompts
from tests.support.weight_updates import answers
from vllm_mtp.tune.adapting import STATE_FILE, State, head_folder
from vllm_mtp.tune.checkpoint import Checkpoint, stored_weights, write_head

PROMPTS = [list(prompt) for prompt in heldout_prompts(6, max_tokens=32)]
NUM_TOKENS = 24
SPECULATION = {"method": "mtp_plus", "controller": "fixed", "draft_vocab": "full"}
ASLEEP = [sys.executable, "-c", "import sys; sys.stdin.read()"]
"""Instead of a trainer: ends with its server, too."""


def write_heads(folder: Path) -> dict[str, str]:
    """The bundled layer, and one that is noise."""
    model = Checkpoint(BUNDLED_CHECKPOINT)
    drafter = model.drafter(False)
    good, dtypes = stored_weights(drafter), model.dtypes(drafter)
    good = {name: each.to(dtypes[name]) for name, each in good.items()}
    random = torch.Generator().manual_seed(1)
    bad = {
        name: (0.05 * torch.randn(each.shape, generator=random)).to(each.dtype)
        for name, each in good.items()
    }
    for name, weights in (("good", good), ("bad", bad)):
        write_head(folder / name, model, weights, {})
    return {name: str(folder / name) for name in ("good", "bad")}


@contextmanager
def planted(steps_between_looks: int = 4) -> Iterator[None]:
    """Within: engines have no trainer, and look often."""
    from vllm_mtp.integration.worker import adapting, traffic

    with (
        mock.patch.object(traffic, "TRAINER", ASLEEP),
        mock.patch.object(adapting, "STEPS_BETWEEN_LOOKS", steps_between_looks),
    ):
        yield


def traffic_of(llm: Any) -> Any:
    """Of an engine in this process."""
    from tests.support.engines import model_runner

    runner = model_runner(llm)
    drafter = getattr(runner, "drafter", None) or runner._speculator
    return drafter.adapter._traffic


def say(llm: Any, number: int, head: str | None = None, **more: Any) -> None:
    """What a trainer does when it has found a head."""
    folder = traffic_of(llm).folder
    if head is not None:
        shutil.copytree(head, head_folder(folder, number))
    state = State(served=number, reason="planted", **more)
    (folder / STATE_FILE).write_text(json.dumps(state._asdict()))


def play(order: dict[str, Any]) -> None:
    """An engine before a head is found, after it, and after it was taken back; in this
    process, or in a fork of V2's."""
    from tests.support.engines import engine

    speculation = SPECULATION | {"model": order["heads"]["bad"], "adapt": True}
    options = {"speculative_config": speculation} | order["options"]
    found = {}
    with planted(), engine(BUNDLED_CHECKPOINT, **options) as llm:
        for when, number, head in (
            ("before", 0, None),
            ("served", 1, order["heads"]["good"]),
            ("back", 0, None),
        ):
            say(llm, number, head)
            answers(llm, PROMPTS[:2], 8)  # in these steps it looks
            found[when] = answers(llm, PROMPTS, NUM_TOKENS)
        found["folder"] = str(traffic_of(llm).folder)
        found["levels"] = traffic_of(llm).levels
    Path(order["result"]).write_text(json.dumps(found))
