"""The fuzzer in a test's own process, where faults can be planted."""

import json
from collections.abc import Sequence
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
    random_plays,
)
from vllm_mtp.lab.fuzz_axes import AXES, on_axis, reference_arguments
from vllm_mtp.lab.fuzz_engines import Player, start_here
from vllm_mtp.lab.fuzz_requests import Request
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
    setting = _setting(seed)
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


def _setting(seed: int) -> Setting:
    return Setting(str(BUNDLED_CHECKPOINT), {"method": "mtp_plus"}, {}, seed)


def short_plays(num_plays: int, play_requests: int, seed: int) -> list[Play]:
    """The shortest of many random requests, for engines that are slow.

    Args:
        num_plays: How many plays.
        play_requests: Requests of each.
        seed: The same one makes the same.
    """
    setting = _setting(seed)
    arguments = reference_arguments(setting.model, {}, on_gpu=False)
    player = Player(start_here, "reference", arguments, max_starts=1)
    count = num_plays * play_requests
    try:
        plays = random_plays(player, setting, 4 * count)
    finally:
        player.close()
    requests = sorted((r for play in plays for r in play), key=_length)[:count]
    # In the order in which they were made, which is any order of kinds.
    requests.sort(key=lambda request: int(request["name"][1:]))
    return [requests[i : i + play_requests] for i in range(0, count, play_requests)]


def _length(request: Request) -> int:
    """About how many tokens it comes to."""
    long, letters = 300, 3
    total = 0
    for chunk in request["chunks"]:
        prompt, sampling = chunk["prompt"], chunk["sampling"]
        total += len(prompt) // (letters if isinstance(prompt, str) else 1)
        total += sampling.get("n", 1) * (sampling.get("max_tokens") or long)
    return total


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
    _, found = play_shares(order["plays"], order["seed"])
    plain = {axis: vars(findings) for axis, findings in found.items()}
    Path(order["result"]).write_text(json.dumps(plain))


def play_shares(
    shares: dict[str, list[Play]], seed: int
) -> tuple[Prepared, dict[str, Findings]]:
    """What is found when each axis has played its share, and the right answers.

    Args:
        shares: Plays by name of the axis.
        seed: Of what disturbs the engines.
    """
    plays = [play for share in shares.values() for play in share]
    ready = prepare(sum(map(len, plays)), seed, plays)
    assert not ready.reference.died
    found = {}
    for axis, share in shares.items():
        found[axis] = find_differences(ready, axis, share)
        sort_out_ties(ready, found[axis])
    return ready, found
