"""Models that vLLM keeps beside a vision tower, without torchvision.

Our environment has none that fits its PyTorch. Text-only Qwen3.5 calls none of it, but
the module that has its class imports it.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds all of torchvision: whatever is imported from it is a mock."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = lambda name: mock.MagicMock(name=name)


@contextmanager
def stand_in() -> Iterator[None]:
    """Within: models can be looked at and built."""
    from vllm.model_executor.models import registry

    modules = _Modules()
    sys.meta_path.append(modules)
    try:
        # Otherwise in a process that knows nothing of this.
        with mock.patch.object(registry, "_run_in_subprocess", lambda ask: ask()):
            yield
    finally:
        sys.meta_path.remove(modules)
