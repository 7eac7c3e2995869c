"""What random requests ask for: each option with values that meet a draft's border.

Stop strings, stop tokens, biases and bad words are taken from what the target would
say, so that they take effect, and in the middle of drafts. Pure.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MAX_TOKENS = 40
MAX_PIN = 8
THINKING_END_TOKEN_ID = 756
"""Of `reasoning_parser.py`."""

_POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["red", "green", "猫", "😀"]},
    },
    "required": ["name", "x", "kind"],
    "additionalProperties": False,
}
_FLAGS = {
    "type": "object",
    "properties": {"flags": {"type": "array", "items": {"type": "boolean"}}},
    "required": ["flags"],
}
SCHEMAS = (_POINT, _FLAGS)
FOREIGN_REGEX = "[😀-😏猫犬漢字é]{3,9}"
GRAMMARS: tuple[Mapping[str, Any], ...] = (
    {"structured_outputs": {"regex": FOREIGN_REGEX}},
    {"structured_outputs": {"regex": r"[a-f]{2,12}(\.[0-9]{1,3})?"}},
    {"structured_outputs": {"choice": ["猫😀", "猫犬", "return", "returns 😀"]}},
    {"structured_outputs": {"json": _POINT}},
    {"response_format": {"type": "json_object"}},
    *(
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema},
            }
        }
        for schema in SCHEMAS
    ),
)

TOOLS: tuple[Mapping[str, Any], ...] = (
    {
        "type": "function",
        "function": {
            "name": "place",
            "description": "Place a point.",
            "parameters": _POINT,
        },
    },
    {
        "type": "function",
        "function": {
            "name": "set_flags",
            "parameters": _FLAGS,
        },
    },
)

BAD_BOTH: tuple[Mapping[str, Any], ...] = (
    {"temperature": -1},
    {"temperature": "hot"},
    {"top_p": 2},
    {"top_k": -7},
    {"min_p": 1.5},
    {"n": 0},
    {"max_tokens": -3},
    {"max_tokens": 100_000},
    {"min_tokens": 1000},
    {"stop": [""]},
    {"stop": [7]},
    {"model": "unknown"},
    {"logit_bias": {"99999999": 1}},
    {"logit_bias": {"x": 1}},
    {"allowed_token_ids": []},
    {"allowed_token_ids": [99_999_999]},
    {"bad_words": [""]},
    {"presence_penalty": 9},
    {"repetition_penalty": -1},
    {"stop_token_ids": ["x"]},
    {"structured_outputs": {"regex": "(("}},
    {"structured_outputs": {"json": {"type": "nothing"}}},
    {"structured_outputs": {"choice": []}},
    {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    {"response_format": {"type": "yaml"}},
    {"stream_options": {"include_usage": True}, "stream": False},
    {"seed": 2**70},
    {"priority": 3},
    {"logprob_token_ids": [99_999_999]},
    {"vllm_xargs": {"a": {"b": 1}}},
)
BAD_COMPLETION = (
    *BAD_BOTH,
    {"suffix": "end"},
    {"prompt": []},
    {"prompt": ""},
    {"prompt": [[99_999_999]]},
    {"prompt": [-1]},
    {"prompt": None},
    {"logprobs": 99},
    {"logprobs": -3},
    {"echo": True, "stream": True, "prompt_logprobs": 1},
)
BAD_CHAT = (
    *BAD_BOTH,
    {"messages": []},
    {"messages": [{"role": "user"}]},
    {"messages": "hello"},
    {"logprobs": True, "top_logprobs": 99},
    {"top_logprobs": 2, "logprobs": False},
    {"tools": [], "tool_choice": "required"},
    {"tool_choice": "required"},
    {
        "tools": list(TOOLS),
        "tool_choice": {"type": "function", "function": {"name": "nobody"}},
    },
)
MALFORMED_BODIES = ("", "{", "[]", "null", '{"model": "demo",}', '{"model": 1}', "\xff")


class _Options:
    """Draws options for one request."""

    def __init__(
        self,
        token_ids: Sequence[int],
        pieces: Sequence[str],
        foreign_ids: Sequence[int],
        rng: random.Random,
    ) -> None:
        self._token_ids, self._pieces = token_ids, pieces
        self._foreign_ids, self._rng = foreign_ids, rng

    def draw(self, more: Sequence[tuple[float, Callable[[], dict[str, Any]]]]) -> Any:
        """Every option with its own probability."""
        body = {"max_tokens": self._rng.randint(1, MAX_TOKENS)} | self._sampling()
        common = (
            (0.25, self._stop),
            (0.1, self._stop_ids),
            (0.15, self._bias),
            (0.1, self._min_tokens),
            (0.1, self._bad_words),
            (0.15, self._penalties),
            (0.15, self._foreign),
            (0.2, self._grammar),
            (0.4, self._pin),
            (0.3, lambda: {"ignore_eos": True}),
            (0.05, lambda: {"skip_special_tokens": False}),
            (0.05, lambda: {"logprob_token_ids": self._some_ids(4)}),
            (0.05, lambda: {"thinking_token_budget": self._rng.randint(0, 6)}),
            (0.05, self._repetition),
            (0.05, lambda: {"truncate_prompt_tokens": self._rng.randint(1, 20)}),
            (0.5, self._stream),
        )
        for probability, option in (*common, *more):
            if self._rng.random() < probability:
                body |= option()
        return body

    def _sampling(self) -> dict[str, Any]:
        rng = self._rng
        kind = rng.random()
        if kind < 0.5:
            return {"temperature": 0}
        several = {"n": rng.randint(2, 3)} if rng.random() < 0.3 else {}
        if kind < 0.65:
            return {"temperature": 1.0, "top_k": 1} | several
        if kind < 0.75:
            return {"temperature": 0.7, "min_p": 1.0} | several
        shape = rng.choice(({}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}))
        seeded = {"temperature": 0.8, "seed": rng.randrange(1000)}
        return seeded | dict(shape) | several

    def _some_ids(self, most: int) -> list[int]:
        found = set(self._rng.choices(self._token_ids, k=self._rng.randint(1, most)))
        return sorted(found)

    def _stop(self) -> dict[str, Any]:
        """A few characters around the border between two tokens."""
        rng, pieces = self._rng, self._pieces
        text, at = "".join(pieces), rng.randrange(len(pieces))
        border = len("".join(pieces[:at]))
        found = text[max(0, border - rng.randint(0, 3)) : border + rng.randint(1, 3)]
        stops = [found or "x", "never said"][: rng.randint(1, 2)]
        including = {"include_stop_str_in_output": True} if rng.random() < 0.4 else {}
        return {"stop": stops} | including

    def _stop_ids(self) -> dict[str, Any]:
        return {"stop_token_ids": self._some_ids(2)}

    def _bias(self) -> dict[str, Any]:
        ids = self._some_ids(3)
        values = (-100.0, -5.0, 2.5, 6.0)
        biases = {str(i): self._rng.choice(values) for i in ids}
        if self._rng.random() < 0.4:
            biases[str(THINKING_END_TOKEN_ID)] = float(self._rng.randint(4, 20))
        return {"logit_bias": biases}

    def _min_tokens(self) -> dict[str, Any]:
        least = self._rng.randint(1, 12)
        return {"min_tokens": least, "max_tokens": least + self._rng.randint(0, 20)}

    def _bad_words(self) -> dict[str, Any]:
        words = [p.strip() for p in self._pieces if p.strip() and "\ufffd" not in p]
        count = self._rng.randint(1, 3)
        return {"bad_words": self._rng.sample(words, min(count, len(words)))}

    def _penalties(self) -> dict[str, Any]:
        values = {
            "repetition_penalty": 1.3,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.4,
        }
        names = self._rng.sample(sorted(values), self._rng.randint(1, 3))
        return {name: values[name] for name in names}

    def _foreign(self) -> dict[str, Any]:
        """Characters of which each takes several tokens."""
        if self._rng.random() < 0.5:
            return {"allowed_token_ids": sorted(set(self._foreign_ids))}
        ids = sorted(set(self._foreign_ids))
        return {"logit_bias": {str(i): float(self._rng.randint(4, 12)) for i in ids}}

    def _grammar(self) -> dict[str, Any]:
        return dict(self._rng.choice(GRAMMARS)) | {"max_tokens": 48}

    def _pin(self) -> dict[str, Any]:
        return {"vllm_xargs": {"mtp_plus_k": self._rng.randint(0, MAX_PIN)}}

    def _repetition(self) -> dict[str, Any]:
        pattern = {"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 2}
        return {"repetition_detection": pattern}

    def _stream(self) -> dict[str, Any]:
        rng = self._rng
        body: dict[str, Any] = {"stream": True}
        if rng.random() < 0.7:
            body["stream_options"] = {
                "include_usage": rng.random() < 0.7,
                "continuous_usage_stats": rng.random() < 0.5,
            }
        if rng.random() < 0.1:
            body["stream_interval"] = rng.randint(1, 5)
        return body


def completion_options(
    token_ids: Sequence[int],
    pieces: Sequence[str],
    foreign_ids: Sequence[int],
    rng: random.Random,
) -> dict[str, Any]:
    """Random options of a completion."""
    more = (
        (0.15, lambda: {"echo": True}),
        (0.25, lambda: {"logprobs": rng.choice((0, 1, 5))}),
        (0.05, lambda: {"prompt_logprobs": rng.randint(0, 2), "stream": False}),
        (0.05, lambda: {"return_tokens_as_token_ids": True}),
        (0.02, lambda: {"max_tokens": 0, "echo": True}),
    )
    options = _Options(token_ids, pieces, foreign_ids, rng)
    found: dict[str, Any] = options.draw(more)
    return found


def chat_options(
    token_ids: Sequence[int],
    pieces: Sequence[str],
    foreign_ids: Sequence[int],
    rng: random.Random,
) -> dict[str, Any]:
    """Random options of a chat completion, as `completion_options`."""

    def tools() -> dict[str, Any]:
        named = {"type": "function", "function": {"name": "set_flags"}}
        choice = rng.choice(("required", "required", named, "auto", "none"))
        body = {"tools": [dict(tool) for tool in TOOLS], "tool_choice": choice}
        return body | {"max_tokens": 64}

    def logprobs() -> dict[str, Any]:
        return {"logprobs": True, "top_logprobs": rng.choice((0, 1, 5))}

    def thinking() -> dict[str, Any]:
        """With or without a push to the end of it."""
        body: dict[str, Any] = {"chat_template_kwargs": {"thinking": True}}
        if rng.random() < 0.6:
            push = float(rng.randint(6, 24))
            body["logit_bias"] = {str(THINKING_END_TOKEN_ID): push}
        return body

    more = (
        (0.25, tools),
        (0.25, logprobs),
        (0.4, thinking),
        (0.05, lambda: {"include_reasoning": False}),
    )
    options = _Options(token_ids, pieces, foreign_ids, rng)
    found: dict[str, Any] = options.draw(more)
    return found
