"""Random requests to an OpenAI server, the same ones for the same seed. Pure.

Every request has one right answer: it is greedy, or has a seed, or leaves the sampler
one token. So a server with speculation can be held to the answer of one without.
"""

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.http_fuzz.options import (
    BAD_CHAT,
    BAD_COMPLETION,
    MALFORMED_BODIES,
    chat_options,
    completion_options,
)

SERVED_NAME = "model"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RAW, CLIENT = "raw", "openai"

FOREIGN_TEXTS = (
    "# 猫は 😀 と言った\nprint('漢字かな交じり 🎉🎉",
    "naïve café — «quotes» … 한국어 텍스트 🧪",
    "s = '👩‍👩‍👧‍👦 🏳️‍🌈'\nt = '",
)
SHORTEST_PROMPT_CHARS, LONGEST_PROMPT_CHARS = 12, 240
CHARS_TO_CONTINUE = 48


@dataclass(frozen=True)
class Seedling:
    """A prompt and how the target alone continues it, which options are made from.

    Attributes:
        path: `COMPLETIONS` or `CHAT`.
        prompt: Text, or of a chat the messages.
        prompt_ids: Its tokens.
        token_ids: Greedy continuation.
        pieces: The same as text, token by token.
    """

    path: str
    prompt: Any
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class FuzzRequest:
    """One request.

    Attributes:
        number: Of the run.
        path: Where to post it.
        body: JSON object.
        through: `CLIENT` or `RAW`.
        closes_after: Events of a stream after which the client goes; None: at its end.
        raw_body: What is posted instead of `body`.
    """

    number: int
    path: str
    body: Mapping[str, Any]
    through: str = RAW
    closes_after: int | None = None
    raw_body: str | None = None

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def kinds(self) -> list[str]:
        """What it uses, for counting."""
        plain = {"model", "prompt", "messages", "return_token_ids"}
        found = [key for key in self.body if key not in plain]
        if self.closes_after is not None:
            found.append("disconnect")
        if self.raw_body is not None:
            found.append("malformed")
        if isinstance(self.body.get("prompt"), list):
            found.append("prompt_list")
        where = "chat" if self.path == CHAT else "completions"
        return [f"{where}.{kind}" for kind in found]

    def as_curl(self) -> str:
        """A command that repeats it, with the server's address in `$URL`."""
        body = self.raw_body
        if body is None:
            body = json.dumps(dict(self.body), ensure_ascii=True)
        quoted = body.replace("'", "'\\''")
        header = "-H 'Content-Type: application/json'"
        return f"curl -sN $URL{self.path} {header} -d '{quoted}'"


def is_determined(body: Mapping[str, Any]) -> bool:
    """Whether a request has one right answer."""
    temperature = body.get("temperature")
    pin = (body.get("vllm_xargs") or {}).get("mtp_plus_k", 0)
    if temperature is None or (pin and body.get("seed") is not None):
        # Who asks for drafts beside a seed gets the distribution, not the same draw.
        return False
    return (
        temperature == 0
        or body.get("seed") is not None
        or body.get("top_k") == 1
        or body.get("min_p") == 1.0
        or bool(body.get("use_beam_search"))
    )


def prompt_texts(texts: Sequence[str], rng: random.Random, count: int) -> list[str]:
    """Beginnings of texts, and some in other scripts."""
    cut = [
        text[: rng.randint(SHORTEST_PROMPT_CHARS, LONGEST_PROMPT_CHARS)]
        for text in rng.choices(texts, k=max(1, count - len(FOREIGN_TEXTS)))
    ]
    return [*cut, *FOREIGN_TEXTS]


def chat_messages(text: str, rng: random.Random) -> list[dict[str, str]]:
    """A conversation that ends with this text of the user."""
    messages = [{"role": "user", "content": text}]
    if rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": "You write Python. 🐍"})
    if rng.random() < 0.3:
        messages[:0] = [
            {"role": "user", "content": "def f(x):"},
            {"role": "assistant", "content": "    return x"},
        ]
    return messages


def make_requests(
    seedlings: Sequence[Seedling],
    foreign_ids: Sequence[int],
    count: int,
    seed: int,
    skipped: Collection[str] = (),
) -> list[FuzzRequest]:
    """All requests of a run."""
    rng = random.Random(seed)
    made = [_make(number, seedlings, foreign_ids, rng) for number in range(count)]
    return [
        replace(each, body={k: v for k, v in each.body.items() if k not in skipped})
        for each in made
    ]


def _make(
    number: int,
    seedlings: Sequence[Seedling],
    foreign_ids: Sequence[int],
    rng: random.Random,
) -> FuzzRequest:
    seedling = rng.choice(seedlings)
    is_chat = seedling.path == CHAT
    if rng.random() < 0.02:
        raw = rng.choice(MALFORMED_BODIES)
        return FuzzRequest(number, seedling.path, {}, raw_body=raw)
    body: dict[str, Any] = {"model": SERVED_NAME, "return_token_ids": True}
    if is_chat:
        body["messages"] = seedling.prompt
        body |= chat_options(seedling.token_ids, seedling.pieces, foreign_ids, rng)
    else:
        body["prompt"] = _prompt(seedling, seedlings, rng)
        body |= completion_options(
            seedling.token_ids, seedling.pieces, foreign_ids, rng
        )
    if body.get("seed") is not None:
        body.pop("vllm_xargs", None)
    through = rng.choice((RAW, CLIENT))
    if rng.random() < 0.08:
        body |= rng.choice(BAD_CHAT if is_chat else BAD_COMPLETION)
    request = FuzzRequest(number, seedling.path, body, through)
    if request.is_stream and rng.random() < 0.2:
        return replace(request, closes_after=rng.randint(0, 8))
    return request


def _prompt(
    seedling: Seedling, seedlings: Sequence[Seedling], rng: random.Random
) -> Any:
    kind = rng.random()
    if kind < 0.4:
        return list(seedling.prompt_ids)
    if kind < 0.6:
        others = [each for each in seedlings if each.path == COMPLETIONS]
        more = rng.choices(others, k=rng.randint(1, 2))
        return [list(each.prompt_ids) for each in (seedling, *more)]
    return seedling.prompt
