"""The grid benchmark: no speculation, vLLM's `mtp` at every K, and `mtp_plus`.

No speculation is there twice, to tell what only the machine does.

Every contender is an engine in a process of its own, and all stay alive; on a CPU with
more than one core two work at a time, else one (``turns.py``). In each cell of the
grid (workload x concurrency x temperature x context)

1. a short round without speculation tells how many tokens a request must generate for
   a round to take the wished time; all contenders then generate the same number,
2. all contenders do a short round in which the context comes into the prefix cache
   and the parts of a step are timed (draft, verify, rest); a static K that is
   hopelessly behind here is measured no further,
3. `mtp_plus` serves the same load untimed until its controller has settled, as on a
   server that has been up for half a minute (what settling costs: trace lab),
4. in every repeat all contenders do one round together: in short turns, always those
   whose clocks are behind. A machine that is disturbed for longer is so for all. Who
   begins rotates; ratios are paired within a repeat. A static K that was far behind
   the best one in the first repeat cannot be the best of its cell and is spared the
   others. A cell is measured again, by those whom it is about, until it is clear on
   which side of its limits it lies (``repeats.py``).

The controller of `mtp_plus` lives on from cell to cell, as on a server. Everything
measured is in a journal at once (``journal.py``); after an interruption the
repeat that was under way is measured anew, so that a pair is always of one session.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.grid.cells import (
    Cell,
    Prompts,
    check_context,
    contexts_of,
    make_warm_up_waves,
    make_waves,
    max_model_len_tokens,
    of_different_lengths,
    plan_cells,
)
from benchmarks.grid.engines import BenchGroup, cut_prompts, play_together
from benchmarks.grid.journal import (
    CALIBRATION,
    ENGINE,
    ROUND,
    SETTLING,
    WARM_UP,
    Journal,
)
from benchmarks.grid.options import PLUS, PLUS_AGAIN, GridOptions
from benchmarks.grid.progress import GridProgress
from benchmarks.grid.race import (
    hopeless_contenders,
    unmeasured_contenders,
    warm_up_groups,
)
from benchmarks.grid.repeats import next_repeat
from benchmarks.grid.report import print_report, write_plots
from benchmarks.grid.summary import summarise, summarise_cell
from benchmarks.options import machine_slug
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import NO_SPECULATION, START_TIMEOUT_S, EngineGroup
from vllm_mtp.tools.option_checks import resolve_model
from vllm_mtp.tools.provenance import collect_provenance, write_json
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

SETTLED_STEPS = 300
"""Decode steps after which the controller has settled in any case."""


def run_grid_bench(options: GridOptions, console: Console) -> dict[str, Any]:
    """Measure what the journal lacks, then print and write; engines are stopped.

    Returns:
        The result as it was written.

    Raises:
        ConfigError: An option is wrong, or the journal is of another benchmark.
        ServerError: An engine failed.
    """
    model = resolve_model(options.model)
    check_context(model, options)
    provenance = collect_provenance(sys.argv)
    machine = machine_slug(provenance["hardware"])
    path = options.output / f"grid-{machine}.jsonl"
    journal = Journal(path)
    journal.begin(options.as_json(), provenance)
    todo = [
        cell
        for cell in plan_cells(options)
        if next_repeat(journal, cell, options) is not None
    ]
    if todo:
        console.print(
            f"{len(todo)} cells to measure, {len(options.contenders)} contenders; "
            f"every measurement is kept in {path}",
            markup=False,
        )
        with log_folder() as logs, exit_on_signals(), BenchGroup() as group:
            _Session(options, model, journal, group, logs, console).run(todo)
    return write_results(journal, path.with_suffix(""), console)


def report_only(source: Path, console: Console) -> dict[str, Any]:
    """Tables and pictures of what has been measured, finished or not.

    Raises:
        ConfigError: It is none.
    """
    return write_results(Journal(source), source.with_suffix(""), console)


def write_results(journal: Journal, stem: Path, console: Console) -> dict[str, Any]:
    """Write `<stem>.json` and pictures, and print the tables."""
    result = summarise(journal)
    write_json(Path(f"{stem}.json"), result)
    pictures = write_plots(result, stem)
    print_report(result, console)
    names = ", ".join(each.name for each in pictures)
    console.print(f"Written: {stem}.json, {names}", markup=False)
    return result


def turns(names: list[str], shift: int) -> Iterator[str]:
    """All contenders, beginning with another one each time."""
    first = shift % len(names)
    yield from [*names[first:], *names[:first]]


class _Session:
    """The engines of one run, from start to stop."""

    def __init__(
        self,
        options: GridOptions,
        model: str,
        journal: Journal,
        group: EngineGroup,
        logs: Path,
        console: Console,
    ) -> None:
        self.options = options
        self.model = model
        self.journal = journal
        self.group = group
        self.logs = logs
        self.names = [contender.name for contender in options.contenders]
        self.progress = GridProgress(console)

    def run(self, cells: list[Cell]) -> None:
        """Measure what is missing of these cells."""
        with self.progress:
            self._start()
            prompts = self._prompts()
            self.progress.begin(len(cells))
            for index, cell in enumerate(cells):
                self._measure(index, cell, prompts)
                self.progress.finish_cell(
                    f"{index + 1}/{len(cells)}",
                    cell.name,
                    summarise_cell(self.journal, cell.name),
                )

    def _start(self) -> None:
        """All at once; each takes a while."""
        options = self.options
        size = EngineSize(
            self.model,
            max_model_len_tokens(options),
            max(options.concurrencies),
            options.dtype,
            options.kv_cache_mib,
        )
        for name, config in options.contenders:
            self.group.launch(name, config, size, self.logs)
        for name in self.names:
            self.progress.say(f"waiting for the engine of {name}")
            facts = self.group.engines[name].answer(START_TIMEOUT_S)
            self.journal.add(ENGINE, contender=name, **facts)

    def _prompts(self) -> Prompts:
        baseline = self.group.engines[NO_SPECULATION]
        facts = self.journal.of_kind(ENGINE)[-1]
        return cut_prompts(baseline, facts["vocab_size"], self.options)

    def _measure(self, index: int, cell: Cell, prompts: Prompts) -> None:
        request_tokens = self._calibrate(cell, prompts)
        self._warm_up(cell, prompts)
        self._settle(cell, prompts, request_tokens)
        while repeat := next_repeat(self.journal, cell, self.options):
            number, names = repeat
            self.progress.show(
                f"{cell.name}: repeat {number + 1}, {len(names)} engines"
            )
            waves = self._waves(cell, prompts, request_tokens, number + 1)
            in_turn = list(turns(names, index + number))
            together = play_together(
                self.group,
                in_turn,
                waves,
                cell.concurrency,
                cached=(
                    contexts_of(cell, prompts) if self.options.whole_requests else None
                ),
            )
            for name in names:  # in the order in which they are read back
                self.journal.add(
                    ROUND,
                    cell=cell.name,
                    repeat=number,
                    contender=name,
                    **together[name],
                )

    def _waves(
        self, cell: Cell, prompts: Prompts, request_tokens: int, number: int
    ) -> list[list[dict[str, Any]]]:
        waves = make_waves(cell, prompts, request_tokens, number)
        return of_different_lengths(waves) if self.options.whole_requests else waves

    def _warm_up(self, cell: Cell, prompts: Prompts) -> None:
        """All contenders but static lengths beyond hope; in groups, the longest last.

        In a later session without those that play no part.
        """
        waves = make_warm_up_waves(cell, prompts)
        for group in warm_up_groups(self.names):
            spared = hopeless_contenders(self.journal, cell.name)
            spared |= unmeasured_contenders(self.journal, cell.name)
            names = [name for name in group if name not in spared]
            if not names:
                continue
            self.progress.show(f"{cell.name}: warm-up of {', '.join(names)}")
            together = play_together(
                self.group, names, waves, cell.concurrency, timed="parts"
            )
            for name, figures in together.items():
                self.journal.add(WARM_UP, cell=cell.name, contender=name, **figures)

    def _settle(self, cell: Cell, prompts: Prompts, request_tokens: int) -> None:
        seconds, num_steps, num_rounds = 0.0, 0, 0
        while seconds < self.options.settle_seconds and num_steps < SETTLED_STEPS:
            # No texts of the first repeats.
            number = 1 + self.options.num_repeats + num_rounds
            waves = self._waves(cell, prompts, request_tokens, number)
            self.progress.show(f"{cell.name}: {PLUS} settles")
            together = play_together(
                self.group, (PLUS, PLUS_AGAIN), waves, cell.concurrency
            )
            num_rounds += 1
            seconds += max(each["seconds"] for each in together.values())
            num_steps += min(each["decode_steps"] for each in together.values())
            for name, figures in together.items():
                self.journal.add(SETTLING, cell=cell.name, contender=name, **figures)

    def _calibrate(self, cell: Cell, prompts: Prompts) -> int:
        """Tokens of a request; once for each cell, whatever the session."""
        for record in self.journal.of_kind(CALIBRATION):
            if record["cell"] == cell.name:
                return int(record["request_tokens"])
        waves = make_warm_up_waves(cell, prompts)
        self.progress.show(f"{cell.name}: how long a round takes")
        figures = self.group.engines[NO_SPECULATION].ask(
            "round", waves=waves, concurrency=cell.concurrency
        )
        tokens_per_s = figures["full_tokens"] / figures["full_seconds"]
        tokens = cell.request_tokens(tokens_per_s, self.options.round_seconds)
        self.journal.add(
            CALIBRATION,
            cell=cell.name,
            axes=asdict(cell),
            request_tokens=tokens,
            num_requests=cell.num_requests,
            prompt_tokens=len(waves[0][0]["prompt"]),
        )
        return tokens
