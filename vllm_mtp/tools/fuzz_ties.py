"""Which differences are ties, that rounding may decide either way.

A token that differs is a tie only if the reference says it, too, as soon as that
token's logit is raised by `LOGPROB_TOLERANCE`. So the evidence is the reference alone,
for greedy requests and for sampled ones, whose random numbers stay the same.
"""

from collections.abc import Mapping
from typing import Any

from vllm_mtp.tools.fuzz import Failure, Findings, Prepared
from vllm_mtp.tools.fuzz_compare import LOGPROB_TOLERANCE, Difference
from vllm_mtp.tools.fuzz_reference import Reference
from vllm_mtp.tools.fuzz_requests import Request


def sort_out_ties(ready: Prepared, findings: Findings) -> None:
    """Move failures that are ties, by the reference's word, to the ties."""
    failures = []
    for failure in findings.failures:
        if failure.name and is_tie(ready.reference_of(failure.axis), failure):
            findings.ties.append(failure)
        else:
            failures.append(failure)
    findings.failures = failures


def is_tie(reference: Reference, failure: Failure) -> bool:
    """Whether the reference says the found token when its logit is a little higher."""
    difference = failure.difference
    if difference.position is None:
        return False
    (request,) = (r for r in failure.play if r["name"] == failure.name)
    answer = reference.answers[failure.name]
    right = answer["outputs"][difference.output]
    asked = _with_bias(request, right, difference)
    found = reference.ask_anew(asked)
    if found is None or found["refused"]:
        return False
    tokens = found["outputs"][0]["token_ids"][: difference.position + 1]
    wanted = [*right["token_ids"][: difference.position], difference.found]
    return bool(tokens == wanted)


def _with_bias(
    request: Request, right: Mapping[str, Any], difference: Difference
) -> Request:
    """The request, alone, with the found token's logit raised where it was said."""
    position = difference.position or 0
    ends = [end[2] for end in right["ends"]]
    number = sum(position >= end for end in ends[: len(request["chunks"]) - 1])
    chunks = [dict(chunk) for chunk in request["chunks"]]
    sampling = dict(chunks[number]["sampling"])
    biases = dict(sampling.get("logit_bias") or {})
    token = str(difference.found)
    biases[token] = biases.get(token, 0.0) + LOGPROB_TOLERANCE
    sampling["logit_bias"] = biases
    if sampling.get("n", 1) > 1:
        # As vLLM seeds the outputs of a request.
        sampling |= {"n": 1, "seed": sampling["seed"] + difference.output}
    chunks[number]["sampling"] = sampling
    return request | {"name": f"{request['name']}-biased", "chunks": chunks}
