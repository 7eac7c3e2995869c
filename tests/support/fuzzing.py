"""The fuzzer in a test's own process, where faults can be planted."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from tests.support.heldout import BUNDLED_CHECKPOINT
from tests.support.quick_starts import collect_garbage, imports_frozen
from vllm_mtp.tools.engine_process import MODULE
from vllm_mtp.tools.fuzz import (
    Findings,
    Play,
    Prepared,
    Setting,
    prepared,
)
from vllm_mtp.tools.fuzz_axes import AXES, on_axis
from vllm_mtp.tools.fuzz_engines import Engine
from vllm_mtp.tools.fuzz_ties import sort_out_ties as _sort_out_ties


class _LocalEngine:
    """An engine of this process."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._engine = import_module(MODULE).CommandedEngine(dict(arguments))

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        answer: dict[str, Any] = getattr(self._engine, command)(**arguments)
        return answer

    def close(self) -> None:
        self._engine.engine.engine_core.shutdown()
        del self._engine


@contextmanager
def start_here(name: str, arguments: Mapping[str, Any]) -> Iterator[Engine]:
    """An engine of this process, alone in it; a `Start`."""
    with imports_frozen():
        engine = _LocalEngine(arguments)
        try:
            yield engine
        finally:
            engine.close()
            collect_garbage()


def prepare(num_requests: int, seed: int) -> Prepared:
    """Requests and their right answers; no engine is left.

    Args:
        num_requests: How many.
        seed: The same one makes the same.
    """
    setting = _setting(seed)
    with prepared(setting, num_requests, start_here) as ready:
        return ready


def learn(ready: Prepared, axis_name: str, plays: list[Play]) -> None:
    """The right answers of an axis that changes requests; no engine is left.

    Args:
        ready: Knows the answers to all others.
        axis_name: One of `AXES`.
        plays: What will be played on it.
    """
    reference = ready.reference_of(axis_name)
    try:
        reference.learn([r for p in plays for r in on_axis(AXES[axis_name], p)])
    finally:
        reference.player.close()


def _setting(seed: int) -> Setting:
    return Setting(str(BUNDLED_CHECKPOINT), {"method": "mtp_plus"}, {}, seed)


def sort_out_ties(ready: Prepared, findings: Findings) -> None:
    """Ask the reference, whose engine starts again."""
    if findings.failures:
        try:
            _sort_out_ties(ready, findings)
        finally:
            ready.reference.player.close()
            ready.adapted.player.close()
