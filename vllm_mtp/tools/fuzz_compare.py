"""Is what an engine answered to a request what the reference answers? Pure.

The reference is an engine without speculation that plays the same request undisturbed.
Compared are: refusals, tokens, how and why each output ended, text, logarithmic
probabilities of tokens and of the prompt, counts. Of an aborted request what came must
be the beginning of the reference's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vllm_mtp.config import METHOD
from vllm_mtp.request_options import FLAT_KEY

Answer = Mapping[str, Any]
"""See ``integration/fuzz/answers.py``."""

LOGPROB_TOLERANCE = 1e-3
"""How far apart logarithms of probabilities may lie in float32; see
`vllm_mtp.tools.verify_options.TIE_TOLERANCES`."""
RANK_SHARE = 0.05
"""How far apart ranks may lie, as a share of the rank: among unlikely tokens many lie
closer together than rounding moves them."""

SAMPLED_PIN = "a sampled request that is drafted for has the same distribution only"
LATE_SEED = (
    "vLLM seeds a session with its first input, and greedy input uses random numbers "
    "up beside sampled requests alone"
)
TRACE = "vLLM refuses trace_decode_token_ids beside speculation, whatever it says"
WRONG_PIN = "an engine without speculation does not know pins of K"


class Difference(NamedTuple):
    """What is not as it should be, the first of a request.

    Attributes:
        what: Kind of difference.
        expected: By the reference.
        found: By the engine.
        output: Number of the output (n > 1), for tokens.
        position: Of the token that differs, from 0; None for others.
    """

    what: str
    expected: Any
    found: Any
    output: int = 0
    position: int | None = None


def exclusion(request: Mapping[str, Any]) -> str | None:
    """Why a request's answers cannot be held against the reference's, or None."""
    has_sampled_only = True
    for chunk in request["chunks"]:
        sampling = chunk["sampling"]
        is_sampled = bool(sampling.get("temperature"))
        if is_sampled and not has_sampled_only:
            return LATE_SEED
        has_sampled_only = is_sampled
        if is_sampled and "seed" in sampling and _pin(sampling):
            return SAMPLED_PIN
        if sampling.get("trace_decode_token_ids"):
            return TRACE
        if _pin(sampling) is not None and not 0 <= _pin(sampling) <= 16:
            return WRONG_PIN
    return None


def _pin(sampling: Mapping[str, Any]) -> Any:
    extra = sampling.get("extra_args") or {}
    pin = extra.get(FLAT_KEY, (extra.get(METHOD) or {}).get("k"))
    return None if isinstance(pin, str) else pin


def compare(expected: Answer, found: Answer) -> Difference | None:
    """First difference between two answers to one request."""
    if bool(expected["refused"]) != bool(found["refused"]):
        return Difference("refusal", expected["refused"], found["refused"])
    if found["problems"]:
        return Difference("stream", None, found["problems"])
    if found["refused"]:
        return None
    for number, output in sorted(found["outputs"].items()):
        wanted = expected["outputs"].get(number)
        if wanted is None:
            return Difference("number of outputs", len(expected["outputs"]), number)
        difference = _compare_output(wanted, output, found["was_aborted"], number)
        if difference is not None:
            return difference
    if found["was_aborted"]:
        return None
    return _compare_whole(expected, found)


def _compare_output(
    wanted: Mapping[str, Any], output: Mapping[str, Any], is_part: bool, number: int
) -> Difference | None:
    right, ours = wanted["token_ids"], output["token_ids"]
    for position, (theirs, mine) in enumerate(zip(right, ours, strict=False)):
        if theirs != mine:
            return Difference("token", theirs, mine, number, position)
    if len(ours) > len(right) or (len(ours) < len(right) and not is_part):
        ends, our_ends = _ends(wanted, right), _ends(output, ours)
        return Difference("number of tokens", ends, our_ends, number)
    if not is_part and _listed(wanted["ends"]) != _listed(output["ends"]):
        return Difference("end", wanted["ends"], output["ends"], number)
    text, our_text = wanted["text"], output["text"]
    if our_text != text and not (is_part and text.startswith(our_text)):
        return Difference("text", text, our_text, number)
    problem = compare_logprobs(
        wanted["logprobs"], output["logprobs"], ours, len(ours) if is_part else None
    )
    if problem:
        return Difference("logprobs", None, problem, number)
    return None


def _ends(output: Mapping[str, Any], token_ids: Sequence[int]) -> Any:
    return {"num_tokens": len(token_ids), "ends": _listed(output["ends"])}


def _listed(ends: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [list(end) for end in ends]


def _compare_whole(expected: Answer, found: Answer) -> Difference | None:
    if expected["outputs"].keys() != found["outputs"].keys():
        numbers, our_numbers = (sorted(each["outputs"]) for each in (expected, found))
        return Difference("number of outputs", numbers, our_numbers)
    count, our_count = (each["num_prompt_tokens"] for each in (expected, found))
    # A session that an error ended may have been told of its next chunk already.
    ends = [end for output in found["outputs"].values() for end in output["ends"]]
    if count != our_count and "error" not in (reason for reason, *_ in ends):
        return Difference("number of prompt tokens", count, our_count)
    problem = compare_logprobs(expected["prompt_logprobs"], found["prompt_logprobs"])
    if problem:
        return Difference("prompt logprobs", None, problem)
    rows, our_rows = (
        each["prompt_token_id_logprobs"] or () for each in (expected, found)
    )
    return _compare_rows(rows, our_rows)


def _compare_rows(
    rows: Sequence[Sequence[float]], our_rows: Sequence[Sequence[float]]
) -> Difference | None:
    what = "prompt_logprob_token_ids"
    if len(rows) != len(our_rows):
        return Difference(what, rows, our_rows)
    for right, ours in zip(rows, our_rows, strict=True):
        if not all(map(_is_near, right, ours)):
            return Difference(what, right, ours)
    return None


def _is_near(right: float, ours: float) -> bool:
    if math.isnan(right) and math.isnan(ours):
        return True  # a grammar that no token of this vocabulary can begin
    return right == ours or math.isclose(right, ours, abs_tol=LOGPROB_TOLERANCE)


Entries = Mapping[int, tuple[float, int | None]]


def compare_logprobs(
    expected: Sequence[Entries | None] | None,
    found: Sequence[Entries | None] | None,
    token_ids: Sequence[int] | None = None,
    count: int | None = None,
) -> str:
    """What differs in the logarithmic probabilities, in words; empty if nothing does.

    Args:
        expected: By position, then by token: value and rank.
        found: The same of the engine.
        token_ids: Tokens that were chosen; each is among the entries of its position.
        count: Positions that came; None if all did.
    """
    if not expected or not found:
        # An engine whose request was aborted early has none, or an empty list.
        is_alike = bool(expected) == bool(found) or count == 0
        return "" if is_alike else "only one engine has them"
    if len(found) != (len(expected) if count is None else count):
        return f"{len(found)} positions, not {count or len(expected)}"
    for position, (right, ours) in enumerate(zip(expected, found, strict=False)):
        chosen = token_ids[position] if token_ids else None
        if problem := _compare_position(right, ours, chosen):
            return f"position {position}: {problem}"
    return ""


def _compare_position(
    right: Entries | None, ours: Entries | None, chosen: int | None
) -> str:
    if right is None or ours is None:
        return "" if right is ours else "only one engine has them"
    problem = _compare_entries(right, ours)
    if not problem and chosen is not None and ours and chosen not in ours:
        return f"the chosen token {chosen} is not there"
    return problem


def _compare_entries(right: Entries, ours: Entries) -> str:
    for token, (value, rank) in ours.items():
        if token not in right:
            lowest = min(entry[0] for entry in right.values())
            if not _is_near(lowest, value):
                return f"token {token} is not among the reference's"
            continue
        wanted, wanted_rank = right[token]
        if not _is_near(wanted, value):
            return f"token {token} has {value:.6g}, not {wanted:.6g}"
        if value == -math.inf or math.isnan(value):
            continue  # what a grammar forbids is in any order
        if rank is None or wanted_rank is None:
            if rank is not wanted_rank:
                return f"token {token} has rank {rank}, not {wanted_rank}"
        elif abs(rank - wanted_rank) > max(1, RANK_SHARE * wanted_rank):
            return f"token {token} has rank {rank}, not {wanted_rank}"
    # Where a grammar allows nothing, any token is the likeliest and any is chosen.
    has_numbers = not any(math.isnan(value) for value, _ in right.values())
    if has_numbers and len(ours) != len(right):
        return f"{len(ours)} tokens, not {len(right)}"
    return ""
