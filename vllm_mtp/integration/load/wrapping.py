"""Functions of vLLM that are wrapped once in a process, whoever asks again.

Others wrap them, too: tracing agents, for instance. A decorator that was there before
is wrapped with what it decorates. One that came later is distinguished from vLLM's own
function by ``__wrapped__``, as ``functools.wraps`` sets it: ours is under it and stays
there.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

_MARK = "_mtp_plus_wrapper"
"""Attribute of our wrappers: the wrapper itself. ``functools.wraps`` copies attributes,
so whoever wraps one of ours has the attribute as well, but is not its value."""


def wrap_once(
    owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> None:
    """Replace a method by its wrapped self, unless ours is there already.

    Args:
        owner: Class of vLLM.
        name: Of a method, static or not.
        wrap: Makes the new function.
    """
    original = getattr(owner, name)
    if _ours_in(original) is None:
        ours = functools.wraps(original)(wrap(original))
        setattr(ours, _MARK, ours)
        _put(owner, name, ours)


def unwrap(owner: type, name: str) -> None:
    """Put back what our wrapper was put around; decorators around ours go with it."""
    ours = _ours_in(getattr(owner, name))
    if ours is not None:
        _put(owner, name, ours.__wrapped__)


def is_wrapped(owner: type, name: str) -> bool:
    """Whether a method is ours, or says that it wraps ours."""
    return _ours_in(getattr(owner, name)) is not None


def _ours_in(function: Any) -> Any:
    """Our wrapper among a function and those that it says it wraps, or ``None``."""
    while function is not None:
        if getattr(function, _MARK, None) is function:
            return function
        function = getattr(function, "__wrapped__", None)
    return None


def _put(owner: type, name: str, function: Callable[..., Any]) -> None:
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(function) if is_static else function)
