"""Options that several subcommands have."""

from typing import Annotated

import typer

ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Folder with a checkpoint, or a hub name. Unset: the bundled one."
    ),
]
"""A checkpoint."""

ENGINES_INTERRUPTED = "interrupted; the engines are stopped, nothing was written"
