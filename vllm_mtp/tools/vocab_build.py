"""A draft vocabulary from text, or from what the target generates.

Counted is what a server would commit: tokens of texts like those that will be served,
or better the tokens that the target itself generates for prompts like those.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vllm_mtp.config import ConfigError
from vllm_mtp.drafting.vocabulary_list import VocabularyList, fingerprint
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.eval_backends import Sampling, started_engine
from vllm_mtp.tools.option_checks import check_output, refuse, resolve_model
from vllm_mtp.tools.options import MODEL_HELP, Options, argument, option, required
from vllm_mtp.tools.prompts import load_prompts
from vllm_mtp.tools.provenance import collect_provenance, replacing

CHUNK_CHARACTERS = 1 << 20
MAX_MODEL_LEN_TOKENS = 2048
SEATS = 8
"""Answers at a time."""

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class VocabOptions(Options):
    """Count tokens and write those that are worth a row of the draft head.

    Serve with it: --speculative-config '{"method":"mtp_plus","draft_vocab":"FILE"}'.
    """

    output: Path = argument("List to write (JSON).")
    model: str = required(MODEL_HELP)
    text: list[Path] | None = option(
        None,
        "Text like what will be served; may be repeated. Of a .jsonl the field `text` "
        "of each line.",
    )
    prompts: Path | None = option(
        None,
        "Prompts (.jsonl with `text` or `messages`): the target answers them, and its "
        "answers are counted. Fits served text better.",
    )
    max_tokens: int = option(256, "Longest answer.", 1, 10**5)
    temperature: float = option(1.0, "Of the answers.", 0, 2)
    dtype: str = option("auto", "Of the engine that answers.")
    size: int | None = option(
        None,
        "Rows of the draft head, rounded up to a multiple of 128. Unset: a quarter of "
        "the vocabulary, at most 16384.",
    )
    coverage: float | None = option(
        None, "Instead of --size: the share that shall be covered."
    )

    def __post_init__(self) -> None:
        """Check what can be checked without the model; see `Options`."""
        super().__post_init__()
        files = [*(self.text or ()), *filter(None, [self.prompts])]
        if not files:
            raise ConfigError("text: give files with --text, or --prompts")
        if self.size is not None and self.coverage is not None:
            raise ConfigError("coverage: give --size or --coverage, not both")
        if self.coverage is not None and not 0 < self.coverage <= 1:
            refuse("coverage", self.coverage, "above 0, at most 1")
        for path in files:
            if not (path.is_file() and os.access(path, os.R_OK)):
                raise ConfigError(f"text: {str(path)!r} is no file that can be read")
        check_output(self.output)


@dataclass(frozen=True)
class ModelVocabulary:
    """What must be known of a model.

    Attributes:
        size: Of the vocabulary, rows without a token included.
        always: Token ids that must be in a list.
        tokenizer: Of transformers.
        max_model_len: Tokens of a prompt and its answer, in an engine of ours.
    """

    size: int
    always: frozenset[int]
    tokenizer: Any
    max_model_len: int = MAX_MODEL_LEN_TOKENS


def build_vocabulary(options: VocabOptions, console: Console) -> VocabularyList:
    """Count, choose, write and print.

    Raises:
        ConfigError: The model or a file cannot be used.
    """
    name = resolve_model(options.model)
    model = read_model(name)
    _check_size(options.size, model.size)
    counts = np.zeros(model.size, np.int64)
    texts = list(_read_texts(options.text or ()))
    for text in track(texts, "counting", console=console, disable=not texts):
        # Not verbose: longer than the model's context is no matter here.
        ids = model.tokenizer.encode(text, add_special_tokens=False, verbose=False)
        counts += np.bincount(ids, minlength=model.size)
    if options.prompts is not None:
        for ids in _generate(name, model.max_model_len, options):
            counts += np.bincount(ids, minlength=model.size)
    if not counts.any():
        raise ConfigError("text: there is not a single token in it")
    listed = build_list(counts, model, options.size, options.coverage)
    with replacing(options.output) as pending:
        pending.write_text(listed.model_dump_json() + "\n")
    _print(counts, listed, console)
    console.print(f"Written: {options.output}", markup=False)
    return listed


def build_list(
    counts: Counts, model: ModelVocabulary, size: int | None, coverage: float | None
) -> VocabularyList:
    """A list for a model; see `choose_token_ids`."""
    token_ids = choose_token_ids(counts, model.always, size, coverage)
    provenance = collect_provenance(sys.argv)
    return VocabularyList(
        vocab_size=model.size,
        tokenizer_sha256=fingerprint(model.tokenizer.get_vocab()),
        token_ids=tuple(map(int, token_ids)),
        counts=tuple(map(int, counts[token_ids])),
        num_counted=int(counts.sum()),
        source={key: provenance[key] for key in ("time_utc", "command", "versions")},
    )


def choose_token_ids(
    counts: Counts,
    always: Iterable[int],
    size: int | None,
    coverage: float | None,
) -> Counts:
    """The ids of a list, the most frequent first.

    Args:
        counts: ``[vocab_size]``.
        always: Ids that must be in it.
        size: Rows; None for `coverage`, or the usual number if that is None, too.
        coverage: Share of all counts that the rows shall cover.
    """
    # Brings torch: seconds, not for the help of other commands.
    from vllm_mtp.drafting.vocabulary import default_num_rows, round_num_rows

    vocab_size = len(counts)
    by_count = np.argsort(-counts, kind="stable")
    if size is None:
        size = default_num_rows(vocab_size, 1) or vocab_size
        if coverage is not None:
            covered = np.cumsum(counts[by_count]) / counts.sum()
            size = int(np.searchsorted(covered, coverage - 1e-12)) + 1
    size = min(round_num_rows(size, 1), vocab_size)
    is_always = np.isin(by_count, list(always))
    # In the order of their counts, those that must be there first of all.
    places = np.argsort(~is_always, kind="stable")[:size]
    return by_count[np.sort(places)]


def _check_size(size: int | None, vocab_size: int) -> None:
    if size is not None and not 1 <= size <= vocab_size:
        raise ConfigError(
            f"size: {size} is not allowed; must be from 1 to {vocab_size}, the size of "
            "the model's vocabulary"
        )


def _parse_line(line: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ConfigError(f"text: {place} is no JSON object")
    return record


def _read_texts(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        try:
            whole = path.read_text("utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"text: {path} is no text in UTF-8") from None
        if path.suffix == ".jsonl":
            lines = enumerate(whole.splitlines(), 1)
            records = (_parse_line(line, f"{path}:{n}") for n, line in lines if line)
            yield from (str(record.get("text", "")) for record in records)
        else:
            starts = range(0, len(whole), CHUNK_CHARACTERS)
            yield from (whole[start : start + CHUNK_CHARACTERS] for start in starts)


def read_model(name: str) -> ModelVocabulary:
    """What a checkpoint says of its vocabulary.

    Raises:
        ConfigError: It cannot be read.
    """
    # Takes seconds to import.
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    try:
        config = AutoConfig.from_pretrained(name).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise ConfigError(f"model: {name!r} cannot be read: {first_line}") from None
    ends = {*tokenizer.all_special_ids, *_end_ids(config)}
    with suppress(OSError):  # not every model has one
        ends |= _end_ids(GenerationConfig.from_pretrained(name))
    size = int(config.vocab_size)
    longest = getattr(config, "max_position_embeddings", MAX_MODEL_LEN_TOKENS)
    return ModelVocabulary(
        size,
        frozenset(i for i in ends if i < size),
        tokenizer,
        min(longest, MAX_MODEL_LEN_TOKENS),
    )


def _end_ids(config: Any) -> set[int]:
    ids = config.eos_token_id
    return set(ids) if isinstance(ids, list) else {ids} - {None}


def _generate(model: str, max_model_len: int, options: VocabOptions) -> list[list[int]]:
    """What the target answers, as token ids."""
    prompts = load_prompts(options.prompts, model, None)
    sampling = Sampling(None, options.temperature, options.max_tokens)
    size = EngineSize(model, max_model_len, SEATS, options.dtype)
    with started_engine(size, None, sampling) as engine:
        return [list(answer.token_ids) for _, answer in engine.answers(prompts)]


def _print(counts: Counts, listed: VocabularyList, console: Console) -> None:
    covered = np.cumsum(-np.sort(-counts)) / counts.sum()
    table = Table(title=f"{listed.num_counted} tokens, {(counts > 0).sum()} different")
    table.add_column("rows", justify="right")
    table.add_column("coverage", justify="right")
    size = len(listed.token_ids)
    powers = [2**n for n in range(8, 20) if 2**n <= len(counts)]
    for rows in sorted({*powers, size}):
        is_chosen = rows == size
        share = listed.coverage()[-1] if is_chosen else covered[rows - 1]
        table.add_row(str(rows), f"{share:.2%}", style="bold" if is_chosen else None)
    console.print(table)
