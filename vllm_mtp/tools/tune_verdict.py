"""Is a tuned head better than the one before? Both draft for the same prompts.

Evaluations are those of ``vllm-mtp eval`` and are kept, so ``vllm-mtp compare`` reads
them, too. A draft length at a temperature is better if the whole interval of the
difference of acceptance lengths, over prompts, lies above zero.

Prompts whose greedy answer repeats itself are left out at temperature 0: any drafter
goes round with the target, and small models repeat themselves often. With too few of
the others there is no verdict there.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from vllm_mtp.tools.compare import CompareOptions, Figure, compare
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import START_TIMEOUT_S, EngineGroup
from vllm_mtp.tools.eval_backends import (
    DRAFT_METRICS,
    Backend,
    EngineBackend,
    Sampling,
)
from vllm_mtp.tools.eval_file import EvalFile, record_of
from vllm_mtp.tools.prompts import Prompt, fingerprint_of
from vllm_mtp.tools.provenance import collect_provenance, replacing
from vllm_mtp.tools.ray_engines import ray_engines
from vllm_mtp.tools.ray_eval import RayBackend
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

TEMPERATURES = (0.0, 1.0)
ANSWER_TOKENS, MAX_MODEL_LEN, CONCURRENCY = 128, 2048, 8
BEFORE, AFTER = "before", "after"
_KV_CACHE_MIB = 512
MIN_PROMPTS = 5
"""Of which an interval says something."""
_GRAM, _MAX_REPEATED = 8, 0.2
"""More than this share of the 8-grams of an answer that repeats itself came before."""
_FALSE_ALARMS = CompareOptions(false_alarm_rate=0.05)


class Cell(NamedTuple):
    """One draft length at one temperature."""

    temperature: float
    draft_length: int
    num_prompts: int
    length: Figure
    """Acceptance length: ``base`` before, ``new`` after."""

    @property
    def is_better(self) -> bool:
        """Surely."""
        return self.length.interval[0] > 0


class Verdict(NamedTuple):
    """Of a tuned head."""

    cells: list[Cell]

    @property
    def is_better(self) -> bool:
        """In every cell."""
        return all(cell.is_better for cell in self.cells)

    @property
    def is_worse(self) -> bool:
        """In any."""
        return any(cell.length.is_worse for cell in self.cells)


def judge(
    model: str,
    heads: Mapping[str, Mapping[str, Any]],
    prompts: Sequence[Prompt],
    draft_lengths: Sequence[int],
    folder: Path,
    console: Console,
    num_engines: int | None = None,
) -> Verdict:
    """Evaluate both heads and compare them.

    Args:
        model: Folder or hub name.
        heads: Speculative configs, `BEFORE` and `AFTER`.
        prompts: Not trained on.
        draft_lengths: To judge at.
        folder: For the evaluations.
        console: Told what comes out.
        num_engines: On a Ray cluster; None for one engine here.

    Raises:
        ServerError: An engine failed.
    """
    size = EngineSize(model, MAX_MODEL_LEN, CONCURRENCY, "auto", _KV_CACHE_MIB)
    longest = {"num_speculative_tokens": max(draft_lengths)}
    found: dict[str, list[EvalFile]] = {}
    settings: list[tuple[Sequence[Prompt], Sampling]] = []
    for name, config in heads.items():
        config = {**config, **longest}
        with (
            _one_engine(name, config, size)
            if num_engines is None
            else _on_ray(num_engines, config, size, console)
        ) as backends:
            if not settings:
                settings = _settings(backends, prompts, draft_lengths, console)
            found[name] = [_evaluate(backends, model, *each) for each in settings]
    cells = []
    for before, after in zip(found[BEFORE], found[AFTER], strict=True):
        for name, file in ((BEFORE, before), (AFTER, after)):
            setting = f"t{file.temperature:g}-k{file.draft_length}"
            with replacing(folder / f"eval-{setting}-{name}.json") as pending:
                pending.write_text(file.model_dump_json() + "\n", encoding="utf-8")
        length = compare(before, after, _FALSE_ALARMS).figures[0]
        cells.append(
            Cell(
                before.temperature,
                int(before.draft_length),
                len(before.records),
                length,
            )
        )
    verdict = Verdict(cells)
    print_verdict(verdict, console)
    return verdict


Backends = Callable[[Sampling], Backend]
"""One for each way to answer, of the same engines."""


@contextmanager
def _one_engine(
    name: str, config: Mapping[str, Any], size: EngineSize
) -> Iterator[Backends]:
    with log_folder() as logs, exit_on_signals(), EngineGroup() as group:
        engine = group.launch(name, config, size, logs, **DRAFT_METRICS)
        engine.answer(START_TIMEOUT_S)
        yield lambda sampling: EngineBackend(
            engine, sampling, CONCURRENCY, MAX_MODEL_LEN
        )


@contextmanager
def _on_ray(
    num_engines: int, config: Mapping[str, Any], size: EngineSize, console: Console
) -> Iterator[Backends]:
    with ray_engines(
        num_engines, size, config, console.print, DRAFT_METRICS
    ) as engines:
        yield lambda sampling: RayBackend(engines, sampling, size)


def _settings(
    backends: Backends,
    prompts: Sequence[Prompt],
    draft_lengths: Sequence[int],
    console: Console,
) -> list[tuple[Sequence[Prompt], Sampling]]:
    """Prompts to be answered in each way."""
    greedy = Sampling(draft_lengths[0], 0.0, ANSWER_TOKENS)
    found = backends(greedy).answers(prompts)
    answers = {prompt.id: answer for prompt, answer in found}
    fresh = [p for p in prompts if not repeats_itself(answers[p.id].token_ids)]
    if len(fresh) < MIN_PROMPTS:
        console.print(
            f"{len(fresh)} of {len(prompts)} greedy answers do not repeat themselves: "
            "temperature 0 is not judged"
        )
    return [
        (
            fresh if temperature == 0 else prompts,
            Sampling(k, temperature, ANSWER_TOKENS),
        )
        for temperature in TEMPERATURES
        for k in draft_lengths
        if temperature or len(fresh) >= MIN_PROMPTS
    ]


def repeats_itself(token_ids: Sequence[int]) -> bool:
    """Whether much of an answer has been in it before."""
    ends = range(_GRAM, len(token_ids) + 1)
    grams = [tuple(token_ids[end - _GRAM : end]) for end in ends]
    return len(grams) - len(set(grams)) > _MAX_REPEATED * len(grams)


def _evaluate(
    backends: Backends, model: str, prompts: Sequence[Prompt], sampling: Sampling
) -> EvalFile:
    start_s = perf_counter()
    records = {
        prompt.id: record_of(
            prompt,
            answer.metrics,
            sampling.draft_length,
            answer.num_tokens,
            answer.seconds,
        )
        for prompt, answer in backends(sampling).answers(prompts)
    }
    return EvalFile(
        model=Path(model).name if Path(model).is_dir() else model,
        prompts_sha256=fingerprint_of(list(prompts)),
        draft_length=sampling.draft_length or 0,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        seconds=perf_counter() - start_s,
        records=tuple(records[prompt.id] for prompt in prompts),
        provenance=collect_provenance(sys.argv),
    )


def print_verdict(verdict: Verdict, console: Console) -> None:
    """A table and a sentence."""
    table = Table("temperature", "K", "prompts", "acceptance length", "gain", "", "")
    for cell in verdict.cells:
        length = cell.length
        low, high = (bound / length.base for bound in length.interval)
        worse = "worse" if length.is_worse else "not shown"
        table.add_row(
            f"{cell.temperature:g}",
            str(cell.draft_length),
            str(cell.num_prompts),
            f"{length.base:.2f} -> {length.new:.2f}",
            f"{length.new / length.base - 1:+.1%}",
            f"{low:+.1%} .. {high:+.1%}",
            "better" if cell.is_better else worse,
        )
    console.print(table)
    sentence = "The tuned head drafts better."
    if verdict.is_worse:
        sentence = "The tuned head drafts worse: do not serve it."
    elif not verdict.is_better:
        sentence = "It is not shown that the tuned head drafts better everywhere."
    console.print(sentence, highlight=False)
