"""What benchmarks measured, for ``python -m benchmarks report``: as they print it."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from benchmarks.adapting import AdaptingBench
from benchmarks.checkouts import CheckoutsBench
from benchmarks.control import held_out, trace_report
from benchmarks.copying.bench import CopyingBench
from benchmarks.crossing import CrossingBench
from benchmarks.drafting import DraftingBench
from benchmarks.graphs import GraphsBench
from benchmarks.grid.report import print_report as print_grid
from benchmarks.host import HostBench
from benchmarks.http_fuzz import bench as http_fuzz
from benchmarks.http_fuzz import soak
from benchmarks.launches import LaunchesBench
from benchmarks.off import OffBench
from benchmarks.rollback.report import print_report as print_rollback
from benchmarks.steps import StepBench
from benchmarks.vocabulary import VocabularyBench
from benchmarks.warm_start import WarmStartBench
from vllm_mtp.tools import report
from vllm_mtp.tools.report import Kind, Result, print_counts


def show_http_fuzz(result: Result, console: Console) -> None:
    """Random requests to two servers."""
    console.print(http_fuzz.verdict(result))
    print_counts("Answers", "status", result["statuses"], console)
    print_counts("Requests that cross each kind", "kind", result["kinds"], console)
    print_counts("Draft tokens", "of the server", result["verified"], console)
    for each in result["findings"]:
        console.print(str(each), markup=False)


def show_soak(result: Result, console: Console) -> None:
    """A server that was kept busy."""
    console.print(soak.verdict(result))
    requests: dict[str, Any] = dict(result["requests"])
    print_counts("Answers", "status", requests.pop("statuses"), console)
    print_counts("Requests", "of the clients", requests, console)
    print_counts("Counters at the end", "of the server", result["counters"], console)


def _keys(*names: str) -> frozenset[str]:
    return frozenset(names)


_SIDE_BY_SIDE = ("identical_texts", "options")

KINDS: Mapping[str, Kind] = {
    **report.KINDS,
    "http-fuzz": Kind(
        "Random requests over HTTP",
        _keys("is_exact", "statuses", "held", "verified"),
        show_http_fuzz,
    ),
    "soak": Kind(
        "Soak", _keys("is_sound", "requests", "memory", "counters"), show_soak
    ),
    "grid": Kind(
        "Every draft length against mtp_plus",
        _keys("cells", "engines", "overall", "targets"),
        print_grid,
    ),
    "rollback": Kind(
        "Rollback kernels",
        _keys("centre", "metadata", "payload", "targets"),
        print_rollback,
    ),
    "steps": Kind(
        "Step time", _keys("baseline", "contenders", *_SIDE_BY_SIDE), StepBench.show
    ),
    "crossing": Kind(
        "Crossing a threshold", _keys("contenders", *_SIDE_BY_SIDE), CrossingBench.show
    ),
    "drafting": Kind(
        "Drafting", _keys("cells", "contenders", *_SIDE_BY_SIDE), DraftingBench.show
    ),
    "off": Kind("Off", _keys("cells", *_SIDE_BY_SIDE), OffBench.show),
    "checkouts": Kind(
        "Two checkouts",
        _keys("axes", "cells", "overall", "options"),
        CheckoutsBench.show,
    ),
    "host": Kind("Host time", _keys("cells", "parts", "options"), HostBench.show),
    "launches": Kind(
        "Launches", _keys("cells", "kinds", "options"), LaunchesBench.show
    ),
    "graphs": Kind("CUDA graphs", _keys("graphs", "options"), GraphsBench.show),
    "held-out": Kind(
        "Controllers in held-out worlds",
        _keys("summaries", "differences", "scores"),
        held_out.print_summary,
    ),
    "replay": Kind(
        "Controller", _keys("runs", "costs", "targets"), trace_report.print_report
    ),
    "adapting": Kind(
        "Adapting to the traffic",
        _keys("rounds", "gain", "cost", "num_equal", "options"),
        AdaptingBench.show,
    ),
    "vocabulary": Kind(
        "Draft vocabularies",
        _keys("rounds", "in_domain", "other_domain", "num_rows"),
        VocabularyBench.show,
    ),
    "copying": Kind(
        "Copying from context",
        _keys("engines", "loads", "cells", *_SIDE_BY_SIDE),
        CopyingBench.show,
    ),
    "warm-start": Kind(
        "Warm start", _keys("warm", "cold", "options"), WarmStartBench.show
    ),
}
"""Of users' commands, and of benchmarks."""
