"""Every kind of result: what it is about, and who renders it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_mtp.lab.report_benches import (
    render_crossing,
    render_drafting,
    render_grid,
    render_host,
    render_off,
    render_replay,
    render_rollback,
    render_steps,
    render_vocab_build,
    render_vocab_compare,
)
from vllm_mtp.lab.report_checks import (
    render_compare,
    render_demo,
    render_doctor,
    render_plan,
    render_verify,
)
from vllm_mtp.lab.report_eval import render_eval
from vllm_mtp.lab.report_fuzz import render_http_requests, render_requests, render_soak
from vllm_mtp.lab.report_page import Body
from vllm_mtp.lab.report_source import EVAL, Source

Renderer = Callable[[Sequence[Source]], Body]


class Kind(NamedTuple):
    """Of result."""

    title: str
    command: str
    meaning: str
    render: Renderer


def _alone(render: Callable[[Mapping[str, Any]], Body]) -> Renderer:
    """For a kind of which every file has a section of its own."""

    def render_one(sources: Sequence[Source]) -> Body:
        (source,) = sources
        return render(source.content)

    return render_one


KINDS = {
    EVAL: Kind(
        "Acceptance",
        "eval",
        "How many draft tokens the target accepts, prompt by prompt.",
        render_eval,
    ),
    "compare": Kind(
        "Acceptance compared",
        "compare",
        "Whether acceptance has become worse, on the same prompts.",
        _alone(render_compare),
    ),
    "plan": Kind(
        "Plan",
        "plan",
        "Arithmetic, not a measurement: which draft length pays, up to which batch.",
        _alone(render_plan),
    ),
    "doctor": Kind(
        "Doctor",
        "doctor",
        "What stands in the way of serving a model with its MTP layers.",
        _alone(render_doctor),
    ),
    "verify": Kind(
        "Exactness",
        "verify",
        "Whether a server with speculation answers as it would without.",
        _alone(render_verify),
    ),
    "verify requests": Kind(
        "Random requests",
        "verify --requests",
        "Whether engines with speculation that are disturbed in many ways answer "
        "random requests as an engine without it does.",
        _alone(render_requests),
    ),
    "verify HTTP": Kind(
        "Random requests over HTTP",
        "verify --http-requests",
        "Whether a server with speculation answers random requests as one without "
        "does.",
        _alone(render_http_requests),
    ),
    "soak": Kind(
        "Soak",
        "soak",
        "What a server holds after a while of every kind of request.",
        _alone(render_soak),
    ),
    "demo": Kind(
        "Side by side",
        "demo",
        "Real servers on the same prompts, taking turns.",
        _alone(render_demo),
    ),
    "grid": Kind(
        "Every draft length against mtp_plus",
        "bench grid",
        "No speculation, vLLM's mtp at every fixed K, and mtp_plus, over workloads, "
        "batches, temperatures and contexts.",
        _alone(render_grid),
    ),
    "rollback": Kind(
        "Rollback kernels",
        "bench rollback",
        "What undoing rejected draft tokens costs, beside vLLM's chain and the copy "
        "bandwidth.",
        _alone(render_rollback),
    ),
    "steps": Kind(
        "Step time",
        "bench steps",
        "Engine step time of whole servers that take the same steps.",
        _alone(render_steps),
    ),
    "crossing": Kind(
        "Crossing a threshold",
        "bench crossing",
        "Requests that begin together and end one by one, so that the batch keeps "
        "crossing the threshold of vLLM's batch-size table.",
        _alone(render_crossing),
    ),
    "drafting": Kind(
        "Drafting",
        "bench drafting",
        "What a smaller draft head and drawn drafts gain at one K.",
        _alone(render_drafting),
    ),
    "off": Kind(
        "Off",
        "bench off",
        "What mtp_plus costs while it does not draft: K pinned to 0 by every request, "
        "beside two engines without speculation.",
        _alone(render_off),
    ),
    "host": Kind(
        "Host time",
        "bench host",
        "What scheduling takes the thread that feeds the device, without speculation, "
        "with vLLM's mtp and with mtp_plus.",
        _alone(render_host),
    ),
    "replay": Kind(
        "Controller",
        "trace replay",
        "The controller without a model, beside the oracle and every fixed K.",
        _alone(render_replay),
    ),
    "vocab build": Kind(
        "Draft vocabulary",
        "vocab build",
        "Tokens that the MTP layers may propose; verification uses all of them.",
        _alone(render_vocab_build),
    ),
    "vocab compare": Kind(
        "Draft vocabularies",
        "vocab compare",
        "A vocabulary that the server learns, beside a list and all tokens.",
        _alone(render_vocab_compare),
    ),
}
"""By the names of `report_source.KEYS`."""
