"""An MTP layer that was trained for one step becomes a drafter for several.

1. The target answers prompts; tokens and hidden states are kept (`tune_texts`).
2. The MTP layers alone are trained on them (`tune/train.py`).
3. They are written as a checkpoint of their own (`tune/checkpoint.py`).
4. Both heads draft for prompts that were not trained on; the new one is called better
   only if the whole interval of the difference says so (`tune_verdict`).

The same command goes on with a run that was interrupted. What it was given and has
measured is in ``tuning.json`` of the head.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from vllm_mtp.config import FULL, METHOD, ConfigError
from vllm_mtp.tools.option_checks import refuse, resolve_model
from vllm_mtp.tools.options import MODEL_HELP, Options, argument, option, required
from vllm_mtp.tools.prompts import Prompt, load_prompts
from vllm_mtp.tools.provenance import collect_provenance
from vllm_mtp.tools.tune_texts import Answering, collect_texts
from vllm_mtp.tools.tune_verdict import Verdict, judge

TEXTS_FOLDER, RUN_FOLDER = "texts", "run"
PICTURE = "tuning.svg"
MEASURE_EVERY = 200
"""Updates between two measurements on held-out texts."""


@dataclass(frozen=True)
class TuneOptions(Options):
    """Tune a model's MTP layers to draft several tokens.

    Serve with the result: --speculative-config '{"method":"mtp_plus","model":"HEAD"}'.
    """

    model: str = argument(MODEL_HELP)
    output: Path = required("Folder for the head and for what is needed to go on.")
    prompts: Path | None = option(
        None,
        "A .jsonl with text or messages and id, like what will be served. Unset: what "
        "the checkpoint brings, or 96 built-in ones, too few for more than a try.",
    )
    num_prompts: int | None = option(None, "At most. Unset: all.", 2, 10**8)
    data: Path | None = option(
        None, "Folder of texts that a server has recorded (`hidden_states_path`)."
    )
    draft_model: Path | None = option(
        None, "Head to begin with (a folder). Unset: the model's own MTP layers."
    )
    answer_tokens: int = option(512, "Of an answer, at most.", 1, 10**6)
    max_model_len: int = option(2048, "Of a prompt and its answer.", 16, 10**7)
    temperature: float = option(1.0, "Of sampled answers.", 0.01, 2)
    sampled_share: float = option(0.8, "Of answers; the others are greedy.", 0, 1)
    concurrency: int = option(64, "Answers at a time.", 1, 4096)
    dtype: str = option("auto", "Of the engine that answers.")
    draft_steps: int = option(7, "Draft steps that are trained.", 1, 16)
    loss: str = option("lk", "lk: acceptance itself; kl: KL alone.")
    step_decay: float = option(
        0.8, "Weight of a draft step relative to the one before.", 0.01, 1
    )
    draft_rows: int | None = option(
        None,
        "Commonest tokens of the texts that are compared, as in a server's draft "
        "vocabulary. Unset: as many as there; 0: all.",
        0,
        2**24,
    )
    epochs: float = option(1.0, "Passes over the texts.", 0.01, 100)
    learning_rate: float = option(1e-4, "Highest.", 1e-8, 1)
    batch_tokens: int = option(8192, "Of an update.", 16, 2**24)
    window_tokens: int = option(2048, "Longer texts are cut.", 16, 2**20)
    recompute: bool = option(
        False, "Compute activations twice instead of keeping them."
    )
    device: str = option("auto", "auto, cpu or cuda: of the training.")
    seed: int = option(0, "Of the order of the texts.", 0, 2**31)
    eval_prompts: int = option(
        48, "Held-out prompts to judge by; 0: by hidden states alone.", 0, 10**5
    )
    eval_depths: tuple[int, ...] = option((3, 7), "Draft lengths to judge at.", 1, 16)

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        if self.loss not in ("lk", "kl"):
            refuse("loss", self.loss, "'lk' or 'kl'")
        if self.device not in ("auto", "cpu", "cuda"):
            refuse("device", self.device, "'auto', 'cpu' or 'cuda'")
        if self.output.is_file():
            refuse("output", str(self.output), "a folder")


def run_tune(options: TuneOptions, console: Console) -> Verdict | None:
    """Do all of it, as far as it has not been done.

    Returns:
        None if nothing was to be judged by.

    Raises:
        ConfigError: Model, prompts or texts cannot be used.
        ServerError: An engine failed.
    """
    from vllm_mtp.tune.checkpoint import Checkpoint, local_folder

    is_first = int(os.environ.get("RANK", "0")) == 0
    if not is_first:
        console = Console(quiet=True)
    if options.data is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "data: several ranks train on texts that are there already; run without "
            "torchrun first, or name those that a server has recorded"
        )
    model = resolve_model(options.model)
    checkpoint = Checkpoint(local_folder(model))
    head = None if options.draft_model is None else str(options.draft_model)
    trained_on, judged_by = _prompts_of(options, model)
    texts = options.data or options.output / TEXTS_FOLDER
    if options.data is None:
        answering = Answering(
            options.answer_tokens,
            options.max_model_len,
            options.concurrency,
            options.temperature,
            options.sampled_share,
            options.dtype,
            speculation(head),
        )
        token_bytes = 2 * int(checkpoint.text_config["hidden_size"])
        collect_texts(model, trained_on, answering, texts, token_bytes, console)
    tuning = _train(options, checkpoint, texts, console)
    verdict = None
    if judged_by and is_first:
        verdict = judge(
            model,
            {"before": speculation(head), "after": speculation(str(options.output))},
            judged_by,
            options.eval_depths,
            options.output / RUN_FOLDER,
            console,
        )
    _print_measured(tuning, console)
    if is_first and find_spec("matplotlib") is not None:
        from vllm_mtp.tune.plots import draw
        from vllm_mtp.tune.train import JOURNAL_FILE

        draw(options.output / RUN_FOLDER / JOURNAL_FILE, options.output / PICTURE)
    return verdict


def speculation(head: str | None) -> dict[str, Any]:
    """Config of an engine that drafts from the whole vocabulary."""
    own = {"method": METHOD, "draft_vocab": FULL}
    return own if head is None else own | {"model": head}


def _prompts_of(options: TuneOptions, model: str) -> tuple[list[Prompt], list[Prompt]]:
    """To be trained on, and to judge by: every n-th one, and at most a fifth."""
    prompts = load_prompts(options.prompts, model, options.num_prompts)
    if not options.eval_prompts:
        return prompts, []
    every = max(5, len(prompts) // options.eval_prompts)
    judged_by = prompts[::every][: options.eval_prompts]
    kept = {prompt.id for prompt in judged_by}
    trained_on = [prompt for prompt in prompts if prompt.id not in kept]
    if not trained_on:
        raise ConfigError("prompts: one is not enough to train on and to judge by")
    return trained_on, judged_by


def _train(
    options: TuneOptions, model: Any, folder: Path, console: Console
) -> Mapping[str, Any]:
    """Train and write the head; what was measured before and after."""
    from vllm_mtp.tune.checkpoint import Checkpoint, write_head
    from vllm_mtp.tune.plan import TuningPlan
    from vllm_mtp.tune.ranks import on_ranks
    from vllm_mtp.tune.shards import Texts
    from vllm_mtp.tune.train import Trainer

    source = model if options.draft_model is None else Checkpoint(options.draft_model)
    # Each of several layers drafts one token.
    several = source.num_mtp_layers if source.num_mtp_layers > 1 else 16
    same = TuningPlan.model_fields.keys() & vars(options).keys()
    plan = TuningPlan.model_validate(
        {name: getattr(options, name) for name in same}
        | {
            "num_steps": min(options.draft_steps, several),
            "checkpoints_activations": options.recompute,
        }
    )
    run = options.output / RUN_FOLDER
    run.mkdir(parents=True, exist_ok=True)
    start_s = perf_counter()
    with on_ranks(options.device) as ranks:
        drafter = ranks.shard(source.drafter(plan.checkpoints_activations))
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
            "provenance": collect_provenance(sys.argv),
        }
        if ranks.is_first:
            stored = {n: weights[n].to(t) for n, t in source.dtypes(weights).items()}
            write_head(options.output, model, stored, tuning)
    return tuning


def _drafted(options: TuneOptions, model: Any, folder: Path) -> Any:
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
    columns = (
        TextColumn("tuning"),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=trainer.num_updates, loss=0.0)

        def watch(update: int, loss: float) -> None:
            bar.update(task, completed=update, loss=loss)
            trainer.note(loss=loss)
            if update % MEASURE_EVERY == 0:
                trainer.note(held_out=trainer.measure()._asdict())

        trainer.run(watch, MEASURE_EVERY)


def _print_measured(tuning: Mapping[str, Any], console: Console) -> None:
    table = Table("K", "accepted", "greedy agrees", "KL, nats", "length", "greedy")
    before, after = (tuning["held_out"][when] for when in ("before", "after"))
    columns = ("acceptance", "agreement", "kl", "sampled_lengths", "greedy_lengths")
    for step in range(len(after["kl"])):
        cells = (f"{before[n][step]:.3f} -> {after[n][step]:.3f}" for n in columns)
        table.add_row(str(step + 1), *cells)
    console.print(table)
    console.print(
        "Along held-out texts: draft step K after steps that held, and acceptance "
        "lengths with drafts of K tokens, drawn at temperature 1 and greedy."
    )
