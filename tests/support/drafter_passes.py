"""Passes of a drafter's model: over how many rows, and which ran to their end."""

from dataclasses import dataclass, field
from typing import Any

from tests.support.engines import model_runner


@dataclass
class Passes:
    """Rows of each pass."""

    begun: list[int] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    """The others stopped on the way."""


def drafter_of(llm: Any) -> Any:
    """Of either model runner; None without speculation."""
    runner = model_runner(llm)
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def watch_passes(llm: Any) -> Passes:
    """Of an engine's drafter, from here on."""
    passes, model = Passes(), drafter_of(llm).model
    # Hooks of torch are passed by where vLLM's decorator is on the class.
    forward = model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        num_rows = kwargs["positions"].shape[-1]
        passes.begun.append(num_rows)
        output = forward(*args, **kwargs)
        passes.ended.append(num_rows)
        return output

    model.forward = watched
    return passes
