"""What benchmarks measured, for a page: one small renderer for each kind.

The tables are those that the commands print, the pictures those that they draw; where
one draws none, every repeat is shown.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console

from benchmarks.control import held_out, trace_report
from benchmarks.crossing import print_crossing
from benchmarks.drafting import BASELINE, print_drafting
from benchmarks.grid import plots as grid_plots
from benchmarks.grid.options import PLUS
from benchmarks.grid.report import print_report as print_grid
from benchmarks.host import print_host
from benchmarks.off import print_off
from benchmarks.rollback.report import draw_rollback
from benchmarks.rollback.report import print_report as print_rollback
from benchmarks.steps import draw_steps, print_steps
from vllm_mtp.config import AUTO, METHOD
from vllm_mtp.tools import report_kinds
from vllm_mtp.tools.demo_plan import NO_SPECULATION
from vllm_mtp.tools.report_kinds import Kind, alone
from vllm_mtp.tools.report_page import Body, Picture, Tone
from vllm_mtp.tools.report_plots import draw_spreads
from vllm_mtp.tools.report_tables import printed

Result = Mapping[str, Any]
Show = Callable[[Result, Console], None]

OF_NONE = "decode speed, of no speculation (small: each repeat; bar: quartiles)"


def _body(
    result: Result, show: Show, summary: str, tone: Tone, *pictures: Picture
) -> Body:
    found = printed(lambda console: show(result, console))
    return Body(summary, tone, pictures, found.tables, found.remarks)


def _judged(targets: Sequence[Result], key: str) -> tuple[str, Tone]:
    """How many targets are reached, those that apply."""
    verdicts = [each[key] for each in targets if each[key] is not None]
    if not verdicts:
        return "No target applies here.", ""
    words = f"{sum(verdicts)} of {len(verdicts)} targets reached."
    return words, "good" if all(verdicts) else "bad"


def _texts(result: Result) -> tuple[str, Tone]:
    """What is expected is no news; of sampled texts nothing is expected."""
    if result["identical_texts"] is None:
        return "", ""
    if result["identical_texts"]:
        return " All wrote the same texts.", ""
    return " Their greedy texts DIFFER.", "bad"


def render_grid(result: Result) -> Body:
    """Every K of vLLM's `mtp` and `mtp_plus`, cell by cell."""
    if not result["cells"]:
        return _body(result, print_grid, "No cell is finished yet.", "")
    overall = result["overall"]
    targets, tone = _judged(result["targets"], "is_reached")
    summary = (
        f"{PLUS} runs {overall['geometric_means'][PLUS]:.2f} times as fast as no "
        f"speculation (geometric mean of {len(result['cells'])} cells) and "
        f"{overall['plus_over_best_single_static']:.2f} times as fast as the best "
        f"single K ({overall['best_single_static']}). {targets}"
    )
    return _body(
        result,
        print_grid,
        summary,
        tone,
        Picture(
            "Decode speed over no speculation in every cell.",
            lambda: grid_plots.draw_ratios(result),
        ),
        Picture(
            "Accepted draft tokens by position.",
            lambda: grid_plots.draw_acceptance(result),
        ),
        Picture(
            "Where the milliseconds of a decode step go.",
            lambda: grid_plots.draw_split(result),
        ),
    )


def render_rollback(result: Result) -> Body:
    """Rollback kernels against what they replace."""
    targets, tone = _judged(result["targets"], "passed")
    ratios = [
        each["as_called_over_chain"]["median"]
        for each in result["metadata"]
        if each["as_called_over_chain"]
    ]
    times = (
        f" Metadata takes {min(ratios):.2f} to {max(ratios):.2f} of the time of "
        "vLLM's chain."
        if ratios
        else ""
    )
    shown = "Metadata: time of a step. Payload: share of the copy bandwidth."
    picture = Picture(shown, lambda: draw_rollback(result))
    return _body(result, print_rollback, targets + times, tone, picture)


def render_steps(result: Result) -> Body:
    """Step time of whole servers."""
    texts, tone = _texts(result)
    ratios = ", ".join(
        f"{each['ratio']['median']:.3f} ({name})"
        for name, each in result["contenders"].items()
        if name != result["baseline"]
    )
    summary = f"Of the step time of {result['baseline']}: {ratios}.{texts}"
    picture = Picture(
        "Step time of every repeat, as a ratio to the first contender's.",
        lambda: draw_steps(result),
    )
    return _body(result, print_steps, summary, tone, picture)


def render_crossing(result: Result) -> Body:
    """A batch that crosses the threshold of vLLM's table."""
    spreads = {name: each["over_none"] for name, each in result["contenders"].items()}
    others = {name: each for name, each in spreads.items() if name != NO_SPECULATION}
    ratios = (f"{each['median']:.2f} ({name})" for name, each in others.items())
    texts, tone = _texts(result)
    summary = f"Of the speed without speculation: {', '.join(ratios)}.{texts}"
    picture = Picture(
        "Decode speed of every repeat, of no speculation.",
        lambda: draw_spreads(others, OF_NONE, 1.0),
    )
    return _body(result, print_crossing, summary, tone, picture)


def render_off(result: Result) -> Body:
    """What `mtp_plus` costs while it does not draft."""
    spreads = {}
    for concurrency, cell in result["cells"].items():
        spreads[f"{METHOD}, {concurrency} at a time"] = cell["over_none"]
        spreads[f"none again, {concurrency} at a time"] = cell["none_again"]
    kept = ", ".join(
        f"{cell['over_none']['median']:.3f} ({concurrency} at a time)"
        for concurrency, cell in result["cells"].items()
    )
    texts, tone = _texts(result)
    summary = f"With K pinned to 0, of the speed without speculation: {kept}.{texts}"
    picture = Picture(
        "Decode speed of every repeat. None again: a second engine without "
        "speculation; how far it is from 1 is what this machine can tell.",
        lambda: draw_spreads(spreads, OF_NONE, 1.0),
    )
    return _body(result, print_off, summary, tone, picture)


def render_host(result: Result) -> Body:
    """What scheduling takes the thread that feeds the device."""
    spreads = {
        f"{name}, {concurrency} at a time": cell[name]["over_mtp_us"]
        for concurrency, cell in result["cells"].items()
        for name in (NO_SPECULATION, METHOD)
    }
    beyond = ", ".join(
        f"{cell[METHOD]['over_mtp_us']['median']:+.0f} us ({concurrency} at a time)"
        for concurrency, cell in result["cells"].items()
    )
    summary = f"CPU time of scheduling in a step, beyond that of vLLM's mtp: {beyond}."
    picture = Picture(
        "Every repeat.",
        lambda: draw_spreads(spreads, "microseconds beyond vLLM's mtp", 0.0),
    )
    return _body(result, print_host, summary, "", picture)


def render_drafting(result: Result) -> Body:
    """What a draft vocabulary and drawn drafts gain."""
    gains = ", ".join(
        f"{cell[METHOD]['over_mtp']['median']:.2f} ({concurrency} at a time)"
        for concurrency, cell in result["cells"].items()
    )
    texts, tone = _texts(result)
    summary = f"{METHOD}, of the speed of vLLM's {BASELINE}: {gains}.{texts}"
    pictures = (
        Picture(
            f"Decode speed of every repeat, of vLLM's {BASELINE}, {concurrency} at a "
            "time.",
            _drawing(cell),
        )
        for concurrency, cell in result["cells"].items()
    )
    return _body(result, print_drafting, summary, tone, *pictures)


def _drawing(cell: Result) -> Callable[[], Any]:
    spreads = {name: each["over_mtp"] for name, each in cell.items()}
    label = f"decode speed, of {BASELINE} (small: each repeat; bar: quartiles)"
    return lambda: draw_spreads(spreads, label, 1.0)


def render_replay(result: Result) -> Body:
    """The controller in synthetic and recorded worlds."""
    targets, tone = _judged(result["targets"], "passed")
    worst = "; ".join(_worst(result["targets"]))
    num_worlds = len({run["world"] for run in result["runs"]})
    summary = f"{num_worlds} worlds. {targets}" + (f" Worst: {worst}." if worst else "")
    return _body(
        result,
        trace_report.print_report,
        summary,
        tone,
        Picture(
            "Regret against the oracle; lines: range over seeds.",
            lambda: trace_report.draw_regret(result),
        ),
        Picture(
            "Draft depth at every step of worlds that change.",
            lambda: trace_report.draw_depths(result),
        ),
        Picture(
            "Time of a target pass on the modelled machines.",
            lambda: trace_report.draw_costs(result),
        ),
    )


def _worst(targets: Sequence[Result]) -> Iterator[str]:
    for each in targets:
        yield f"{each['name']} {each['value']:.1%} (limit {each['limit']:.0%})"


def render_vocab_compare(result: Result) -> Body:
    """Draft vocabularies: learnt, listed and whole."""
    # Brings torch and transformers: seconds, for this kind alone.
    from benchmarks.vocabulary import draw_vocabulary, print_vocabulary

    after = result["in_domain"]
    last = result["other_domain"]["last"]
    summary = (
        f"With {result['num_rows']} learnt rows ({AUTO}) the acceptance length is "
        f"{after['auto_over_full']:.3f} of the whole vocabulary's on text like that "
        f"learnt from, and {last['auto_over_full']:.3f} after a change of traffic."
    )
    shown = "Acceptance length, round by round."
    picture = Picture(shown, lambda: draw_vocabulary(result))
    return _body(result, print_vocabulary, summary, "", picture)


def render_held_out(result: Result) -> Body:
    """Controllers in worlds drawn at random."""
    names = [*result["summaries"]]
    name, found = names[0], result["summaries"][names[0]]
    speed, regret = found["over_no_drafts_p5"]["value"], found["regret"]["value"]
    summary = (
        f"{result['options']['worlds']} worlds: in 19 of 20 {name} runs at least "
        f"{speed:.3f} times as fast as K = 0; mean regret {100 * regret:.1f} %."
    )
    tone: Tone = "good" if speed >= result["options"]["promise"] else "bad"
    return _body(result, held_out.print_summary, summary, tone)


KINDS: Mapping[str, Kind] = {
    **report_kinds.KINDS,
    "grid": Kind(
        "Every draft length against mtp_plus",
        "python -m benchmarks grid",
        "No speculation, vLLM's mtp at every fixed K, and mtp_plus, over workloads, "
        "batches, temperatures and contexts.",
        alone(render_grid),
    ),
    "rollback": Kind(
        "Rollback kernels",
        "python -m benchmarks rollback",
        "What undoing rejected draft tokens costs, beside vLLM's chain and the copy "
        "bandwidth.",
        alone(render_rollback),
    ),
    "steps": Kind(
        "Step time",
        "python -m benchmarks steps",
        "Engine step time of whole servers that take the same steps.",
        alone(render_steps),
    ),
    "crossing": Kind(
        "Crossing a threshold",
        "python -m benchmarks crossing",
        "Requests that begin together and end one by one, so that the batch keeps "
        "crossing the threshold of vLLM's batch-size table.",
        alone(render_crossing),
    ),
    "drafting": Kind(
        "Drafting",
        "python -m benchmarks drafting",
        "What a smaller draft head and drawn drafts gain at one K.",
        alone(render_drafting),
    ),
    "off": Kind(
        "Off",
        "python -m benchmarks off",
        "What mtp_plus costs while it does not draft: K pinned to 0 by every request, "
        "beside two engines without speculation.",
        alone(render_off),
    ),
    "host": Kind(
        "Host time",
        "python -m benchmarks host",
        "What scheduling takes the thread that feeds the device, without speculation, "
        "with vLLM's mtp and with mtp_plus.",
        alone(render_host),
    ),
    "held-out": Kind(
        "Held-out worlds",
        "python -m benchmarks trace held-out",
        "Controllers in machines and loads drawn at random that nothing was tuned by.",
        alone(render_held_out),
    ),
    "replay": Kind(
        "Controller",
        "python -m benchmarks trace replay",
        "The controller without a model, beside the oracle and every fixed K.",
        alone(render_replay),
    ),
    "vocab compare": Kind(
        "Draft vocabularies",
        "python -m benchmarks vocabulary",
        "A vocabulary that the server learns, beside a list and all tokens.",
        alone(render_vocab_compare),
    ),
}
"""Of users' commands, and of benchmarks."""
