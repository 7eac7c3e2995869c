"""Every kind of result of a user's command: what it is about, and who renders it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_mtp.tools.report_checks import (
    render_compare,
    render_doctor,
    render_plan,
    render_verify,
    render_vocab_build,
)
from vllm_mtp.tools.report_eval import render_eval
from vllm_mtp.tools.report_fuzz import (
    render_requests,
)
from vllm_mtp.tools.report_page import Body
from vllm_mtp.tools.report_source import EVAL, Source

Renderer = Callable[[Sequence[Source]], Body]


class Kind(NamedTuple):
    """Of result."""

    title: str
    command: str
    meaning: str
    render: Renderer


def alone(render: Callable[[Mapping[str, Any]], Body]) -> Renderer:
    """For a kind of which every file has a section of its own."""

    def render_one(sources: Sequence[Source]) -> Body:
        (source,) = sources
        return render(source.content)

    return render_one


KINDS: Mapping[str, Kind] = {
    EVAL: Kind(
        "Acceptance",
        "vllm-mtp eval",
        "How many draft tokens the target accepts, prompt by prompt.",
        render_eval,
    ),
    "compare": Kind(
        "Acceptance compared",
        "vllm-mtp compare",
        "Whether acceptance has become worse, on the same prompts.",
        alone(render_compare),
    ),
    "plan": Kind(
        "Plan",
        "vllm-mtp plan",
        "Arithmetic, not a measurement: which draft length pays, up to which batch.",
        alone(render_plan),
    ),
    "doctor": Kind(
        "Doctor",
        "vllm-mtp doctor",
        "What stands in the way of serving a model with its MTP layers.",
        alone(render_doctor),
    ),
    "verify": Kind(
        "Exactness",
        "vllm-mtp verify",
        "Whether a server with speculation answers as it would without.",
        alone(render_verify),
    ),
    "verify requests": Kind(
        "Random requests",
        "vllm-mtp verify --requests",
        "Whether engines with speculation that are disturbed in many ways answer "
        "random requests as an engine without it does.",
        alone(render_requests),
    ),
    "vocab build": Kind(
        "Draft vocabulary",
        "vllm-mtp vocab build",
        "Tokens that the MTP layers may propose; verification uses all of them.",
        alone(render_vocab_build),
    ),
}
"""By the names of `report_source.KEYS`; what benchmarks write is rendered by them."""
