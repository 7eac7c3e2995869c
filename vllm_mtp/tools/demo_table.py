"""What a person sees of the demo: progress, texts, the table and the verdict."""

import time
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from vllm_mtp.config import METHOD, VLLM_METHOD
from vllm_mtp.tools.demo_measure import Difference, Measurement, Spread
from vllm_mtp.tools.demo_plan import NO_SPECULATION

PLAIN_INTERVAL_S = 10.0
REFRESH_PER_S = 4.0  # seldom: the servers need the processor
PROMPT_TAIL_CHARS = 160
MAX_DIFFERENCES_SHOWN = 3


class Progress:
    """One line that changes on a terminal; now and then a line of its own elsewhere."""

    def __init__(self, console: Console) -> None:
        """Prepare for a console; nothing is printed."""
        self._console = console
        self._status: Status | None = None
        self._last_plain_s = float("-inf")

    def __call__(self, text: str) -> None:
        """Show what goes on."""
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status(
                    "", refresh_per_second=REFRESH_PER_S
                )
                self._status.start()
            self._status.update(escape(text))
        elif time.monotonic() - self._last_plain_s >= PLAIN_INTERVAL_S:
            self._last_plain_s = time.monotonic()
            self._console.print(f"  {text}", markup=False, highlight=False)

    def close(self) -> None:
        """Take the line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def print_continuation(
    console: Console, title: str, prompt: str, pieces: Iterable[str]
) -> int:
    """Print the end of a prompt and its continuation, as the pieces arrive.

    Args:
        console: Where.
        title: What is shown.
        prompt: The text that was continued.
        pieces: Of the continuation.

    Returns:
        Number of pieces.
    """
    tail = prompt[-PROMPT_TAIL_CHARS:]
    shown = tail if tail == prompt else f"...{tail}"
    # out(): texts are data; print() would wrap them and read markup in them.
    console.out(f"\n{title}", style="bold", highlight=False)
    console.out(shown, style="dim", highlight=False, end="")
    count = 0
    for piece in pieces:
        console.out(piece, style="green", highlight=False, end="")
        count += bool(piece)
    console.print()
    return count


def method_title(method: str, baseline_draft_tokens: int) -> str:
    """A method in words."""
    return {
        NO_SPECULATION: "no speculation",
        VLLM_METHOD: f"vLLM's {VLLM_METHOD}, K={baseline_draft_tokens}",
        METHOD: METHOD,
    }[method]


def format_spread(spread: Spread, digits: int, unit: str = "") -> str:
    """`median [min..max]`."""
    return (
        f"{spread.median:.{digits}f}{unit} "
        f"\\[{spread.minimum:.{digits}f}..{spread.maximum:.{digits}f}]"
    )


def build_table(
    results: Mapping[str, Measurement], baseline_draft_tokens: int
) -> Table:
    """The comparison.

    Args:
        results: One measurement for each method.
        baseline_draft_tokens: K of vLLM's own `mtp`.

    Returns:
        A table with a row for each method.
    """
    title = "Side by side: median [min..max] of the timed passes"
    table = Table(title=escape(title), box=box.SIMPLE_HEAVY, pad_edge=False)
    for header in ("", "tokens/s", "speed-up", "tokens\nper step"):
        justify: JustifyMethod = "right" if header else "left"
        table.add_column(header, justify=justify, no_wrap=True)
    table.add_column("accepted %,\nby position")
    for method, result in results.items():
        per_step = result.counters.tokens_per_step
        survival = result.counters.survival
        table.add_row(
            method_title(method, baseline_draft_tokens),
            format_spread(Spread.of(result.tokens_per_s), 0),
            format_spread(Spread.of(result.speedup), 2, "x"),
            "-" if per_step is None else f"{per_step:.2f}",
            " ".join(f"{100 * share:.0f}" for share in survival) or "-",
        )
    return table


def print_verdict(
    console: Console, differences: Sequence[Difference], num_compared: int
) -> None:
    """Say whether the output is the same.

    Args:
        console: Where.
        differences: What differs from no speculation.
        num_compared: Continuations that were compared.
    """
    if not differences:
        console.print(
            f"Same greedy text: yes, in all {num_compared} continuations.",
            style="bold green",
        )
        return
    console.print(
        f"Same greedy text: NO, {len(differences)} of {num_compared} continuations "
        "differ from no speculation:",
        style="bold red",
    )
    for each in differences[:MAX_DIFFERENCES_SHOWN]:
        console.print(
            f"  {each.method}, prompt {each.prompt}: from generated token "
            f"{each.position} on",
            markup=False,
        )
