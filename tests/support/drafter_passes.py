"""Passes of a drafter's model: over how many rows, and which of them were whole."""

from dataclasses import dataclass, field
from typing import Any

from vllm.model_executor.layers.linear import RowParallelLinear

from tests.support.engines import model_runner


@dataclass
class Passes:
    """Rows of each pass."""

    begun: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    """The others wrote keys and values alone, or nothing."""


def drafter_of(llm: Any) -> Any:
    """Of either model runner; None without speculation."""
    runner = model_runner(llm)
    return getattr(runner, "drafter", None) or getattr(runner, "speculator", None)


def watch_passes(llm: Any) -> Passes:
    """Of an engine's drafter, from here on."""
    passes, model = Passes(), drafter_of(llm).model
    # Hooks of torch are passed by where vLLM's decorator is on the class.
    forward, products = model.forward, _count_products(model)

    def watched(*args: Any, **kwargs: Any) -> Any:
        num_rows = kwargs["positions"].shape[-1]
        passes.begun.append(num_rows)
        before = products[0]
        output = forward(*args, **kwargs)
        if products[0] > before:
            passes.whole.append(num_rows)
        return output

    model.forward = watched
    return passes


def _count_products(model: Any) -> list[int]:
    """Matrix products of the last projection behind the attention, from here on."""
    count = [0]
    last = [m for m in model.modules() if isinstance(m, RowParallelLinear)][-1]
    apply = last.quant_method.apply

    def counted(layer: Any, *args: Any, **kwargs: Any) -> Any:
        count[0] += layer is last
        return apply(layer, *args, **kwargs)

    last.quant_method.apply = counted
    return count
