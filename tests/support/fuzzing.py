"""The fuzzer in a test's own process, where faults can be planted."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.heldout import BUNDLED_CHECKPOINT
from vllm_mtp.lab.fuzz import (
    Findings,
    Play,
    Prepared,
    Setting,
    find_differences,
    prepared,
)
from vllm_mtp.lab.fuzz_axes import AXES, on_axis
from vllm_mtp.lab.fuzz_ties import sort_out_ties as _sort_out_ties


def prepare(
    num_requests: int, seed: int, plays: Sequence[Play] | None = None
) -> Prepared:
    """Requests and their right answers; no engine is left.

    Args:
        num_requests: How many.
        seed: The same one makes the same.
        plays: These, instead of random ones.
    """
    setting = Setting(str(BUNDLED_CHECKPOINT), {"method": "mtp_plus"}, {}, seed)
    with prepared(setting, num_requests, plays=plays) as ready:
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


def sort_out_ties(ready: Prepared, findings: Findings) -> None:
    """Ask the reference, whose engine starts again."""
    if findings.failures:
        try:
            _sort_out_ties(ready, findings)
        finally:
            ready.reference.player.close()
            ready.adapted.player.close()


def play_in_fork(order: dict[str, Any]) -> None:
    """Let this process' engines answer, with its model runner.

    Args:
        order: ``plays`` by name of the axis, ``seed``, and ``result``, a file for what
            is found (`Findings`) by name of the axis.
    """
    shares = order["plays"]
    plays = [play for share in shares.values() for play in share]
    ready = prepare(sum(map(len, plays)), order["seed"], plays)
    assert not ready.reference.died
    found = {}
    for axis, share in shares.items():
        findings = find_differences(ready, axis, share)
        sort_out_ties(ready, findings)
        found[axis] = asdict(findings)
    Path(order["result"]).write_text(json.dumps(found))
