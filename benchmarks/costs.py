"""What `mtp_plus` costs beside its drafts: graphs, K = 0, and what steps launch.

The benchmarks `graphs`, `off` and `launches` (at K = 0 and at K of vLLM's `mtp`), each
with a result of its own, of one set of engines: on a GPU starting them takes longer
than all that is asked of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.graphs import GraphsBench
from benchmarks.harness import EngineBench, run_together
from benchmarks.launches import LaunchesBench
from benchmarks.off import OffBench
from benchmarks.options import DTYPES, check_output_folder
from examples.tiny_model import TINY_MODEL
from vllm_mtp.tools.option_checks import check_name
from vllm_mtp.tools.options import Options, option

LAUNCHES_REQUESTS = 32
"""At most, where launches are counted: more requests launch the same."""


@dataclass(frozen=True, kw_only=True)
class CostsOptions(Options):
    """Run graphs, off and launches with one set of engines."""

    model: str = option(str(TINY_MODEL), "Folder with a checkpoint, or a hub name.")
    dtype: str = option("float32", "Weights and arithmetic.")
    draft_length: int = option(3, "K of vLLM's own mtp.", 1, 16)
    concurrency: tuple[int, ...] = option((1, 32), "Requests at a time.", 1, 256)
    request_tokens: int = option(64, "Tokens of every request.", 2, 512)
    repeats: int = option(5, "Timed rounds of each engine.", 1, 100)
    output: Path = option(Path(), "Folder for the results.")

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        check_name("dtype", self.dtype, DTYPES)
        check_output_folder(self.output)

    @property
    def benches(self) -> tuple[EngineBench, ...]:
        """In their order: launches last, since a profiler may leave traces."""
        common: dict[str, Any] = {
            "model": self.model,
            "dtype": self.dtype,
            "output": self.output,
            "request_tokens": self.request_tokens,
        }
        graphs = GraphsBench(
            **common,
            draft_length=self.draft_length,
            concurrency=max(self.concurrency),
        )
        off = OffBench(**common, concurrency=self.concurrency, repeats=self.repeats)
        few = tuple(n for n in self.concurrency if n <= LAUNCHES_REQUESTS)
        launches = (
            LaunchesBench(
                **common,
                concurrency=few or (min(self.concurrency),),
                draft_length=pinned,
                mtp_draft_length=self.draft_length,
            )
            for pinned in (0, self.draft_length)
        )
        return graphs, off, *launches


def run_costs(chosen: CostsOptions, console: Console) -> None:
    """Measure, print and write; engines are stopped.

    Raises:
        ServerError: An engine failed.
    """
    run_together(chosen.benches, console)
