"""``vllm-mtp``: one subcommand per file, each thin."""

import typer

from vllm_mtp.cli import (
    compare,
    demo,
    doctor,
    evaluate,
    options,
    plan,
    report,
    verify,
    vocab,
)

app = typer.Typer(
    name="vllm-mtp",
    help="Lossless speculative decoding with a model's own MTP layers, for vLLM.",
    no_args_is_help=True,
)
app.command()(compare.compare)
app.command()(demo.demo)
app.command()(doctor.doctor)
app.command("eval")(evaluate.evaluate)
app.command()(options.options)
app.command()(plan.plan)
app.command()(report.report)
app.command()(verify.verify)
app.add_typer(vocab.app)
