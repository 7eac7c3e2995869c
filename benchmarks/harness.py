"""Benchmarks of a few engines side by side: options, interleaved rounds, one result.

A benchmark is a dataclass: its fields are the options of its command, and it says which
engines it compares, what they are asked, and what a result is made of. The harness
starts all engines at once, lets them serve the same requests in short turns
(`grid/turns.py`), so that a machine which becomes slower does so for all, begins each
repeat with another engine, and pairs ratios within a repeat.
"""

import sys
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from benchmarks.grid.cells import CODE, PROMPT_TOKENS, Prompts
from benchmarks.grid.engines import BenchGroup, Timed, cut_prompts, play_together
from benchmarks.grid.options import GridOptions
from benchmarks.grid.turns import TURN_S
from benchmarks.options import DTYPES, check_output_folder, machine_slug
from benchmarks.spread import Spread
from examples.tiny_model import TINY_MODEL
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import START_TIMEOUT_S, EngineGroup
from vllm_mtp.tools.option_checks import check_name, resolve_model
from vllm_mtp.tools.options import Options, option
from vllm_mtp.tools.provenance import collect_provenance, write_json
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

SPARE_TOKENS = 16
"""vLLM's `mtp` has nothing drafted for a batch of which a request nears the end of the
model."""

Contenders = dict[str, dict[str, Any] | None]
"""Speculative config by name; None without speculation."""
Figures = Mapping[str, Any]
"""What an engine counted in a round."""
Rounds = Sequence[Mapping[str, Figures]]
"""Of each repeat, the figures of each engine."""
Waves = Sequence[Sequence[Mapping[str, Any]]]
"""Requests: a wave begins when the one before is over."""


@dataclass(frozen=True, kw_only=True)
class Measurement(Options, ABC):
    """What a command measures and shows. A subclass adds its options."""

    command: ClassVar[str]
    """Of ``python -m benchmarks``, and of the result file."""

    model: str = option(str(TINY_MODEL), "Folder with a checkpoint, or a hub name.")
    output: Path = option(Path(), "Folder for the result.")

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        check_output_folder(self.output)

    @property
    def file_name(self) -> str:
        """First part of the result's name."""
        return self.command

    @abstractmethod
    def measure(self, console: Console) -> dict[str, Any]:
        """The result but for options and provenance.

        Raises:
            ServerError: An engine failed.
        """

    @staticmethod
    @abstractmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """Print a result."""

    @staticmethod
    def draw(result: Mapping[str, Any], path: Path) -> None:
        """Draw a result beside its file, if it has a picture."""


@dataclass(frozen=True, kw_only=True)
class EngineBench(Measurement):
    """Engines of one model. A subclass says which, and what to do with them."""

    dtype: str = option(
        "float32", "Only in float32 are greedy texts of all engines sure to agree."
    )

    starts_in_turn: ClassVar[bool] = False
    """Whether one engine starts after the other, undisturbed."""

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        check_name("dtype", self.dtype, DTYPES)

    @property
    def engine_args(self) -> dict[str, Any]:
        """Of vLLM's ``EngineArgs``, for all engines."""
        return {}

    @property
    @abstractmethod
    def contenders(self) -> Contenders:
        """Speculative config of each engine."""

    @property
    @abstractmethod
    def most_requests(self) -> int:
        """At a time."""

    @property
    @abstractmethod
    def longest_tokens(self) -> int:
        """Of an answer."""

    @property
    def room_tokens(self) -> int:
        """``max_model_len`` of the engines: the longest request, and some to spare."""
        return PROMPT_TOKENS + self.longest_tokens + SPARE_TOKENS

    @abstractmethod
    def play(
        self, group: EngineGroup, prompts: Prompts, console: Console
    ) -> dict[str, Any]:
        """The result but for options and provenance.

        Args:
            group: Engines, of which some may be others'.
            prompts: To choose from.
            console: Told what is under way.

        Raises:
            ServerError: An engine failed.
        """

    def measure(self, console: Console) -> dict[str, Any]:
        """Start all engines and play.

        Raises:
            ServerError: An engine failed.
        """
        with log_folder() as logs, exit_on_signals(), BenchGroup() as group:
            prompts = start_engines(group, [self], logs)
            return self.play(group, prompts, console)


@dataclass(frozen=True, kw_only=True)
class RoundsBench(EngineBench):
    """Engines that play rounds in turns. A subclass says of what."""

    warm_ups: int = option(2, "Untimed rounds, in which engines learn.", 0, 100)
    repeats: int = option(5, "Timed rounds of each engine.", 1, 100)
    turn_seconds: float = option(
        TURN_S, "How long an engine works before the next one's turn.", 0.01, 60.0
    )

    timed: ClassVar[Timed | None] = None
    """What of a step to time apart."""


@dataclass(frozen=True, kw_only=True)
class Bench(RoundsBench):
    """Engines side by side. A subclass answers the questions."""

    @property
    @abstractmethod
    def cells(self) -> Sequence[int]:
        """Requests at a time, of each part of the benchmark."""

    @property
    def most_requests(self) -> int:
        """At a time."""
        return max(self.cells)

    @abstractmethod
    def waves(self, prompts: Prompts, concurrency: int) -> Iterator[Waves]:
        """Requests of each round, for ever."""

    @abstractmethod
    def summarise(self, cells: Mapping[int, Rounds]) -> dict[str, Any]:
        """The result but for options and provenance."""

    def play(
        self, group: EngineGroup, prompts: Prompts, console: Console
    ) -> dict[str, Any]:
        """Play all rounds, summarise."""
        played = {}
        for concurrency in self.cells:
            console.print(f"{concurrency} requests at a time", highlight=False)
            waves = self.waves(prompts, concurrency)
            played[concurrency] = play_rounds(group, self, waves, concurrency, console)
        return self.summarise(played)


def run_bench(bench: Measurement, console: Console) -> dict[str, Any]:
    """Measure, print and write.

    Returns:
        The result as it was written.

    Raises:
        ServerError: An engine failed.
    """
    provenance = collect_provenance(sys.argv)
    return _write(bench, bench.measure(console), provenance, console)


def run_together(benches: Sequence[EngineBench], console: Console) -> None:
    """Measure, print and write with one set of engines: to start them takes longest.

    Args:
        benches: Of one model and format. The first with an engine of a name says which.
        console: Told what is under way.

    Raises:
        ServerError: An engine failed.
    """
    provenance = collect_provenance(sys.argv)
    with log_folder() as logs, exit_on_signals(), BenchGroup() as group:
        prompts = start_engines(group, benches, logs)
        for bench in benches:
            result = bench.play(group, prompts, console)
            _write(bench, result, provenance, console)


def _write(
    bench: Measurement,
    result: Mapping[str, Any],
    provenance: dict[str, Any],
    console: Console,
) -> dict[str, Any]:
    written = {**result, "options": bench.as_json(), "provenance": provenance}
    machine = machine_slug(provenance["hardware"])
    path = bench.output / f"{bench.file_name}-{machine}.json"
    write_json(path, written)
    bench.draw(written, path.with_suffix(".png"))
    bench.show(written, console)
    console.print(f"Written: {path}", markup=False)
    return written


def start_engines(
    group: EngineGroup, benches: Sequence[EngineBench], logs: Path
) -> Prompts:
    """Start the engines of all benches and wait for them.

    Raises:
        ServerError: An engine failed.
    """
    most = max(bench.most_requests for bench in benches)
    room = max(bench.room_tokens for bench in benches)
    first, *_ = benches
    size = EngineSize(resolve_model(first.model), room, most, first.dtype)
    in_turn = any(bench.starts_in_turn for bench in benches)
    contenders = ChainMap(*(bench.contenders for bench in benches))
    facts = []
    for name, config in contenders.items():
        engine = group.launch(name, config, size, logs, **first.engine_args)
        if in_turn:
            facts.append(engine.answer(START_TIMEOUT_S))
    engines = list(group.engines.values())
    if not in_turn:
        facts = [engine.answer(START_TIMEOUT_S) for engine in engines]
    sizes = GridOptions(concurrencies=(most,), output=logs)
    return cut_prompts(engines[0], facts[0]["vocab_size"], sizes)


def play_rounds(
    group: EngineGroup,
    bench: RoundsBench,
    waves: Iterator[Waves],
    concurrency: int,
    console: Console,
) -> Rounds:
    """Rounds of a bench's engines together, each begun by another one.

    Returns:
        Those after the warm-ups.
    """
    names = list(bench.contenders)
    rounds = []
    for number in range(bench.warm_ups + bench.repeats):
        repeat = number - bench.warm_ups
        what = f"warm-up {number + 1}" if repeat < 0 else f"repeat {repeat + 1}"
        console.print(what, highlight=False)
        shift = number % len(names)
        played = play_together(
            group,
            [*names[shift:], *names[:shift]],
            next(waves),
            concurrency,
            bench.timed if repeat >= 0 else None,
            turn_s=bench.turn_seconds,
        )
        rounds.append(played)
    return rounds[bench.warm_ups :]


def same_wave(
    prompts: Prompts, num_requests: int, sampling: Mapping[str, Any]
) -> Iterator[Waves]:
    """The same requests in every round: beginnings of Python code."""
    own = cycle(prompts.own[CODE])
    wave = [
        {"prompt": list(prompt), "sampling": dict(sampling)}
        for prompt in islice(own, num_requests)
    ]
    while True:
        yield [wave]


def full_speed(figures: Figures) -> float:
    """Tokens per second of steps in which as many requests ran as the cell is about."""
    return float(figures["full_tokens"] / figures["full_seconds"])


def full_step_ms(figures: Figures) -> float:
    """Time of such a step."""
    return float(1e3 * figures["full_seconds"] / figures["full_steps"])


def spread_of(rounds: Rounds, name: str, figure: Callable[[Figures], float]) -> Spread:
    """A figure of an engine over the repeats."""
    return Spread.of([figure(each[name]) for each in rounds])


def acceptance_length(own: Iterable[Figures]) -> float:
    """Tokens committed in a step of a request, of decode steps."""
    own = list(own)
    steps = sum(each["decode_request_steps"] for each in own)
    return float(sum(each["decode_tokens"] for each in own) / steps)


def texts_agree(cells: Mapping[int, Rounds]) -> bool:
    """Whether all engines wrote the same in each round."""
    return all(
        len({figures["texts_sha256"] for figures in each.values()}) == 1
        for rounds in cells.values()
        for each in rounds
    )


def say_texts(result: Mapping[str, Any], console: Console) -> None:
    """Say whether greedy texts agreed, if they had to."""
    if result["identical_texts"] is not None:
        same = "the same" if result["identical_texts"] else "DIFFERENT"
        console.print(f"Greedy texts: {same} from all engines")


def ratio_row(spread: Mapping[str, Any]) -> tuple[str, str]:
    """Median and quartiles of a ratio, for a table."""
    return f"{spread['median']:.3f}", "{:.3f}..{:.3f}".format(*spread["quartiles"])
