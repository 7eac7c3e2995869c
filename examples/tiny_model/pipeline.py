"""The whole way from Python's sources to a checkpoint folder."""

import random
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from examples.tiny_model.checkpoint import (
    DTYPES,
    load_model,
    save_checkpoint,
    write_json,
)
from examples.tiny_model.corpus import CorpusSplit, collect_sources, split_by_file
from examples.tiny_model.dataset import encode_files, iterate_batches
from examples.tiny_model.evaluate import (
    generate,
    replay_acceptance,
    teacher_forced_agreement,
    trunk_cross_entropy,
)
from examples.tiny_model.model import MiMoModel
from examples.tiny_model.plan import TrainingPlan, Watcher
from examples.tiny_model.prompts import (
    PROMPTS_FILE,
    HeldOutPrompt,
    cut_prompts,
    write_prompts,
)
from examples.tiny_model.provenance import (
    LICENSE_NOTE_FILE,
    PROVENANCE_FILE,
    build_provenance,
    describe_acceptance,
    license_note,
    software_versions,
)
from examples.tiny_model.shape import ModelShape
from examples.tiny_model.tokenizer import train_tokenizer
from examples.tiny_model.train import train_mtp, train_trunk


def measure(
    model: MiMoModel,
    tokenizer: Tokenizer,
    split: CorpusSplit,
    prompts: list[HeldOutPrompt],
    plan: TrainingPlan,
) -> list[dict[str, Any]]:
    """Agreement on held-out text and acceptance on continued prompts.

    Returns:
        Entries for `PROVENANCE.json`, at temperatures 0 and 1.
    """
    num_steps = plan.num_draft_steps
    held_out = encode_files(split.held_out, tokenizer, seed=plan.seed)
    batch = next(
        iterate_batches(held_out, batch_size=16, seq_len_tokens=256, seed=plan.seed)
    )
    agreement = teacher_forced_agreement(model, batch, num_steps)
    results: list[dict[str, Any]] = [
        {
            "how": "held-out text; agreement: of the MTP layer's most likely token "
            "with the trunk's, teacher-forced",
            "num_tokens": batch.numel(),
            "trunk_nats_per_token": round(trunk_cross_entropy(model, batch), 4),
            "agreement_per_pos": [round(x, 4) for x in agreement],
        }
    ]
    ids = [tokenizer.encode(prompt.text).ids for prompt in prompts]
    for temperature in (0.0, 1.0):
        texts = generate(
            model,
            ids,
            max_new_tokens=plan.num_measured_tokens,
            temperature=temperature,
            seed=plan.seed,
        )
        for method in ("greedy", "probabilistic") if temperature else ("greedy",):
            count = replay_acceptance(
                model,
                texts,
                [len(prompt) for prompt in ids],
                num_steps=num_steps,
                method=method,
                temperature=temperature,
                seed=plan.seed,
            )
            results.append(
                describe_acceptance(
                    count,
                    how="replayed in torch, float32, on all held-out prompts, "
                    f"{plan.num_measured_tokens} new tokens each",
                    temperature=temperature,
                    drafts=method,
                )
            )
    return results


def train_model(
    split: CorpusSplit,
    shape: ModelShape,
    plan: TrainingPlan,
    watch: Watcher,
    say: Callable[[str], None],
) -> tuple[MiMoModel, Tokenizer, int]:
    """Tokenizer and model, trained in both stages.

    Returns:
        Model, tokenizer, and the number of training tokens of one pass.
    """
    say(f"training a tokenizer of {shape.vocab_size} tokens")
    tokenizer = train_tokenizer((file.text for file in split.train), shape.vocab_size)
    say(f"encoding {len(split.train)} files")
    tokens = encode_files(split.train, tokenizer, seed=plan.seed)
    model = MiMoModel(shape)
    model.initialize(plan.seed)
    train_trunk(model, tokens, plan, watch)
    train_mtp(model, tokens, plan, watch)
    return model, tokenizer, tokens.numel()


def make_checkpoint(
    *,
    corpus_root: Path,
    output: Path,
    shape: ModelShape,
    plan: TrainingPlan,
    command: str,
    dtype: str = "bfloat16",
    watch: Watcher = lambda report: None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Trains a model on `corpus_root` and writes a complete folder.

    Args:
        corpus_root: Folder of Python sources.
        output: Folder to write; must be empty or not exist yet.
        shape: Sizes of the model.
        plan: Steps, rates and seed.
        command: The command line, for the provenance.
        dtype: Of the stored weights; a key of `checkpoint.DTYPES`.
        watch: Called after every training step.
        say: Called with one line as each phase begins.

    Returns:
        The provenance, as written.

    Raises:
        ValueError: If an argument is not usable.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: {dtype!r}; expected one of {', '.join(DTYPES)}")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"output: {output} is not empty; expected a new folder")
    torch.set_num_threads(plan.num_threads)
    random.seed(plan.seed)
    torch.manual_seed(plan.seed)
    split = split_by_file(collect_sources(corpus_root))
    model, tokenizer, num_tokens = train_model(split, shape, plan, watch, say)
    prompts = cut_prompts(split.held_out, tokenizer, plan.num_prompts, seed=plan.seed)
    save_checkpoint(output, model, tokenizer, dtype=dtype)
    write_prompts(prompts, output / PROMPTS_FILE)
    note = license_note(software_versions()["python"], datetime.now(UTC).year)
    (output / LICENSE_NOTE_FILE).write_text(note, encoding="utf-8")
    say("measuring acceptance on held-out prompts")
    provenance = build_provenance(
        command=command,
        shape=shape,
        plan=plan,
        split=split,
        num_train_tokens=num_tokens,
        # As stored: rounding to 16 bits belongs to the checkpoint.
        measured=measure(load_model(output), tokenizer, split, prompts, plan),
    )
    write_json(output / PROVENANCE_FILE, provenance)
    return provenance
