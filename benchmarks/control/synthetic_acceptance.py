"""Laws of acceptance: what the target would accept, request by request.

One law covers those that the literature and the issue trackers describe::

    geometric            one probability for every position
    decaying             a probability for each position, as of a layer trained for one
                         step (70/11/2 %: FastMTP)
    heterogeneous        requests differ by a log-odds shift of their own (`spread`)
    kinds                requests of different kinds have profiles of different shape
    context-decaying     log-odds fall with each doubling of the context
    drifting             log-odds swing slowly with the steps
    phase-switching      the profile changes at given steps
    bursty               each request wanders between easy and hard stretches

Tokens are accepted independently given these probabilities. Real acceptance is burstier
still (boilerplate, then prose).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# [num_requests] or [num_requests, K_max]
Array = NDArray[Any]

Profile = tuple[float, ...]
"""Conditional acceptance by position; the last one repeats."""


def decaying(*probabilities: float) -> Profile:
    """A profile given position by position."""
    return probabilities


def geometric(probability: float) -> Profile:
    """The same probability at every position."""
    return (probability,)


@dataclass(frozen=True)
class AcceptanceLaw:
    """Conditional acceptance of every request, position, context length and step."""

    profiles: tuple[Profile, ...]
    """One for each kind of request; kinds are equally frequent."""
    spread: float = 0.0
    """Standard deviation of the requests' log-odds shifts."""
    context_decay: float = 0.0
    """Log-odds lost with each doubling of the context beyond 1,024 tokens."""
    drift: float = 0.0
    """Amplitude of the slow swing, log-odds."""
    drift_period_steps: float = 1000.0
    phases: tuple[tuple[int, tuple[Profile, ...]], ...] = ()
    """(first step, profiles from then on), in order."""
    bursts: float = 0.0
    """Log-odds above and below the mean of easy and hard stretches."""
    burst_steps: float = 20.0
    """Mean length of a stretch."""
    sampled_loss: float = 1.0
    """Log-odds that a request with temperature accepts less."""

    def describe(self) -> str:
        """What sets it apart, in words."""
        words = [_describe(self.profiles)]
        if self.phases:
            words += [
                f"from step {step} {_describe(profiles)}"
                for step, profiles in self.phases[:2]
            ]
            words += ["and so on"] if len(self.phases) > 2 else []
        if self.spread:
            words.append(f"requests differ by {self.spread:g} log-odds")
        if self.context_decay:
            words.append(f"{self.context_decay:g} log-odds less per context doubling")
        if self.drift:
            period = f"{self.drift_period_steps:g} steps"
            words.append(f"swings by {self.drift:g} log-odds in {period}")
        if self.bursts:
            words.append(f"bursts of {self.bursts:g} log-odds")
        return ", ".join(words)

    def profiles_at(self, step: int) -> tuple[Profile, ...]:
        """Profiles in force at a step."""
        current = self.profiles
        for first_step, profiles in self.phases:
            if step >= first_step:
                current = profiles
        return current

    def conditional(
        self, step: int, max_draft_length: int, kinds: Array, shifts: Array,
        contexts: Array,
    ) -> Array:  # fmt: skip
        """Probabilities of acceptance.

        Args:
            step: Number of the engine step.
            max_draft_length: K_max.
            kinds: Uniform numbers in 0..1 that say which kind a request is.
            shifts: Each request's log-odds shift, bursts and regime included.
            contexts: Context lengths, tokens.

        Returns:
            [num_requests, K_max].
        """
        profiles = self.profiles_at(step)
        table = np.array(
            [
                [profile[min(j, len(profile) - 1)] for j in range(max_draft_length)]
                for profile in profiles
            ]
        )
        base = table[np.minimum((kinds * len(table)).astype(int), len(table) - 1)]
        base = np.clip(base, 1e-6, 1 - 1e-6)
        doublings = np.log2(np.maximum(contexts, 1024) / 1024)
        swing = self.drift * np.sin(2 * np.pi * step / self.drift_period_steps)
        shift = shifts + swing - self.context_decay * doublings
        odds = base / (1 - base) * np.exp(shift)[:, None]
        result: Array = odds / (1 + odds)
        return result


def _describe(profiles: tuple[Profile, ...]) -> str:
    kinds = [
        "/".join(f"{100 * probability:.0f}" for probability in profile)
        for profile in profiles
    ]
    return f"accepts {' or '.join(kinds)} %"
