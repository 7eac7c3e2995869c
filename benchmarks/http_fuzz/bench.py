"""Random requests to two servers: does speculation show in any answer?

Two real ``vllm serve``, one without speculation and one with it, get the same random
requests, many at a time, and every answer of the second is held to that of the first.
What differs is asked again alone, told from a near-tie, shrunk, and printed as a
command that repeats it. At the end neither server may hold a request or a KV block.

Report (JSON)::

    is_exact        neither a defect, nor anything held, nor nothing verified
    findings        defects: differences, the request, the shrunk request as a command
    target_faults   answers of the server without speculation that other requests
                    beside it have changed: it was wrong, not the other one
    ties            requests whose texts part where two tokens are equally likely
    kinds           how many requests used each option, and statuses of the answers
    held            what a server did not free
    verified        drafted and accepted tokens
    options, provenance
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from benchmarks.http_fuzz.client import Answer, FuzzClient
from benchmarks.http_fuzz.findings import Findings
from benchmarks.http_fuzz.requests import FuzzRequest, make_requests
from benchmarks.http_fuzz.servers import (
    grow_seedlings,
    read_metrics,
    restart,
    server_pair,
    wait_idle,
)
from examples.tiny_model import TINY_MODEL
from vllm_mtp.cli.errors import FAILED_EXIT_CODE
from vllm_mtp.config import METHOD
from vllm_mtp.tools.option_checks import (
    check_method,
    check_name,
    check_output,
    resolve_model,
)
from vllm_mtp.tools.options import Options, option
from vllm_mtp.tools.provenance import collect_provenance, write_json
from vllm_mtp.tools.server_process import (
    Server,
    ServerError,
    ServerGroup,
    exit_on_signals,
    log_folder,
)
from vllm_mtp.tools.verify_options import TIE_TOLERANCES

START_TIMEOUT_S = 600.0
REQUESTS_AT_ONCE = 6
PART_REQUESTS = 50
"""So many between two lines about how far it is."""

DEATH_TIMEOUT_S = 20.0
"""For a server whose engine has died to be gone itself."""

MAX_DEATHS = 3
"""Servers that died and were started again before a run gives up."""


@dataclass(frozen=True, kw_only=True)
class HttpFuzzOptions(Options):
    """Send random requests to a server without speculation and to one with it.

    Exit code 0: all answers are the same. 1: they are not, or a server failed. 2: wrong
    input.
    """

    model: str = option(str(TINY_MODEL), "Folder with a checkpoint, or a hub name.")
    num_requests: int = option(500, "How many.", 1, 100_000, name="requests")
    seed: int = option(0, "Of the requests.", 0, 2**31 - 1)
    skipped: tuple[str, ...] = option(
        (), "Options of requests to leave out, with commas between.", name="without"
    )
    speculative_config: dict[str, Any] = option(
        {"method": METHOD},
        "What is held to no speculation (JSON). Where it names no controller, draft "
        "lengths are random: one that finds drafting useless would test nothing.",
    )
    engine_args: dict[str, Any] = option(
        {}, "Further arguments of vLLM's EngineArgs (JSON), for both servers."
    )
    dtype: str = option("float32", "Weights and arithmetic.")
    output: Path | None = option(None, "Also write a report (JSON).")

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        check_name("dtype", self.dtype, tuple(TIE_TOLERANCES))
        check_method(self.speculative_config)
        check_output(self.output)

    @property
    def config(self) -> dict[str, Any]:
        """Of the server with speculation."""
        return {"controller": "random"} | self.speculative_config


def run_http_fuzz(options: HttpFuzzOptions, console: Console) -> dict[str, Any]:
    """Start both servers, ask, compare, shrink, print and write.

    Returns:
        The report as it was written.

    Raises:
        ConfigError: There is no such model.
        ServerError: A server failed.
    """
    model = resolve_model(options.model)
    with (
        log_folder() as logs,
        exit_on_signals(),
        server_pair(
            model, options.config, options.dtype, options.engine_args, logs
        ) as group,
    ):
        group.wait_ready(START_TIMEOUT_S, lambda line: None)
        try:
            report = _fuzz(group, model, options, console)
        except OSError as error:
            for server in group.servers:
                server.check_alive()
            raise ServerError(f"a request failed: {error}") from error
    if options.output is not None:
        write_json(options.output, report)
        console.print(f"Written: {options.output}", markup=False)
    console.print(verdict(report), markup=False, highlight=False)
    return report


def http_fuzz_command(options: HttpFuzzOptions, console: Console) -> None:
    """Fuzz; the exit code says whether all answers were right."""
    if not run_http_fuzz(options, console)["is_exact"]:
        raise typer.Exit(FAILED_EXIT_CODE)


def _fuzz(
    group: ServerGroup, model: str, options: HttpFuzzOptions, console: Console
) -> dict[str, Any]:
    servers = group.servers
    target, speculating = clients = [FuzzClient(server.url) for server in servers]
    seedlings, foreign_ids = grow_seedlings(target, model, options.seed)
    requests = make_requests(
        seedlings, foreign_ids, options.num_requests, options.seed, options.skipped
    )
    findings = Findings(target, speculating, TIE_TOLERANCES[options.dtype], console)
    statuses: Counter[str] = Counter()
    for start in range(0, len(requests), PART_REQUESTS):
        part = requests[start : start + PART_REQUESTS]
        for request, *answers in zip(part, *ask_all(clients, part), strict=True):
            statuses[str(answers[0].status)] += 1
            findings.compare(request, *answers)
        if not _are_alive(servers, findings):
            restart(group, START_TIMEOUT_S)
            continue
        findings.explain()
        if not _are_alive(servers, findings):
            restart(group, START_TIMEOUT_S)
        done = min(start + PART_REQUESTS, len(requests))
        console.print(
            f"{done} of {len(requests)} requests, {findings.summary}", highlight=False
        )
    held = {server.name: wait_idle(server.url) for server in servers}
    metrics = read_metrics(servers[1].url)
    verified = {
        name: int(metrics.get(f"vllm:spec_decode_num_{name}_tokens_total", 0))
        for name in ("draft", "accepted")
    }
    is_exact = not findings.defects and not any(held.values())
    return {
        "is_exact": is_exact and verified["accepted"] > 0,
        "findings": findings.defects,
        "ties": findings.ties,
        "target_faults": findings.target_faults,
        "kinds": dict(Counter(kind for each in requests for kind in each.kinds)),
        "statuses": dict(statuses),
        "held": held,
        "verified": verified,
        "options": options.as_json() | {"speculative_config": options.config},
        "provenance": collect_provenance(sys.argv),
    }


def _are_alive(servers: Sequence[Server], findings: Findings) -> bool:
    """Whether all are; a dead one is a defect.

    Raises:
        ServerError: It is one too many.
    """
    for server in servers:
        if findings.saw_death:
            server.wait(DEATH_TIMEOUT_S)
        try:
            server.check_alive()
        except ServerError as error:
            findings.died(server, error)
            if findings.num_deaths > MAX_DEATHS:
                raise
            return False
    return True


def ask_all(
    clients: Sequence[FuzzClient], requests: Sequence[FuzzRequest]
) -> list[list[Answer]]:
    """Answers of each server to all requests, several at a time."""
    with ThreadPoolExecutor(len(clients) * REQUESTS_AT_ONCE) as pool:
        waiting: list[list[Any]] = [[] for _ in clients]
        for request in requests:
            for client, futures in zip(clients, waiting, strict=True):
                futures.append(pool.submit(client.ask, request))
        return [[future.result() for future in futures] for futures in waiting]


def verdict(report: Mapping[str, Any]) -> str:
    """What the report says, in a sentence."""
    count = report["options"]["num_requests"]
    if report["is_exact"]:
        ties = len(report["ties"])
        but = f", but for {ties} near-ties that rounding decides" if ties else ""
        return f"Exact: {count} answers are those of no speculation{but}."
    if report["findings"]:
        failed = sum(each["num_requests"] for each in report["findings"])
        kinds = len(report["findings"])
        return f"NOT EXACT: {failed} of {count} answers differ, of {kinds} kinds."
    if any(report["held"].values()):
        return f"NOT FREED: {report['held']}"
    return "NOT SHOWN: no draft token was accepted, so nothing was put to the test."
