"""Copies between host and device that would make the host wait on a GPU."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TO, _COPY = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default
_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class BlockingCopies(TorchDispatchMode):
    """Within: copies from the CPU to another device, and what reads from it.

    Attributes:
        found: Names of operations that would wait.
        num_copies: Those to the device, waiting or not.
    """

    def __init__(self) -> None:
        """None was seen yet."""
        super().__init__()
        self.found: list[str] = []
        self.num_copies = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if function in _READS and args[0].device.type != "cpu":
            self.found.append(str(function))
        result = function(*args, **given)
        if function is _TO:
            self._note(function, args[0], result, given.get("non_blocking", False))
        elif function is _COPY:
            self._note(function, args[1], result, any(args[2:]) or any(given.values()))
        return result

    def _note(
        self, function: Any, source: torch.Tensor, copy: torch.Tensor, is_async: bool
    ) -> None:
        if source.device != copy.device:
            self.num_copies += 1
            if not is_async:
                self.found.append(str(function))
