"""Functions of vLLM that are wrapped once, whoever asks again."""

from collections.abc import Callable
from typing import Any


def wrap_once(
    owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a method by its wrapped self, unless it is that already.

    Args:
        owner: Class of vLLM.
        name: Of a method.
        wrap: Makes the new function; uses ``functools.wraps``, which marks it.
    """
    original = owner.__dict__[name]
    if not hasattr(original, "__wrapped__"):
        setattr(owner, name, wrap(original))
