"""``vllm-mtp demo``: one model with `mtp_plus`, with vLLM's `mtp`, and without either.

Starts one ``vllm serve`` after the other and measures each with vLLM's own
``vllm bench serve``: the same greedy prompts, speed, and acceptance from the server's
counters. Texts are compared with those of the server that does not speculate.

Result (JSON)::

    methods.<name>     figures of ``vllm bench serve --save-result``, and ``speedup``
    num_compared       texts that were compared
    differences        method and number of the prompt of each text that differs
    options, provenance
"""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_mtp.config import (
    DEFAULT_FIXED_DRAFT_LENGTH,
    MAX_DRAFT_LENGTH,
    METHOD,
    VLLM_METHOD,
    ConfigError,
)
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.option_checks import check_output, resolve_model
from vllm_mtp.tools.options import MODEL_HELP, Options, argument, option
from vllm_mtp.tools.prompts import load_prompts
from vllm_mtp.tools.provenance import collect_provenance, gpu_names, write_json
from vllm_mtp.tools.server_process import (
    Program,
    ProgramGroup,
    Server,
    ServerGroup,
    exit_on_signals,
    free_ports,
    log_folder,
    serve_environ,
)

MAX_MODEL_LEN_TOKENS = 1024
KV_CACHE_BYTES = 1024**3
"""Of a server on a CPU, which would otherwise take most of the machine's memory."""

BENCH_TIMEOUT_S = 3600.0
EXACT_DTYPE = "float32"
MAX_DIFFERENCES_SHOWN = 3
FIGURES = (
    "completed",
    "failed",
    "duration",
    "total_output_tokens",
    "output_throughput",
    "mean_ttft_ms",
    "mean_tpot_ms",
    "spec_decode_num_drafts",
    "spec_decode_acceptance_length",
    "spec_decode_per_position_acceptance_rates",
)
"""Of ``vllm bench serve``; those of speculation are missing without it."""


@dataclass(frozen=True)
class DemoOptions(Options):
    """Show mtp_plus, vLLM's own mtp and no speculation side by side.

    Exit code 1: texts differ in float32, or a server failed. 2: wrong input.
    """

    model: str = argument(MODEL_HELP)
    num_prompts: int = option(16, "Number of prompts.", 1, 10_000, name="prompts")
    max_tokens: int = option(64, "Generated for each prompt.", 2, 512, name="tokens")
    concurrency: int = option(1, "Requests at a time.", 1, 64)
    draft_tokens: int = option(
        DEFAULT_FIXED_DRAFT_LENGTH,
        "K of vLLM's own mtp; mtp_plus chooses for itself.",
        1,
        MAX_DRAFT_LENGTH,
    )
    dtype: str = option(
        EXACT_DTYPE, "Of the servers. Only in float32 texts are sure to agree."
    )
    start_timeout_s: float = option(
        600.0, "How long a server may take to start.", 1, 86_400
    )
    serve_args: str = option("", "More for every `vllm serve`: '--trust-remote-code'.")
    output: Path | None = option(None, "Also write the result (JSON).")

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        try:
            shlex.split(self.serve_args)
        except ValueError as error:
            raise ConfigError(f"serve-args: {self.serve_args!r}: {error}") from None
        check_output(self.output)

    @property
    def configs(self) -> dict[str, dict[str, Any] | None]:
        """Speculative config by method; the first is what the others are held to."""
        mtp = {"method": VLLM_METHOD, "num_speculative_tokens": self.draft_tokens}
        return {NO_SPECULATION: None, VLLM_METHOD: mtp, METHOD: {"method": METHOD}}


def run_demo(options: DemoOptions, console: Console) -> dict[str, Any]:
    """Measure all methods, print and write; servers are stopped however it ends.

    Raises:
        ConfigError: An option is wrong; nothing was started.
        ServerError: A server or a client failed.
    """
    model = resolve_model(options.model)
    texts = [p.plain_text for p in load_prompts(None, model, options.num_prompts)]
    provenance = collect_provenance(sys.argv)
    with log_folder() as scratch, exit_on_signals():
        prompts = scratch / "prompts.json"
        prompts.write_text(json.dumps([_as_sharegpt(text) for text in texts]))
        measured = {
            method: _measure(method, config, model, scratch, options, console)
            for method, config in options.configs.items()
        }
    result = {**summarise(options, measured), "provenance": provenance}
    print_demo(result, texts, measured, console)
    if options.output is not None:
        write_json(options.output, result)
        console.print(f"Written to {options.output}", markup=False)
    return result


def _as_sharegpt(text: str) -> dict[str, Any]:
    """A prompt in the one format of ``vllm bench serve`` that needs no pandas."""
    return {"conversations": [{"value": text}, {"value": ""}]}


def _measure(
    method: str,
    config: dict[str, Any] | None,
    model: str,
    scratch: Path,
    options: DemoOptions,
    console: Console,
) -> dict[str, Any]:
    """What ``vllm bench serve`` finds of one server."""
    on_gpu, (port,) = bool(gpu_names()), free_ports(1)
    environ = serve_environ(os.environ, scratch, Path(model).is_dir(), on_gpu)
    command = serve_command(model, config, port, options, on_gpu)
    server = Server(method, command, port, scratch / f"{method}.log")
    found = scratch / f"{method}.json"
    with (
        _working(f"{method}: starting a server", console) as say,
        ServerGroup([server], environ) as group,
    ):
        group.wait_ready(options.start_timeout_s, say)
        say(f"{method}: {options.num_prompts} prompts")
        client = Program(
            f"the benchmark of {method!r}",
            bench_command(model, port, found, options),
            scratch / f"{method}-bench.log",
        )
        with ProgramGroup([client], environ):
            client.wait_done(BENCH_TIMEOUT_S)
        server.check_alive()
    result: dict[str, Any] = json.loads(found.read_text())
    if result["failed"] or not result["completed"]:
        errors = [error for error in result["errors"] if error] or ["no prompt fits"]
        raise server.error(f"failed {result['failed']} requests: {errors[0][-300:]}")
    return result


@contextmanager
def _working(text: str, console: Console) -> Iterator[Any]:
    """Say what goes on: a line that changes on a terminal, else the first one."""
    if not console.is_terminal:
        console.print(text, markup=False, highlight=False)
    with console.status(text) as status:
        yield status.update


def serve_command(
    model: str,
    config: Mapping[str, Any] | None,
    port: int,
    options: DemoOptions,
    on_gpu: bool,
) -> list[str]:
    """``vllm serve``. Prefix caching is off: warm-ups must not save work.

    Args:
        model: Folder or hub name.
        config: Value of ``--speculative-config``; None without speculation.
        port: On the loopback interface.
        options: What the user chose; their ``serve_args`` come last and win.
        on_gpu: Let vLLM compile and capture graphs.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", options.dtype]
    command += ["--max-model-len", str(max_model_len_tokens(model, options.max_tokens))]
    command += ["--max-num-seqs", str(options.concurrency), "--served-model-name", "m"]
    command += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    if not on_gpu:
        command += ["--enforce-eager", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    if config is not None:
        command += ["--speculative-config", json.dumps(config)]
    return [*command, *shlex.split(options.serve_args)]


def bench_command(
    model: str, port: int, result: Path, options: DemoOptions
) -> list[str]:
    """``vllm bench serve``, greedy, all answers equally long."""
    prompts = result.with_name("prompts.json")
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    command += ["--base-url", f"http://127.0.0.1:{port}", "--backend", "openai"]
    command += ["--model", "m", "--served-model-name", "m", "--tokenizer", model]
    command += ["--dataset-name", "sharegpt", "--dataset-path", str(prompts)]
    command += ["--sharegpt-output-len", str(options.max_tokens), "--disable-shuffle"]
    command += ["--num-prompts", str(options.num_prompts), "--no-oversample"]
    command += ["--max-concurrency", str(options.concurrency), "--temperature", "0"]
    command += ["--num-warmups", str(2 * options.concurrency), "--ignore-eos"]
    command += ["--disable-tqdm", "--save-result", "--save-detailed"]
    command += ["--result-dir", str(result.parent), "--result-filename", result.name]
    if "--trust-remote-code" in shlex.split(options.serve_args):
        command.append("--trust-remote-code")
    return command


def max_model_len_tokens(model: str, max_tokens: int) -> int:
    """Context of the servers: short, but no longer than the checkpoint's own.

    Raises:
        ConfigError: It leaves no room for a prompt.
    """
    config = Path(model) / "config.json"
    own = None
    if config.is_file():
        own = json.loads(config.read_text()).get("max_position_embeddings")
    context = min(MAX_MODEL_LEN_TOKENS, own or MAX_MODEL_LEN_TOKENS)
    if max_tokens >= context:
        raise ConfigError(
            f"tokens: {max_tokens} leaves no room for a prompt; expected less than the "
            f"servers' context of {context} tokens"
        )
    return context


def summarise(
    options: DemoOptions, measured: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The result's figures: see the top of this file."""
    baseline = measured[NO_SPECULATION]
    expected = baseline["generated_texts"]
    methods = {
        method: {name: found[name] for name in FIGURES if name in found}
        | {"speedup": found["output_throughput"] / baseline["output_throughput"]}
        for method, found in measured.items()
    }
    differences = [
        {"method": method, "prompt": number}
        for method, found in measured.items()
        for number, (want, got) in enumerate(
            zip(expected, found["generated_texts"], strict=True)
        )
        if want != got
    ]
    return {
        "model": options.model,
        "methods": methods,
        "num_compared": len(expected) * (len(measured) - 1),
        "differences": differences,
        "is_exact": not differences,
        "options": options.as_json(),
    }


def print_demo(
    result: Mapping[str, Any],
    prompts: list[str],
    measured: Mapping[str, Mapping[str, Any]],
    console: Console,
) -> None:
    """A text, the table, and whether all texts are equal."""
    console.out(prompts[0][-160:], style="dim", highlight=False, end="")
    console.out(measured[METHOD]["generated_texts"][0], style="green", highlight=False)
    table = Table()
    titles = ("method", "tokens/s", "speed-up", "acceptance\nlength")
    for title in titles:
        table.add_column(title, justify="left" if title == "method" else "right")
    table.add_column("accepted %,\nby position")
    for method, each in result["methods"].items():
        rates = each.get("spec_decode_per_position_acceptance_rates") or ()
        length = each.get("spec_decode_acceptance_length")
        table.add_row(
            method,
            f"{each['output_throughput']:.1f}",
            f"{each['speedup']:.2f}x",
            f"{length:.2f}" if length else "-",
            " ".join(f"{100 * rate:.0f}" for rate in rates) or "-",
        )
    console.print(table)
    console.print(
        "One server after the other: on a busy machine measure again. Small greedy "
        "models repeat themselves, which makes drafts easy to accept.",
        style="dim",
    )
    _print_texts(result, console)


def _print_texts(result: Mapping[str, Any], console: Console) -> None:
    num_compared, differences = result["num_compared"], result["differences"]
    if not differences:
        console.print(f"Same greedy text: yes, {num_compared} of {num_compared}.")
        return
    console.print(
        f"Same greedy text: NO, {len(differences)} of {num_compared} differ from "
        "no speculation:",
        style="bold red",
    )
    for each in differences[:MAX_DIFFERENCES_SHOWN]:
        console.print(f"  {each['method']}, prompt {each['prompt'] + 1}", markup=False)
    if result["options"]["dtype"] != EXACT_DTYPE:
        console.print(f"(In {result['options']['dtype']} rounding alone can do that.)")
