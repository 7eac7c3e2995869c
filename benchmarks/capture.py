"""What an engine's start spends on CUDA graphs, as vLLM's model runner returns it."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from vllm.compilation.counter import compilation_counter
from vllm.platforms import current_platform


@dataclass
class Captured:
    """Graphs of an engine; all 0 where it has none."""

    graph_seconds: float = 0.0
    graph_bytes: int = 0
    """Of the GPU: meaningless where another process takes or frees memory meanwhile."""
    num_graphs: int = 0
    """Piecewise ones included, of which a batch has one for each layer."""
    num_full_graphs: int = 0
    """Of Model Runner V2."""


@contextmanager
def noted_capture(runners: Iterable[type] | None = None) -> Iterator[Captured]:
    """Take note of the graphs that are captured meanwhile.

    Args:
        runners: Classes whose ``capture_model`` does so; None: vLLM's.

    Yields:
        What was captured.
    """
    captured = Captured()
    with ExitStack() as stack:
        for runner in _vllm_runners() if runners is None else runners:
            noted = _noted(runner.capture_model, captured)  # type: ignore[attr-defined]
            stack.enter_context(patch.object(runner, "capture_model", noted))
        yield captured


def _vllm_runners() -> tuple[type, ...]:
    if not current_platform.is_cuda_alike():
        return ()
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as V2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as V1

    return V1, V2


def _noted(capture_model: Callable[..., int], captured: Captured) -> Callable[..., int]:
    @functools.wraps(capture_model)  # its parameters are looked up
    def noted(runner: Any, *args: Any, **kwargs: Any) -> int:
        num_before = compilation_counter.num_cudagraph_captured
        began_at_s = time.perf_counter()
        captured.graph_bytes = capture_model(runner, *args, **kwargs)
        captured.graph_seconds = time.perf_counter() - began_at_s
        captured.num_graphs = compilation_counter.num_cudagraph_captured - num_before
        captured.num_full_graphs = sum(len(each) for each in _full_graphs(runner))
        return captured.graph_bytes

    return noted


def _full_graphs(runner: Any) -> Iterator[dict[Any, Any]]:
    """Of each manager: the target's, and those that a speculator has."""
    managers = [getattr(runner, "cudagraph_manager", None)]
    if (speculator := getattr(runner, "speculator", None)) is not None:
        managers += vars(speculator).values()
    for manager in managers:
        if isinstance(graphs := getattr(manager, "graphs", None), dict):
            yield graphs
