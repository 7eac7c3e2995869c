"""Random values for every field of vLLM's ``SamplingParams``. Pure.

`FIELDS` has one generator for each field that a user may set; `NOT_SET` names the
others. A test compares both with the class. Values are drawn so that they matter for
the prompt at hand, and often lie on a border.
"""

import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from vllm_mtp.config import METHOD
from vllm_mtp.request_options import AUTO, FLAT_KEY
from vllm_mtp.tools.fuzz_corpus import Corpus, KnownPrompt
from vllm_mtp.tools.fuzz_grammars import draw_grammar

Options = dict[str, Any]


class Draw(NamedTuple):
    """What a generator draws from.

    Attributes:
        rng: Source of all choices.
        corpus: What is known of the model.
        prompt: Of the request.
        options: Drawn so far, ``temperature`` and ``max_tokens`` first.
    """

    rng: Random
    corpus: Corpus
    prompt: KnownPrompt
    options: Options

    @property
    def is_sampled(self) -> bool:
        """Whether the request is not greedy."""
        return bool(self.options["temperature"] > 0)

    def said(self, count: int) -> list[int]:
        """Some tokens that the target says to the prompt, or says often."""
        known = self.prompt.answer or self.corpus.common
        return [self.rng.choice(known) for _ in range(count)]

    def word(self) -> str:
        """A piece of what the target says; its ends need not be ends of tokens."""
        text = self.prompt.answer_text
        if not text.strip():
            return "self"
        start = self.rng.randrange(len(text))
        return text[start : start + self.rng.choice((1, 2, 3, 5, 9))]

    def phrase(self) -> str:
        """Two or three words or signs of it, most of which are whole tokens."""
        pieces = list(re.finditer(r"\w+|[^\w\s]+", self.prompt.answer_text))
        if len(pieces) < 2:
            return self.word()
        first = self.rng.randrange(len(pieces) - 1)
        last = min(first + self.rng.choice((1, 1, 2)), len(pieces) - 1)
        return self.prompt.answer_text[pieces[first].start() : pieces[last].end()]

    def any_token(self) -> int:
        """Any token at all."""
        return self.rng.randrange(self.corpus.vocab_size)


Generator = Callable[[Draw], Options]


def _sampled(draw: Draw) -> Options:
    """What makes a request a sampled one whose text is the same every time."""
    if draw.is_sampled:
        return {}
    temperature = draw.rng.choice((0.2, 0.7, 1.0, 1.3))
    return {"temperature": temperature, "seed": draw.rng.randrange(2**31)}


def _temperature(draw: Draw) -> Options:
    return _sampled(draw) | {"temperature": draw.rng.choice((0.01, 0.3, 0.8, 1.0, 2))}


def _one_of(name: str, *values: Any) -> Generator:
    return lambda draw: {name: draw.rng.choice(values)}


def _of_sampled(name: str, *values: Any) -> Generator:
    return lambda draw: _sampled(draw) | {name: draw.rng.choice(values)}


def _n(draw: Draw) -> Options:
    return _sampled(draw) | {"n": draw.rng.choice((2, 3))}


def _max_tokens(draw: Draw) -> Options:
    k = draw.corpus.max_draft_length
    near = (1, 2, k, k + 1, k + 2, 2 * k + 3)
    rng = draw.rng
    if rng.random() < 0.3:
        return {"max_tokens": rng.choice(near)}
    if rng.random() < 0.06:
        return {"max_tokens": rng.choice((None, draw.corpus.max_model_len))}
    return {"max_tokens": rng.randint(3, 56)}


def _min_tokens(draw: Draw) -> Options:
    """With ends that would come before and come soon after."""
    most = draw.options["max_tokens"] or 24
    rng = draw.rng
    soon = rng.randint(1, draw.corpus.max_draft_length + 4)
    number = rng.choice((soon, soon, soon, most // 2, most - 1, most))
    ends: Options = {}
    if not {"stop", "stop_token_ids"} & draw.options.keys():
        if rng.random() < 0.7:
            ends = {"stop_token_ids": list(draw.corpus.common[:12])}
        else:
            ends = rng.choice((_stop, _stop_token_ids))(draw)
    return ends | {"min_tokens": max(0, min(number, most))}


def _stop(draw: Draw) -> Options:
    count = draw.rng.choice((1, 1, 2, 4))
    words = [draw.rng.choice((draw.word, draw.phrase))() for _ in range(count)]
    return {"stop": words, "detokenize": True}


def _include_stop(draw: Draw) -> Options:
    stop = {} if "stop" in draw.options else _stop(draw)
    return stop | {"include_stop_str_in_output": True}


def _stop_token_ids(draw: Draw) -> Options:
    rng = draw.rng
    if rng.random() < 0.5:
        count = rng.choice((3, 12, 25))
        return {"stop_token_ids": list(draw.corpus.common[:count])}
    return {"stop_token_ids": draw.said(rng.choice((1, 2, 5)))}


def _logprobs(draw: Draw) -> Options:
    if draw.rng.random() < 0.04:
        short = min(draw.options["max_tokens"] or 3, 3)
        return {"logprobs": -1, "max_tokens": short}
    return {"logprobs": draw.rng.choice((0, 1, 2, 5, 20))}


def _logprob_token_ids(draw: Draw) -> Options:
    count = draw.rng.choice((1, 2, 5))
    ids = list(dict.fromkeys([*draw.said(count), draw.any_token()]))
    return {"logprob_token_ids": ids} | (
        {"logprobs": len(ids)} if "logprobs" in draw.options else {}
    )


def _prompt_logprobs(draw: Draw) -> Options:
    is_short = len(draw.prompt.token_ids) < 4
    return {"prompt_logprobs": draw.rng.choice((0, 1, 5, -1 if is_short else 2))}


def _prompt_logprob_token_ids(draw: Draw) -> Options:
    start = draw.options.get("prompt_logprob_start") or 0
    num_rows = len(draw.prompt.token_ids) - 1 - start
    if num_rows < 1:
        return {}
    width = draw.rng.choice((1, 3))
    rows = [[draw.any_token() for _ in range(width)] for _ in range(num_rows)]
    return {"prompt_logprob_token_ids": rows}


def _prompt_logprob_start(draw: Draw) -> Options:
    start = draw.rng.randrange(max(1, len(draw.prompt.token_ids) - 1))
    options = {"prompt_logprob_start": start}
    rows = _prompt_logprob_token_ids(draw._replace(options=draw.options | options))
    return options | rows if rows else {}


def _logit_bias(draw: Draw) -> Options:
    rng = draw.rng
    tokens = [*draw.said(rng.choice((1, 3, 8))), draw.any_token(), rng.choice((0, 2))]
    biases = (-100.0, -3.0, -0.5, 0.5, 2.0, 4.0, 8.0)
    return {"logit_bias": {str(token): rng.choice(biases) for token in tokens}}


def _allowed_token_ids(draw: Draw) -> Options:
    rng = draw.rng
    if rng.random() < 0.2:
        return {"allowed_token_ids": draw.said(rng.choice((1, 2)))}
    some = rng.sample(range(draw.corpus.vocab_size), min(40, draw.corpus.vocab_size))
    return {"allowed_token_ids": sorted({*draw.corpus.common[:60], *some})}


def _bad_words(draw: Draw) -> Options:
    count = draw.rng.choice((1, 2, 5))
    words = [draw.rng.choice((draw.word, draw.phrase))() for _ in range(count)]
    return {"bad_words": [word for word in words if word.strip()] or ["self"]}


def _thinking_token_budget(draw: Draw) -> Options:
    return {"thinking_token_budget": draw.rng.choice((0, 1, 3, 8, -1))}


def _repetition_detection(draw: Draw) -> Options:
    rng = draw.rng
    largest = rng.choice((1, 2, 4, 8))
    return {
        "repetition_detection": {
            "max_pattern_size": largest,
            "min_pattern_size": rng.randint(0, largest),
            "min_count": rng.choice((2, 3)),
        }
    }


def _extra_args(draw: Draw) -> Options:
    """A pin of K. A sampled request with a seed keeps its text only without drafts."""
    highest = 0 if draw.is_sampled else draw.corpus.max_draft_length
    k = draw.rng.choice((AUTO, 0, 1, highest, draw.rng.randint(0, highest)))
    if draw.is_sampled and k != AUTO:
        k = 0
    pin = draw.rng.choice(({METHOD: {"k": k}}, {FLAT_KEY: k}))
    return {"extra_args": pin}


def _routed_experts_prompt_start(draw: Draw) -> Options:
    count = len(draw.prompt.token_ids)
    return {"routed_experts_prompt_start": draw.rng.choice((0, 1, count))}


def _trace_decode_token_ids(draw: Draw) -> Options:
    return {"trace_decode_token_ids": draw.said(4)}


FIELDS: Mapping[str, Generator] = {
    "n": _n,
    "presence_penalty": _one_of("presence_penalty", -2.0, -0.5, 0.8, 2.0),
    "frequency_penalty": _one_of("frequency_penalty", -1.0, 0.3, 0.6, 2.0),
    "repetition_penalty": _one_of("repetition_penalty", 0.7, 1.05, 1.3, 2.0),
    "temperature": _temperature,
    "watermarking": _one_of("watermarking", False, None),
    "top_p": _of_sampled("top_p", 0.05, 0.5, 0.9, 1.0),
    "top_k": _of_sampled("top_k", -1, 1, 2, 6, 40, 10**6),
    "min_p": _of_sampled("min_p", 0.01, 0.2, 1.0),
    "seed": _of_sampled("seed", 0, 1, 2**31, 2**63 - 1),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _one_of("ignore_eos", True),
    "max_tokens": _max_tokens,
    "min_tokens": _min_tokens,
    "logprobs": _logprobs,
    "prompt_logprobs": _prompt_logprobs,
    "prompt_logprob_token_ids": _prompt_logprob_token_ids,
    "prompt_logprob_start": _prompt_logprob_start,
    "logprob_token_ids": _logprob_token_ids,
    "flat_logprobs": lambda draw: _logprobs(draw) | {"flat_logprobs": True},
    "detokenize": _one_of("detokenize", False),
    "skip_special_tokens": _one_of("skip_special_tokens", False),
    "spaces_between_special_tokens": _one_of("spaces_between_special_tokens", False),
    "include_stop_str_in_output": _include_stop,
    "output_kind": _one_of("output_kind", "CUMULATIVE", "DELTA", "FINAL_ONLY"),
    "stream_interval": _one_of("stream_interval", 2, 3, 7),
    "skip_clone": _one_of("skip_clone", True),
    "structured_outputs": draw_grammar,
    "logit_bias": _logit_bias,
    "allowed_token_ids": _allowed_token_ids,
    "extra_args": _extra_args,
    "bad_words": _bad_words,
    "skip_reading_prefix_cache": _one_of("skip_reading_prefix_cache", True, False),
    "thinking_token_budget": _thinking_token_budget,
    "repetition_detection": _repetition_detection,
    "routed_experts_prompt_start": _routed_experts_prompt_start,
    "trace_decode_token_ids": _trace_decode_token_ids,
}
"""A generator for each field. It may set others that its own needs."""

NOT_SET: Mapping[str, str] = {
    "output_text_buffer_length": "vLLM derives it from `stop`",
    "_eos_token_id": "vLLM takes it from the model",
    "_all_stop_token_ids": "vLLM derives it from `stop_token_ids`",
    "_watermarking_skipped": "vLLM notes in it what it did",
    "_bad_words_token_ids": "vLLM derives it from `bad_words`",
}
"""Fields that no user sets, and why."""

V2_ONLY = ("prompt_logprob_token_ids", "prompt_logprob_start")
"""Fields that Model Runner V1 refuses."""
REFUSED_SHARE = 0.05
"""How often fields that are refused are drawn compared with others (1)."""

RARE = {
    "watermarking": 0.2,
    "skip_clone": 0.2,
    "routed_experts_prompt_start": 0.2,
    "trace_decode_token_ids": 0.1,
    "spaces_between_special_tokens": 0.4,
    "flat_logprobs": 0.5,
    "n": 0.5,
}
"""How often fields are drawn compared with others (1): some change nothing here, some
are refused by every engine."""
