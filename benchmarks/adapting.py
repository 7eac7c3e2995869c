"""What does `adapt` bring when the traffic changes, and what does it cost?

Two engines with the same head answer the same requests, round by round and in
alternating order; one of them adapts. Python is served first, then English prose, then
Python again. The trainer stands still while it is the other engine's turn. In every
fourth round requests are not drafted for, so that the times of the two differ by what
adapting costs; in every eighth the trainer stands still all the time, which leaves what
the server itself does for it.

Prose is what the installed packages say of themselves: descriptions and licences.

Result (JSON)::

    rounds[].domain, .num_tokens (served before it), .is_plain (nothing is drafted),
            .is_trained (the trainer runs while the adapting engine does),
            .head (number, of the adapting engine), .seconds.<engine>,
            .lengths.<engine>: acceptance length at K = 1, 2, ...
    gain.<domain>: length of adapting / frozen at K = 1, 2, ..., over the
            rounds of the last quarter of the domain
    cost: seconds of adapting / frozen in plain rounds after the first tokens
    cost_of_serving: the same where the trainer stands still
    num_equal: answers of greedy requests that were the same, num_greedy
"""

import json
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import distributions
from itertools import cycle, islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.grid.engines import BenchGroup
from benchmarks.harness import Measurement
from benchmarks.spread import Spread
from examples.tiny_model.one_step import write_training_prompts
from vllm_mtp.config import METHOD
from vllm_mtp.integration.worker.traffic import MEMORY_FOLDER
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import START_TIMEOUT_S, EngineProcess
from vllm_mtp.tools.option_checks import resolve_model
from vllm_mtp.tools.options import option
from vllm_mtp.tools.server_process import exit_on_signals, log_folder
from vllm_mtp.tune.adapting import State, read_state

FROZEN, ADAPTING = "frozen", "adapting"
ENGINES = (FROZEN, ADAPTING)
CODE, PROSE, CODE_AGAIN = "code", "prose", "code again"
PLAIN_EVERY, UNTRAINED_EVERY = 4, 8
MIN_CHARACTERS, MAX_CHARACTERS = 160, 400
LETTERS = 0.93
"""Of a paragraph, letters and spaces: others are tables and code."""
MAX_MODEL_LEN = 512


@dataclass(frozen=True, kw_only=True)
class AdaptingBench(Measurement):
    """Compare a head that adapts to the traffic with one that does not."""

    command: ClassVar[str] = "adapting"

    draft_model: str | None = option(None, "Head of both. Unset: the model's own.")
    draft_length: int = option(7, "K of both.", 1, 16)
    concurrency: int = option(2, "Requests at a time.", 1, 64)
    request_tokens: int = option(100, "Of an answer.", 8, 400)
    round_requests: int = option(24, "Of a round.", 2, 1000)
    code_tokens: int = option(20_000, "Served before the traffic changes.", 0, 10**8)
    prose_tokens: int = option(200_000, "Served then.", 0, 10**8)
    code_again_tokens: int = option(40_000, "And then.", 0, 10**8)
    phase_minutes: float = option(60.0, "Of each of the three, at most.", 0.1, 10**4)
    temperature: float = option(1.0, "Of the requests.", 0, 2)
    dtype: str = option("bfloat16", "Of both.")

    def measure(self, console: Console) -> dict[str, Any]:
        """Round by round."""
        # The trainer takes the other cores.
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        model = resolve_model(self.model)
        size = EngineSize(model, MAX_MODEL_LEN, self.concurrency, self.dtype, 256)
        rounds: list[dict[str, Any]] = []
        with log_folder() as logs, exit_on_signals(), BenchGroup() as group:
            for name in ENGINES:
                config = self._config(name)
                engine = group.launch(
                    name, config, size, logs, enable_prefix_caching=False
                )
                engine.answer(START_TIMEOUT_S)
            prompts = _prompts(group.engines[FROZEN], logs)
            for domain, wanted in self._phases():
                served, end_s = 0, time.monotonic() + 60 * self.phase_minutes
                while served < wanted and time.monotonic() < end_s:
                    done = self._round(group.engines, domain, prompts, len(rounds))
                    rounds.append(done | {"num_tokens": served})
                    served += done["served"]
                    console.print(f"{domain} {served}: {_line(done)}", highlight=False)
        return {"rounds": rounds, **summary(rounds)}

    def _phases(self) -> tuple[tuple[str, int], ...]:
        return (
            (CODE, self.code_tokens),
            (PROSE, self.prose_tokens),
            (CODE_AGAIN, self.code_again_tokens),
        )

    def _config(self, name: str) -> dict[str, Any]:
        config: dict[str, Any] = {
            "method": METHOD,
            "controller": "fixed",
            "num_speculative_tokens": self.draft_length,
        }
        if self.draft_model is not None:
            config["model"] = self.draft_model
        return config | {"adapt": name == ADAPTING}

    def _round(
        self,
        engines: Mapping[str, EngineProcess],
        domain: str,
        prompts: Mapping[str, Iterator[list[int]]],
        number: int,
    ) -> dict[str, Any]:
        is_plain = number % PLAIN_EVERY == PLAIN_EVERY - 1
        is_trained = number % UNTRAINED_EVERY != UNTRAINED_EVERY - 1
        chosen = list(islice(prompts[domain], self.round_requests))
        requests = [
            {"prompt": prompt, "sampling": self._sampling(is_plain, place == 0)}
            for place, prompt in enumerate(chosen)
        ]
        found, seconds = {}, {}
        turn = number // UNTRAINED_EVERY if is_plain else number
        for name in ENGINES if turn % 2 else ENGINES[::-1]:
            with _trainer_waits(name == FROZEN or not is_trained):
                start_s = time.perf_counter()
                found[name] = engines[name].ask("generate", requests=requests)
                seconds[name] = time.perf_counter() - start_s
        first = [found[name]["answers"][0]["token_ids"] for name in ENGINES]
        return {
            "domain": domain,
            "is_plain": is_plain,
            "is_trained": is_trained,
            "served": sum(map(len, chosen)) + len(chosen) * self.request_tokens,
            "head": _state().served,
            "is_equal": first[0] == first[1],
            "seconds": seconds,
            "lengths": {name: _lengths(each) for name, each in found.items()},
        }

    def _sampling(self, is_plain: bool, is_greedy: bool) -> dict[str, Any]:
        sampling = {
            "temperature": 0.0 if is_greedy else self.temperature,
            "max_tokens": self.request_tokens,
        }
        return sampling | ({"extra_args": {f"{METHOD}_k": 0}} if is_plain else {})

    @staticmethod
    def show(result: Mapping[str, Any], console: Console) -> None:
        """Gains by domain, and the cost."""
        table = Table("domain", "K", "adapting / frozen")
        for domain, gains in result["gain"].items():
            for k, gain in gains.items():
                table.add_row(domain, k, _said(gain))
        console.print(table)
        console.print(
            f"time of rounds without drafts: {_said(result['cost'])}, "
            f"{_said(result.get('cost_of_serving'))} where the trainer waits; greedy "
            f"answers that are equal: {result['num_equal']} of {result['num_greedy']}"
        )


def summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """See the top of this file."""
    plain = [each for each in rounds if each["is_plain"] and each["num_tokens"]]
    costs = {}
    for name, is_trained in (("cost", True), ("cost_of_serving", False)):
        of_it = [each["seconds"] for each in plain if each["is_trained"] == is_trained]
        ratios = [seconds[ADAPTING] / seconds[FROZEN] for seconds in of_it]
        costs[name] = Spread.of(ratios).as_json() if ratios else None
    gains = {}
    for domain in dict.fromkeys(each["domain"] for each in rounds):
        of_it = [r for r in rounds if r["domain"] == domain and not r["is_plain"]]
        last = of_it[-max(3, len(of_it) // 4) :]
        both = [[each["lengths"][name] for name in ENGINES] for each in last]
        gains[domain] = {
            str(k + 1): Spread.of([b[k] / a[k] for a, b in both]).as_json()
            for k in range(min(len(side) for pair in both for side in pair))
        }
    greedy = [each["is_equal"] for each in rounds]
    return {
        "gain": gains,
        **costs,
        "num_equal": sum(greedy),
        "num_greedy": len(greedy),
    }


def _lengths(counted: Mapping[str, Any]) -> list[float]:
    """Acceptance lengths had K been 1, 2, ...: every draft has as many tokens."""
    if not counted["num_drafts"]:
        return []
    kept = np.cumsum(counted["accepted_per_position"]) / counted["num_drafts"]
    return [float(each) for each in 1 + kept]


def _said(spread: Mapping[str, Any] | None) -> str:
    if spread is None:
        return "not measured"
    low, high = spread["quartiles"]
    return f"{spread['median']:.3f} ({low:.3f} .. {high:.3f})"


def _line(done: Mapping[str, Any]) -> str:
    ratio = done["seconds"][ADAPTING] / done["seconds"][FROZEN]
    last = [f"{n} {each[-1]:.3f}" for n, each in done["lengths"].items() if each]
    return f"head {done['head']}, time {ratio:.3f}, " + ", ".join(last)


def _state() -> State:
    try:
        (folder,) = MEMORY_FOLDER.glob(f"{METHOD}-*")
        return read_state(folder)
    except (OSError, ValueError, json.JSONDecodeError):
        return State()


@contextmanager
def _trainer_waits(waits: bool) -> Iterator[None]:
    trainers = [
        process
        for process in psutil.Process().children(recursive=True)
        if waits and any("trainer_process" in word for word in process.cmdline())
    ]
    for trainer in trainers:
        trainer.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for trainer in trainers:
            trainer.send_signal(signal.SIGCONT)


def _prompts(engine: EngineProcess, folder: Path) -> dict[str, Iterator[list[int]]]:
    """Of each domain, without end."""
    file = folder / "code.jsonl"
    write_training_prompts(file, 1000)
    code = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    texts = [text[:MAX_CHARACTERS] for text in code + prose_paragraphs()]
    token_ids = engine.ask("tokenize", texts=texts)["token_ids"]
    half = len(code) // 2
    return {
        CODE: cycle(token_ids[:half]),
        CODE_AGAIN: cycle(token_ids[half : len(code)]),
        PROSE: cycle(token_ids[len(code) :]),
    }


def prose_paragraphs() -> list[str]:
    """Of installed packages, in an order that a seed decides."""
    texts = []
    for each in distributions():
        licences = [file for file in each.files or () if "LICENSE" in file.name]
        files = [Path(str(file.locate())) for file in licences]
        texts += [
            file.read_text("utf-8", "replace") for file in files if file.is_file()
        ]
        texts.append(each.read_text("METADATA") or "")
    found = {" ".join(part.split()) for text in texts for part in text.split("\n\n")}
    kept = sorted(filter(_is_prose, found))
    random.Random(0).shuffle(kept)
    return kept


def _is_prose(text: str) -> bool:
    letters = sum(each.isalpha() or each == " " for each in text)
    is_long = len(text) >= MIN_CHARACTERS
    return is_long and text.isascii() and letters / len(text) > LETTERS
