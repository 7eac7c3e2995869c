"""``vllm-mtp report``: results that our commands wrote, as Markdown.

A result is shown in the words and tables that its command prints, with where its
figures come from. Results name neither their command nor a format, so a kind is known
by keys that its writer always writes and no other one does together.
"""

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.errors import ConsoleError
from rich.table import Table
from rich.text import Text

from vllm_mtp.config import ConfigError
from vllm_mtp.drafting.vocabulary_list import VocabularyList
from vllm_mtp.tools.checked_file import first_problem
from vllm_mtp.tools.compare import CompareOptions, Comparison, Figure
from vllm_mtp.tools.compare_report import print_comparison
from vllm_mtp.tools.eval_file import EvalFile
from vllm_mtp.tools.eval_report import print_eval
from vllm_mtp.tools.option_checks import refuse
from vllm_mtp.tools.plan import Plan, PlanOptions, Row
from vllm_mtp.tools.plan_report import print_plan
from vllm_mtp.tools.provenance import describe_hardware, replacing

Result = Mapping[str, Any]

COMMANDS = (
    "`vllm-mtp eval`, `compare`, `plan`, `doctor --json`, `verify`, `vocab build` or "
    "`python -m benchmarks`"
)
JOURNAL_SUFFIXES = (".jsonl", ".partial")
GARBLED = (
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
    ConsoleError,  # rich: a cell that is no text
)
"""What showing a file stumbles over that only looks like one of ours."""

MARKUP = re.compile(r"\[(?:bold )?(?:green|red|dim)\]|\[/\]")
"""That our commands print; other brackets are text."""
SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#&~])")
"""Means something in Markdown or HTML."""


class Kind(NamedTuple):
    """Of result.

    Attributes:
        title: Of its section.
        keys: That it has; where several kinds fit, the one with the most is meant.
        show: Prints it, as its command does.
    """

    title: str
    keys: frozenset[str]
    show: Callable[[Result, Console], None]


class DamagedError(ConfigError):
    """A file has the keys of a result, but not what belongs there."""


def show_eval(result: Result, console: Console) -> None:
    """Acceptance by position and by category."""
    print_eval(EvalFile.model_validate(result), console)


def show_compare(result: Result, console: Console) -> None:
    """A comparison of two evaluations."""
    figures = [
        Figure(
            each["name"],
            each["base"],
            each["new"],
            (each["interval"][0], each["interval"][1]),
            each["floor"],
        )
        for each in result["figures"]
    ]
    options = CompareOptions(result["false_alarm_rate"])
    print_comparison(Comparison(figures, result["num_prompts"], options), console)
    names = " and ".join(result.get("files", ()))
    if names:
        console.print(f"Compared: {names}.", markup=False)


def show_plan(result: Result, console: Console) -> None:
    """Speedup over draft length and batch."""
    options = TypeAdapter(PlanOptions).validate_python(result["options"])
    rows = [Row(**row) for row in result["rows"]]
    best = {int(batch): Row(**row) for batch, row in result["best"].items()}
    print_plan(Plan(rows, best, result["stops_paying_at"]), options, console)


def show_doctor(result: Result, console: Console) -> None:
    """Findings, and what a probe measured."""
    from vllm_mtp.tools.doctor import Finding, print_findings

    print_findings([Finding(**each) for each in result["findings"]], console)
    if result["probe"]:
        console.print(_probe_table(result["probe"]))


def _probe_table(probe: Result) -> Table:
    table = Table(title="What a few prompts showed")
    titles = ("K", "acceptance length", "step ms", "drafting ms", "predicted speedup")
    for title in titles:
        table.add_column(title, justify="right")
    for each in probe["lengths"]:
        table.add_row(
            str(each["draft_length"]),
            f"{each['acceptance_length']:.2f}",
            f"{1e3 * each['step_seconds']:.2f}",
            f"{1e3 * each['draft_seconds']:.2f}",
            f"{each['predicted_speedup']:.2f}",
        )
    return table


def show_verify(result: Result, console: Console) -> None:
    """Whether the output is the target's."""
    # Brings scipy: a second, for this kind alone.
    from vllm_mtp.tools.verify import print_report
    from vllm_mtp.tools.verify_options import VerifyOptions

    chosen = result["options"]
    options = VerifyOptions(str(chosen["model"]), dtype=chosen["dtype"])
    print_report(result, options, console)


def show_requests(result: Result, console: Console) -> None:
    """Random requests to engines, by what disturbs them."""
    from vllm_mtp.tools.fuzz_run import verdict

    engines = result["engines"]
    counts = list(dict.fromkeys(name for each in engines.values() for name in each))
    table = Table(title="Engines")
    table.add_column("engine")
    for name in counts:
        table.add_column(name.removeprefix("num_").replace("_", " "), justify="right")
    for engine, each in engines.items():
        table.add_row(engine, *(str(each.get(name, 0)) for name in counts))
    console.print(verdict(result))
    console.print(table)
    print_counts("Requests that cross each kind", "kind", result["kinds"], console)
    print_counts("Played and not compared", "reason", result["excluded"], console)
    for each in result["failures"]:
        console.print(each["command"], markup=False)


def show_vocabulary(result: Result, console: Console) -> None:
    """A list of tokens for the draft head."""
    listed = VocabularyList.model_validate(result)
    coverage = listed.coverage()
    num_rows = len(listed.token_ids)
    sizes = sorted({num_rows, *(2**n for n in range(7, 24) if 2**n < num_rows)})
    console.print(
        f"{num_rows:,} of {listed.vocab_size:,} tokens cover {coverage[-1]:.2%} of "
        f"the {listed.num_counted:,} that were counted."
    )
    shares = {f"{rows:,}": f"{coverage[rows - 1]:.2%}" for rows in sizes}
    print_counts("Coverage", "rows", shares, console)


def print_counts(
    title: str, what: str, counts: Mapping[str, Any], console: Console
) -> None:
    """A table of names and numbers."""
    table = Table(title=title)
    table.add_column(what)
    table.add_column("number", justify="right")
    for name, count in counts.items():
        table.add_row(str(name), str(count))
    console.print(table)


def _keys(*names: str) -> frozenset[str]:
    return frozenset(names)


KINDS: Mapping[str, Kind] = {
    "eval": Kind(
        "Acceptance",
        _keys("model", "prompts_sha256", "draft_length", "records"),
        show_eval,
    ),
    "compare": Kind(
        "Acceptance compared",
        _keys("is_failure", "num_prompts", "figures"),
        show_compare,
    ),
    "plan": Kind(
        "Plan", _keys("rows", "best", "stops_paying_at", "assumptions"), show_plan
    ),
    "doctor": Kind("Doctor", _keys("is_healthy", "findings", "probe"), show_doctor),
    "verify": Kind(
        "Exactness", _keys("is_exact", "greedy", "sampled", "verified"), show_verify
    ),
    "verify requests": Kind(
        "Random requests",
        _keys("num_compared", "num_failures", "kinds", "engines"),
        show_requests,
    ),
    "vocab build": Kind(
        "Draft vocabulary",
        _keys("vocab_size", "token_ids", "counts", "num_counted"),
        show_vocabulary,
    ),
}
"""Of users' commands; `python -m benchmarks report` knows those of benchmarks, too."""


def make_report(paths: Sequence[Path], kinds: Mapping[str, Kind] = KINDS) -> str:
    """All results, one section each, as Markdown.

    Args:
        paths: Results, in the order in which they are shown; a file that is named
            twice counts once.
        kinds: That can be shown.

    Raises:
        ConfigError: No file is given, or one cannot be read or is no result of these
            kinds.
    """
    if not paths:
        raise ConfigError(f"result: no file is given; must be what {COMMANDS} wrote")
    by_file = {os.path.realpath(path): path for path in reversed(paths)}
    once = list(reversed(by_file.values()))
    names = short_names(once)
    sections = [
        _section(path, name, kinds) for path, name in zip(once, names, strict=True)
    ]
    return "\n".join(sections)


def write_report(text: str, output: Path, results: Sequence[Path]) -> None:
    """Write a report, whole or not at all.

    Raises:
        ConfigError: It cannot be written.
    """
    real = Path(os.path.realpath(output))
    if not real.parent.is_dir():
        refuse("output", str(output), "a file in a folder that exists")
    if real.exists() and not real.is_file():
        refuse("output", str(output), "a file, not a folder or a device")
    if real in (Path(os.path.realpath(path)) for path in results):
        refuse("output", str(output), "another file than the results")
    try:
        with replacing(real) as pending:
            # JSON may hold halves of characters, which no file can.
            pending.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(
            f"output: {output} cannot be written: {error.strerror or error}; must be "
            "a file in a folder that is writable"
        ) from None


def _section(path: Path, name: str, kinds: Mapping[str, Kind]) -> str:
    content = _read(path)
    kind = kind_of(content, kinds)
    if kind is None:
        raise _refusal(
            path,
            "is JSON, but no result of these commands; of a benchmark, `python -m "
            "benchmarks report` shows it",
        )
    console = _Collector()
    try:
        kinds[kind].show(content, console)
        origin = list(_origin(content))
    except GARBLED as error:
        raise _damaged(path, error) from error
    title = f"## {kinds[kind].title}: {escaped(name)}"
    return "\n".join([title, "", *console.lines, *origin, ""])


class _Collector(Console):
    """A console that keeps what is printed, as lines of Markdown."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def print(self, *objects: Any, **options: Any) -> None:
        for each in objects:
            if isinstance(each, Table):
                self.lines += _table_lines(each)
            else:
                self.lines += [escaped(_plain(each)), ""]


def _table_lines(table: Table) -> Iterator[str]:
    if table.title:
        yield f"**{escaped(_plain(table.title))}**"
        yield ""
    yield _row(_plain(column.header) for column in table.columns)
    rules = ("---:" if each.justify == "right" else "---" for each in table.columns)
    yield f"| {' | '.join(rules)} |"
    columns = [[_plain(cell) for cell in column.cells] for column in table.columns]
    for cells in zip(*columns, strict=True):
        yield _row(cells)
    yield ""
    if table.caption:
        yield escaped(_plain(table.caption))
        yield ""


def _row(cells: Iterator[str] | Sequence[str]) -> str:
    return f"| {' | '.join(escaped(cell) for cell in cells)} |"


def _plain(content: Any) -> str:
    """Text on one line, without what colours it in a terminal."""
    if not isinstance(content, str | Text):
        raise TypeError(f"{type(content).__name__} is no text")
    text = content.plain if isinstance(content, Text) else content
    text = MARKUP.sub("", text).replace("\\[", "[")
    return " ".join(text.split())


def escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return SPECIAL.sub(r"\\\1", text).replace("\\<", "&lt;").replace("\\&", "&amp;")


def _origin(content: Result) -> Iterator[str]:
    """Where figures come from: command, time, code and machine."""
    origin = content.get("provenance") or content.get("source")
    if not origin:
        return
    words = [str(origin.get("time_utc", "")), shlex.join(origin.get("command", ()))]
    versions = origin.get("versions", {})
    words.append(", ".join(f"{name} {versions[name]}" for name in versions))
    if git := origin.get("git"):
        words.append(f"commit {git['commit']}" + (" (dirty)" * git["is_dirty"]))
    if "hardware" in origin:
        words.append(describe_hardware(origin["hardware"]))
    yield f"*{escaped(_plain('; '.join(filter(None, words))))}*"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise _refusal(path, "is not a text") from None
    except (ValueError, RecursionError):
        raise _refusal(path, _why_not_json(path)) from None


def _refusal(path: Path, problem: str) -> ConfigError:
    return ConfigError(f"result: {path} {problem}; must be what {COMMANDS} wrote")


def _damaged(path: Path, error: Exception) -> DamagedError:
    if isinstance(error, ValidationError):
        what = first_problem(error)
    else:
        words = str(error).partition("\n")[0] or type(error).__name__
        what = f"there is no {words}" if isinstance(error, KeyError) else words
    return DamagedError(
        f"result: {path} is damaged or of another version ({what}); must be what "
        f"{COMMANDS} of this version wrote"
    )


def _why_not_json(path: Path) -> str:
    if path.suffix in JOURNAL_SUFFIXES:
        return "is a journal, from which the same command makes the result (.json)"
    return "is not JSON"


def kind_of(content: object, kinds: Mapping[str, Kind]) -> str | None:
    """Which command wrote something, by its keys; None for none of these."""
    if not isinstance(content, dict):
        return None
    fitting = [name for name, kind in kinds.items() if kind.keys <= content.keys()]
    return max(fitting, key=lambda name: len(kinds[name].keys), default=None)


def short_names(paths: Sequence[Path]) -> list[str]:
    """As few of the last parts of each path as tell it from the others."""
    absolute = [path.absolute() for path in paths]
    return [_short_name(path, absolute) for path in absolute]


def _short_name(path: Path, all_paths: Sequence[Path]) -> str:
    for number in range(1, len(path.parts)):
        tail = path.parts[-number:]
        if sum(other.parts[-number:] == tail for other in all_paths) == 1:
            return "/".join(tail)
    return str(path)
