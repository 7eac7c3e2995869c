"""How fast is a server in its first steps, with what another one has learned?

In each repeat three new engines serve the same greedy requests, one at a time, in turns
of some steps, so that a machine which changes speed does so for all: ``warm`` begins
with the folder that a fourth one has left, ``cold`` with an empty one, and ``settled``
as ``warm``, but it has served some rounds already. So ``settled`` is what ``warm`` is
later. Prefix caches are emptied before each round; and before all, each engine answers
one short request of fixed draft length, so that what any process does once (which a
small model's steps are short beside) is in no round.

Result (JSON)::

    <contender>.tokens_per_s    first round over that of ``settled``: median, quartiles
    <contender>.tokens_per_step, .draft_tokens_per_step    the same
    <contender>.num_steps       of the round
    options, provenance
"""

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import CODE, PROMPT_TOKENS
from benchmarks.grid.engines import BenchGroup, cut_prompts, play_together
from benchmarks.grid.options import GridOptions
from benchmarks.harness import Measurement
from benchmarks.spread import Spread
from vllm_mtp.config import METHOD
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import START_TIMEOUT_S, EngineGroup
from vllm_mtp.tools.option_checks import resolve_model
from vllm_mtp.tools.options import option
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

TEACHER, SETTLED, WARM, COLD = "teacher", "settled", "warm", "cold"
CONTENDERS = (WARM, COLD)
ENGINES = (SETTLED, *CONTENDERS)
WARM_UP = {"temperature": 0.0, "max_tokens": 12, "extra_args": {"mtp_plus_k": 3}}
SAVED_AFTER_S = 11.0
"""A little more than `state_file.SAVE_PERIOD_S`: what follows is written."""
FIGURES = {
    "tokens_per_s": ("decode_tokens", "decode_seconds"),
    "tokens_per_step": ("decode_tokens", "decode_steps"),
    "draft_tokens_per_step": ("num_draft_tokens", "decode_steps"),
}


@dataclass(frozen=True, kw_only=True)
class WarmStartBench(Measurement):
    """Compare the first steps of a server with its later ones.

    One server begins with what another has learned, one with nothing.
    """

    command: ClassVar[str] = "warm-start"

    repeats: int = option(5, "New engines of each kind.", 1, 100)
    requests: int = option(12, "Of a round, one at a time.", 1, 64)
    request_tokens: int = option(96, "Of every request.", 8, 512)
    settling_rounds: int = option(3, "Of the settled engine, before.", 1, 100)
    teaching_rounds: int = option(6, "Of the engine that is learned from.", 2, 100)

    def measure(self, console: Console) -> dict[str, Any]:
        """One set of engines after the other."""
        model = resolve_model(self.model)
        size = EngineSize(model, PROMPT_TOKENS + self.request_tokens, 1)
        with log_folder() as logs, exit_on_signals():
            learned = logs / TEACHER
            self._teach(size, learned, logs, console)
            repeats = []
            for number in range(self.repeats):
                console.print(f"repeat {number + 1} of {self.repeats}", highlight=False)
                first = number % len(ENGINES)
                names = ENGINES[first:] + ENGINES[:first]
                repeats.append(self._compare(names, size, learned, logs))
        return self.summarise(repeats)

    def _teach(
        self, size: EngineSize, folder: Path, logs: Path, console: Console
    ) -> None:
        console.print("an engine learns", highlight=False)
        with BenchGroup() as group:
            waves = self._start(group, {TEACHER: folder}, size, logs)
            for number in range(self.teaching_rounds):
                if number == self.teaching_rounds - 1:
                    time.sleep(SAVED_AFTER_S)
                play_together(group, [TEACHER], waves, 1, cached=())

    def _compare(
        self, names: Sequence[str], size: EngineSize, learned: Path, logs: Path
    ) -> dict[str, dict[str, Any]]:
        """What each engine counted in the same round."""
        folders = {name: logs / f"state-{name}" for name in names}
        for folder in folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        for name in (SETTLED, WARM):
            shutil.copytree(learned, folders[name])
        with BenchGroup() as group:
            waves = self._start(group, folders, size, logs)
            for _ in range(self.settling_rounds):
                play_together(group, [SETTLED], waves, 1, cached=())
            return play_together(group, names, waves, 1, cached=())

    def _start(
        self,
        group: EngineGroup,
        folders: Mapping[str, Path],
        size: EngineSize,
        logs: Path,
    ) -> list[list[dict[str, Any]]]:
        """Start engines, warm each up; returns the requests of a round."""
        for name, folder in folders.items():
            config = {"method": METHOD, "warm_start_path": str(folder)}
            group.launch(name, config, size, logs)
        for name in folders:
            facts = group.engines[name].answer(START_TIMEOUT_S)
        engine = next(iter(group.engines.values()))
        sizes = GridOptions(concurrencies=(1,), output=self.output)
        prompts = cut_prompts(engine, facts["vocab_size"], sizes).own[CODE]
        chosen = [list(prompt) for prompt in islice(prompts, self.requests)]
        for name in folders:
            once = {"prompt": chosen[0], "sampling": WARM_UP}
            group.engines[name].ask("generate", requests=[once])
        sampling = {"temperature": 0.0, "max_tokens": self.request_tokens}
        return [[{"prompt": prompt, "sampling": sampling} for prompt in chosen]]

    @staticmethod
    def summarise(
        repeats: Sequence[Mapping[str, Mapping[str, Any]]],
    ) -> dict[str, Any]:
        """See the top of this file."""
        return {
            name: {
                figure: Spread.of(
                    [_over_settled(each, name, figure) for each in repeats]
                ).as_json()
                for figure in FIGURES
            }
            | {"num_steps": [each[name]["decode_steps"] for each in repeats]}
            for name in CONTENDERS
        }

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """A line for each contender."""
        table = Table(title="First steps, over those of a settled engine")
        for column in ("start", "tokens/s", "tokens a step", "draft tokens a step"):
            table.add_column(column, justify="right")
        for name in CONTENDERS:
            found = (result[name][figure] for figure in FIGURES)
            table.add_row(name, *(_shown(each) for each in found))
        console.print(table)


def _over_settled(
    played: Mapping[str, Mapping[str, Any]], name: str, figure: str
) -> float:
    over, under = FIGURES[figure]
    values = []
    for engine in (name, SETTLED):
        counts = played[engine]
        drafted = {"num_draft_tokens": sum(counts["drafted_per_position"])}
        counts = {**counts, **drafted}
        values.append(counts[over] / max(counts[under], 1e-9))
    return float(values[0] / max(values[1], 1e-9))


def _shown(spread: Mapping[str, Any]) -> str:
    lower, upper = spread["quartiles"]
    return f"{spread['median']:.3f} ({lower:.3f} - {upper:.3f})"
