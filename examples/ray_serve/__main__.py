"""``python -m examples.ray_serve``: two replicas on this machine, asked and stopped."""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from examples.ray_serve.app import SERVED_NAME, AppOptions, require_ray
from examples.ray_serve.by_replica import Counts, read_counts
from examples.ray_serve.clients import Clients, Tally, connect
from examples.ray_serve.cluster import LeftBehindError
from examples.ray_serve.local import LocalApplication, local_application
from vllm_mtp.cli.command import command_of
from vllm_mtp.cli.errors import FAILED_EXIT_CODE
from vllm_mtp.tools.option_checks import resolve_model
from vllm_mtp.tools.options import Options, option
from vllm_mtp.tools.prompts import load_prompts
from vllm_mtp.tools.provenance import gpu_names
from vllm_mtp.tools.server_process import exit_on_signals

PROGRAM = "python -m examples.ray_serve"
MODEL = str(Path(__file__).parents[1] / "tiny_model" / "mimo-python")
METRICS_TIMEOUT_S = 60.0
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}

app = typer.Typer(name=PROGRAM)


@dataclass(frozen=True)
class DemoOptions(Options):
    """Two replicas with mtp_plus behind one endpoint, on this machine.

    Exit code 1: a request was lost, a replica was idle, or a process outlived the demo.
    2: wrong input, or Ray is missing.
    """

    model: str = option(MODEL, "Folder with a checkpoint, or a hub name.")
    replicas: int = option(2, "Servers side by side.", 1, 64)
    num_prompts: int = option(16, "Number of prompts.", 2, 10_000, name="prompts")
    max_tokens: int = option(48, "Generated for each prompt.", 2, 512, name="tokens")


def run_demo(options: DemoOptions, console: Console) -> None:
    """Start, ask, count, stop.

    Raises:
        ConfigError: An option is wrong; nothing was started.
        LeftBehindError: A process had to be ended.
    """
    require_ray()
    model = resolve_model(options.model)
    prompts = [p.plain_text for p in load_prompts(None, model, options.num_prompts)]
    with exit_on_signals(), tempfile.TemporaryDirectory() as folder:
        console.print(f"Ray, and {options.replicas} replicas: starting")
        with local_application(_application(options, model, folder)) as application:
            console.print(f"{application.num_running()} replicas at {application.url}")
            tally, counts = ask(application, prompts, options, console)
    console.print("Ray has stopped; no process is left.")
    print_counts(counts, tally, console)
    if tally.num_lost or len(counts) < options.replicas:
        raise typer.Exit(FAILED_EXIT_CODE)


def _application(options: DemoOptions, model: str, folder: str) -> AppOptions:
    return AppOptions(
        model,
        min_replicas=options.replicas,
        max_replicas=options.replicas,
        requests_at_once=4,
        warm_start_path=folder,
        cpu=not gpu_names(),
    )


def ask(
    application: LocalApplication,
    prompts: Sequence[str],
    options: DemoOptions,
    console: Console,
) -> tuple[Tally, dict[str, Counts]]:
    """Completions, a streamed answer, a call of a tool; then what replicas counted.

    Args:
        application: To be asked.
        prompts: Of the completions; the first one's answer is streamed, too.
        options: How many tokens, and how many replicas must have counted something.
        console: Shows the answers.
    """
    # Ray Serve LLM, once imported, lets each request be logged.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    tally = Clients(application.url, 8).send(prompts, options.max_tokens)
    client = connect(application.url)
    console.out(prompts[0][-100:], style="dim", highlight=False, end="")
    for piece in stream(client, prompts[0], options.max_tokens):
        console.out(piece, style="green", highlight=False, end="")
    console.print()
    console.print(f"A tool is called: {call_of_tool(client)}", markup=False)
    application.wait_for(
        lambda: len(read_counts()) >= options.replicas,
        "the metrics of all replicas",
        METRICS_TIMEOUT_S,
    )
    return tally, read_counts()


def stream(client: Any, prompt: str, max_tokens: int) -> Iterator[str]:
    """Pieces of an answer, as they come."""
    for chunk in client.completions.create(
        model=SERVED_NAME,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    ):
        if chunk.choices:
            yield chunk.choices[0].text


def call_of_tool(client: Any) -> str:
    """What the model calls a tool with; it is told to call it."""
    answer = client.chat.completions.create(
        model=SERVED_NAME,
        messages=[{"role": "user", "content": "How is the weather in Rome?"}],
        tools=[WEATHER_TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=128,
        temperature=0,
        # The bundled model, which never saw a tool, would fill it up with blank lines.
        frequency_penalty=2.0,
        presence_penalty=2.0,
    )
    message = answer.choices[0].message
    calls = message.tool_calls or ()
    called = [f"{call.function.name}({call.function.arguments})" for call in calls]
    return ", ".join(called) or f"none, but {message.content!r}"


def print_counts(counts: dict[str, Counts], tally: Tally, console: Console) -> None:
    """A line for each replica."""
    table = Table()
    table.add_column("replica")
    for title in ("draft tokens", "accepted %", "tokens a step"):
        table.add_column(title, justify="right")
    for replica, each in sorted(counts.items()):
        table.add_row(
            replica,
            f"{each.num_draft_tokens:.0f}",
            f"{100 * each.acceptance:.0f}",
            f"{each.tokens_per_step:.2f}",
        )
    console.print(table)
    console.print(
        f"Requests: {tally.num_sent} sent, {tally.num_failed} failed, "
        f"{tally.num_retried} tried again, {tally.num_lost} lost."
    )


app.command()(
    command_of(
        DemoOptions,
        run_demo,
        "demo",
        "interrupted; Ray has stopped",
        LeftBehindError,
    )
)

if __name__ == "__main__":
    app(prog_name=PROGRAM)
