"""Where a checkpoint comes from: enough to make it again and to judge it."""

import platform
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from examples.tiny_model.corpus import CorpusSplit, corpus_hash
from examples.tiny_model.evaluate import AcceptanceCount
from examples.tiny_model.plan import TrainingPlan
from examples.tiny_model.shape import ModelShape

PROVENANCE_FILE = "PROVENANCE.json"
LICENSE_NOTE_FILE = "LICENSE-NOTE.md"

LICENSE_NOTE = """# Licence of this checkpoint

The weights and the tokenizer were trained by this project, from scratch, on
the standard library of CPython {python} (file list and hash of the corpus in
`PROVENANCE.json`). CPython is distributed under the Python Software Foundation
License Version 2; a few of its modules carry notices of their own.
Copyright (c) 2001-{year} Python Software Foundation; All Rights Reserved.

`heldout_prompts.jsonl` quotes short stretches of files of that library, named
in each line, under the same licence.

No other data and no other model's weights or outputs went in.
"""


def license_note(python: str, year: int) -> str:
    """The note that goes with a checkpoint trained on CPython's library."""
    return LICENSE_NOTE.format(python=python, year=year)


def software_versions() -> dict[str, str]:
    """Versions of what shapes the result."""
    packages = ("torch", "tokenizers", "safetensors")
    return {"python": platform.python_version()} | {
        package: version(package) for package in packages
    }


def describe_acceptance(
    count: AcceptanceCount, *, how: str, temperature: float, drafts: str
) -> dict[str, Any]:
    """A measured figure with what it needs to be understood."""
    return {
        "how": how,
        "temperature": temperature,
        "drafts": drafts,
        "num_draft_tokens": len(count.num_accepted_per_pos),
        "num_drafts": count.num_drafts,
        "acceptance_per_pos": [round(x, 4) for x in count.acceptance_per_pos],
        "acceptance_length": round(count.acceptance_length, 4),
    }


def build_provenance(
    *,
    command: str,
    shape: ModelShape,
    plan: TrainingPlan,
    split: CorpusSplit,
    num_train_tokens: int,
    measured: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The content of `PROVENANCE.json`.

    Args:
        command: The command line that makes this checkpoint.
        shape: Sizes of the model.
        plan: Steps, rates and seed.
        split: The corpus, to be named file by file where it was held out.
        num_train_tokens: Tokens of one pass over the training half.
        measured: From `describe_acceptance`.
    """
    return {
        "command": command,
        "seed": plan.seed,
        "versions": software_versions(),
        "corpus": {
            "name": f"CPython {platform.python_version()} standard library",
            "license": "PSF-2.0",
            "sha256_train": corpus_hash(split.train),
            "sha256_held_out": corpus_hash(split.held_out),
            "num_train_files": len(split.train),
            "num_train_tokens": num_train_tokens,
            "held_out_files": [file.name for file in split.held_out],
        },
        "shape": shape.model_dump(),
        "plan": plan.model_dump(),
        "measured": list(measured),
    }
