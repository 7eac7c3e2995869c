"""Are the weights of an MTP layer what a loader and a drafter need? Read from files.

An MTP layer that was lost, zeroed, or rounded away in quantization loads and serves:
the output stays right and next to no draft is accepted. What a file can tell:

- *missing*: the decoder layer within it lacks weights that a layer of the trunk has;
- *wrong shape*: a weight of that decoder layer is shaped unlike the trunk's;
- *not finite*, *zero*: of the numbers themselves;
- *rounded away*: a weight of thousands of numbers that are only a few different ones;
- *unlike the trunk*: typical size 30 times smaller or larger than the same weight of
  the trunk;
- *lost scales*: stored in 8 bits or fewer, with none of the scales that the trunk has.

Numbers that are in the wrong place cannot be told from right ones: for that, drafts
have to be tried.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open

MAX_BYTES_PER_TENSOR = 64 * 2**20
"""More of a tensor is not read: rows at even distances stand for it."""
FEW_VALUES, MANY_NUMBERS = 16, 4096
USUAL_RATIO = 30.0
USUAL_SHARE = 0.5
"""Of a trunk layer's weights that an MTP layer of its kind has, even if damaged."""
SCALES = re.compile(r"(scale|scales|scale_inv|qzeros|zeros|absmax|quant_state)\b")
LOW_BITS = frozenset({"I8", "U8", "I32", "F8_E4M3", "F8_E5M2"})
"""Data types that are meant to be scaled."""

_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2}
_TRUNK_LAYER = re.compile(r"(.*?\blayers\.)(\d+)\.(.+)")


class Problem(NamedTuple):
    """Something wrong with a weight."""

    kind: str
    """Of the list in the module's docstring."""
    weight: str
    """Its name, or that of what is missing."""
    detail: str


class Header(NamedTuple):
    """What a file says of a tensor before it is read."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


def read_headers(folder: Path) -> dict[str, Header]:
    """All tensors of a checkpoint folder, by name."""
    headers = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no mapping
                part = tensors.get_slice(name)
                shape = tuple(part.get_shape())
                headers[name] = Header(str(part.get_dtype()), shape, file)
    return headers


def weight_bytes(headers: Mapping[str, Header], mtp_patterns: Sequence[str]) -> int:
    """Of all weights of the MTP layers, as stored."""
    return sum(
        prod(header.shape) * _BYTES.get(header.dtype, 1)
        for name, header in headers.items()
        if any(re.match(pattern, name) for pattern in mtp_patterns)
    )


def examine(
    headers: Mapping[str, Header], mtp_patterns: Sequence[str]
) -> Iterator[Problem]:
    """Everything that is wrong with the MTP layers of a checkpoint.

    Args:
        headers: Of all its tensors.
        mtp_patterns: For each MTP layer, what its weights' names begin with (regular
            expressions).
    """
    for pattern in mtp_patterns:
        own = [name for name in headers if re.match(pattern, name)]
        if not own:
            wanted = pattern.replace("\\", "") + "*"
            yield Problem("missing", wanted, "none of its weights is there")
            continue
        trunk = _trunk_layer_like(own, headers, mtp_patterns)
        yield from _compare_with_trunk(own, trunk, headers)
        for name in own:
            yield from _examine_numbers(name, _same_weight(name, trunk), headers)


def _trunk_layer_like(
    own: Sequence[str], headers: Iterable[str], mtp_patterns: Sequence[str]
) -> dict[str, str]:
    """Names of the weights of a trunk layer, by what follows its number.

    Of the layer that has most of them in common with the MTP layer's: a model may have
    dense layers and others with experts.
    """
    layers: dict[int, dict[str, str]] = {}
    for name in headers:
        found = _TRUNK_LAYER.fullmatch(name)
        if found and not any(re.match(pattern, name) for pattern in mtp_patterns):
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


def _compare_with_trunk(
    own: Sequence[str], trunk: Mapping[str, str], headers: Mapping[str, Header]
) -> Iterator[Problem]:
    known = {_same_weight(name, trunk): name for name in own}
    known.pop(None, None)
    if len(known) < USUAL_SHARE * len(trunk):
        return  # built unlike the trunk
    trunk_has_scales = any(SCALES.search(name) for name in trunk)
    has_scales = any(SCALES.search(name) for name in own)
    for suffix, theirs in trunk.items():
        if theirs in known:
            ours, shape = known[theirs], headers[theirs].shape
            if headers[ours].shape != shape:
                yield Problem(
                    "wrong shape",
                    ours,
                    f"{headers[ours].shape}, in the trunk {shape}",
                )
        elif not SCALES.search(suffix) and "." in suffix:
            yield Problem("missing", f"*.{suffix}", f"the trunk has {theirs}")
    for ours in own:
        if headers[ours].dtype in LOW_BITS and trunk_has_scales and not has_scales:
            detail = f"{headers[ours].dtype} without scales, which the trunk has"
            yield Problem("lost scales", ours, detail)


def _examine_numbers(
    name: str, reference: str | None, headers: Mapping[str, Header]
) -> Iterator[Problem]:
    if headers[name].dtype in LOW_BITS or headers[name].dtype == "BOOL":
        return  # mean nothing without their scales
    numbers = _read(name, headers)
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
        size = numbers.std().item()
        usual = _read(reference, headers).std().item()
        if usual and not 1 / USUAL_RATIO < size / usual < USUAL_RATIO:
            detail = f"typical size {size:.2g}, in the trunk {usual:.2g}"
            yield Problem("unlike the trunk", name, detail)


def _read(name: str, headers: Mapping[str, Header]) -> torch.Tensor:
    """``[any]`` float32: the numbers, or of a large tensor rows that stand for them."""
    header = headers[name]
    with safe_open(header.file, framework="pt") as tensors:
        if not header.shape:
            scalar: torch.Tensor = tensors.get_tensor(name).float().flatten()
            return scalar
        part = tensors.get_slice(name)
        num_rows = header.shape[0]
        row_bytes = 4 * prod(header.shape[1:])
        num_read = max(1, min(num_rows, MAX_BYTES_PER_TENSOR // max(row_bytes, 1)))
        if num_read == num_rows:
            whole: torch.Tensor = part[:].float().flatten()
            return whole
        starts = torch.linspace(0, num_rows - 1, num_read).long().tolist()
        return torch.cat([part[i : i + 1].float().flatten() for i in starts])
