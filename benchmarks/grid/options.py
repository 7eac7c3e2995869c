"""What ``python -m benchmarks grid`` measures: options, limits and contenders."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.options import AGAIN, DTYPES, check_output_folder
from examples.tiny_model import TINY_MODEL
from vllm_mtp.config import METHOD, VLLM_METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.option_checks import check_name, check_names
from vllm_mtp.tools.options import Options, option

WORKLOADS = {
    "code": "in-domain: the start of Python code that was held out from training",
    "prose": "out-of-domain: English prose",
    "constrained": "out-of-domain: English prose, the output limited to the upper "
    "half of the vocabulary, of which vLLM's drafts know nothing: nearly none is "
    "accepted",
    "phases": "code, then constrained, back and forth",
}
CONTEXTS = ("short", "long")

MAX_STATIC_DRAFT_LENGTH = 8

PLUS = METHOD
PLUS_AGAIN = f"{METHOD} again"
"""Equal processes differ by up to 4 % as long as they live: ours runs twice, too, and
its speed is the mean of both."""


class Contender(NamedTuple):
    """An engine of the comparison."""

    name: str
    speculative_config: dict[str, Any] | None


def static_name(draft_length: int) -> str:
    """Name of vLLM's own `mtp` with a fixed K."""
    return f"{VLLM_METHOD} K={draft_length}"


@dataclass(frozen=True, kw_only=True)
class GridOptions(Options):
    """Compare mtp_plus with no speculation and with every fixed draft length.

    Each contender is an engine in a process of its own, and they take turns within
    each repeat, two at a time if there are two cores. The cells of the grid are all
    combinations of workload, concurrency, temperature and context. Ctrl-C stops
    everything; the same command then continues where it was.
    """

    workloads: tuple[str, ...] = option(
        tuple(WORKLOADS),
        "Of: code (in-domain), prose (out-of-domain), constrained (prose, the output "
        "limited to half of the vocabulary, on Model Runner V2 to 1024 tokens of it: "
        "nearly no draft of vLLM's is accepted), phases (code and constrained by "
        "turns).",
        name="workload",
    )
    concurrencies: tuple[int, ...] = option(
        (1, 4, 16, 32), "Requests at a time.", 1, 256, name="concurrency"
    )
    temperatures: tuple[float, ...] = option(
        (0.0, 1.0), "Of sampling; 0 is greedy.", 0, 2, name="temperature"
    )
    contexts: tuple[str, ...] = option(
        CONTEXTS, "Of: short (65 tokens), long (see --long-context).", name="context"
    )
    draft_lengths: tuple[int, ...] = option(
        tuple(range(1, MAX_STATIC_DRAFT_LENGTH + 1)),
        "K of vLLM's own mtp, a contender each.",
        1,
        MAX_STATIC_DRAFT_LENGTH,
    )
    num_repeats: int = option(
        3, "Timed rounds of each contender in a cell, at least.", 1, 100, name="repeats"
    )
    max_repeats: int = option(
        9,
        "So many while what was measured is too close to a limit to tell on which "
        "side of it the cell lies.",
        1,
        100,
    )
    round_seconds: float = option(
        1.2,
        "Decode time of a round without speculation. All contenders generate as many "
        "tokens as that takes, at least 40 for each request.",
        0.01,
        600.0,
    )
    settle_seconds: float = option(
        20.0,
        "How long mtp_plus serves each cell before its rounds are timed, as on a "
        "server that has been up for a while.",
        0.0,
        600.0,
    )
    whole_requests: bool = option(
        False,
        "Compare whole requests, prompts included, too: their lengths differ, and "
        "prefix caches are emptied before each timed round, but for the context of "
        "long cells. Takes longer.",
    )
    model: str = option(
        str(TINY_MODEL),
        "Folder with a checkpoint, or a hub name. Unset: the tiny one, which is so "
        "small that vLLM's own overhead is most of a step; see "
        "python -m examples.tiny_model expand.",
    )
    dtype: str = option(
        "float32", "Greedy texts of all contenders must agree in float32."
    )
    long_context_tokens: int = option(
        1024,
        "Tokens before the prompt in long cells.",
        64,
        1_000_000,
        name="long-context",
    )
    kv_cache_mib: int = option(
        320, "KV cache of each engine; there is one per contender.", 16, 1 << 20
    )
    output: Path = option(
        Path(),
        "Folder for grid-<hardware>.json, a picture, and a .jsonl with every "
        "measurement, from which an interrupted run continues, also with other "
        "workloads, temperatures or more repeats.",
    )

    def __post_init__(self) -> None:
        """Check every option; see `Options`."""
        super().__post_init__()
        check_names("workload", self.workloads, tuple(WORKLOADS))
        check_names("context", self.contexts, CONTEXTS)
        check_name("dtype", self.dtype, DTYPES)
        check_output_folder(self.output)

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """No speculation first, twice, then every static K, then ours, twice."""
        static = (
            Contender(
                static_name(length),
                {"method": VLLM_METHOD, "num_speculative_tokens": length},
            )
            for length in self.draft_lengths
        )
        return (
            Contender(NO_SPECULATION, None),
            Contender(AGAIN, None),
            *static,
            Contender(PLUS_AGAIN, {"method": METHOD}),
            Contender(PLUS, {"method": METHOD}),
        )

    @property
    def is_exact(self) -> bool:
        """Whether greedy texts must agree: in a shorter format near-ties may flip."""
        return self.dtype == "float32"
