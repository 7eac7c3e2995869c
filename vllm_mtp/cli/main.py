"""``vllm-mtp``: its subcommands."""

import typer

from vllm_mtp.cli import (
    compare,
    demo,
    doctor,
    options,
    plan,
    report,
    tune,
    verify,
    vocab,
)
from vllm_mtp.cli.command import command_of
from vllm_mtp.tools.convert_heads import ConvertHeadsOptions, convert_heads
from vllm_mtp.tools.demo import DemoOptions
from vllm_mtp.tools.eval import EvalOptions, run_eval
from vllm_mtp.tools.rounds import RoundsOptions, write_rounds
from vllm_mtp.tools.tune import TuneOptions

EVAL_INTERRUPTED = (
    "interrupted; finished prompts are kept, and the same command goes on with the rest"
)

app = typer.Typer(
    name="vllm-mtp",
    help="Lossless speculative decoding with a model's own MTP layers, for vLLM.",
    no_args_is_help=True,
)
app.command()(compare.compare)
app.command()(command_of(ConvertHeadsOptions, convert_heads, "convert-heads"))
app.command()(command_of(DemoOptions, demo.demo, "demo", demo.INTERRUPTED))
app.command()(doctor.doctor)
app.command()(command_of(EvalOptions, run_eval, "eval", EVAL_INTERRUPTED))
app.command()(options.options)
app.command()(plan.plan)
app.command()(report.report)
app.command()(command_of(RoundsOptions, write_rounds, "rounds"))
app.command()(command_of(TuneOptions, tune.tune, "tune", tune.INTERRUPTED))
app.command()(command_of(verify.VerifyCommand, verify.run_verify, "verify"))
app.add_typer(vocab.app)
