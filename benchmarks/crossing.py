"""A load that keeps crossing the threshold of vLLM's batch-size table (vllm#49548).

Eight requests begin together and end one after another, again and again, so the batch
falls from eight to one and jumps back. With a table (``num_speculative_tokens_per_``
``batch_size``: K up to a batch size, 0 above) vLLM switches drafting on and off within
every wave; users saw throughput collapse. All contenders serve the same waves in
short turns (`engine_process`), and ratios are paired within a repeat.

Result (JSON)::

    contenders.<name>.speculative_config   what the engine was given
                     .tokens_per_s         spread over the repeats: decode steps only
                     .over_none            paired ratios
                     .mean_draft_length, .acceptance_length
    identical_texts, options, provenance
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.grid.cells import CODE, Prompts
from benchmarks.grid.engines import BenchGroup
from benchmarks.options import check_output_folder, machine_slug
from benchmarks.small_group import play_repeats, room_for, start_engines
from benchmarks.spread import Spread
from examples.tiny_model import TINY_MODEL
from vllm_mtp.config import METHOD, VLLM_METHOD
from vllm_mtp.tools.engine_arguments import EngineSize
from vllm_mtp.tools.engine_process import NO_SPECULATION
from vllm_mtp.tools.option_checks import check_fields, resolve_model
from vllm_mtp.tools.provenance import collect_provenance, write_json
from vllm_mtp.tools.server_process import exit_on_signals, log_folder

CONCURRENCY = 8
MAX_LIMIT = 100
TABLE = f"{VLLM_METHOD} with a table"


@dataclass(frozen=True)
class CrossingOptions:
    """What the user chose.

    Attributes:
        model: Folder or hub name.
        draft_length: K of vLLM's own `mtp`, with the table and without.
        threshold: Largest batch for which the table drafts.
        request_tokens: The shortest request's; the others have 2, 3, ... 8 times that.
        num_waves: Of a round.
        num_repeats: Timed rounds of each contender.
        output: Folder for the result.
    """

    model: str = str(TINY_MODEL)
    draft_length: int = 3
    threshold: int = 4
    request_tokens: int = 12
    num_waves: int = 2
    num_repeats: int = 5
    output: Path = Path()

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: One of them has a value that is not allowed.
        """
        most = {
            "draft_length": 8,
            "threshold": CONCURRENCY - 1,
            "request_tokens": MAX_LIMIT,
            "num_waves": MAX_LIMIT,
            "num_repeats": MAX_LIMIT,
        }
        check_fields(self, {name: (1, limit) for name, limit in most.items()})
        check_output_folder(self.output)

    @property
    def contenders(self) -> dict[str, dict[str, Any] | None]:
        """Speculative config of each."""
        fixed = {
            "method": VLLM_METHOD,
            "num_speculative_tokens": self.draft_length,
        }
        table = [
            (1, self.threshold, self.draft_length),
            (self.threshold + 1, CONCURRENCY, 0),
        ]
        return {
            NO_SPECULATION: None,
            f"{VLLM_METHOD} K={self.draft_length}": fixed,
            TABLE: {**fixed, "num_speculative_tokens_per_batch_size": table},
            METHOD: {"method": METHOD},
        }


def run_crossing_bench(options: CrossingOptions, console: Console) -> dict[str, Any]:
    """Measure, print and write.

    Args:
        options: What the user chose.
        console: Where to print.

    Returns:
        The result as it was written.

    Raises:
        ServerError: An engine failed.
    """
    model = resolve_model(options.model)
    with log_folder() as logs, exit_on_signals(), BenchGroup() as group:
        longest = room_for(CONCURRENCY * options.request_tokens)
        size = EngineSize(model, longest, CONCURRENCY)
        prompts = start_engines(group, options.contenders, size, logs)
        waves = crossing_waves(prompts, options)
        rounds = play_repeats(group, waves, CONCURRENCY, options.num_repeats, console)
    result = summarise_crossing(options, rounds)
    machine = machine_slug(result["provenance"]["hardware"])
    path = options.output / f"crossing-{machine}.json"
    write_json(path, result)
    print_crossing(result, console)
    console.print(f"Written: {path}", markup=False)
    return result


def crossing_waves(
    prompts: Prompts, options: CrossingOptions
) -> list[list[dict[str, Any]]]:
    """Waves of eight requests, each one longer than the one before."""
    own = prompts.own[CODE]
    return [
        [
            {
                "prompt": list(own[(CONCURRENCY * wave + i) % len(own)]),
                "sampling": {
                    "temperature": 0.0,
                    "max_tokens": options.request_tokens * (i + 1),
                },
            }
            for i in range(CONCURRENCY)
        ]
        for wave in range(options.num_waves)
    ]


def summarise_crossing(
    options: CrossingOptions, rounds: Sequence[Mapping[str, Mapping[str, Any]]]
) -> dict[str, Any]:
    """The result, from what each engine counted in each round."""
    speeds = {
        name: Spread.of(
            [
                each[name]["decode_tokens"] / each[name]["decode_seconds"]
                for each in rounds
            ]
        )
        for name in options.contenders
    }
    contenders = {
        name: {
            "speculative_config": config,
            "tokens_per_s": speeds[name].as_json(),
            "over_none": Spread.of_ratio(
                speeds[name], speeds[NO_SPECULATION]
            ).as_json(),
            **_lengths([each[name] for each in rounds]),
        }
        for name, config in options.contenders.items()
    }
    texts = {each[name]["texts_sha256"] for each in rounds for name in speeds}
    return {
        "contenders": contenders,
        "identical_texts": len(texts) == 1,
        "options": asdict(options) | {"output": str(options.output)},
        "provenance": collect_provenance(sys.argv),
    }


def print_crossing(result: Mapping[str, Any], console: Console) -> None:
    """A line for each contender."""
    table = Table(title="A batch that keeps crossing the table's threshold")
    for column in ("contender", "tokens/s", "of none", "quartiles", "K", "acc. length"):
        table.add_column(column, justify="left" if column == "contender" else "right")
    for name, figures in result["contenders"].items():
        ratio = figures["over_none"]
        table.add_row(
            name,
            f"{figures['tokens_per_s']['median']:.0f}",
            f"{ratio['median']:.3f}",
            "{:.2f}..{:.2f}".format(*ratio["quartiles"]),
            f"{figures['mean_draft_length']:.2f}",
            f"{figures['acceptance_length']:.2f}",
        )
    console.print(table)
    same = "the same" if result["identical_texts"] else "DIFFERENT"
    console.print(f"Greedy texts: {same} from all contenders")


def _lengths(rounds: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    request_steps = sum(each["decode_request_steps"] for each in rounds)
    drafted = sum(sum(each["drafted_per_position"]) for each in rounds)
    return {
        "mean_draft_length": drafted / sum(each["request_steps"] for each in rounds),
        "acceptance_length": sum(each["decode_tokens"] for each in rounds)
        / request_steps,
    }
