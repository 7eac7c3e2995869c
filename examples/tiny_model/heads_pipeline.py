"""The whole way from a trained model to its extra heads."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from examples.tiny_model.checkpoint import DTYPES, save_weights, write_json
from examples.tiny_model.corpus import collect_sources, split_by_file
from examples.tiny_model.dataset import encode_files
from examples.tiny_model.heads import head_weights, load_heads_model
from examples.tiny_model.heads_checkpoint import HEADS_FILE
from examples.tiny_model.pipeline import measure
from examples.tiny_model.plan import TrainingPlan, Watcher
from examples.tiny_model.prompts import PROMPTS_FILE, read_prompts
from examples.tiny_model.provenance import (
    LICENSE_NOTE_FILE,
    PROVENANCE_FILE,
    build_provenance,
)
from examples.tiny_model.tokenizer import load_tokenizer
from examples.tiny_model.train import train_mtp


def make_heads(
    *,
    source: Path,
    corpus_root: Path,
    output: Path,
    plan: TrainingPlan,
    command: str,
    dtype: str = "bfloat16",
    watch: Watcher = lambda report: None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Trains extra heads on a frozen trunk, as stage 2 trains the MTP layer.

    Args:
        source: Checkpoint of the trunk, with its held-out prompts.
        corpus_root: Folder of Python sources: those that the trunk was trained on.
        output: Folder to write; must be empty or not exist yet.
        plan: As many heads as it has draft steps, trained for its MTP steps.
        command: The command line, for the provenance.
        dtype: Of the stored weights; a key of `checkpoint.DTYPES`.
        watch: Called after every training step.
        say: Called with one line as each phase begins.

    Returns:
        The provenance, as written.

    Raises:
        ValueError: If an argument is not usable.
    """
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"output: {output} is not empty; expected a new folder")
    torch.set_num_threads(plan.num_threads)
    model = load_heads_model(source, plan.num_draft_steps)
    tokenizer = load_tokenizer(source)
    split = split_by_file(collect_sources(corpus_root))
    say(f"encoding {len(split.train)} files")
    tokens = encode_files(split.train, tokenizer, seed=plan.seed)
    train_mtp(model, tokens, plan, watch)
    output.mkdir(parents=True, exist_ok=True)
    save_weights(head_weights(model), output / HEADS_FILE, DTYPES[dtype])
    # As stored: rounding to 16 bits belongs to the checkpoint.
    model = load_heads_model(source, plan.num_draft_steps, output / HEADS_FILE)
    prompts = read_prompts(source / PROMPTS_FILE)
    say("measuring acceptance on held-out prompts")
    provenance = {
        "trunk": source.resolve().name,
        **build_provenance(
            command=command,
            shape=model.shape,
            plan=plan,
            split=split,
            num_train_tokens=tokens.numel(),
            measured=measure(model, tokenizer, split, prompts, plan),
        ),
    }
    write_json(output / PROVENANCE_FILE, provenance)
    shutil.copy(source / LICENSE_NOTE_FILE, output)  # the same corpus
    return provenance
