"""Random requests, and plays of them: who arrives when, who is aborted. Pure.

A request is plain data, so that it can be printed, kept and repeated::

    {"name": "r17", "priority": 0,
     "chunks": [{"prompt": "text" or [token ids], "sampling": {...}}],
     "arrives": 4,                  step of the engine, from 0
     "aborts": 9}                   steps later; absent: never

A session (``StreamingInput``) has ``"session": true`` and several chunks, each with the
``step`` after its arrival at which it comes, and ``ends``, the step at which the
session is told that no chunk follows. A play is a list of requests; some disturb the
engine (see `fuzz_axes.py`).
"""

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Any

from vllm_mtp.tools.fuzz_axes import disturb
from vllm_mtp.tools.fuzz_corpus import Corpus, KnownPrompt
from vllm_mtp.tools.fuzz_options import FIELDS, RARE, REFUSED_SHARE, Draw, Options
from vllm_mtp.tools.fuzz_unseeded import CHANCE as UNSEEDED_CHANCE
from vllm_mtp.tools.fuzz_unseeded import drop_seed, is_unseeded

Request = dict[str, Any]

PLAY_REQUESTS = 32
"""Requests of a play: several times the seats, so that some wait."""

SESSION, ABORT, PRIORITY = "session", "abort", "priority"
DISTURBANCE, UNSEEDED = "disturbance", "unseeded"
"""Kinds of input, beside the names of fields."""
WRONG = "wrong"
"""Requests that every engine refuses."""
KINDS = (*FIELDS, SESSION, ABORT, PRIORITY, DISTURBANCE, UNSEEDED, WRONG)
"""What a run can be told to leave out."""

NUM_OPTIONS = (0, 1, 1, 2, 2, 2, 3, 3, 4)
"""Options of a request beside its length and its pin, each as likely."""

PIN_CHANCE, SAMPLED_CHANCE = 0.35, 0.2
SESSION_CHANCE, ABORT_CHANCE, WRONG_CHANCE = 0.08, 0.1, 0.03
ARRIVAL_STEPS = 40

_ALWAYS = ("temperature", "seed", "max_tokens", "extra_args")
"""Fields with a chance of their own."""

_NOT_IN_SESSIONS = (
    # Refused by AsyncLLM.
    *("n", "stop", "include_stop_str_in_output"),
    # Taken from a session's first chunk, for all of them.
    *("output_kind", "stream_interval", "detokenize"),
    *("skip_special_tokens", "spaces_between_special_tokens", "flat_logprobs"),
    *("logprob_token_ids", "prompt_logprobs", "prompt_logprob_token_ids"),
    *("prompt_logprob_start", "skip_clone", "skip_reading_prefix_cache"),
    *("routed_experts_prompt_start", "trace_decode_token_ids"),
)
_OF_FIRST_CHUNK = ("logprobs", "structured_outputs")
"""Fields that all chunks have as the first one has them."""
_SESSION_PROMPT_TOKENS = 40
_SESSION_ANSWER_TOKENS = 24


def make_plays(
    corpus: Corpus, num_requests: int, seed: int, without: Collection[str] = ()
) -> list[list[Request]]:
    """Random requests in plays."""
    plays = []
    for first in range(0, num_requests, PLAY_REQUESTS):
        numbers = range(first, min(first + PLAY_REQUESTS, num_requests))
        plays.append(_make_play(corpus, numbers, seed, without))
    return plays


def _make_play(
    corpus: Corpus, numbers: range, seed: int, without: Collection[str]
) -> list[Request]:
    rng = Random(f"play {seed} {numbers.start}")
    span = rng.choice((0, ARRIVAL_STEPS // 2, ARRIVAL_STEPS))
    has_priorities = PRIORITY not in without and rng.random() < 0.5
    requests = []
    for number in numbers:
        # Of its own, so that leaving a kind out changes few others.
        own = Random(f"request {seed} {number}")
        request = make_request(corpus, f"r{number}", own, without)
        if _loses_seed(request, own, without):
            request = drop_seed(request, own)
        request["arrives"] = rng.randint(0, span)
        priority = rng.choice((-1, 0, 0, 2))
        if has_priorities:
            request["priority"] = priority
        if rng.random() < ABORT_CHANCE and ABORT not in without:
            request["aborts"] = rng.choice((1, 2, 5, rng.randint(1, 40)))
        requests.append(request)
    if DISTURBANCE in without:
        return requests
    return disturb(requests, Random(f"disturbances {seed} {numbers.start}"))


def _loses_seed(request: Request, rng: Random, without: Collection[str]) -> bool:
    return (
        rng.random() < UNSEEDED_CHANCE
        and not request.get("session")
        and not {UNSEEDED, "temperature", "seed"} & {*without}
    )


def make_request(
    corpus: Corpus, name: str, rng: Random, without: Collection[str] = ()
) -> Request:
    """A random request that arrives at once."""
    if rng.random() < SESSION_CHANCE and SESSION not in without:
        return _make_session(corpus, name, rng, without)
    prompt = rng.choice(corpus.prompts)
    sampling = draw_options(corpus, prompt, rng, without)
    given: str | list[int] = list(prompt.token_ids)
    if prompt.text is not None and rng.random() < 0.7:
        given = prompt.text
    if rng.random() < WRONG_CHANCE and WRONG not in without:
        given, sampling = _spoil(given, sampling, corpus, rng)
    return {"name": name, "chunks": [{"prompt": given, "sampling": sampling}]}


def draw_options(
    corpus: Corpus,
    prompt: KnownPrompt,
    rng: Random,
    without: Collection[str] = (),
    num_options: int | None = None,
) -> Options:
    """Random ``SamplingParams`` that a server without speculation can answer.

    Args:
        corpus: What is known of the model.
        prompt: Of the request.
        rng: Source of all choices.
        without: Fields to leave out.
        num_options: Options beside length and pin; None for a random number.
    """
    draw = Draw(rng, corpus, prompt, {"temperature": 0.0, "max_tokens": 16})
    names = [name for name in FIELDS if name not in _ALWAYS]
    count = rng.choice(NUM_OPTIONS) if num_options is None else num_options
    chosen = ["max_tokens"]
    if rng.random() < SAMPLED_CHANCE:
        chosen.append("temperature")
    weights = RARE | dict.fromkeys(corpus.refused, REFUSED_SHARE)
    chosen += _sample(names, count, rng, weights)
    if rng.random() < PIN_CHANCE:
        chosen.append("extra_args")
    for name in chosen:
        found = FIELDS[name](draw)
        if not found.keys() & set(without):
            draw.options.update(found)
    return make_consistent(draw.options)


def _sample(
    names: Sequence[str], count: int, rng: Random, shares: Mapping[str, float]
) -> list[str]:
    left, chosen = list(names), []
    for _ in range(min(count, len(left))):
        weights = [shares.get(name, 1.0) for name in left]
        (name,) = rng.choices(left, weights)
        left.remove(name)
        chosen.append(name)
    return chosen


def make_consistent(options: Mapping[str, Any]) -> Options:
    """Options that vLLM accepts together: a later one gives way."""
    kept = dict(options)
    most = kept.get("max_tokens")
    if most is not None and kept.get("min_tokens", 0) > most:
        kept["min_tokens"] = most
    if "stop" in kept:
        kept.pop("detokenize", None)
    if "logprob_token_ids" in kept and "logprobs" in kept:
        kept["logprobs"] = len(kept["logprob_token_ids"])
    if "prompt_logprob_start" in kept and "prompt_logprob_token_ids" not in kept:
        del kept["prompt_logprob_start"]
    if {"prompt_logprobs", "prompt_logprob_token_ids"} & kept.keys():
        # Of tokens that are cached nothing is computed: vLLM shows memory as it was.
        kept.pop("skip_reading_prefix_cache", None)
    return kept


def _make_session(
    corpus: Corpus, name: str, rng: Random, without: Collection[str]
) -> Request:
    chunks: list[dict[str, Any]] = []
    num_tokens = step = 0
    first: Options = {"output_kind": rng.choice(("CUMULATIVE", "DELTA"))}
    if "output_kind" in without:
        first = {}
    for number in range(rng.choice((1, 2, 2, 3, 4))):
        prompt = rng.choice(corpus.prompts)
        prompt = prompt._replace(token_ids=prompt.token_ids[-_SESSION_PROMPT_TOKENS:])
        sampling = draw_options(
            corpus, prompt, rng, {*without, *_NOT_IN_SESSIONS}, rng.choice((0, 1, 2))
        )
        if number and "seed" not in chunks[-1]["sampling"]:
            # vLLM seeds a session once, and greedy input may use random numbers up.
            _make_greedy(sampling)
        most = rng.choice((1, 2, rng.randint(3, _SESSION_ANSWER_TOKENS)))
        sampling["max_tokens"] = most
        if number:
            sampling = _as_in_first_chunk(sampling, chunks[0]["sampling"])
        sampling = make_consistent(sampling)
        num_tokens += len(prompt.token_ids) + most
        if number and num_tokens >= corpus.max_model_len:
            break
        step += rng.choice((1, 3, rng.randint(1, 30))) if number else 0
        chunk = {"prompt": list(prompt.token_ids), "sampling": first | sampling}
        chunks.append(chunk | {"step": step})
    ends = step + rng.choice((0, 1, 10))
    return {"name": name, "session": True, "chunks": chunks, "ends": ends}


def _as_in_first_chunk(sampling: Options, first: Options) -> Options:
    kept = {k: v for k, v in sampling.items() if k not in _OF_FIRST_CHUNK}
    return kept | {k: first[k] for k in _OF_FIRST_CHUNK if k in first}


def _make_greedy(sampling: Options) -> None:
    for name in ("seed", "top_p", "top_k", "min_p"):
        sampling.pop(name, None)
    sampling["temperature"] = 0.0


def _spoil(
    prompt: str | list[int], sampling: Options, corpus: Corpus, rng: Random
) -> tuple[str | list[int], Options]:
    """A mistake that a server answers with an error."""
    beyond = corpus.vocab_size
    mistakes: tuple[Options, ...] = (
        {"stop_token_ids": [beyond]},
        {"logit_bias": {str(beyond): 1.0}},
        {"allowed_token_ids": []},
        {"logprobs": -2},
        {"min_tokens": 9, "max_tokens": 3},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0, "temperature": 1.0},
        {"bad_words": [""]},
        {"presence_penalty": 2.5},
        {"extra_args": {"mtp_plus": {"k": -1}}},
    )
    number = rng.randrange(len(mistakes) + 1)
    if number == len(mistakes):
        return [1] * (corpus.max_model_len + 1), sampling
    return prompt, sampling | mistakes[number]


def kinds_of(request: Mapping[str, Any]) -> set[str]:
    """Fields and kinds of input that a request crosses."""
    fields = {name for chunk in request["chunks"] for name in chunk["sampling"]}
    if request.get("session"):
        fields.add(SESSION)
    if request.get("aborts") is not None:
        fields.add(ABORT)
    if request.get("priority"):
        fields.add(PRIORITY)
    if request.get("disturbs"):
        fields.add(DISTURBANCE)
    if is_unseeded(request):
        fields.add(UNSEEDED)
    return fields
