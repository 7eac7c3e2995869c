"""The fuzzer in a test's own process, where faults can be planted."""

from tests.support.heldout import BUNDLED_CHECKPOINT
from vllm_mtp.tools.fuzz import (
    Findings,
    Play,
    Prepared,
    Setting,
    prepared,
)
from vllm_mtp.tools.fuzz_axes import AXES, on_axis
from vllm_mtp.tools.fuzz_ties import sort_out_ties as _sort_out_ties


def prepare(num_requests: int, seed: int) -> Prepared:
    """Requests and their right answers; no engine is left.

    Args:
        num_requests: How many.
        seed: The same one makes the same.
    """
    setting = _setting(seed)
    with prepared(setting, num_requests) as ready:
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
