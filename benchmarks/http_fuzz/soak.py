"""Does a server stay as it was under hours of every kind of request?

One ``vllm serve`` with `mtp_plus`, and clients that send it the random requests of
`requests.py` as fast as they can: streams, tools, grammars, bad bodies, clients
that go away. Afterwards the server must hold nothing, its memory must not have grown,
and its counters must agree with each other.

Report (JSON)::

    is_sound      no check failed
    failed        what did, in words
    requests      num_requests, statuses, num_cut, num_hung, num_tokens
    memory        rss_mib over time, its growth from the first part to the last, bound
    counters      drafted and accepted tokens, ours and vLLM's
    options, provenance
"""

import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import typer
from rich.console import Console

from benchmarks.http_fuzz.client import HUNG, Answer, FuzzClient
from benchmarks.http_fuzz.requests import FuzzRequest, Seedling, make_requests
from benchmarks.http_fuzz.servers import (
    grow_seedlings,
    read_metrics,
    single_server,
    wait_idle,
)
from examples.tiny_model import TINY_MODEL
from vllm_mtp.cli.errors import FAILED_EXIT_CODE
from vllm_mtp.config import METHOD
from vllm_mtp.tools.option_checks import check_method, check_output, resolve_model
from vllm_mtp.tools.options import Options, option
from vllm_mtp.tools.provenance import collect_provenance, write_json
from vllm_mtp.tools.server_process import (
    Server,
    ServerError,
    ServerGroup,
    exit_on_signals,
    log_folder,
)

START_TIMEOUT_S = 600.0
PART_REQUESTS = 100
MEMORY_PERIOD_S = 2.0
HAND_OVER_S = 2.0
"""Counts reach the server's front end once a second."""

WARM_UP_SHARE = 0.4
"""Of the run: caches fill and allocators settle; memory counts from there on."""

GROWTH_BOUND_MIB, GROWTH_BOUND_SHARE = 64.0, 0.03
"""How much more memory the processes may hold at the end than after the warm-up:
grammars that were compiled stay in vLLM's cache, and heaps are never quite full."""


_KIB_PER_MIB = 1024


@dataclass(frozen=True, kw_only=True)
class SoakOptions(Options):
    """Keep a server busy with every kind of request; it must end as it began.

    Exit code 0: it holds nothing, has not grown, and its counters agree. 1: it does
    not, or it died. 2: wrong input.
    """

    model: str = option(str(TINY_MODEL), "Folder with a checkpoint, or a hub name.")
    minutes: float = option(30.0, "How long clients go on.", 0.1, 10_000.0)
    num_clients: int = option(8, "Requests at a time.", 1, 64, name="clients")
    speculative_config: dict[str, Any] = option(
        {"method": METHOD}, "Of the server (JSON), as for `vllm serve`."
    )
    skipped: tuple[str, ...] = option(
        (), "Options of requests to leave out, with commas between.", name="without"
    )
    seed: int = option(0, "Of the requests.", 0, 2**31 - 1)
    output: Path | None = option(None, "Also write a report (JSON).")

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        check_method(self.speculative_config)
        check_output(self.output)


def run_soak(options: SoakOptions, console: Console) -> dict[str, Any]:
    """Start the server, keep it busy, look at it, print and write.

    Returns:
        The report as it was written.

    Raises:
        ConfigError: There is no such model.
        ServerError: The server died.
    """
    model = resolve_model(options.model)
    with (
        log_folder() as logs,
        exit_on_signals(),
        single_server(model, options.speculative_config, logs) as group,
    ):
        group.wait_ready(START_TIMEOUT_S, lambda line: None)
        try:
            report = _soak(group, model, options, console)
        except OSError as error:
            group.servers[0].check_alive()
            raise ServerError(f"a request failed: {error}") from error
    if options.output is not None:
        write_json(options.output, report)
        console.print(f"Written: {options.output}", markup=False)
    console.print(verdict(report), markup=False, highlight=False)
    return report


def soak_command(options: SoakOptions, console: Console) -> None:
    """Soak; the exit code says whether the server was sound."""
    if not run_soak(options, console)["is_sound"]:
        raise typer.Exit(FAILED_EXIT_CODE)


def _soak(
    group: ServerGroup, model: str, options: SoakOptions, console: Console
) -> dict[str, Any]:
    (server,) = group.servers
    seedlings, foreign_ids = grow_seedlings(FuzzClient(server.url), model, options.seed)
    crowd = Crowd(server.url, _requests(seedlings, foreign_ids, options))
    rss_mib = crowd.run(options.num_clients, 60 * options.minutes, server, console)
    held = wait_idle(server.url)
    time.sleep(HAND_OVER_S)
    server.check_alive()
    counters = speculation_counters(read_metrics(server.url))
    memory = memory_report(rss_mib)
    failed = [
        *(f"not freed: {each}" for each in held),
        *memory["failed"],
        *contradictions(counters),
        *([f"{crowd.num_hung} requests got no answer"] if crowd.num_hung else []),
    ]
    return {
        "is_sound": not failed,
        "failed": failed,
        "requests": {
            "num_requests": crowd.statuses.total(),
            "statuses": dict(crowd.statuses),
            "num_cut": crowd.num_cut,
            "num_hung": crowd.num_hung,
            "num_tokens": crowd.num_tokens,
        },
        "memory": memory,
        "counters": counters,
        "options": options.as_json(),
        "provenance": collect_provenance(sys.argv),
    }


def _requests(
    seedlings: Sequence[Seedling], foreign_ids: Sequence[int], options: SoakOptions
) -> Iterator[FuzzRequest]:
    """Without an end."""
    seed = options.seed
    while True:
        yield from make_requests(
            seedlings, foreign_ids, PART_REQUESTS, seed, options.skipped
        )
        seed += 1


class Crowd:
    """Clients of one server, each with one request at a time."""

    def __init__(self, url: str, requests: Iterator[FuzzRequest]) -> None:
        """Nobody has come yet."""
        self.statuses: Counter[str] = Counter()
        self.num_cut = self.num_hung = self.num_tokens = 0
        self._url, self._requests = url, requests
        self._lock, self._is_over = threading.Lock(), threading.Event()

    def run(
        self, num_clients: int, seconds: float, server: Server, console: Console
    ) -> list[float]:
        """Let clients come and go.

        Returns:
            Memory of the server's processes in MiB, every `MEMORY_PERIOD_S`.

        Raises:
            ServerError: The server died.
        """
        clients = [threading.Thread(target=self._client) for _ in range(num_clients)]
        for client in clients:
            client.start()
        deadline, rss_mib = time.monotonic() + seconds, [session_rss_mib(server.pid)]
        try:
            while time.monotonic() < deadline:
                time.sleep(MEMORY_PERIOD_S)
                server.check_alive()
                rss_mib.append(session_rss_mib(server.pid))
                if len(rss_mib) % 30 == 0:
                    console.print(f"{self.statuses.total()} requests", highlight=False)
        finally:
            self._is_over.set()
            for client in clients:
                client.join()
        return rss_mib

    def _client(self) -> None:
        client = FuzzClient(self._url)
        while not self._is_over.is_set():
            with self._lock:
                request = next(self._requests)
            answer = client.ask(request)
            with self._lock:
                self._count(answer)

    def _count(self, answer: Answer) -> None:
        self.statuses[str(answer.status)] += 1
        self.num_cut += answer.is_cut
        self.num_hung += (answer.error or "").startswith(HUNG)
        self.num_tokens += sum(len(c.token_ids) for c in answer.choices.values())


def session_rss_mib(leader: int) -> float:
    """Resident memory of a session's processes; what they share is counted by each."""
    total_kib = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything; behind it: state, parent,
            # group, session.
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                total_kib += _rss_kib(stat.with_name("status").read_text())
        except (OSError, IndexError, ValueError):  # it has just ended
            continue
    return total_kib / _KIB_PER_MIB


def _rss_kib(status: str) -> int:
    for line in status.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def memory_report(rss_mib: Sequence[float]) -> dict[str, Any]:
    """How memory grew from the warm-up to the end."""
    warm = int(len(rss_mib) * WARM_UP_SHARE)
    quarter = max(1, (len(rss_mib) - warm) // 3)
    before = median(rss_mib[warm : warm + quarter])
    after = median(rss_mib[-quarter:])
    bound = max(GROWTH_BOUND_MIB, GROWTH_BOUND_SHARE * before)
    failed = []
    if after - before > bound:
        failed = [
            f"memory grew from {before:.0f} to {after:.0f} MiB, by more than "
            f"{bound:.0f}"
        ]
    return {
        "rss_mib": [round(each, 1) for each in rss_mib],
        "after_warm_up_mib": round(before, 1),
        "at_the_end_mib": round(after, 1),
        "bound_mib": round(bound, 1),
        "failed": failed,
    }


def speculation_counters(metrics: Mapping[str, float]) -> dict[str, int]:
    """What was drafted and accepted, by our count and by vLLM's."""
    names = {
        "drafted": "vllm_mtp:draft_tokens_total",
        "accepted": "vllm_mtp:accepted_tokens_total",
        "rejected_slots": "vllm_mtp:rejected_slots_total",
        "drafted_of_vllm": "vllm:spec_decode_num_draft_tokens_total",
        "accepted_of_vllm": "vllm:spec_decode_num_accepted_tokens_total",
        "accepted_by_position_of_vllm": (
            "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        ),
        "failures": "vllm_mtp:drafting_failures_total",
        "generated": "vllm:generation_tokens_total",
        "num_preempted": "vllm:num_preemptions_total",
    }
    return {name: int(metrics.get(full, 0)) for name, full in names.items()}


def contradictions(counters: Mapping[str, int]) -> list[str]:
    """Where counters cannot all be right."""
    rules = {
        "something was accepted": counters["accepted"] > 0,
        "accepted <= drafted": counters["accepted"] <= counters["drafted"],
        "drafted is vLLM's": counters["drafted"] == counters["drafted_of_vllm"],
        "accepted is vLLM's": counters["accepted"] == counters["accepted_of_vllm"],
        "accepted is the sum over positions": counters["accepted"]
        == counters["accepted_by_position_of_vllm"],
        # Draft tokens that a grammar forbids had slots, too.
        "rejected slots >= drafted - accepted": counters["rejected_slots"]
        >= counters["drafted"] - counters["accepted"],
        "nothing broke in drafting": counters["failures"] == 0,
    }
    return [f"does not hold: {rule}" for rule, holds in rules.items() if not holds]


def verdict(report: Mapping[str, Any]) -> str:
    """What the report says, in a sentence."""
    count = report["requests"]["num_requests"]
    if not report["is_sound"]:
        return f"NOT SOUND after {count} requests: " + "; ".join(report["failed"])
    memory = report["memory"]
    return (
        f"Sound: nothing held after {count} requests, "
        f"{memory['after_warm_up_mib']:.0f} MiB after the warm-up and "
        f"{memory['at_the_end_mib']:.0f} MiB at the end."
    )
