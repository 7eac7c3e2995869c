"""Engine step times side by side: one real server per contender, taking turns.

A *round* sends every prompt to one server, a fixed number at a time; contenders take
turns within a repeat and who begins rotates, so a machine that becomes slower does so
for all. Greedy contenders with the same draft length take the same steps, so a ratio
of step times is what a change costs, and nothing else.

Result (JSON)::

    contenders.<name>.speculative_config   what the server was given
                     .step_ms              median, quartiles, and each repeat
                     .ratio                step time over the first contender's, paired
                                           within a repeat: median, quartiles, each
                     .num_steps            engine steps of each repeat
                     .acceptance_length    tokens per draft, of all repeats
    identical_texts                        whether all wrote the same tokens
    options, provenance
"""

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.options import machine_slug
from benchmarks.spread import Spread
from examples.tiny_model import TINY_MODEL
from vllm_mtp.config import METHOD, VLLM_METHOD, ConfigError
from vllm_mtp.tools.demo_client import DemoClient, SpecCounters, parse_counters
from vllm_mtp.tools.demo_plan import (
    NO_SPECULATION,
    ServerSettings,
    max_model_len_tokens,
    read_prompts,
    resolve_model,
    serve_command,
    serve_environ,
)
from vllm_mtp.tools.demo_servers import (
    Server,
    ServerGroup,
    exit_on_signals,
    free_ports,
    http_get,
    log_folder,
)
from vllm_mtp.tools.demo_table import Progress
from vllm_mtp.tools.provenance import (
    collect_provenance,
    describe_hardware,
    gpu_names,
    replacing,
    write_json,
)


class Contender(NamedTuple):
    """A server of the comparison."""

    name: str
    speculative_config: dict[str, Any] | None


def default_contenders(draft_length: int) -> tuple[Contender, ...]:
    """vLLM's own `mtp` and both rollbacks of `mtp_plus`, drafting equally long."""
    same = {"num_speculative_tokens": draft_length}
    ours = {"method": METHOD, **same, "controller": "fixed"}
    return (
        Contender(f"mtp K={draft_length}", {"method": VLLM_METHOD, **same}),
        Contender("mtp_plus", ours),
        Contender("mtp_plus scrub", {**ours, "kv_rollback": "scrub"}),
    )


def parse_contender(text: str) -> Contender:
    """`NAME=JSON`, where JSON is a speculative config or `none`.

    Raises:
        ConfigError: It is neither.
    """
    name, separator, config = text.partition("=")
    if name and config.strip() == NO_SPECULATION:
        return Contender(name, None)
    try:
        parsed = json.loads(config)
    except (ValueError, RecursionError):
        parsed = None
    if not (name and separator and isinstance(parsed, dict)):
        raise ConfigError(
            f"contender: {text!r}; expected NAME=none or NAME={{...}}, a speculative "
            "config"
        )
    return Contender(name, parsed)


@dataclass(frozen=True)
class StepBenchOptions:
    """What is measured. The first contender is what the others are compared with."""

    contenders: tuple[Contender, ...]
    model: str = str(TINY_MODEL)
    concurrency: int = 1
    num_prompts: int = 12
    max_tokens: int = 64
    num_repeats: int = 9
    dtype: str = "float32"
    start_timeout_s: float = 600.0
    serve_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the contenders.

        Raises:
            ConfigError: Fewer than two, or two of one name.
        """
        names = [contender.name for contender in self.contenders]
        if len(names) < 2 or len(set(names)) != len(names):
            raise ConfigError(
                f"contender: {', '.join(names) or 'none given'}; expected at least "
                "two, each name once"
            )


class Round(NamedTuple):
    """All prompts on one server."""

    seconds: float
    counters: SpecCounters
    token_ids: tuple[tuple[int, ...], ...]

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / self.counters.num_steps


def run_step_bench(
    options: StepBenchOptions, folder: Path, console: Console
) -> dict[str, Any]:
    """Measure, print and write; servers are stopped however it ends.

    Args:
        options: What the user chose.
        folder: For `steps-<hardware>.json` and `.png`.
        console: Where to print.

    Raises:
        ConfigError: An option is wrong; nothing was started.
        ServerError: A server died or did not answer.
    """
    if not folder.is_dir():
        raise ConfigError(f"output: {str(folder)!r} is no folder; name one that exists")
    provenance = collect_provenance(sys.argv)
    machine = machine_slug(provenance["hardware"])
    json_path = folder / f"steps-{machine}.json"
    with log_folder() as logs, exit_on_signals():
        repeats = _Session(options, logs, console).run()
    result = {**summarise(options, repeats), "provenance": provenance}
    write_json(json_path, result)
    plot(result, json_path.with_suffix(".png"))
    print_steps(result, console)
    console.print(f"Written to {json_path} and .png", markup=False)
    return result


class _Session:
    """The servers of one measurement and their clients."""

    def __init__(self, options: StepBenchOptions, logs: Path, console: Console) -> None:
        self.options = options
        self.progress = Progress(console)
        model = resolve_model(options.model)
        self.prompts = [p.text for p in read_prompts(model, options.num_prompts)]
        on_gpu = bool(gpu_names())
        settings = ServerSettings(
            options.dtype, len(options.contenders), options.serve_args, on_gpu
        )
        ports = free_ports(len(options.contenders))
        self.servers = {
            each.name: Server(
                each.name,
                serve_command(model, each.speculative_config, port, settings),
                port,
                logs / f"{each.name}.log",
            )
            for each, port in zip(options.contenders, ports, strict=True)
        }
        self.environ = serve_environ(os.environ, logs, Path(model).is_dir(), on_gpu)
        prompt_tokens = max_model_len_tokens(model) - options.max_tokens
        self.clients = {
            name: DemoClient(server.url, options.max_tokens, prompt_tokens)
            for name, server in self.servers.items()
        }

    def run(self) -> list[dict[str, Round]]:
        """One round of every contender in each repeat; the first repeat is dropped."""
        group = ServerGroup(list(self.servers.values()), self.environ)
        try:
            with group:
                group.wait_ready(self.options.start_timeout_s, self.progress)
                return [
                    self._repeat(number)
                    for number in range(self.options.num_repeats + 1)
                ][1:]
        finally:
            self.progress.close()

    def _repeat(self, number: int) -> dict[str, Round]:
        names = list(self.servers)
        first = number % len(names)
        rounds = {}
        for name in [*names[first:], *names[:first]]:
            self.progress(f"repeat {number}/{self.options.num_repeats}, {name}")
            rounds[name] = self._round(name)
        return rounds

    def _round(self, name: str) -> Round:
        page = f"{self.servers[name].url}/metrics"
        before = parse_counters(http_get(page))
        start = time.perf_counter()
        with ThreadPoolExecutor(self.options.concurrency) as pool:
            done = list(pool.map(self.clients[name].complete, self.prompts))
        seconds = time.perf_counter() - start
        counters = parse_counters(http_get(page)).since(before)
        return Round(seconds, counters, tuple(each.token_ids for each in done))


def summarise(
    options: StepBenchOptions, repeats: Sequence[dict[str, Round]]
) -> dict[str, Any]:
    """The result's figures: see the top of this file.

    Args:
        options: what was measured.
        repeats: one round of every contender in each.
    """
    baseline = options.contenders[0].name
    step_ms = {
        contender.name: Spread.of([each[contender.name].step_ms for each in repeats])
        for contender in options.contenders
    }
    contenders = {}
    for name, config in options.contenders:
        rounds = [repeat[name] for repeat in repeats]
        counters = [each.counters for each in rounds]
        num_drafts = sum(each.num_drafts for each in counters)
        num_accepted = sum(each.num_accepted_tokens for each in counters)
        contenders[name] = {
            "speculative_config": config,
            "step_ms": step_ms[name].as_json(),
            "ratio": Spread.of_ratio(step_ms[name], step_ms[baseline]).as_json(),
            "num_steps": [each.num_steps for each in counters],
            "acceptance_length": 1 + num_accepted / num_drafts if num_drafts else None,
        }
    texts = {each.token_ids for repeat in repeats for each in repeat.values()}
    return {
        "baseline": baseline,
        "contenders": contenders,
        "identical_texts": len(texts) == 1,
        "options": asdict(options),
    }


def print_steps(result: Mapping[str, Any], console: Console) -> None:
    """A line for each contender."""
    table = Table(title="Engine step time")
    table.add_column("contender")
    for title in ("step ms", f"of {result['baseline']}", "quartiles", "tokens/draft"):
        table.add_column(title, justify="right")
    for name, each in result["contenders"].items():
        ratio, length = each["ratio"], each["acceptance_length"]
        table.add_row(
            name,
            f"{each['step_ms']['median']:.3f}",
            f"{ratio['median']:.3f}",
            "{:.3f} .. {:.3f}".format(*ratio["quartiles"]),
            f"{length:.2f}" if length else "-",
        )
    console.print(table)


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw the ratios into a PNG, whole or not at all."""
    with replacing(path) as pending:
        draw_steps(result).savefig(pending, dpi=140, format="png")


def draw_steps(result: Mapping[str, Any]) -> Figure:
    """The ratios of all repeats, a box for each contender."""
    contenders = result["contenders"]
    hardware = result["provenance"]["hardware"]
    figure = Figure(figsize=(7, 1.2 + 0.6 * len(contenders)), layout="constrained")
    axes = figure.subplots()
    axes.boxplot(
        [each["ratio"]["each"] for each in contenders.values()],
        tick_labels=list(contenders),
        orientation="horizontal",
    )
    axes.invert_yaxis()
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel(f"engine step time, as a ratio to {result['baseline']}")
    options = result["options"]
    axes.set_title(
        f"{describe_hardware(hardware)}; {options['dtype']}, "
        f"{options['concurrency']} at a time",
        fontsize=9,
    )
    return figure
