"""Which kernels run on a device: picked once, when a worker starts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from vllm_mtp.records import GreedyStep, RollbackPlan

MODULES = {
    "native": "vllm_mtp.kernels.native_ops",
    "triton": "vllm_mtp.kernels.triton_ops",
    "reference": "vllm_mtp.kernels.reference",
}
"""Every backend and its module; all have the same function names."""

PREFERENCE = {
    "cuda": ("native", "triton", "reference"),
    # Triton has no CPU target, only an interpreter: it runs there when it is asked for.
    "cpu": ("native", "reference"),
}
"""Fastest first; a device type that is not named has the reference."""


class BackendUnavailableError(RuntimeError):
    """A backend was asked for that this installation cannot run on this device."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The kernels in use; signatures are those of ``reference``."""

    name: str
    device_type: str
    rollback_metadata: Callable[[RollbackPlan, torch.Tensor, torch.Tensor], None]
    pad_rejected_rows: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    scrub_rejected_slots: Callable[
        [
            list[torch.Tensor],
            list[torch.Tensor],
            torch.Tensor,
            torch.Tensor,
            torch.Tensor,
        ],
        None,
    ]
    accept_greedily: Callable[
        [GreedyStep, torch.Tensor, torch.Tensor, torch.Tensor], None
    ]


def choose(device: torch.device, backend: str | None = None) -> Backend:
    """The kernels for a device, the same record each time.

    Args:
        device: that the tensors of a step lie on.
        backend: name of the only backend to accept; None takes the fastest.

    Raises:
        BackendUnavailableError: ``backend`` is unknown or cannot run on ``device``.
    """
    if backend is None:
        names = PREFERENCE.get(device.type, ("reference",))
        backend = next(name for name in names if _why_unavailable(name, device) is None)
    elif backend not in MODULES:
        raise BackendUnavailableError(
            f"backend = {backend!r} is unknown; must be one of {', '.join(MODULES)}"
        )
    elif reason := _why_unavailable(backend, device):
        usable = [name for name, why in available(device).items() if why is None]
        raise BackendUnavailableError(
            f"backend = {backend!r} cannot run on {device}, where "
            f"{', '.join(usable)} can: {reason}"
        )
    return _backend(backend, device.type)


def available(device: torch.device) -> dict[str, str | None]:
    """Why each backend cannot run on a device; None where it can."""
    return {name: _why_unavailable(name, device) for name in MODULES}


def _why_unavailable(name: str, device: torch.device) -> str | None:
    if name == "reference":
        return None
    try:
        module = _module(name)
    except ImportError as error:
        return f"{MODULES[name]} cannot be imported: {error}"
    reason: str | None = module.why_unavailable(device)
    return reason


@cache
def _backend(name: str, device_type: str) -> Backend:
    module = _module(name)
    return Backend(
        name=name,
        device_type=device_type,
        rollback_metadata=module.rollback_metadata,
        pad_rejected_rows=module.pad_rejected_rows,
        scrub_rejected_slots=module.scrub_rejected_slots,
        accept_greedily=module.accept_greedily,
    )


def _module(name: str) -> ModuleType:
    """Imported when it is first asked for: Triton takes a second and may be absent."""
    return import_module(MODULES[name])
