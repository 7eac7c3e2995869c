"""``python -m benchmarks``, in a clone: measures, replays, and shows the results."""

import sys

import typer

from benchmarks import cli_report, cli_trace
from benchmarks.adapting import AdaptingBench
from benchmarks.checkouts import CheckoutsBench
from benchmarks.copying.bench import CopyingBench
from benchmarks.costs import CostsOptions, run_costs
from benchmarks.crossing import CrossingBench
from benchmarks.drafting import DraftingBench
from benchmarks.graphs import GraphsBench
from benchmarks.grid.command import INTERRUPTED, GridCommand, run_grid_command
from benchmarks.harness import Measurement, run_bench
from benchmarks.host import HostBench
from benchmarks.http_fuzz.bench import HttpFuzzOptions, http_fuzz_command
from benchmarks.http_fuzz.soak import SoakOptions, soak_command
from benchmarks.launches import LaunchesBench
from benchmarks.off import OffBench
from benchmarks.rollback.command import run_rollback
from benchmarks.rollback.options import RollbackBenchOptions
from benchmarks.steps import StepBench
from benchmarks.vocabulary import VocabularyBench
from benchmarks.warm_start import WarmStartBench
from vllm_mtp.cli.command import command_of

app = typer.Typer(
    name="python -m benchmarks",
    help="Measure this machine: times, ratios and targets, with a picture.",
    no_args_is_help=True,
)
BENCHES: tuple[type[Measurement], ...] = (
    *(StepBench, CrossingBench, OffBench, HostBench, DraftingBench),
    *(VocabularyBench, CheckoutsBench, LaunchesBench, GraphsBench, AdaptingBench),
    *(WarmStartBench, CopyingBench),
)
app.command()(
    command_of(
        RollbackBenchOptions,
        run_rollback,
        "rollback",
        "interrupted; nothing was written",
    )
)
app.command()(command_of(GridCommand, run_grid_command, "grid", INTERRUPTED))
app.command()(command_of(CostsOptions, run_costs, "costs"))
for bench in BENCHES:
    app.command()(command_of(bench, run_bench, bench.command))
app.command()(command_of(HttpFuzzOptions, http_fuzz_command, "http-fuzz"))
app.command()(command_of(SoakOptions, soak_command, "soak"))
app.command()(cli_report.report)
app.add_typer(cli_trace.app)

if __name__ == "__main__":
    sys.argv[0] = "benchmarks"  # as results name the command that wrote them
    app(prog_name="python -m benchmarks")
