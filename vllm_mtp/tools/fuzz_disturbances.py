"""What is done to a whole engine during a play, at steps drawn from the seed. Pure.

A request carries it, so that a play stays a list of requests and is made small as one::

    "disturbs": {"step": 7, "what": "pause", "lasts": 3}

``step`` counts from the arrival, ``lasts`` the steps until the engine goes on.
Answers stay what they are, but `ABORTING` cuts off those that are under way.
"""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

RESET, PAUSE, CLEAR, SLEEP = "reset", "pause", "pause and clear", "sleep"
ABORTING = "pause and abort"
KINDS = (RESET, PAUSE, CLEAR, SLEEP, ABORTING)
"""`RESET` empties the prefix cache while requests run: all of them are preempted.
`PAUSE` freezes them, with `CLEAR` the cache is emptied meanwhile, and `SLEEP` is vLLM's
sleep with requests that are kept. On a CPU vLLM frees no memory of an engine that
sleeps, so levels 1 and 2 are the same there and no weights are lost."""

LIKELIHOOD = {RESET: 4, PAUSE: 3, CLEAR: 3, SLEEP: 2, ABORTING: 0.5}
NUM_IN_PLAY = (2, 4, 6, 9)
MAX_STEP, MAX_LASTS = 15, 6

Request = dict[str, Any]


def disturb(play: Sequence[Request], rng: Random) -> list[Request]:
    """The play with disturbances."""
    count = min(rng.choice(NUM_IN_PLAY), len(play))
    chosen = set(rng.sample(range(len(play)), count))
    disturbed = []
    for number, request in enumerate(play):
        if number in chosen:
            (what,) = rng.choices(KINDS, [LIKELIHOOD[kind] for kind in KINDS])
            step, lasts = rng.randint(0, MAX_STEP), rng.randint(0, MAX_LASTS)
            event = {"step": step, "what": what, "lasts": 0 if what == RESET else lasts}
            request = request | {"disturbs": event}
        disturbed.append(request)
    return disturbed


def undisturbed(play: Sequence[Mapping[str, Any]]) -> list[Request]:
    """The play without disturbances."""
    return [
        {key: value for key, value in request.items() if key != "disturbs"}
        for request in play
    ]


def is_reset(play: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the prefix cache is emptied while steps are under way."""
    return any((each.get("disturbs") or {}).get("what") == RESET for each in play)
