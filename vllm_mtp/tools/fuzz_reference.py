"""What an engine without speculation answers to each request, undisturbed."""

from collections.abc import Sequence

from vllm_mtp.tools.fuzz_compare import Answer
from vllm_mtp.tools.fuzz_engines import Player
from vllm_mtp.tools.fuzz_requests import Request

REFERENCE_BATCH = 256
"""Requests of a play of the reference."""


class Reference:
    """The engine without speculation, and what it has answered."""

    def __init__(self, player: Player) -> None:
        """Nothing is asked yet."""
        self.player = player
        self.answers: dict[str, Answer] = {}
        """By name of the request."""
        self.died: dict[str, str] = {}
        """Requests of which this engine dies: vLLM's own fault."""

    def learn(self, requests: Sequence[Request]) -> None:
        """Have requests answered that are not yet."""
        waiting = [r for r in requests if not self.knows(r["name"])]
        while waiting and self.player.can_play:
            batch, waiting = waiting[:REFERENCE_BATCH], waiting[REFERENCE_BATCH:]
            played = self.player.play(batch, is_undisturbed=True)
            lost = set(played["in_flight"]) if played["died"] else set()
            answers = played["answers"]
            self.answers |= {n: a for n, a in answers.items() if n not in lost}
            if not played["died"]:
                continue
            if len(batch) == 1:
                self.died[batch[0]["name"]] = played["died"]
                continue
            waiting = self._learn_half(batch, lost) + waiting

    def _learn_half(self, batch: Sequence[Request], lost: set[str]) -> list[Request]:
        """One of those in flight killed the engine: halve them until it is alone."""
        again = [r for r in batch if r["name"] not in self.answers]
        half = [r for r in again if r["name"] in lost][: max(1, len(lost) // 2)]
        self.learn(half)
        return [r for r in again if r not in half]

    def knows(self, name: str) -> bool:
        """Whether a request has been answered, or cannot be."""
        return name in self.answers or name in self.died

    def of_others(self) -> "Reference":
        """The same engine, asked other requests, whose names may be the same."""
        return Reference(self.player)

    def ask_anew(self, request: Request) -> Answer | None:
        """The answer to one request, alone; None if the engine died of it."""
        if not self.player.can_play:
            return None
        played = self.player.play([request], is_undisturbed=True)
        answer: Answer | None = played["answers"].get(request["name"])
        return None if played["died"] else answer
