"""The training of ``vllm-mtp tune``: here, on torchrun's ranks, or on Ray's."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vllm_mtp.tools.option_checks import resolve_model
from vllm_mtp.tools.provenance import collect_provenance
from vllm_mtp.tools.ray_train import following, train_on_ray

if TYPE_CHECKING:
    from vllm_mtp.tools.tune import TuneOptions
    from vllm_mtp.tune.plan import TuningPlan

RUN_FOLDER = "run"
MEASURE_EVERY = 200
"""Updates between two measurements on held-out texts."""


def train(
    options: "TuneOptions",
    folder: Path,
    command: Sequence[str],
    console: Console,
) -> Mapping[str, Any]:
    """Train and write the head, on each rank.

    Args:
        options: Of the command.
        folder: With the texts.
        command: That was given, for the provenance.
        console: Told how far it is.

    Returns:
        What was measured before and after.

    Raises:
        ConfigError: Model or texts cannot be used.
    """
    from vllm_mtp.tune.checkpoint import Checkpoint, local_folder, write_head
    from vllm_mtp.tune.ranks import on_ranks
    from vllm_mtp.tune.shards import Texts
    from vllm_mtp.tune.train import Trainer

    model = Checkpoint(local_folder(resolve_model(options.model)))
    source = model if options.draft_model is None else Checkpoint(options.draft_model)
    num_layers = options.mtp_layers or source.num_mtp_layers
    plan = _plan_of(options, num_layers)
    run = options.output / RUN_FOLDER
    run.mkdir(parents=True, exist_ok=True)
    start_s = perf_counter()
    with on_ranks(options.device) as ranks:
        whole = source.drafter(plan.checkpoints_activations, num_layers=plan.mtp_layers)
        dtypes = source.dtypes(whole)
        drafter = ranks.shard(whole)
        drafted = _drafted(options, model, folder)
        target = model.target(ranks.device, drafted)
        trainer = Trainer(drafter, target, Texts(folder), plan, run)
        if not trainer.resume():
            trainer.begin()
        _watched(trainer, console)
        after = trainer.measure()
        before = trainer.first_note()
        weights = ranks.gather(drafter)
        tuning = {
            "plan": plan.model_dump(),
            "num_updates": trainer.num_updates,
            "num_texts": len(trainer.trained.windows),
            "seconds": perf_counter() - start_s,
            "held_out": {"before": before, "after": after._asdict()},
            "provenance": collect_provenance(command),
        }
        if ranks.is_first:
            stored = {name: weights[name].to(kind) for name, kind in dtypes.items()}
            write_head(options.output, model, stored, tuning, num_layers)
    return tuning


def _plan_of(options: "TuneOptions", num_layers: int) -> "TuningPlan":
    from vllm_mtp.tune.plan import TuningPlan

    # Each of several layers drafts one token.
    several = num_layers if num_layers > 1 else 16
    same = TuningPlan.model_fields.keys() & vars(options).keys()
    return TuningPlan.model_validate(
        {name: getattr(options, name) for name in same}
        | {
            "num_steps": min(options.draft_steps, several),
            "checkpoints_activations": options.recompute,
        }
    )


def _drafted(options: "TuneOptions", model: Any, folder: Path) -> Any:
    """``[num_rows]`` int64: tokens that may be drafted; None for all."""
    from vllm_mtp.drafting.vocabulary import default_num_rows
    from vllm_mtp.tune.shards import count_tokens

    vocab_size = int(model.text_config["vocab_size"])
    num_rows = options.draft_rows
    if num_rows is None:
        num_rows = default_num_rows(vocab_size, 1) or 0
    if not 0 < num_rows < vocab_size:
        return None
    commonest = count_tokens(folder, vocab_size).topk(num_rows).indices
    return commonest.sort().values


def _watched(trainer: Any, console: Console) -> None:
    """Train to the end under a progress bar."""
    with _progress(console, trainer.num_updates) as show:

        def watch(update: int, loss: float) -> None:
            show(update, loss)
            trainer.note(loss=loss)
            if update % MEASURE_EVERY == 0:
                trainer.note(held_out=trainer.measure()._asdict())

        trainer.run(watch, MEASURE_EVERY)


@contextmanager
def _progress(
    console: Console, num_updates: int | None
) -> Iterator[Callable[[int, float], None]]:
    """Within: a bar, which the function tells updates and losses."""
    columns = (
        TextColumn("tuning"),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=num_updates, loss=0.0)

        def show(update: int, loss: float) -> None:
            bar.update(task, completed=update, loss=loss)

        yield show


def train_ranks_on_ray(
    options: "TuneOptions",
    num_ranks: int,
    folder: Path,
    command: Sequence[str],
    console: Console,
) -> Mapping[str, Any]:
    """The same on ranks of a Ray cluster, whose machines all see the folders.

    Raises:
        ConfigError: Model, texts or cluster cannot be used.
        ServerError: A rank failed.
    """
    from vllm_mtp.tune.checkpoint import TUNING_FILE
    from vllm_mtp.tune.train import JOURNAL_FILE

    run = options.output / RUN_FOLDER
    run.mkdir(parents=True, exist_ok=True)
    work = partial(_train_rank, options, folder, list(command))
    # The number of updates is known to the ranks alone.
    with _progress(console, None) as show, following(run / JOURNAL_FILE, show):
        train_on_ray(work, num_ranks, options.device, run)
    text = (options.output / TUNING_FILE).read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


def _train_rank(options: "TuneOptions", folder: Path, command: Sequence[str]) -> None:
    train(options, folder, command, Console(quiet=True))
