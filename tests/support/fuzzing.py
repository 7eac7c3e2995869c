"""The fuzzer in a test's own process, where faults can be planted."""

from tests.support.heldout import BUNDLED_CHECKPOINT
from vllm_mtp.lab.fuzz import Findings, Prepared, Setting, find_differences, prepared
from vllm_mtp.lab.fuzz import sort_out_ties as _sort_out_ties
from vllm_mtp.lab.fuzz_requests import kinds_of
from vllm_mtp.lab.fuzz_run import shares

BROKEN = ("logprob_token_ids", "thinking_token_budget", "session", "min_tokens")
"""Kinds that fail today; each goes when it is mended."""


BROKEN_MIXED = "temperature"
"""The engine dies when a sampled request has left a batch of greedy ones."""

BROKEN_ASYNC = "seed"
"""Async scheduling on V1: a seed does not give the same text there."""


def prepare(num_requests: int, seed: int, *broken: str) -> Prepared:
    """Requests and their right answers; no engine is left.

    Args:
        num_requests: How many.
        seed: The same one makes the same.
        *broken: Kinds to leave out beside `BROKEN`.
    """
    setting = Setting(str(BUNDLED_CHECKPOINT), {"method": "mtp_plus"}, {}, seed)
    with prepared(setting, num_requests, without=(*BROKEN, *broken)) as ready:
        return ready


def play_share(ready: Prepared, axis: str, axes: list[str]) -> Findings:
    """One of the axes plays its share of the requests."""
    plays = shares(ready.plays, axes)[axis]
    if "async" in axis:
        plays = [[r for r in p if BROKEN_ASYNC not in kinds_of(r)] for p in plays]
    return find_differences(ready, axis, plays)


def sort_out_ties(ready: Prepared, findings: Findings) -> None:
    """Ask the reference, whose engine starts again."""
    if findings.failures:
        try:
            _sort_out_ties(ready, findings)
        finally:
            ready.reference.player.close()
