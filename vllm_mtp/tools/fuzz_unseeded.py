"""Sampled requests without a seed: companions that say something else every time. Pure.

Whoever has one in its batch takes other paths. What it says itself is held against its
own parameters.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

from vllm_mtp.tools.fuzz_compare import Answer, Difference, compare_logprobs

Request = dict[str, Any]

REASON = "a sampled request without a seed says something else every time"
CHANCE = 0.08

_LEAVES_EARLY = ("repetition_detection", "structured_outputs", "thinking_token_budget")
"""Fields that end or steer an answer in ways that are not held against it here."""


def is_unseeded(request: Mapping[str, Any]) -> bool:
    """Whether a chunk of it is sampled without a seed."""
    options = [chunk["sampling"] for chunk in request["chunks"]]
    return any(
        (o.get("temperature") or 0) > 0 and o.get("seed") is None for o in options
    )


def drop_seed(request: Request, rng: Random) -> Request:
    """The request, sampled and without a seed; any pin of K is allowed then."""
    (chunk,) = request["chunks"]
    sampling = {k: v for k, v in chunk["sampling"].items() if k != "seed"}
    if not sampling["temperature"]:
        sampling["temperature"] = rng.choice((0.3, 0.8, 1.0, 1.5))
    return request | {"chunks": [chunk | {"sampling": sampling}]}


def check_alone(
    request: Mapping[str, Any], expected: Answer, found: Answer
) -> Difference | None:
    """What of an answer its own parameters do not allow."""
    if bool(expected["refused"]) != bool(found["refused"]):
        return Difference("refusal", expected["refused"], found["refused"])
    if found["problems"]:
        return Difference("stream", None, found["problems"])
    if found["refused"]:
        return None
    sampling = request["chunks"][0]["sampling"]
    count, wanted = len(found["outputs"]), sampling.get("n", 1)
    if count != wanted and not found["was_aborted"]:
        return Difference("number of outputs", wanted, count)
    for number, output in found["outputs"].items():
        problem = _tokens_problem(sampling, output["token_ids"])
        problem = problem or _logprobs_problem(sampling, output)
        if not problem and not found["was_aborted"]:
            problem = _end_problem(sampling, output)
        if problem:
            return Difference("unseeded answer", sampling, problem, number)
    return None


def _tokens_problem(sampling: Mapping[str, Any], token_ids: list[int]) -> str:
    if sampling.keys() & set(_LEAVES_EARLY):
        return ""
    allowed, stops = sampling.get("allowed_token_ids"), sampling.get("stop_token_ids")
    if allowed and not set(token_ids) <= set(allowed):
        return f"not allowed: {sorted(set(token_ids) - set(allowed))}"
    first_end = max(sampling.get("min_tokens", 0), 1) - 1
    if stops and set(token_ids[first_end:-1]) & set(stops):
        return f"went on behind a stop token: {token_ids}"
    # Where nothing else is allowed, an end is said too early.
    if stops and not allowed and set(token_ids[:first_end]) & set(stops):
        return f"said a stop token before min_tokens: {token_ids}"
    return ""


def _logprobs_problem(sampling: Mapping[str, Any], output: Mapping[str, Any]) -> str:
    token_ids, logprobs = output["token_ids"], output["logprobs"]
    if sampling.get("logprobs") is None or not token_ids:
        return ""
    if not logprobs:
        return "no logprobs"
    return compare_logprobs(logprobs, logprobs, token_ids, len(token_ids))


def _end_problem(sampling: Mapping[str, Any], output: Mapping[str, Any]) -> str:
    token_ids = output["token_ids"]
    ((reason, stop_reason, _),) = output["ends"] or (("none", None, 0),)
    most = sampling.get("max_tokens") or len(token_ids)
    if reason == "length":
        # Or it has reached the model's length.
        return "" if len(token_ids) <= most else f"{len(token_ids)} tokens, not {most}"
    if reason == "stop":
        # vLLM lets a grammar that is done end before `min_tokens`.
        is_done = "structured_outputs" in sampling
        if len(token_ids) < sampling.get("min_tokens", 0) and not is_done:
            return f"stopped after {len(token_ids)} tokens"
        if isinstance(stop_reason, int) and token_ids[-1] != stop_reason:
            return f"stopped by {stop_reason}, which is not its last token"
        return ""
    # A grammar may have no way on but a stop token, which vLLM does not let it take.
    fields = {"repetition": "repetition_detection", "error": "structured_outputs"}
    return "" if fields.get(reason) in sampling else f"ended by {reason}"
