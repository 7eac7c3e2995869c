"""Measures the servers side by side: same prompts, same run, taking turns.

Only one server works at a time, and who goes first changes from request to request,
so a machine that becomes slower or faster does so for all of them.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from vllm_mtp.tools.demo_client import Completion, SpecCounters
from vllm_mtp.tools.demo_plan import NO_SPECULATION, Prompt


class Completer(Protocol):
    """Whoever continues a text."""

    def complete(self, prompt: str) -> Completion:
        """Continue a text."""
        ...


class Spread(NamedTuple):
    """A figure over several repetitions."""

    median: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one value."""
        return cls(statistics.median(values), min(values), max(values))


class Difference(NamedTuple):
    """A greedy continuation that is not that of no speculation.

    Attributes:
        method: Whose.
        prompt: Source of the prompt.
        position: Index of the first generated token that differs.
    """

    method: str
    prompt: str
    position: int


class Turn(NamedTuple):
    """One request of the plan."""

    method: str
    prompt_index: int


@dataclass(frozen=True)
class Measurement:
    """What was measured of one method.

    Attributes:
        tokens_per_s: Speed of each timed pass over the prompts.
        speedup: The same, each divided by no speculation in the same pass.
        counters: Of the server, over the timed passes.
    """

    tokens_per_s: tuple[float, ...]
    speedup: tuple[float, ...]
    counters: SpecCounters


def plan_turns(methods: Sequence[str], num_prompts: int, shift: int) -> list[Turn]:
    """Order of the requests of one pass.

    Args:
        methods: All of them, in a fixed order.
        num_prompts: Prompts of the pass.
        shift: Number of the pass; every pass starts with another method.

    Returns:
        Every method once for each prompt, the first one rotating.
    """
    turns = []
    for index in range(num_prompts):
        first = (index + shift) % len(methods)
        order = [*methods[first:], *methods[:first]]
        turns += [Turn(method, index) for method in order]
    return turns


def run_pass(
    clients: Mapping[str, Completer],
    prompts: Sequence[Prompt],
    shift: int,
    report: Callable[[str], None],
) -> dict[str, list[Completion]]:
    """Continue every prompt with every method, taking turns.

    Args:
        clients: One for each method.
        prompts: Texts.
        shift: Number of the pass.
        report: Called with a line about each request.

    Returns:
        Continuations of each method, in the order of the prompts.
    """
    done: dict[str, list[Completion]] = {method: [] for method in clients}
    for turn in plan_turns(list(clients), len(prompts), shift):
        report(f"prompt {turn.prompt_index + 1}/{len(prompts)}, {turn.method}")
        prompt = prompts[turn.prompt_index].text
        done[turn.method].append(clients[turn.method].complete(prompt))
    return done


def pass_speed(completions: Sequence[Completion]) -> float:
    """Tokens per second of one pass of one method, prefills included."""
    num_tokens = sum(len(each.token_ids) for each in completions)
    return num_tokens / sum(each.seconds for each in completions)


def summarise(
    passes: Sequence[Mapping[str, Sequence[Completion]]],
    counters: Mapping[str, SpecCounters],
) -> dict[str, Measurement]:
    """Turn timed passes into figures.

    Args:
        passes: Timed passes, each with every method.
        counters: Of each method's server, over these passes.

    Returns:
        One measurement for each method.
    """
    speeds = {
        method: tuple(pass_speed(each[method]) for each in passes)
        for method in counters
    }
    baseline = speeds[NO_SPECULATION]
    return {
        method: Measurement(
            tokens_per_s=own,
            speedup=tuple(a / b for a, b in zip(own, baseline, strict=True)),
            counters=counters[method],
        )
        for method, own in speeds.items()
    }


def find_differences(
    passes: Sequence[Mapping[str, Sequence[Completion]]], prompts: Sequence[Prompt]
) -> list[Difference]:
    """Compare every continuation with the first one of no speculation.

    Args:
        passes: All passes, the untimed ones too.
        prompts: Their prompts.

    Returns:
        What differs; empty when all methods and passes agree, as they must.
    """
    expected = passes[0][NO_SPECULATION]
    return [
        Difference(method, prompt.source, _first_difference(want, got))
        for each in passes
        for method, completions in each.items()
        for prompt, want, got in zip(prompts, expected, completions, strict=True)
        if (want.token_ids, want.text) != (got.token_ids, got.text)
    ]


def _first_difference(want: Completion, got: Completion) -> int:
    pairs = zip(want.token_ids, got.token_ids, strict=False)
    for position, (expected, actual) in enumerate(pairs):
        if expected != actual:
            return position
    return min(len(want.token_ids), len(got.token_ids))
