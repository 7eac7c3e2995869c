"""What this package relies on in vLLM: every symbol and signature, checked at start.

``seams.toml`` is the whole list. A symbol that is gone, has lost a parameter or is no
function or class any more is named together with the installed version, before any
weight is loaded, instead of failing in the middle of a step. So is one whose parameters
are hidden by somebody's decorator without ``functools.wraps``.
"""

import inspect
import pkgutil
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from vllm_mtp.config import METHOD
from vllm_mtp.integration.load.seams import SEAMS, Seam

SUPPORTED_VLLM = SpecifierSet(">=0.32,<0.34", prereleases=True)
"""Same range as in pyproject.toml; a test keeps the two equal."""


class CompatibilityError(RuntimeError):
    """The installed vLLM lacks something that this package is built on."""


def check(groups: Iterable[str]) -> None:
    """Check the version, then every seam of ``groups``.

    Raises:
        CompatibilityError: names all missing symbols and the installed version.
    """
    check_version(version("vllm"))
    wanted = frozenset(groups)
    missing = [
        problem
        for seam in SEAMS
        if seam.group in wanted and (problem := find_problem(seam))
    ]
    if missing:
        raise CompatibilityError(
            f"method {METHOD!r} does not fit vllm {version('vllm')}: "
            f"{'; '.join(missing)}. Supported: vllm {SUPPORTED_VLLM}."
        )


def check_attributes(owner: object, names: Iterable[str]) -> None:
    """Check what no signature shows: attributes that vLLM sets when it builds objects.

    Raises:
        CompatibilityError: names the missing ones, their owner and the version.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise CompatibilityError(
            f"method {METHOD!r} does not fit vllm {version('vllm')}: "
            f"{type(owner).__name__} has no {', '.join(missing)}. "
            f"Supported: vllm {SUPPORTED_VLLM}."
        )


def check_version(installed: str) -> None:
    """Refuse a vLLM outside the tried range.

    Raises:
        CompatibilityError: names the installed and the supported versions.
    """
    if Version(installed) not in SUPPORTED_VLLM:
        low = min(Version(spec.version) for spec in SUPPORTED_VLLM)
        age = "old" if Version(installed) < low else "new"
        raise CompatibilityError(
            f"vllm {installed} is too {age} for method {METHOD!r}: "
            f"supported are versions {SUPPORTED_VLLM}."
        )


def find_problem(seam: Seam) -> str | None:
    """What is wrong with one seam, or ``None``."""
    try:
        symbol = pkgutil.resolve_name(seam.path)
    except (ImportError, AttributeError) as error:
        return f"{seam.path} is missing ({error})"
    if seam.is_data:
        return None
    if seam.is_class and not inspect.isclass(symbol):
        return f"{seam.path} is no class but {symbol!r:.80}"
    if not callable(symbol):
        return f"{seam.path} is no function but {symbol!r:.80}"
    if not seam.parameters:
        return None
    lost = set(seam.parameters) - _parameters_of(symbol)
    if lost:
        return f"{seam.path} has no parameter {', '.join(sorted(lost))}"
    return None


def _parameters_of(symbol: Callable[..., Any]) -> set[str]:
    """Names; none where a function does not say."""
    try:
        return set(inspect.signature(symbol).parameters)
    except (TypeError, ValueError):
        return set()
