"""Where the time of a step goes, and what it launches, for a while.

Methods are wrapped with timers on Model Runner V1 of the engine's own process; with the
other runner there is no split. Launches are counted with either.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

VERIFY, DRAFT, METRICS = "verify", "draft", "metrics"

_KIND_OF = {
    "cudaLaunchKernel": "kernels",
    "cudaLaunchKernelExC": "kernels",
    "cuLaunchKernel": "kernels",
    "cuLaunchKernelEx": "kernels",
    "cudaGraphLaunch": "graphs",
    "cudaMemcpyAsync": "copies",
    "cudaMemsetAsync": "copies",
    "cudaStreamSynchronize": "waits",
    "cudaEventSynchronize": "waits",
    "cudaDeviceSynchronize": "waits",
}
OPERATIONS = "operations"
LAUNCHES = (*dict.fromkeys(_KIND_OF.values()), OPERATIONS)
"""What is counted of a step."""


@dataclass
class Parts:
    """Seconds by part, growing while the methods are wrapped."""

    seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((VERIFY, DRAFT), 0.0)
    )
    is_counting: bool = True
    """Whether the present step is one of those to be counted."""


@contextmanager
def timed_parts(
    runner: Any, counters: Iterable[tuple[Any, Sequence[str]]] = ()
) -> Iterator[Parts | None]:
    """Sum the seconds of the target's pass with sampling, of drafting, of counting.

    Yields:
        What is summed; None where nothing can be timed.
    """
    if not hasattr(runner, "_model_forward"):
        yield None
        return
    parts = Parts()
    with wrapping(partial(_timed, parts=parts)) as wrap:
        # The target's pass, its head, and (rejection) sampling.
        wrap(runner, "_model_forward", VERIFY)
        wrap(runner.model, "compute_logits", VERIFY)
        wrap(runner, "_sample", VERIFY)
        if getattr(runner, "drafter", None) is not None:
            wrap(runner.drafter, "propose", DRAFT)
        for counter, names in counters:
            parts.seconds[METRICS] = 0.0
            for name in names:
                wrap(counter, name, METRICS)
        yield parts


@contextmanager
def counted_launches() -> Iterator[Parts]:
    """Count what this process launches; `Parts.seconds` has the counts in the end."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    parts, counts = Parts({}), Counter[str]()
    with profile(activities=activities) as profiler:
        yield parts
    for event in profiler.key_averages():
        kind = _KIND_OF.get(event.key, "")
        counts[OPERATIONS if event.key.startswith("aten::") else kind] += event.count
    parts.seconds |= {kind: float(counts[kind]) for kind in LAUNCHES}


@contextmanager
def wrapping(timed: Callable[..., Any]) -> Iterator[Callable[[Any, str, str], None]]:
    """Wraps methods of instances, and takes the wrappers off in the end.

    Yields:
        Wraps a method, by its owner, its name and its part.
    """
    replaced: list[tuple[dict[str, Any], str, Any]] = []

    def wrap(owner: Any, name: str, part: str) -> None:
        own = vars(owner)
        # Our plugin wraps methods of instances, too: those wrappers must come back.
        replaced.append((own, name, own.get(name)))
        own[name] = timed(getattr(owner, name), part=part)

    try:
        yield wrap
    finally:
        for own, name, before in replaced:
            if before is None:
                del own[name]
            else:
                own[name] = before


def _timed(method: Callable[..., Any], parts: Parts, part: str) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        if not parts.is_counting:
            return method(*args, **kwargs)
        _wait_for_device()
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            _wait_for_device()
            parts.seconds[part] += time.perf_counter() - start

    return timed


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
