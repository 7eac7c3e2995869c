"""Engines start in a fraction of the time where others have started before.

Tests start hundreds, one after another in a process. A start of 0.7 s CPU time is made
of 0.1 s of work and of what has no effect from the second start on: looking for garbage
among all that was imported, putting the same kernels into the same places, and copying
the same tokenizer.
"""

import copy
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

collect_garbage = gc.collect
"""Also where `imports_frozen` has vLLM do without."""


@contextmanager
def imports_frozen() -> Iterator[None]:
    """Within: engines start, run and end, and what importing vLLM left stays frozen.

    An engine that starts and ends collects garbage ten times, and one that ends thaws
    what is frozen: of what it was itself it must. Here who started it collects, once
    and behind it.
    """
    freeze_imports()
    from vllm.tokenizers import hf

    without = dict.fromkeys(("freeze", "unfreeze"), _do_nothing)
    with (
        mock.patch.multiple(gc, collect=_collect_nothing, **without),
        mock.patch.object(hf, "copy", _COPIES),
    ):
        yield


@cache
def freeze_imports() -> None:
    """Let the garbage collector pass over what importing vLLM left, once for all."""
    import vllm
    import vllm.entrypoints.llm  # noqa: F401

    _register_kernels_once()
    _inspect_models_here()
    collect_garbage()
    gc.freeze()


def _register_kernels_once() -> None:
    """vLLM looks through all modules, anew at each start, for kernels to replace.

    Those whose replacement is in place already are left out: modules that are imported
    later get it from there. What something else has replaced meanwhile is put back.
    """
    from vllm.triton_utils import dispatcher

    register = dispatcher.register_kernels

    def register_others(overrides: Mapping[str, Callable[..., Any]]) -> None:
        def is_in_place(name: str) -> bool:
            owner, attribute = dispatcher._resolve_kernel(name)
            present = getattr(owner, attribute)
            return getattr(present, "_impl", None) is overrides[name]

        others = {n: impl for n, impl in overrides.items() if not is_in_place(n)}
        if others:
            register(others)

    dispatcher.register_kernels = register_others


def _inspect_models_here() -> None:
    """vLLM asks a process of its own what a model class can do, lest CUDA begins here.

    That imports vLLM anew for each class, 7 s of a core. Without a GPU nothing begins.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda inspect: inspect()


class _Copies:
    """The module `copy` where vLLM copies a tokenizer for the threads of an engine.

    The engines here have one thread, and the copy of an engine that has ended serves
    the next one with that tokenizer.
    """

    copy = staticmethod(copy.copy)

    def __init__(self) -> None:
        """Nothing was copied yet."""
        self._copies: dict[int, tuple[Any, Any]] = {}

    def deepcopy(self, tokenizer: Any) -> Any:
        """A copy, perhaps an old one."""
        # vLLM loads each once; what engines are given are flat copies.
        loaded = getattr(tokenizer, "_tokenizer", tokenizer)
        if id(loaded) not in self._copies:
            self._copies[id(loaded)] = loaded, copy.deepcopy(tokenizer)
        return self._copies[id(loaded)][1]


_COPIES = _Copies()


def _do_nothing() -> None:
    """What an engine does to the collector's frozen objects here."""


def _collect_nothing(generation: int = 2) -> int:
    """What an engine finds that looks for garbage."""
    return 0
