"""What random requests found, for a page."""

from collections.abc import Mapping
from typing import Any

from vllm_mtp.tools.report_page import Body, Cell, PageTable, Remark

Result = Mapping[str, Any]


def render_requests(result: Result) -> Body:
    """Random requests to engines, by what disturbs them."""
    # Brings the code that starts engines, for this kind alone.
    from vllm_mtp.tools.fuzz_run import verdict

    engines = result["engines"]
    counts = list(dict.fromkeys(name for each in engines.values() for name in each))
    rows = tuple(
        (Cell(engine), *(Cell(str(each.get(name, 0))) for name in counts))
        for engine, each in engines.items()
    )
    headers = (
        "engine",
        *(name.replace("num_", "").replace("_", " ") for name in counts),
    )
    return Body(
        verdict(result),
        "bad" if result["num_failures"] else "good",
        tables=[
            PageTable("Engines", headers, rows, frozenset(range(1, len(headers)))),
            counted("Requests that cross each kind", "kind", result["kinds"]),
            counted("Played and not compared", "reason", result["excluded"]),
        ],
        remarks=[Remark(each["command"]) for each in result["failures"]],
    )


def counted(caption: str, what: str, counts: Mapping[str, int]) -> PageTable:
    rows = tuple((Cell(name), Cell(str(count))) for name, count in counts.items())
    return PageTable(caption, (what, "number"), rows, frozenset({1}))
