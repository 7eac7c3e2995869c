"""A comparison as a table, as Markdown for a pull request and as JUnit XML for CI."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from vllm_mtp.tools.compare import LENGTH, CompareOptions, Comparison, Figure, compare
from vllm_mtp.tools.eval_file import EvalFile, read_eval_file
from vllm_mtp.tools.provenance import collect_provenance, replacing, write_json

COLUMNS = ("figure", "base", "new", "difference", "interval", "verdict")


def run_compare(
    paths: Sequence[Path],
    options: CompareOptions,
    outputs: dict[str, Path | None],
    console: Console,
) -> Comparison:
    """Read, compare, print and write.

    Args:
        paths: Base and new evaluation.
        options: What counts as worse.
        outputs: Files for ``markdown``, ``junit`` and ``json``; None for none.
        console: Where to print.

    Raises:
        ConfigError: A file cannot be used, or they are not of the same thing.
    """
    base, new = map(read_eval_file, paths)
    comparison = compare(base, new, options)
    print_comparison(comparison, console)
    for kind, path in outputs.items():
        if path is None:
            continue
        if kind == "json":
            write_json(path, comparison.as_json() | _origin(paths, base))
        else:
            text = {"markdown": markdown, "junit": junit}[kind](comparison)
            with replacing(path) as pending:
                pending.write_text(text, encoding="utf-8")
    return comparison


def print_comparison(comparison: Comparison, console: Console) -> None:
    """A table of all figures and a sentence."""
    console.print(_table(comparison))
    console.print(verdict(comparison), highlight=False)


def _origin(paths: Sequence[Path], base: EvalFile) -> dict[str, Any]:
    """What was compared, where and when."""
    return {
        "model": base.model,
        "files": [path.name for path in paths],
        "provenance": collect_provenance(sys.argv),
    }


def verdict(comparison: Comparison) -> str:
    """In a sentence."""
    failed = [each.name for each in comparison.figures if each.is_failure]
    if failed:
        return f"Worse: {', '.join(failed)}."
    return f"Not worse, on {comparison.num_prompts} prompts."


def _cells(figure: Figure) -> tuple[str, ...]:
    percent = figure.name != LENGTH
    scale, unit = (100.0, " %") if percent else (1.0, "")
    digits = 1 if percent else 3

    def number(value: float, sign: str = "") -> str:
        return f"{scale * value:{sign}.{digits}f}"

    low, high = figure.interval
    return (
        figure.name,
        number(figure.base) + unit,
        number(figure.new) + unit,
        number(figure.new - figure.base, "+"),
        f"{number(low, '+')} .. {number(high, '+')}",
        _judgement(figure),
    )


def _judgement(figure: Figure) -> str:
    if figure.is_below_floor:
        return f"below {figure.floor / figure.base:.0%} of the base"
    return "worse" if figure.is_worse else "ok"


def _table(comparison: Comparison) -> Table:
    table = Table(title="Acceptance, new against base")
    for column in COLUMNS:
        numeric = column in ("base", "new", "difference")
        table.add_column(column, justify="right" if numeric else "left")
    for figure in comparison.figures:
        table.add_row(*_cells(figure), style="red" if figure.is_failure else None)
    return table


def markdown(comparison: Comparison) -> str:
    """For a comment."""
    return "\n".join(_markdown_lines(comparison)) + "\n"


def _markdown_lines(comparison: Comparison) -> Iterator[str]:
    mark = "❌" if comparison.is_failure else "✅"
    yield f"### {mark} Acceptance of drafts: {verdict(comparison)}"
    yield ""
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "| --- | ---: | ---: | ---: | --- | --- |"
    for figure in comparison.figures:
        yield "| " + " | ".join(_cells(figure)) + " |"
    yield ""
    rate = comparison.options.false_alarm_rate
    yield (
        f"{comparison.num_prompts} prompts, paired; all intervals together miss the "
        f"truth on the bad side at most {rate:.1%} of the time."
    )


def junit(comparison: Comparison) -> str:
    """For a CI server: a test case for each figure."""
    failures = sum(each.is_failure for each in comparison.figures)
    suite = ElementTree.Element(
        "testsuite",
        name="vllm-mtp compare",
        tests=str(len(comparison.figures)),
        failures=str(failures),
    )
    for figure in comparison.figures:
        case = ElementTree.SubElement(
            suite, "testcase", classname="acceptance", name=figure.name
        )
        if figure.is_failure:
            cells = dict(zip(COLUMNS, _cells(figure), strict=True))
            message = (
                f"{cells['new']} against {cells['base']} "
                f"({cells['interval']}): {cells['verdict']}"
            )
            ElementTree.SubElement(case, "failure", message=message)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
