"""``python -m examples.tiny_model``: train a small model, or grow one unchanged."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.tiny_model.plan import StepReport, TrainingPlan, Watcher
from examples.tiny_model.shape import ModelShape

PROGRAM = "python -m examples.tiny_model"

app = typer.Typer(
    name=PROGRAM,
    help="Make small models with an MTP layer, for tests and benchmarks.",
    no_args_is_help=True,
)

_LOG_EVERY_STEPS = 50
_PLAN = TrainingPlan()
_SHAPE = ModelShape()


def _fail(message: str) -> typer.Exit:
    typer.echo(f"error: {message}", err=True)
    return typer.Exit(code=2)


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turns errors of the user into one sentence and exit code 2."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        prefix = f"{where}: {first['input']!r}: " if where else ""
        raise _fail(prefix + message) from error
    except ValueError as error:
        raise _fail(str(error)) from error


@contextmanager
def _watched(console: Console) -> Iterator[Watcher]:
    """A progress bar on a terminal, and a line now and then elsewhere."""
    columns = (
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}, MTP {task.fields[mtp_loss]:.3f}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks = {
            stage: bar.add_task(stage, total=None, loss=0.0, mtp_loss=0.0)
            for stage in ("trunk", "mtp")
        }

        def watch(report: StepReport) -> None:
            bar.update(
                tasks[report.stage],
                completed=report.step,
                total=report.num_steps,
                loss=report.loss,
                mtp_loss=report.mtp_loss,
            )
            if not console.is_terminal and report.step % _LOG_EVERY_STEPS == 0:
                console.print(
                    f"{report.stage} {report.step}/{report.num_steps} "
                    f"loss {report.loss:.3f} MTP {report.mtp_loss:.3f}"
                )

        yield watch


@app.command()
def train(
    output: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder of Python sources; default: the standard library."),
    ] = None,
    vocab_size: int = _SHAPE.vocab_size,
    hidden_size: int = _SHAPE.hidden_size,
    intermediate_size: int = _SHAPE.intermediate_size,
    num_hidden_layers: int = _SHAPE.num_hidden_layers,
    num_heads: int = _SHAPE.num_heads,
    num_kv_heads: int = _SHAPE.num_kv_heads,
    num_trunk_steps: int = _PLAN.num_trunk_steps,
    num_mtp_steps: int = _PLAN.num_mtp_steps,
    num_draft_steps: int = _PLAN.num_draft_steps,
    num_prompts: int = _PLAN.num_prompts,
    num_measured_tokens: int = _PLAN.num_measured_tokens,
    num_threads: int = _PLAN.num_threads,
    seed: int = _PLAN.seed,
    dtype: str = "bfloat16",
) -> None:
    """Train a MiMo-style model with one MTP layer on Python sources."""
    from examples.tiny_model.corpus import standard_library_root
    from examples.tiny_model.pipeline import make_checkpoint

    console = Console()
    with _user_errors(), _watched(console) as watch:
        provenance = make_checkpoint(
            corpus_root=corpus or standard_library_root(),
            output=output,
            shape=ModelShape(
                vocab_size=vocab_size,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                num_hidden_layers=num_hidden_layers,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
            ),
            plan=TrainingPlan(
                num_trunk_steps=num_trunk_steps,
                num_mtp_steps=num_mtp_steps,
                num_draft_steps=num_draft_steps,
                num_prompts=num_prompts,
                num_measured_tokens=num_measured_tokens,
                num_threads=num_threads,
                seed=seed,
            ),
            command=" ".join([PROGRAM, *sys.argv[1:]]),
            dtype=dtype,
            watch=watch,
            say=console.print,
        )
    for entry in provenance["measured"]:
        console.print(entry)


@app.command()
def train_heads(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder of the trunk.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    corpus: Annotated[
        Path | None,
        typer.Option(help="Folder of Python sources; default: the standard library."),
    ] = None,
    num_heads: Annotated[int, typer.Option(help="Extra heads.")] = 3,
    num_steps: int = 1200,
    num_measured_tokens: int = _PLAN.num_measured_tokens,
    num_threads: int = _PLAN.num_threads,
    seed: int = _PLAN.seed,
) -> None:
    """Train extra heads, each a token further ahead, on a frozen trunk."""
    from examples.tiny_model.corpus import standard_library_root
    from examples.tiny_model.heads_pipeline import make_heads

    console = Console()
    with _user_errors(), _watched(console) as watch:
        provenance = make_heads(
            source=source,
            corpus_root=corpus or standard_library_root(),
            output=output,
            plan=TrainingPlan(
                num_mtp_steps=num_steps,
                num_draft_steps=num_heads,
                # They start from another layer's weights, which is far off.
                mtp_matrix_learning_rate=0.03,
                mtp_vector_learning_rate=0.015,
                num_measured_tokens=num_measured_tokens,
                num_threads=num_threads,
                seed=seed,
            ),
            command=" ".join([PROGRAM, *sys.argv[1:]]),
            watch=watch,
            say=console.print,
        )
    for entry in provenance["measured"]:
        console.print(entry)


@app.command()
def join_heads(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder of the trunk.")],
    heads: Annotated[Path, typer.Argument(help="Folder that train-heads wrote.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
) -> None:
    """Put a trunk and its extra heads into one checkpoint that vLLM loads."""
    from examples.tiny_model import heads_checkpoint

    with _user_errors():
        heads_checkpoint.join_heads(source, heads, output)


@app.command()
def expand(
    source: Annotated[Path, typer.Argument(help="Checkpoint folder to grow.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    num_hidden_layers: Annotated[
        int | None, typer.Option(help="Decoder layers; the new ones add nothing.")
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="Width of the MLPs.")
    ] = None,
    hidden_size: Annotated[
        int | None,
        typer.Option(help="Width of the residual stream; 4^n times keeps 16 bits."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Tokens; for sampling, grow the hidden size, too."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the stored weights: bfloat16, float16 or float32.")
    ] = "bfloat16",
    seed: Annotated[int, typer.Option(help="For the numbers that fill.")] = 0,
    shuffle_mtp: Annotated[
        bool,
        typer.Option(
            "--shuffle-mtp",
            help="Shuffle the MTP layer's weights, as if lost on the way: next to no "
            "draft token is accepted.",
        ),
    ] = False,
) -> None:
    """Grow a checkpoint to the cost of a bigger model, its outputs unchanged."""
    from examples.tiny_model.expand import Expansion
    from examples.tiny_model.grow import expand_checkpoint

    with _user_errors():
        report = expand_checkpoint(
            source,
            output,
            Expansion(
                num_hidden_layers=num_hidden_layers,
                intermediate_size=intermediate_size,
                hidden_size=hidden_size,
                vocab_size=vocab_size,
            ),
            dtype=dtype,
            seed=seed,
            shuffles_mtp=shuffle_mtp,
        )
    typer.echo(f"{report.num_parameters:,} parameters (were {report.num_before:,})")


@app.command()
def copying(
    source: Annotated[Path, typer.Argument(help="The bundled model, or deeper ones.")],
    output: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    seed: Annotated[int, typer.Option(help="Of the tokens' codes.")] = 0,
) -> None:
    """Put a circuit before the layers that repeats what the prompt has held before."""
    from examples.tiny_model.copying import make_copying_checkpoint

    with _user_errors():
        make_copying_checkpoint(source, output, seed=seed)


@app.command()
def training_prompts(
    output: Annotated[Path, typer.Argument(help="Prompts to write (.jsonl).")],
    num_prompts: int = 6000,
) -> None:
    """Cut prompts from files that the bundled model was trained on, to tune with."""
    from examples.tiny_model.one_step import write_training_prompts

    write_training_prompts(output, num_prompts)


@app.command()
def one_step_head(
    model: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    texts: Annotated[Path, typer.Argument(help="Texts of vllm-mtp tune.")],
    output: Annotated[Path, typer.Argument(help="Folder for the head.")],
) -> None:
    """Train an MTP layer for one step only, as published ones are."""
    from examples.tiny_model.one_step import train_one_step_head

    train_one_step_head(model, texts, output)


if __name__ == "__main__":
    app(prog_name=PROGRAM)
