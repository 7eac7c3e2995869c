"""What a person sees while the grid is measured: a bar, and a line for each cell."""

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

REFRESH_PER_S = 2  # seldom: the engines need the processor


class GridProgress:
    """A bar on a terminal; elsewhere the lines of finished cells alone."""

    def __init__(self, console: Console) -> None:
        """Prepare for a console; nothing is printed."""
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            refresh_per_second=REFRESH_PER_S,
            disable=not console.is_terminal,
        )
        self._task: TaskID = self._progress.add_task("", total=None)

    def __enter__(self) -> Self:
        """Show the bar."""
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take the bar away."""
        self._progress.stop()

    def begin(self, num_cells: int) -> None:
        """From here on cells are counted."""
        self._progress.reset(self._task, total=num_cells)

    def show(self, text: str) -> None:
        """What goes on now; on a terminal only."""
        self._progress.update(self._task, description=escape(text))

    def say(self, text: str) -> None:
        """What goes on now, in a line of its own where there is no terminal."""
        self.show(text)
        if not self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False)

    def finish_cell(self, count: str, name: str, cell: dict[str, Any]) -> None:
        """A line about a finished cell."""
        self._progress.advance(self._task)
        plus, best = cell["plus_over_none"], cell["plus_over_best_static"]
        speed = cell["contenders"]["none"]["tokens_per_s"]["median"]
        self._console.print(
            f"{count} {name}: no speculation {speed:.0f} tokens/s, mtp_plus "
            f"{plus['median']:.2f} of it, {best['median']:.2f} of "
            f"{cell['best_static']}",
            markup=False,
            highlight=False,
        )
