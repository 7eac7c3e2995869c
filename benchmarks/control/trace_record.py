"""``python -m benchmarks trace record``: one engine serves, every step is written down.

By default the controller is `random`: it tries every draft length in every kind of
step, so the recording knows what each would have cost and brought, and a replay can
judge any controller by it.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.grid.cells import (
    Cell,
    check_context,
    make_waves,
    max_model_len_tokens,
    plan_cells,
)
from benchmarks.grid.engines import BenchGroup, cut_prompts
from benchmarks.grid.options import GridOptions
from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.integration.observe.tracing import check_path
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import START_TIMEOUT_S
from vllm_mtp.tools.option_checks import resolve_model
from vllm_mtp.tools.server_process import exit_on_signals, log_folder


@dataclass(frozen=True)
class RecordOptions:
    """What is recorded."""

    path: Path
    """File to write; it must not exist."""
    load: GridOptions
    """Workloads, concurrencies, temperatures and contexts; the model and its dtype."""
    controller: str = "random"
    request_tokens: int = 96
    """Tokens that each request generates."""
    num_rounds: int = 2
    """How often every combination is served."""


def record_trace(options: RecordOptions, console: Console) -> int:
    """Serve the load; returns the number of lines written.

    Args:
        options: What the user chose.
        console: For progress.

    Raises:
        ConfigError: The file cannot be written, or a value is not allowed.
        ServerError: The engine failed.
    """
    if options.request_tokens < 2 or options.num_rounds < 1:
        raise ConfigError(
            f"tokens: {options.request_tokens}, rounds: {options.num_rounds}; expected "
            "at least 2 and 1"
        )
    path = options.path.absolute()
    check_path(path)
    model = resolve_model(options.load.model)
    check_context(model, options.load)
    with log_folder() as logs, exit_on_signals(), BenchGroup() as group:
        console.print("waiting for the engine")
        config, size = _speculation(options, path), _size(options.load, model)
        engine = group.launch(METHOD, config, size, logs)
        facts = engine.answer(START_TIMEOUT_S)
        prompts = cut_prompts(engine, facts["vocab_size"], options.load)
        for cell in _shuffled(options):
            console.print(f"serving {cell.name}")
            waves = make_waves(cell, prompts, options.request_tokens)
            engine.ask("round", waves=waves, concurrency=cell.concurrency)
    with path.open() as lines:
        return sum(1 for _ in lines)


def _speculation(options: RecordOptions, path: Path) -> dict[str, Any]:
    return {
        "method": METHOD,
        "controller": options.controller,
        "trace_path": str(path),
    }


def _size(load: GridOptions, model: str) -> EngineSize:
    return EngineSize(
        model,
        max_model_len_tokens(load),
        max(load.concurrencies),
        load.dtype,
        load.kv_cache_mib,
    )


def _shuffled(options: RecordOptions) -> list[Cell]:
    """All combinations, round by round in another order: loads change, as they do."""
    order = random.Random(0)
    cells: list[Cell] = []
    for _ in range(options.num_rounds):
        part = plan_cells(options.load)
        order.shuffle(part)
        cells += part
    return cells
