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
            _counted("Requests that cross each kind", "kind", result["kinds"]),
            _counted("Played and not compared", "reason", result["excluded"]),
        ],
        remarks=[Remark(each["command"]) for each in result["failures"]],
    )


def render_http_requests(result: Result) -> Body:
    """Random requests to two servers."""
    from vllm_mtp.tools.http_fuzz import verdict

    return Body(
        verdict(result),
        "good" if result["is_exact"] else "bad",
        tables=[
            _counted("Answers", "status", result["statuses"]),
            _counted("Requests that cross each kind", "kind", result["kinds"]),
            _counted("Draft tokens", "of the server", result["verified"]),
        ],
        remarks=[Remark(str(each)) for each in result["findings"]],
    )


def render_soak(result: Result) -> Body:
    """A server that was kept busy."""
    from vllm_mtp.tools.soak import verdict

    statuses = result["requests"]["statuses"]
    requests = {k: v for k, v in result["requests"].items() if k != "statuses"}
    return Body(
        verdict(result),
        "good" if result["is_sound"] else "bad",
        tables=[
            _counted("Requests", "of the clients", requests),
            _counted("Answers", "status", statuses),
            _counted("Counters at the end", "of the server", result["counters"]),
        ],
        remarks=[Remark(each) for each in result["failed"]],
    )


def _counted(caption: str, what: str, counts: Mapping[str, int]) -> PageTable:
    rows = tuple((Cell(name), Cell(str(count))) for name, count in counts.items())
    return PageTable(caption, (what, "number"), rows, frozenset({1}))
