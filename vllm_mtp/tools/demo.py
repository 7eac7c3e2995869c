"""The demo: `mtp_plus`, vLLM's own `mtp` and no speculation, side by side.

Starts one real `vllm serve` for each method, sends the same prompts to all of them in
turns, and prints the texts, the acceptance and the speeds, whatever they are. It
leaves nothing behind but the result file that was asked for.
"""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from openai import APIError, BadRequestError
from rich.console import Console

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.demo_client import Completion, DemoClient, parse_counters
from vllm_mtp.tools.demo_measure import (
    Difference,
    Measurement,
    Spread,
    find_differences,
    run_pass,
    summarise,
)
from vllm_mtp.tools.demo_plan import (
    DemoOptions,
    Prompt,
    ServerSettings,
    max_prompt_tokens,
    read_prompts,
    resolve_model,
    serve_command,
    serve_environ,
    speculative_config,
)
from vllm_mtp.tools.demo_servers import (
    Server,
    ServerError,
    ServerGroup,
    exit_on_signals,
    free_ports,
    http_get,
    log_folder,
)
from vllm_mtp.tools.demo_table import (
    Progress,
    build_table,
    print_continuation,
    print_verdict,
)
from vllm_mtp.tools.provenance import collect_provenance, gpu_names, write_json

EXACT_DTYPE = "float32"
CHAT_QUESTION = "Write a Python function that returns the sum of a list."


@dataclass(frozen=True)
class DemoResult:
    """What the demo found.

    Attributes:
        measurements: One for each method.
        differences: Continuations that differ from no speculation.
        num_compared: Continuations that were compared.
    """

    measurements: dict[str, Measurement]
    differences: list[Difference]
    num_compared: int


def is_exact(options: DemoOptions) -> bool:
    """Whether the texts must agree: in a shorter format rounding may change them."""
    return options.dtype == EXACT_DTYPE


def run_demo(
    options: DemoOptions, json_path: Path | None, console: Console
) -> DemoResult:
    """Run the whole demo; servers are stopped however it ends.

    Args:
        options: What the user chose.
        json_path: File for the result, if wanted.
        console: Where to print.

    Returns:
        The result, already printed and written.

    Raises:
        ConfigError: An option is wrong; nothing was started.
        ServerError: A server died or did not answer.
    """
    start = time.monotonic()
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise ConfigError(f"json: the folder of {str(json_path)!r} does not exist")
    model = resolve_model(options.model)
    prompts = read_prompts(model, options.num_prompts)
    provenance = collect_provenance(sys.argv)
    hardware = provenance["hardware"]
    console.print(
        f"Model: {model}\nMachine: {hardware['num_cores']} cores, {hardware['cpu']}, "
        f"{', '.join(hardware['gpus']) or 'no GPU'}; load average "
        f"{hardware['load_average_1min']} before the start",
        style="dim",
        markup=False,
        highlight=False,
    )
    with log_folder() as logs, exit_on_signals():
        session = _Session(options, model, prompts, logs, console)
        result = session.run()
    console.print(f"Servers stopped; {time.monotonic() - start:.0f} s altogether.")
    if json_path is not None:
        content = result_as_json(options, model, result)
        write_json(json_path, {**content, "provenance": provenance})
        console.print(f"Written to {json_path}", markup=False)
    return result


def result_as_json(
    options: DemoOptions, model: str, result: DemoResult
) -> dict[str, Any]:
    """Everything that was printed, and the single figures behind it."""
    methods = {
        method: {
            "tokens_per_s": Spread.of(each.tokens_per_s)._asdict(),
            "tokens_per_s_of_each_pass": each.tokens_per_s,
            "speedup": Spread.of(each.speedup)._asdict(),
            "speedup_of_each_pass": each.speedup,
            "tokens_per_step": each.counters.tokens_per_step,
            "survival": each.counters.survival,
            "counters": each.counters._asdict(),
        }
        for method, each in result.measurements.items()
    }
    return {
        "model": model,
        "options": asdict(options),
        "methods": methods,
        "num_compared": result.num_compared,
        "differences": [each._asdict() for each in result.differences],
    }


class _Session:
    """The servers of one demo, their clients and the console."""

    def __init__(
        self,
        options: DemoOptions,
        model: str,
        prompts: Sequence[Prompt],
        logs: Path,
        console: Console,
    ) -> None:
        self.options = options
        self.prompts = prompts
        self.console = console
        self.progress = Progress(console)
        on_gpu = bool(gpu_names())
        settings = ServerSettings(
            options.dtype, len(options.methods), options.serve_args, on_gpu
        )
        ports = free_ports(len(options.methods))
        self.servers = {
            method: Server(
                method,
                serve_command(
                    model, speculative_config(method, options), port, settings
                ),
                port,
                logs / f"{method}.log",
            )
            for method, port in zip(options.methods, ports, strict=True)
        }
        is_local = Path(model).is_dir()
        self.environ = serve_environ(os.environ, logs, is_local, on_gpu)
        prompt_tokens = max_prompt_tokens(model, options)
        self.clients = {
            method: DemoClient(server.url, options.max_tokens, prompt_tokens)
            for method, server in self.servers.items()
        }

    def run(self) -> DemoResult:
        """Start, measure and stop."""
        start = time.monotonic()
        names = ", ".join(self.servers)
        self.console.print(f"Starting {len(self.servers)} servers: {names}")
        group = ServerGroup(list(self.servers.values()), self.environ)
        try:
            with group:
                group.wait_ready(self.options.start_timeout_s, self.progress)
                self.progress.close()
                elapsed_s = time.monotonic() - start
                self.console.print(f"All servers answer after {elapsed_s:.0f} s.")
                return self._measure_or_explain()
        finally:
            self.progress.close()

    def _measure_or_explain(self) -> DemoResult:
        try:
            warm_up = self._pass(0, "first pass (not timed)")
            self._show_texts()
            result = self._measure(warm_up)
        except (APIError, OSError) as error:
            for server in self.servers.values():
                server.check_alive()
            raise ServerError(f"a request failed: {error}") from error
        return result

    def _pass(self, number: int, title: str) -> dict[str, list[Completion]]:
        done = run_pass(
            self.clients,
            self.prompts,
            number,
            lambda text: self.progress(f"{title}: {text}"),
        )
        self.progress.close()
        return done

    def _show_texts(self) -> None:
        method, client = list(self.clients.items())[-1]
        first, last = self.prompts[0], self.prompts[-1]
        pieces = print_continuation(
            self.console,
            f"{method}, streaming, {first.source}",
            first.text,
            client.stream(first.text),
        )
        self.console.print(f"(streamed in {pieces} pieces)", style="dim")
        print_continuation(
            self.console,
            f"{method}, completion, {last.source}",
            last.text,
            [client.complete(last.text).text],
        )
        try:
            answer = client.chat(CHAT_QUESTION)
        except BadRequestError as error:
            # A checkpoint without a chat template is not for chatting; vLLM says so.
            answer = f"(the server refuses to chat: {error.message})"
        print_continuation(
            self.console, f"{method}, chat", f"{CHAT_QUESTION}\n", [answer]
        )

    def _measure(self, warm_up: dict[str, list[Completion]]) -> DemoResult:
        before = self._read_counters()
        num_repeats = self.options.num_repeats
        passes = [
            self._pass(number, f"timed pass {number}/{num_repeats}")
            for number in range(1, num_repeats + 1)
        ]
        after = self._read_counters()
        counters = {method: after[method].since(before[method]) for method in after}
        result = DemoResult(
            summarise(passes, counters),
            find_differences([warm_up, *passes], self.prompts),
            len(self.prompts) * len(self.servers) * (1 + num_repeats),
        )
        self._print(result)
        return result

    def _read_counters(self) -> dict[str, Any]:
        return {
            method: parse_counters(http_get(f"{server.url}/metrics"))
            for method, server in self.servers.items()
        }

    def _print(self, result: DemoResult) -> None:
        options = self.options
        self.console.print()
        self.console.print(
            build_table(result.measurements, options.baseline_draft_tokens)
        )
        self.console.print(
            f"{len(self.prompts)} prompts x up to {options.max_tokens} tokens, "
            f"{options.num_repeats} timed passes, greedy, {options.dtype}, one request "
            "at a time, the servers in turns; times include the prompt. Greedy small "
            "models repeat themselves, which makes drafts easy to accept.",
            style="dim",
        )
        print_verdict(self.console, result.differences, result.num_compared)
        if result.differences and not is_exact(options):
            self.console.print(f"(In {options.dtype} rounding alone can do that.)")
