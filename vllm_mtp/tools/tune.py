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
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_mtp.config import FULL, METHOD, ConfigError
from vllm_mtp.tools.option_checks import refuse, resolve_model
from vllm_mtp.tools.options import MODEL_HELP, Options, argument, option, required
from vllm_mtp.tools.prompts import Prompt, load_prompts
from vllm_mtp.tools.ray_cluster import connected, require_ray
from vllm_mtp.tools.tune_texts import Answering, collect_texts
from vllm_mtp.tools.tune_train import (
    RUN_FOLDER,
    train,
    train_ranks_on_ray,
)
from vllm_mtp.tools.tune_verdict import Verdict, judge

TEXTS_FOLDER = "texts"
PICTURE = "tuning.svg"


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
    mtp_layers: int | None = option(
        None,
        "Of the head; those beyond the checkpoint's own begin as copies of its last "
        "one, each for one draft step (looped extension). Unset: the checkpoint's.",
        1,
        16,
    )
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
    ray: int | None = option(
        None,
        "Engines that answer and ranks that train, on a Ray cluster, one GPU each; its "
        "machines must all see OUTPUT and the model. Unset: this machine.",
        1,
        4096,
    )
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
        if self.ray is not None:
            require_ray()


def run_tune(options: TuneOptions, console: Console) -> Verdict | None:
    """Do all of it, as far as it has not been done.

    Returns:
        None if nothing was to be judged by.

    Raises:
        ConfigError: Model, prompts, texts or the Ray cluster cannot be used.
        ServerError: An engine failed.
    """
    if options.ray is None:
        return _tune(options, console)
    with connected():
        return _tune(_for_other_machines(options), console)


def _for_other_machines(options: TuneOptions) -> TuneOptions:
    """With paths that do not depend on where the command was given."""
    folders = {
        name: path.absolute()
        for name in ("output", "data", "draft_model")
        if (path := getattr(options, name)) is not None
    }
    return replace(options, model=resolve_model(options.model), **folders)


def _tune(options: TuneOptions, console: Console) -> Verdict | None:
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
        collect_texts(
            model, trained_on, answering, texts, token_bytes, console, options.ray
        )
    if options.ray is None:
        tuning = train(options, texts, sys.argv, console)
    else:
        tuning = train_ranks_on_ray(options, options.ray, texts, sys.argv, console)
    verdict = None
    if judged_by and is_first:
        verdict = judge(
            model,
            {"before": speculation(head), "after": speculation(str(options.output))},
            judged_by,
            options.eval_depths,
            options.output / RUN_FOLDER,
            console,
            options.ray,
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
