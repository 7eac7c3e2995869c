"""Times contenders in turns: every repeat measures each once, and who begins rotates.

Host time: calls issued one after another, one synchronisation at the end, divided by
their number. On a GPU that is the longer of what the host and what the device takes.

Device time (GPU only): the same calls captured in a CUDA graph and replayed between two
events. What the host does in between is not in the graph, the gaps between kernels are.
"""

import math
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch.utils.benchmark import Timer

from benchmarks.spread import Spread

MIN_HOST_S = 0.01
"""Least time that one host measurement takes, however fast the call."""
MIN_DEVICE_S = 0.005
MAX_CALLS = 10_000
MAX_GRAPH_CALLS = 1024


class ContendersDifferError(RuntimeError):
    """Two contenders gave different results: times of them would compare nothing."""


class Contender(NamedTuple):
    """One way to do the work of a case."""

    name: str
    calls: Sequence[Callable[[], object]]
    """Taken in turns. They do equally much, on different memory, so that a small case
    does not run in the caches that it warmed itself."""
    waits_for_device: bool = False
    """Waits for the GPU on its way, so no CUDA graph can hold it."""


class Timing(NamedTuple):
    """What one call of a contender takes, in microseconds."""

    host_us: Spread
    device_us: Spread | None
    why_no_device_us: str | None

    @property
    def best_us(self) -> Spread:
        """On the device where that was measured, else as the host sees it."""
        return self.device_us or self.host_us

    def as_json(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "host_us": self.host_us.as_json(),
            "device_us": self.device_us.as_json() if self.device_us else None,
            "why_no_device_us": self.why_no_device_us,
        }


def measure(
    contenders: Sequence[Contender], num_repeats: int, device: torch.device
) -> dict[str, Timing]:
    """Time the contenders of one case.

    Returns:
        Timings by name, in the given order.
    """
    clocks = [_Clock(contender, device) for contender in contenders]
    for repeat in range(num_repeats):
        first = repeat % len(clocks)
        for clock in [*clocks[first:], *clocks[:first]]:
            clock.sample()
    return {clock.contender.name: clock.timing() for clock in clocks}


def measure_copy(
    num_bytes: int, num_repeats: int, device: torch.device
) -> tuple[float, ...]:
    """Bandwidth of a large ``copy_`` in GB/s, bytes read and bytes written counted."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    copy = Contender("copy", [lambda: target.copy_(source)])
    timing = measure([copy], num_repeats, device)["copy"]
    return tuple(2 * num_bytes / us / 1e3 for us in timing.best_us.each)


class _Clock:
    """Measures one contender, again and again."""

    def __init__(self, contender: Contender, device: torch.device) -> None:
        self.contender = contender
        self._host_us: list[float] = []
        self._device_us: list[float] = []
        self._why_no_device_us: str | None = None
        following = cycle(contender.calls).__next__
        self._timer = Timer(
            "following()()",
            globals={"following": following},
            num_threads=torch.get_num_threads(),
        )
        call_s = self._timer.timeit(1).mean
        self._num_calls = max(1, min(MAX_CALLS, math.ceil(MIN_HOST_S / call_s)))
        self._graph: _Graph | None = None
        if device.type != "cuda":
            self._why_no_device_us = "there is no separate device"
        elif contender.waits_for_device:
            self._why_no_device_us = "it waits for the device, no CUDA graph can"
        else:
            self._capture(call_s)

    def sample(self) -> None:
        self._host_us.append(1e6 * self._timer.timeit(self._num_calls).mean)
        if self._graph is not None:
            self._device_us.append(self._graph.replay_us())

    def timing(self) -> Timing:
        return Timing(
            Spread.of(self._host_us),
            Spread.of(self._device_us) if self._device_us else None,
            self._why_no_device_us,
        )

    def _capture(self, call_s: float) -> None:
        try:
            self._graph = _Graph(self.contender.calls, call_s)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            self._why_no_device_us = f"no CUDA graph could be captured: {reason}"


class _Graph:
    """Calls captured in a CUDA graph."""

    def __init__(self, calls: Sequence[Callable[[], object]], call_s: float) -> None:
        num_calls = min(MAX_GRAPH_CALLS, math.ceil(MIN_DEVICE_S / call_s))
        # All of the calls, equally often.
        self._num_calls = len(calls) * max(1, round(num_calls / len(calls)))
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            calls[0]()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # The outer block restores the stream where a capture fails.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(self._graph, stream=stream),
        ):
            for call in islice(cycle(calls), self._num_calls):
                call()
        self._num_replays = 1
        replay_s = 1e-6 * self.replay_us() * self._num_calls
        self._num_replays = max(1, math.ceil(MIN_DEVICE_S / replay_s))

    def replay_us(self) -> float:
        """Microseconds of one call."""
        start, end = (_event() for _ in range(2))
        self._graph.replay()
        start.record()
        for _ in range(self._num_replays):
            self._graph.replay()
        end.record()
        torch.cuda.synchronize()
        num_calls = self._num_replays * self._num_calls
        return 1e3 * float(start.elapsed_time(end)) / num_calls


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
