"""What ``python -m benchmarks grid`` measures: options, limits and contenders."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.options import AGAIN, DTYPES, check_numbers, check_output_folder
from examples.tiny_model import TINY_MODEL
from vllm_mtp.config import METHOD, VLLM_METHOD
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.option_checks import check_fields, check_name, check_names

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
MAX_CONCURRENCY = 256
MAX_TEMPERATURE = 2.0
MAX_REPEATS = 100
MAX_ROUND_SECONDS = 600.0
MAX_CONTEXT_TOKENS = 1_000_000

PLUS = METHOD
PLUS_AGAIN = f"{METHOD} again"
"""A process has its own luck for as long as it lives: two without speculation differ by
up to 4 % for hours. So ours runs twice, too, and its speed is the mean of both."""


class Contender(NamedTuple):
    """An engine of the comparison."""

    name: str
    speculative_config: dict[str, Any] | None


def static_name(draft_length: int) -> str:
    """Name of vLLM's own `mtp` with a fixed K."""
    return f"{VLLM_METHOD} K={draft_length}"


@dataclass(frozen=True)
class GridOptions:
    """What the user chose.

    Attributes:
        workloads: Of ``WORKLOADS``.
        concurrencies: Requests at a time.
        temperatures: Of sampling; 0 is greedy.
        contexts: Of ``CONTEXTS``.
        draft_lengths: K of vLLM's own `mtp`, a contender each.
        num_repeats: Timed rounds of each contender in each cell, at least.
        max_repeats: So often while it is open on which side of its limits a cell is.
        round_seconds: Decode time of a round without speculation.
        settle_seconds: How long `mtp_plus` serves a cell before rounds are timed.
        whole_requests: Whether whole requests are compared, too: the prefix caches are
            emptied before each timed round but for the context, so that all contenders
            compute the same prompts, and requests are not equally long.
        model: Folder or hub name.
        dtype: Weights and arithmetic.
        long_context_tokens: Tokens before the prompt in ``long`` cells.
        kv_cache_mib: KV cache of each engine.
        output: Folder for the result files.
    """

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    concurrencies: tuple[int, ...] = (1, 4, 16, 32)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    contexts: tuple[str, ...] = CONTEXTS
    draft_lengths: tuple[int, ...] = tuple(range(1, MAX_STATIC_DRAFT_LENGTH + 1))
    num_repeats: int = 3
    max_repeats: int = 9
    round_seconds: float = 1.2
    settle_seconds: float = 20.0
    whole_requests: bool = False
    model: str = str(TINY_MODEL)
    dtype: str = "float32"
    long_context_tokens: int = 1024
    kv_cache_mib: int = 320
    output: Path = Path()

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: One of them has a value that is not allowed.
        """
        check_names("workload", self.workloads, tuple(WORKLOADS))
        check_names("context", self.contexts, CONTEXTS)
        check_numbers("concurrency", self.concurrencies, (1, MAX_CONCURRENCY))
        check_numbers("temperature", self.temperatures, (0.0, MAX_TEMPERATURE))
        check_numbers("draft-lengths", self.draft_lengths, (1, MAX_STATIC_DRAFT_LENGTH))
        check_fields(
            self,
            {
                "num_repeats": (1, MAX_REPEATS),
                "max_repeats": (1, MAX_REPEATS),
                "round_seconds": (0.01, MAX_ROUND_SECONDS),
                "settle_seconds": (0.0, MAX_ROUND_SECONDS),
                "long_context_tokens": (64, MAX_CONTEXT_TOKENS),
                "kv_cache_mib": (16, 1 << 20),
            },
            names={"long_context_tokens": "long-context"},
        )
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

    def as_json(self) -> dict[str, Any]:
        """For the result file."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in (asdict(self) | {"output": str(self.output)}).items()
        }
