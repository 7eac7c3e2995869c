"""``vllm-mtp verify --requests``: the fuzzer from its options to its report.

Report (JSON)::

    num_requests, num_compared, num_failures
    kinds        requests that cross each field of SamplingParams and kind of input
    engines      by axis: requests, draft tokens, steps, preemptions
    ties, refused, excluded, reference_died
    failures     what differs, and the command that repeats it
    options, provenance

Many requests are asked in rounds, of which each has engines and answers of its own.
"""

import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_mtp.config import METHOD, ConfigError
from vllm_mtp.tools.fuzz import (
    Failure,
    Findings,
    Play,
    Prepared,
    Setting,
    axis_player,
    compare_play,
    find_differences,
    prepared,
)
from vllm_mtp.tools.fuzz_axes import AXES
from vllm_mtp.tools.fuzz_engines import Start, process_starter
from vllm_mtp.tools.fuzz_requests import KINDS, kinds_of
from vllm_mtp.tools.fuzz_shrink import MAX_TRIES, Shrinker
from vllm_mtp.tools.fuzz_ties import sort_out_ties
from vllm_mtp.tools.option_checks import (
    check_method,
    check_names,
    check_output,
    refuse,
    resolve_model,
)
from vllm_mtp.tools.provenance import collect_provenance, write_json
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

MAX_REQUESTS = 1_000_000
ROUND_REQUESTS = 2000
MAX_SHRUNK = 3
"""Failures of an engine that are made small; each takes up to a minute."""


@dataclass(frozen=True)
class FuzzOptions:
    """What the user chose; see `cli/verify.py`."""

    model: str
    num_requests: int = 2000
    seed: int = 0
    without: tuple[str, ...] = ()
    axes: tuple[str, ...] | None = None
    request: str | None = None
    speculative_config: dict[str, Any] = field(
        default_factory=lambda: {"method": METHOD}
    )
    engine_args: dict[str, Any] = field(default_factory=dict)
    output: Path | None = None

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: One of them has a value that is not allowed.
        """
        if not 1 <= self.num_requests <= MAX_REQUESTS:
            refuse("requests", self.num_requests, f"from 1 to {MAX_REQUESTS}")
        if self.without:
            check_names("without", self.without, KINDS)
        if self.axes is not None:
            check_names("engines", self.axes, tuple(AXES))
        check_method(self.speculative_config)
        check_output(self.output)
        if self.request is not None:
            parse_case(self.request)


def parse_case(text: str) -> tuple[str, Play]:
    """Engine and play of ``--request``.

    Raises:
        ConfigError: It is none.
    """
    try:
        case = json.loads(text)
        axis, play = case["engine"], case["requests"]
        names = [request["name"] for request in play]
        is_play = all(c["sampling"] is not None for r in play for c in r["chunks"])
        is_case = axis in AXES and len(set(names)) == len(names) > 0 and is_play
    except (ValueError, TypeError, KeyError):
        is_case = False
    if not is_case:
        raise ConfigError(
            f"request: {text[:80]!r} is not allowed; must be a JSON object with "
            f"`engine` (one of {', '.join(AXES)}) and `requests`, as a run prints it"
        )
    return axis, play


def run_fuzzer(options: FuzzOptions, console: Console) -> dict[str, Any]:
    """Make requests, let all engines answer, compare, print and write.

    Returns:
        The report as it was written.

    Raises:
        ServerError: An engine did not start.
    """
    setting = Setting(
        resolve_model(options.model),
        options.speculative_config,
        options.engine_args,
        options.seed,
    )
    report: dict[str, Any] = {}
    with log_folder() as logs, exit_on_signals():
        start = process_starter(logs)
        for first in range(0, options.num_requests, ROUND_REQUESTS):
            count = min(ROUND_REQUESTS, options.num_requests - first)
            report = added(report, _play_round(setting, count, options, start, console))
            setting = setting._replace(seed=setting.seed + 1)
    report |= {
        "options": asdict(options) | {"output": options.output and options.output.name},
        "provenance": collect_provenance(sys.argv),
    }
    if options.output is not None:
        write_json(options.output, report)
        console.print(f"Written: {options.output}", markup=False)
    console.print(verdict(report), highlight=False, markup=False)
    return report


def _play_round(
    setting: Setting, count: int, options: FuzzOptions, start: Start, console: Console
) -> dict[str, Any]:
    plays = names = None
    if options.request is not None:
        axis, play = parse_case(options.request)
        plays, names = [play], [axis]
    found: dict[str, Findings] = {}
    console.print(f"seed {setting.seed}: the right answers", highlight=False)
    with prepared(setting, count, start, options.without, plays) as ready:
        for name, share in shares(ready.plays, names or options.axes).items():
            found[name] = _play_axis(ready, name, share, start, console)
        return summarise(ready, found)


def added(total: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Two reports in one: numbers and lists are added up, key by key."""
    both = dict(total)
    for key, value in more.items():
        if isinstance(value, dict):
            both[key] = added(both.get(key, {}), value)
        else:
            both[key] = both[key] + value if key in both else value
    return both


def shares(
    plays: list[Play], names: tuple[str, ...] | list[str] | None
) -> dict[str, list[Play]]:
    """Which plays which axis gets: in turn, and at least one.

    Args:
        plays: All of them.
        names: Of the axes; None for all.
    """
    chosen = list(names or AXES)
    return {
        name: plays[number :: len(chosen)] or [plays[number % len(plays)]]
        for number, name in enumerate(chosen)
    }


def _play_axis(
    ready: Prepared, name: str, plays: list[Play], start: Start, console: Console
) -> Findings:
    findings = find_differences(ready, name, plays, start)
    sort_out_ties(ready, findings)
    counts, proof = findings.counts, AXES[name].proof
    console.print(
        f"{name}: {findings.num_requests} requests, {findings.num_compared} compared, "
        f"{counts['accepted']} of {counts['drafted']} draft tokens kept, "
        f"{proof.removeprefix('num_')} {counts[proof]}, "
        f"{len(findings.ties)} near-ties, {len(findings.failures)} differ",
        highlight=False,
    )
    if not counts[proof]:
        console.print(f"{name}: it was not put to the test")
    for number, failure in enumerate(findings.failures):
        if number < MAX_SHRUNK:
            failure = _shrunk(ready, failure, start)
            findings.failures[number] = failure
        console.print(_sentence(failure), highlight=False, markup=False)
        console.print(command_of(ready.setting, failure), soft_wrap=True, markup=False)
    return findings


def _shrunk(ready: Prepared, failure: Failure, start: Start) -> Failure:
    setting = ready.setting
    player = axis_player(setting, failure.axis, start, MAX_TRIES)
    latest = failure

    def still_fails(play: Play) -> bool:
        nonlocal latest
        if not player.can_play:
            return False
        reference = ready.reference_of(failure.axis).of_others()
        reference.learn(play)
        findings = Findings()
        played = player.play(play, seed=setting.seed)
        compare_play(reference, failure.axis, play, played, findings)
        alike = [
            each
            for each in findings.failures
            if each.difference.what == failure.difference.what
        ]
        if alike:
            latest = alike[0]
        return bool(alike)

    try:
        Shrinker(still_fails).shrink(failure.play, failure.name)
    finally:
        player.close()
    return latest


def _sentence(failure: Failure) -> str:
    difference = failure.difference
    where = "" if difference.position is None else f" at token {difference.position}"
    who = failure.name or "some request"
    return (
        f"{failure.axis}: {who}: {difference.what}{where}: expected "
        f"{str(difference.expected)[:200]}, found {str(difference.found)[:300]}"
    )


def case_of(failure: Failure) -> dict[str, Any]:
    """What ``--request`` takes to repeat a failure."""
    return {"engine": failure.axis, "requests": failure.play}


def command_of(setting: Setting, failure: Failure) -> str:
    """The command that repeats a failure."""
    words = ["vllm-mtp", "verify", setting.model]
    if setting.speculative_config != {"method": METHOD}:
        config = json.dumps(setting.speculative_config)
        words += ["--speculative-config", config]
    if setting.engine_args:
        words += ["--engine-args", json.dumps(setting.engine_args)]
    case = json.dumps(case_of(failure), separators=(",", ":"))
    words += ["--seed", str(setting.seed), "--request", case]
    return shlex.join(words)


def summarise(ready: Prepared, found: Mapping[str, Findings]) -> dict[str, Any]:
    """The report of a round, from what each axis came to."""
    kinds: Counter[str] = Counter()
    for play in ready.plays:
        for request in play:
            kinds.update(kinds_of(request))
    refused: Counter[str] = Counter()
    excluded: Counter[str] = Counter()
    for each in found.values():
        refused.update(each.refused)
        excluded.update(each.excluded)
    failures = [f for each in found.values() for f in each.failures]
    ties = [f for each in found.values() for f in each.ties]
    return {
        "num_requests": sum(each.num_requests for each in found.values()),
        "num_compared": sum(each.num_compared for each in found.values()),
        "num_failures": len(failures),
        "kinds": dict(kinds.most_common()),
        "engines": {
            name: {"num_requests": each.num_requests} | dict(each.counts)
            for name, each in found.items()
        },
        "ties": [f.difference._asdict() | {"engine": f.axis} for f in ties],
        "refused": dict(refused),
        "excluded": dict(excluded),
        "reference_died": list(ready.reference.died.values()),
        "failures": [
            f.difference._asdict()
            | {"request": f.name, "command": command_of(ready.setting, f)}
            for f in failures
        ],
    }


def verdict(report: Mapping[str, Any]) -> str:
    """What the report says, in a sentence."""
    count, compared = report["num_failures"], report["num_compared"]
    if count:
        return f"NOT EXACT: {count} of {report['num_requests']} requests differ."
    drafted = sum(each.get("accepted", 0) for each in report["engines"].values())
    if not drafted and compared:
        return "NOT SHOWN: no draft token was accepted, so nothing was put to the test."
    return f"Exact: none of {compared} requests differs."
