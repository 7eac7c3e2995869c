"""Are the numbers of an MTP layer's weights what a drafter needs? Read from files.

An MTP layer that was zeroed, or rounded away in quantization, loads and serves: the
output stays right and next to no draft is accepted. What a file can tell:

- *not finite*, *zero*: of the numbers themselves;
- *rounded away*: a weight of thousands of numbers that are only a few different ones;
- *unlike the trunk*: typical size 30 times smaller or larger than the same weight of
  the trunk;
- *lost scales*: stored in 8 bits or fewer, with none of the scales that the trunk has.

Numbers that are in the wrong place cannot be told from right ones: for that, drafts
have to be tried.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from vllm_mtp.config import ConfigError
from vllm_mtp.integration.load.layout import USUAL, Layout

MAX_BYTES_PER_TENSOR = 64 * 2**20
"""More of a tensor is not read: rows at even distances stand for it."""
FEW_VALUES, MANY_NUMBERS = 16, 4096
USUAL_RATIO = 30.0
SCALES = re.compile(r"(scale|scales|scale_inv|qzeros|zeros|absmax|quant_state)\b")
LOW_BITS = frozenset({"I8", "U8", "I32", "F8_E4M3", "F8_E5M2"})
"""Data types that are meant to be scaled."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By their names in safetensors files."""
_TRUNK_LAYER = re.compile(r"(.*?\blayers\.)(\d+)\.(.+)")


class Problem(NamedTuple):
    """Something wrong with a weight."""

    kind: str
    """Of the list in the module's docstring, or of `checkpoint.examine_weights`."""
    weight: str
    """Its name."""
    detail: str


class Header(NamedTuple):
    """What a file says of a tensor before it is read."""

    dtype: str
    """As written in the file."""
    shape: tuple[int, ...]
    file: Path | None
    """None where it is not on this machine."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """What torch calls it; bytes where torch has no name for it."""
        return DTYPES.get(self.dtype, torch.uint8)


@dataclass(frozen=True)
class DryLoad:
    """What vLLM's draft model takes of a checkpoint (`dry_load.py`)."""

    model: str
    """Class of vLLM's draft model."""
    own: list[str]
    """Names in the checkpoint of the MTP layers' weights."""
    missing: list[str]
    """In the checkpoint's names."""
    nameless: list[str]
    """Missing, too: parameters in vLLM's names, where no other is known."""
    wrong_shape: dict[str, str]
    """Shape and the one wanted, by name in the checkpoint."""
    unknown: dict[str, str]
    """What vLLM says about weights that it has no place for."""
    layout: Layout = USUAL
    """How they were given to it."""

    @property
    def is_whole(self) -> bool:
        return not (self.missing or self.nameless or self.wrong_shape or self.unknown)


def read_headers(files: Iterable[Path]) -> dict[str, Header]:
    """All tensors of safetensors files, by name.

    Raises:
        ConfigError: One cannot be read.
    """
    headers = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - no mapping
                    part = tensors.get_slice(name)
                    shape = tuple(part.get_shape())
                    headers[name] = Header(str(part.get_dtype()), shape, file)
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{file} cannot be read: {error}.") from None
    return headers


def weight_bytes(headers: Mapping[str, Header], own: Iterable[str]) -> int:
    """Of the weights ``own``, as stored."""
    return sum(
        prod(headers[name].shape) * headers[name].torch_dtype.itemsize for name in own
    )


def examine(
    headers: Mapping[str, Header],
    own: Collection[str],
    max_bytes: int = MAX_BYTES_PER_TENSOR,
) -> Iterator[Problem]:
    """Everything that is wrong with the numbers of MTP layers.

    Args:
        headers: Of all tensors of a checkpoint.
        own: Names of the MTP layers' weights.
        max_bytes: Of a tensor that are read, in float32, as long as they look right.
            With fewer than `MAX_BYTES_PER_TENSOR` sizes are not compared.
    """
    trunk = _trunk_layer_like(own, headers)
    yield from _find_lost_scales(own, trunk, headers)
    is_quick = max_bytes < MAX_BYTES_PER_TENSOR
    with _Numbers(headers) as numbers:
        for name in own:
            if headers[name].file is None:
                continue
            if is_quick and not any(_examine_numbers(name, None, numbers, max_bytes)):
                continue
            reference = _same_weight(name, trunk)
            yield from _examine_numbers(name, reference, numbers, MAX_BYTES_PER_TENSOR)


def _trunk_layer_like(own: Collection[str], headers: Iterable[str]) -> dict[str, str]:
    """Names of the weights of a trunk layer, by what follows its number.

    Of the layer that has most of them in common with the MTP layer's: a model may have
    dense layers and others with experts.
    """
    known = frozenset(own)
    layers: dict[int, dict[str, str]] = {}
    for name in headers:
        found = _TRUNK_LAYER.fullmatch(name)
        if found and name not in known:
            layers.setdefault(int(found[2]), {})[found[3]] = name
    if not layers:
        return {}

    def likeness(index: int) -> tuple[float, int]:
        layer = layers[index]
        shared = sum(_same_weight(name, layer) is not None for name in own)
        return shared / len(layer), index

    return layers[max(layers, key=likeness)]


def _same_weight(name: str, trunk: Mapping[str, str]) -> str | None:
    """The trunk's weight of the same kind."""
    parts = name.split(".")
    for start in range(len(parts)):
        if (suffix := ".".join(parts[start:])) in trunk:
            return trunk[suffix]
    return None


def _find_lost_scales(
    own: Collection[str], trunk: Mapping[str, str], headers: Mapping[str, Header]
) -> Iterator[Problem]:
    trunk_has_scales = any(SCALES.search(name) for name in trunk)
    if not trunk_has_scales or any(SCALES.search(name) for name in own):
        return
    for name in own:
        if headers[name].dtype in LOW_BITS:
            detail = f"{headers[name].dtype} without scales, which the trunk has"
            yield Problem("lost scales", name, detail)


def _examine_numbers(
    name: str, reference: str | None, source: "_Numbers", max_bytes: int
) -> Iterator[Problem]:
    headers = source.headers
    if headers[name].dtype in LOW_BITS or headers[name].dtype == "BOOL":
        return  # mean nothing without their scales
    numbers = source.read(name, max_bytes)
    if not numbers.numel():
        return
    if not torch.isfinite(numbers).all():
        share = (~torch.isfinite(numbers)).double().mean().item()
        yield Problem("not finite", name, f"{share:.2%} NaN or infinite")
        return
    is_matrix = len(headers[name].shape) > 1
    if not is_matrix:
        return  # biases may well be zero, and norms all ones
    if (zeros := (numbers == 0).double().mean().item()) > 0.999:
        yield Problem("zero", name, f"{zeros:.2%} of its numbers")
        return
    if numbers.numel() >= MANY_NUMBERS:
        num_values = len(torch.unique(numbers))
        if num_values <= FEW_VALUES:
            detail = f"{num_values} different numbers in {numbers.numel()}"
            yield Problem("rounded away", name, detail)
            return
    if reference is not None and headers[reference].dtype not in LOW_BITS:
        size = _typical_size(numbers)
        usual = _typical_size(source.read(reference, max_bytes))
        if usual and not 1 / USUAL_RATIO < size / usual < USUAL_RATIO:
            detail = f"typical size {size:.2g}, in the trunk {usual:.2g}"
            yield Problem("unlike the trunk", name, detail)


def _typical_size(numbers: torch.Tensor) -> float:
    """Root of the mean square, which a scale alone has, too."""
    return numbers.square().mean().sqrt().item()


class _Numbers(ExitStack):
    """Reads tensors. A file stays open: to open one means to parse all its headers."""

    def __init__(self, headers: Mapping[str, Header]) -> None:
        super().__init__()
        self.headers = headers
        self._files: dict[Path | None, Any] = {}

    def read(self, name: str, max_bytes: int) -> torch.Tensor:
        """``[any]`` float32: all numbers, or of a large tensor rows at even
        distances."""
        file, shape = self.headers[name].file, self.headers[name].shape
        if file not in self._files:
            opened = safe_open(file, framework="pt")
            self._files[file] = self.enter_context(opened)
        tensors = self._files[file]
        if not shape:
            scalar: torch.Tensor = tensors.get_tensor(name).float().flatten()
            return scalar
        part, num_rows, row_bytes = (
            tensors.get_slice(name),
            shape[0],
            4 * prod(shape[1:]),
        )
        num_read = max(1, min(num_rows, max_bytes // max(row_bytes, 1)))
        if num_read == num_rows:
            whole: torch.Tensor = part[:].float().flatten()
            return whole
        starts = torch.linspace(0, num_rows - 1, num_read).long().tolist()
        return torch.cat([part[i : i + 1].float().flatten() for i in starts])
