"""What one symbol of vLLM that this package is built on is described by."""

from typing import NamedTuple


class Seam(NamedTuple):
    """One symbol of vLLM and the parameter names that we pass or override."""

    group: str
    """``core`` or what needs it: ``v1``, ``v2``, ``cpu``."""
    path: str
    """Dotted module path, then attribute path."""
    parameters: tuple[str, ...] = ()
    is_data: bool = False
    """A constant or a property: read, not called."""

    @property
    def is_class(self) -> bool:
        """Subclassed or built by us; its name has capitals, as all of vLLM's."""
        return not self.is_data and self.path.rpartition(".")[2][0].isupper()
