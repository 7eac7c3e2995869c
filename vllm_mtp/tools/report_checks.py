"""What checks and forecasts found, for a page: one small renderer for each kind."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from vllm_mtp.drafting.vocabulary_list import VocabularyList
from vllm_mtp.tools.compare import CompareOptions, Comparison, Figure
from vllm_mtp.tools.compare_report import print_comparison, verdict
from vllm_mtp.tools.plan import Plan, PlanOptions, Row
from vllm_mtp.tools.plan_report import draw_plan
from vllm_mtp.tools.report_page import Body, Cell, PageTable, Picture, Remark, Tone
from vllm_mtp.tools.report_plots import draw_coverage, draw_probe
from vllm_mtp.tools.report_tables import printed

Result = Mapping[str, Any]

LEVELS: dict[str, Tone] = {"ok": "good", "note": "", "problem": "bad"}


def render_compare(result: Result) -> Body:
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
    comparison = Comparison(figures, result["num_prompts"], options)
    names = " and ".join(result.get("files", ()))
    of_model = f"{result['model']}: " if "model" in result else ""
    tables = printed(lambda console: print_comparison(comparison, console)).tables
    return Body(
        of_model + verdict(comparison),
        "bad" if comparison.is_failure else "good",
        tables=tables,
        remarks=[Remark(f"Compared: {names}.")] if names else (),
    )


def render_plan(result: Result) -> Body:
    """The arithmetic of speculation: speedup over draft length and batch."""
    options = TypeAdapter(PlanOptions).validate_python(result["options"])
    rows = [Row(**row) for row in result["rows"]]
    best = {int(batch): Row(**row) for batch, row in result["best"].items()}
    plan = Plan(rows, best, result["stops_paying_at"])
    return Body(
        _plan_summary(plan, options),
        pictures=[
            Picture(
                "Speedup over no speculation, by draft length.",
                lambda: draw_plan(plan, options),
            )
        ],
        tables=[_plan_table(plan, options)],
        remarks=[Remark(str(result["assumptions"]))],
    )


def _plan_summary(plan: Plan, options: PlanOptions) -> str:
    parts = []
    for batch, row in plan.best.items():
        where = "" if options.is_measured else f" at batch {batch}"
        gain = f"best K {row.draft_length}, {row.speedup:.2f}x"
        parts.append((gain if row.draft_length else "no draft length pays") + where)
    on = (
        "By measured times"
        if options.is_measured
        else f"On {options.num_gpus} x {options.hardware.name}, {options.model.name}"
    )
    until = ""
    if plan.stops_paying_at is not None:
        until = f" From batch {plan.stops_paying_at} on, speculation does not pay."
    return f"{on}: {'; '.join(parts)}.{until}"


def _plan_table(plan: Plan, options: PlanOptions) -> PageTable:
    headers = ["K", "acceptance length"]
    for batch in plan.best:
        headers.append("speedup" if options.is_measured else f"batch {batch}")
    by_length: dict[int, dict[int, Row]] = {}
    for row in plan.rows:
        by_length.setdefault(row.draft_length, {})[row.batch] = row
    rows = [
        (
            Cell(str(length)),
            Cell(f"{next(iter(found.values())).acceptance_length:.2f}"),
            *(
                Cell(
                    f"{found[batch].speedup:.2f}",
                    "good" if best.draft_length == length else "",
                )
                for batch, best in plan.best.items()
            ),
        )
        for length, found in by_length.items()
    ]
    numeric = frozenset(range(len(headers)))
    note = "Marked: the best K of each batch."
    caption = "Speedup over no speculation, drafting included"
    return PageTable(caption, tuple(headers), tuple(rows), numeric, note)


def render_doctor(result: Result) -> Body:
    """Findings, and what a probe measured."""
    findings = result["findings"]
    problems = [str(each["text"]) for each in findings if each["level"] == "problem"]
    probe = result["probe"]
    tables = [
        PageTable(
            "What was looked at",
            ("topic", "finding", "level"),
            tuple(
                (
                    Cell(str(each["topic"])),
                    Cell(str(each["text"])),
                    Cell(each["level"], LEVELS[each["level"]]),
                )
                for each in findings
            ),
        )
    ]
    if not problems:
        summary = "Nothing stands in the way of mtp_plus."
    else:
        summary = f"{len(problems)} problem(s): {'; '.join(problems)}."
    if probe:
        summary += (
            f" Predicted on this machine: K = {probe['best_draft_length']}, "
            f"{probe['predicted_speedup']:.2f} times as fast as without."
        )
        tables.append(_probe_table(probe))
    shown = "Predicted speedup, and acceptance length, by draft length."
    return Body(
        summary,
        "bad" if problems else "good",
        [Picture(shown, lambda: draw_probe(probe))] if probe else (),
        tables,
    )


def _probe_table(probe: Result) -> PageTable:
    headers = ("K", "acceptance length", "step ms", "drafting ms", "predicted speedup")
    rows = [
        (
            Cell(str(each["draft_length"])),
            Cell(f"{each['acceptance_length']:.2f}"),
            Cell(f"{1e3 * each['step_seconds']:.2f}"),
            Cell(f"{1e3 * each['draft_seconds']:.2f}"),
            Cell(
                f"{each['predicted_speedup']:.2f}",
                "good" if each["draft_length"] == probe["best_draft_length"] else "",
            ),
        )
        for each in probe["lengths"]
    ]
    note = f"Predicted: {probe['formula']}."
    caption = "What a few prompts showed"
    return PageTable(caption, headers, tuple(rows), frozenset(range(5)), note)


def render_verify(result: Result) -> Body:
    """Whether the output is the target's."""
    # Brings scipy and the client of the servers: seconds, for this kind alone.
    from vllm_mtp.tools.verify import print_report
    from vllm_mtp.tools.verify import verdict as verdict_of_verify
    from vllm_mtp.tools.verify_options import VerifyOptions

    options = VerifyOptions(
        result["options"]["model"], dtype=result["options"]["dtype"]
    )
    found = printed(lambda console: print_report(result, options, console))
    return Body(
        verdict_of_verify(result),
        "good" if result["is_exact"] else "bad",
        tables=found.tables,
        remarks=found.remarks[:-1],  # the last one is the summary
    )


def render_vocab_build(result: Result) -> Body:
    """A list of tokens for the draft head."""
    listed = VocabularyList.model_validate(result)
    coverage = listed.coverage()
    num_rows = len(listed.token_ids)
    sizes = sorted({num_rows, *(2**n for n in range(7, 24) if 2**n < num_rows)})
    rows = tuple(
        (Cell(f"{rows:,}"), Cell(f"{coverage[rows - 1]:.2%}")) for rows in sizes
    )
    return Body(
        f"{num_rows:,} of {listed.vocab_size:,} tokens cover {coverage[-1]:.2%} of "
        f"the {listed.num_counted:,} that were counted.",
        "",
        [
            Picture(
                "Share of the counted tokens that the first rows cover.",
                lambda: draw_coverage(coverage),
            )
        ],
        [PageTable("Coverage", ("rows", "coverage"), rows, frozenset({0, 1}))],
    )
