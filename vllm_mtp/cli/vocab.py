"""``vllm-mtp vocab``: see vocab_build.py in tools/."""

import typer

from vllm_mtp.cli.command import command_of
from vllm_mtp.tools.vocab_build import VocabOptions, build_vocabulary

app = typer.Typer(
    name="vocab",
    help="Draft vocabularies: which tokens the MTP layers may propose.",
    no_args_is_help=True,
)
app.command()(command_of(VocabOptions, build_vocabulary, "build"))
