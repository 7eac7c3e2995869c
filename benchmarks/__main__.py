"""``python -m benchmarks``, in a clone: measures, replays, and shows the results."""

import sys

import typer

from benchmarks import cli, cli_report, cli_small, cli_trace
from benchmarks.harness import command_of, run_bench
from benchmarks.http_fuzz.bench import HttpFuzzOptions, http_fuzz_command
from benchmarks.http_fuzz.soak import SoakOptions, soak_command
from benchmarks.steps import StepBench

app = typer.Typer(
    name="python -m benchmarks",
    help="Measure this machine: times, ratios and targets, with a picture.",
    no_args_is_help=True,
)
for command in (
    cli.rollback,
    cli.grid,
    cli_small.crossing,
    cli_small.off,
    cli_small.host,
    cli_small.drafting,
    cli_small.vocabulary,
    cli_report.report,
):
    app.command()(command)
app.command()(command_of(HttpFuzzOptions, http_fuzz_command, "http-fuzz"))
app.command()(command_of(SoakOptions, soak_command, "soak"))
app.command()(command_of(StepBench, run_bench, StepBench.command))
app.add_typer(cli_trace.app)

if __name__ == "__main__":
    sys.argv[0] = "benchmarks"  # as results name the command that wrote them
    app(prog_name="python -m benchmarks")
