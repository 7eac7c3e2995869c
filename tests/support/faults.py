"""Faults that tests plant in drafting."""

from typing import Any

from prometheus_client import REGISTRY


class PlantedError(RuntimeError):
    """Nothing in the package raises it."""


def break_call(owner: Any, name: str, call: int, runs_first: bool = False) -> list[int]:
    """Let a method raise in one of its calls and every later one.

    Args:
        owner: Class or object.
        name: Of the method.
        call: The first call that fails, from 1.
        runs_first: The method does its work before it fails.

    Returns:
        A list of one number: how often it has failed.
    """
    method, calls, failures = getattr(owner, name), [0], [0]

    def breaks(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] < call:
            return method(*args, **kwargs)
        failures[0] += 1
        if runs_first:
            method(*args, **kwargs)
        raise PlantedError(f"call {calls[0]} of {name}")

    setattr(owner, name, breaks)
    return failures


def counted_failures() -> dict[str, float]:
    """`vllm_mtp:drafting_failures_total` by part, of engines in this process."""
    return {
        sample.labels["part"]: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == "vllm_mtp:drafting_failures_total"
    }
