"""What one symbol of vLLM that this package is built on is described by."""

from typing import NamedTuple


class Seam(NamedTuple):
    """One symbol of vLLM and the parameter names that we pass or override."""

    group: str
    """``core`` or what needs it: ``v1``, ``v2``, ``cpu``."""
    path: str
    """Dotted module path, then attribute path."""
    parameters: tuple[str, ...] = ()
