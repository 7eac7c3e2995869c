"""Every symbol of vLLM that this package is built on: read from ``seams.toml``."""

import tomllib
from importlib.resources import files
from typing import NamedTuple, Self

_DATA_MARK = "= "


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

    @classmethod
    def parse(cls, group: str, text: str) -> Self:
        """From ``path``, ``path(parameter, ...)`` or ``= path`` of data."""
        path, _, parameters = text.removeprefix(_DATA_MARK).partition("(")
        names = tuple(parameters.removesuffix(")").split(", ")) if parameters else ()
        return cls(group, path, names, text.startswith(_DATA_MARK))


def read_seams() -> tuple[Seam, ...]:
    """All of them, in the file's order."""
    text = files(__package__).joinpath("seams.toml").read_text(encoding="utf-8")
    return tuple(
        Seam.parse(group, symbol)
        for group, parts in tomllib.loads(text).items()
        for part in parts
        for symbol in part["symbols"]
    )


SEAMS = read_seams()
