"""Makes a failing play small: fewest fellow requests, fewest options, least tokens.

Every step is tried, and kept if the play still fails. The number of tries is bounded,
so the result is small, not the smallest. Pure: whether a play fails is asked of others.
"""

from collections.abc import Callable, Iterator
from typing import Any

from vllm_mtp.tools.fuzz_requests import Request

MAX_TRIES = 60

Play = list[Request]
StillFails = Callable[[Play], bool]

_DEPENDS_ON = {
    "prompt_logprob_token_ids": ("prompt_logprob_start",),
    "stop": ("include_stop_str_in_output",),
    "seed": ("temperature", "n", "top_p", "top_k", "min_p"),
}
"""Fields that make no sense without another one; they go with it."""
_NEEDED = ("temperature", "max_tokens", "output_kind")


class Shrinker:
    """Tries smaller plays, as often as it may."""

    def __init__(self, still_fails: StillFails, max_tries: int = MAX_TRIES) -> None:
        """Begin."""
        self.num_left = max_tries
        self._still_fails = still_fails

    def shrink(self, play: Play, name: str = "") -> Play:
        """A smaller play that fails, too."""
        play = self._fewer_requests(play, name)
        play = self._repeat(play, _without_disturbance)
        play = self._repeat(play, _with_fewer_chunks)
        play = self._repeat(play, _with_fewer_options)
        return self._repeat(play, _with_fewer_tokens)

    def _fails(self, play: Play) -> bool:
        if self.num_left <= 0 or not play:
            return False
        self.num_left -= 1
        return self._still_fails(play)

    def _fewer_requests(self, play: Play, name: str) -> Play:
        """Halves first, then quarters, and so on; see Zeller's delta debugging."""
        alone = [request for request in play if request["name"] == name]
        if alone and len(play) > 1 and self._fails(alone):
            return alone
        size = len(play) // 2
        while size:
            start = 0
            while start < len(play):
                part = play[start : start + size]
                rest = [r for r in play if r not in part or r["name"] == name]
                if len(rest) < len(play) and self._fails(rest):
                    play = rest
                else:
                    start += size
            size //= 2
        return play

    def _repeat(self, play: Play, smaller: Callable[[Request], Iterator[Any]]) -> Play:
        """Replace each request by a smaller one for as long as the play fails."""
        for number in range(len(play)):
            is_smaller = True
            while is_smaller and self.num_left > 0:
                is_smaller = False
                for request in smaller(play[number]):
                    candidate = [*play[:number], request, *play[number + 1 :]]
                    if self._fails(candidate):
                        play, is_smaller = candidate, True
                        break
        return play


def _without_disturbance(request: Request) -> Iterator[Request]:
    for name in ("aborts", "disturbs", "adapter", "priority", "arrives"):
        if request.get(name):
            yield {key: value for key, value in request.items() if key != name}


def _with_fewer_chunks(request: Request) -> Iterator[Request]:
    chunks = request["chunks"]
    if len(chunks) > 1:
        yield request | {"chunks": chunks[:-1]}
        yield request | {"chunks": chunks[1:]}


def _with_fewer_options(request: Request) -> Iterator[Request]:
    for number, chunk in enumerate(request["chunks"]):
        sampling = chunk["sampling"]
        for name in sampling:
            if name in _NEEDED:
                continue
            gone = {name, *_DEPENDS_ON.get(name, ())}
            kept = {key: value for key, value in sampling.items() if key not in gone}
            yield _changed(request, number, sampling={"temperature": 0.0} | kept)


def _with_fewer_tokens(request: Request) -> Iterator[Request]:
    for number, chunk in enumerate(request["chunks"]):
        sampling, prompt = chunk["sampling"], chunk["prompt"]
        most = sampling.get("max_tokens")
        for fewer in {most // 2, most - 1} if most else {64}:
            if fewer > 0:
                least = min(sampling.get("min_tokens", 0), fewer)
                shorter = sampling | {"max_tokens": fewer}
                if least:
                    shorter["min_tokens"] = least
                yield _changed(request, number, sampling=shorter)
        rows = {"prompt_logprob_token_ids", "prompt_logprob_start"}
        if len(prompt) > 1 and not rows & sampling.keys():
            yield _changed(request, number, prompt=prompt[len(prompt) // 2 :])


def _changed(request: Request, number: int, **values: Any) -> Request:
    chunks = list(request["chunks"])
    chunks[number] = chunks[number] | values
    return request | {"chunks": chunks}
