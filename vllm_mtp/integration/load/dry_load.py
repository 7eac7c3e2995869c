"""Which weights of a checkpoint vLLM's MTP model takes, tried without any memory.

The draft model is built on the meta device and its own ``load_weights`` is given every
tensor that the safetensors headers promise. What it writes where is seen by a
``TorchDispatchMode``, so vLLM itself says which names there are, for every family.

What was written nowhere is missing. Its name in the checkpoint is found by experiment:
names that the trunk's layers and the parameter suggest are given to ``load_weights``,
until one is written there. A parameter of a quantized layer counts only if one is: some
are made by vLLM itself.

Weights of embeddings and heads are left out, for vLLM shares the target's, unless the
model says that its head is its own.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from vllm_mtp.integration.load.weight_health import DryLoad, Header

_NUMBERED = re.compile(r"(.*?\.)(\d+)\.(.+)")
_PLAIN = (
    UnquantizedLinearMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedEmbeddingMethod,
)

Shape = tuple[int, ...]
Region = tuple[int, Shape, Shape]
"""Of a parameter: offset, sizes and strides, in elements."""


class UndecidedError(RuntimeError):
    """Without memory the loader cannot tell."""


class _Writes(TorchDispatchMode):
    """Sees what is written into parameters, and which tensor was being loaded."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.parameters = dict(required_parameters(model))
        self.regions: dict[str, dict[Region, str]] = {n: {} for n in self.parameters}
        """The tensor that a region was written from, by parameter."""
        self._owners = {_storage(each): n for n, each in self.parameters.items()}
        self._loading: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and self._loading is not None:
            written = args[0]
            owner = self._owners.get(_storage(written))
            if owner is not None:
                sizes, strides = tuple(written.shape), tuple(written.stride())
                place = (written.storage_offset(), sizes, strides)
                self.regions[owner].setdefault(place, self._loading)
        return result

    def other_names(self, owner: str) -> list[str]:
        """Of a parameter that modules share."""
        names = self.model.named_parameters(remove_duplicate=False)
        own = self.parameters[owner]
        return [name for name, each in names if each is own and name != owner]

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Exception]:
        """Load and go on after errors.

        Returns:
            What was raised, by the tensor that ``load_weights`` was given last; "" for
            what it raised at the end.
        """
        raised: dict[str, Exception] = {}
        rest = self._watched(tensors)
        while True:
            try:
                with self:
                    # A chain: loaders close what they are given when they raise.
                    self.model.load_weights(chain(rest))
                return raised
            except Exception as error:
                raised[self._loading or ""] = error
                if self._loading is None:
                    return raised

    def _watched(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            self._loading = name
            yield name, tensor
        self._loading = None

    def sources(self) -> dict[str, str]:
        """The parameter that it went to, by name in the checkpoint."""
        pairs = self.regions.items()
        return {source: owner for owner, each in pairs for source in each.values()}

    def num_taken(self) -> Counter[str]:
        """Elements that went into parameters, by name in the checkpoint."""
        taken: Counter[str] = Counter()
        for regions in self.regions.values():
            for (_, shape, _), source in regions.items():
                taken[source] += prod(shape)
        return taken

    def incomplete(self) -> list[str]:
        """Parameters with elements that nothing was written to."""
        return [
            name
            for name, each in self.parameters.items()
            if sum(prod(shape) for _, shape, _ in self.regions[name])
            # What vLLM pads a parameter with is not in the checkpoint.
            < getattr(each, "weight_loader_numel", each.numel())
        ]


def dry_load(model: Any, headers: Mapping[str, Header], num_layers: int) -> DryLoad:
    """Give a draft model on the meta device all tensors of a checkpoint.

    Args:
        model: One that vLLM has just built.
        headers: Of the whole checkpoint, the target's weights, too.
        num_layers: Decoder layers of the target.

    Raises:
        UndecidedError: vLLM's loader cannot do without the numbers themselves.
    """
    writes = _Writes(model)
    raised = writes.load((name, _empty(each)) for name, each in headers.items())
    at_the_end = raised.pop("", None)
    if at_the_end is not None and _wants_numbers(at_the_end):
        raise UndecidedError(_line(at_the_end))
    refused = dict(_refused(writes, headers, raised))
    sources, partly_taken = writes.sources(), _partly_taken(model, writes, headers)
    found = _find_names(writes, headers, refused, num_layers)
    unknown = {name: line for name, line in refused.items() if name not in found}
    wrong_shape = {
        name: f"{list(headers[name].shape)} instead of {list(shape)}"
        for name, shape in found.items()
        if name in headers
    } | partly_taken
    missing = [name for name in found if name not in headers]
    cut_off = {sources[name] for name in partly_taken}
    nameless = [name for name in _nameless(model, writes) if name not in cut_off]
    own = [name for name in headers if name in sources or name in wrong_shape]
    # An error at the end may be why nothing was written.
    return DryLoad(
        type(model).__name__,
        own,
        missing,
        nameless if at_the_end is None else [],
        wrong_shape,
        unknown,
    )


def _nameless(model: Any, writes: _Writes) -> list[str]:
    """Parameters that were not filled, as vLLM calls them."""
    return [name for name in writes.incomplete() if is_plain(model, name)]


def _partly_taken(
    model: Any, writes: _Writes, headers: Mapping[str, Header]
) -> dict[str, str]:
    """Weights that the loader takes a part of, and how much that is."""
    taken = writes.num_taken()
    return {
        name: f"{list(headers[name].shape)} of which vLLM takes {taken[name]} numbers"
        for name, owner in writes.sources().items()
        if taken[name] < prod(headers[name].shape) and is_plain(model, owner)
    }


def _refused(
    writes: _Writes, headers: Mapping[str, Header], raised: Mapping[str, Exception]
) -> Iterator[tuple[str, str]]:
    """Weights that the loader will not have, with its words.

    Raises:
        UndecidedError: It may have meant another one, or be able to do with numbers.
    """
    for name, error in raised.items():
        # Some loaders keep tensors, and raise only when they are given a later one.
        if name not in writes.load([(name, _empty(headers[name]))]):
            raise UndecidedError(_line(error))
        header = headers[name]
        zeros = torch.zeros(header.shape, dtype=header.torch_dtype, device="cpu")
        with_numbers = writes.load([(name, zeros)])
        if name not in with_numbers:
            continue
        if _wants_numbers(with_numbers[name]):
            raise UndecidedError(_line(error))
        yield name, _line(error)


def _wants_numbers(error: Exception) -> bool:
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


def _find_names(
    writes: _Writes,
    headers: Mapping[str, Header],
    refused: Collection[str],
    num_layers: int,
) -> dict[str, Shape]:
    """What would be written where nothing was: shapes by name in the checkpoint."""
    found: dict[str, Shape] = {}
    unwritten = writes.incomplete()
    for name, shape in _candidates(writes, headers, num_layers):
        if name in found or (name in headers and name not in refused):
            continue
        before = {owner: len(writes.regions[owner]) for owner in unwritten}
        writes.load([(name, _empty(Header("F32", shape, None)))])
        if any(len(writes.regions[owner]) > n for owner, n in before.items()):
            found[name] = shape
            unwritten = writes.incomplete()
        if not unwritten:
            break
    return found


def _candidates(
    writes: _Writes, headers: Mapping[str, Header], num_layers: int
) -> Iterator[tuple[str, Shape]]:
    """Names that what is missing may have, likely ones first, with likely shapes."""
    sources, unwritten = writes.sources(), writes.incomplete()
    if not unwritten:
        return
    heads = [each for owner in unwritten for each in _renumbered(owner, num_layers)]
    found = [_NUMBERED.match(name) for name in (*sources, *heads)]
    prefixes = dict.fromkeys(each[1] + each[2] for each in found if each)
    suffixes = {
        (each[3], header.shape): None
        for name, header in headers.items()
        if (each := _NUMBERED.match(name))
    }
    # First the names of the trunk: a loader may take those of its own parameters, too.
    for prefix in prefixes:
        for suffix, shape in suffixes:
            yield f"{prefix}.{suffix}", shape
    for owner in unwritten:
        shape = tuple(writes.parameters[owner].shape)
        for name in (*_like_others(owner, sources), *_renumbered(owner, num_layers)):
            yield name, shape
        # Of a head that is the embedding, too.
        yield from ((name, shape) for name in writes.other_names(owner))
    yield from _crossed(writes, headers, sources)


def _crossed(
    writes: _Writes, headers: Mapping[str, Header], sources: Mapping[str, str]
) -> Iterator[tuple[str, Shape]]:
    """Each module that MTP weights were found in, with all that any module has."""
    parents: dict[str, None] = {}
    for name in sources:
        parts = name.split(".")
        parents |= dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts)))
    shapes = {name: header.shape for name, header in headers.items()}
    shapes |= {n: tuple(writes.parameters[n].shape) for n in writes.incomplete()}
    leaves = dict.fromkeys((_leaf(name), shape) for name, shape in shapes.items())
    for parent in parents:
        # Experts beside the first have been found by their numbers.
        if sum(part.isdigit() for part in parent.split(".")) < 2:
            yield from ((f"{parent}.{leaf}", shape) for leaf, shape in leaves)


def _leaf(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _like_others(owner: str, sources: Mapping[str, str]) -> Iterator[str]:
    """The name in the checkpoint of a parameter whose name differs in one part, with
    that part exchanged."""
    wanted = owner.split(".")
    for name, other in sources.items():
        parts = other.split(".")
        if len(parts) != len(wanted):
            continue
        pairs = zip(parts, wanted, strict=True)
        differ = [(theirs, ours) for theirs, ours in pairs if theirs != ours]
        if len(differ) == 1:
            ((theirs, ours),) = differ
            yield ".".join(ours if e == theirs else e for e in name.split("."))


def _renumbered(owner: str, num_layers: int) -> Iterator[str]:
    """vLLM numbers MTP layers after the target's; some checkpoints do not."""
    found = _NUMBERED.match(owner)
    if found and int(found[2]) >= num_layers:
        yield f"{found[1]}{int(found[2]) - num_layers}.{found[3]}"
    yield owner


def required_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters that only the checkpoint can fill, each once."""
    seen = set()
    owns_head = getattr(model, "has_own_lm_head", False)
    for prefix, module in model.named_modules():
        is_own = owns_head and isinstance(module, ParallelLMHead)
        if (isinstance(module, VocabParallelEmbedding) and not is_own) or isinstance(
            getattr(module, "quant_method", None), BaseKVCacheMethod
        ):
            continue
        for name, each in module.named_parameters(recurse=False):
            if each.numel() and id(each) not in seen:
                seen.add(id(each))
                yield f"{prefix}.{name}".removeprefix("."), each


def is_plain(model: Any, name: str) -> bool:
    """Whether a parameter is one of a layer that is not quantized."""
    module = model.get_submodule(name.rpartition(".")[0])
    method = getattr(module, "quant_method", None)
    return not isinstance(method, QuantizeMethodBase) or isinstance(method, _PLAIN)


def _empty(header: Header) -> torch.Tensor:
    """``[header.shape]``: a scalar is a number, since loaders ask for its value."""
    device = "meta" if prod(header.shape) > 1 else "cpu"
    return torch.zeros(header.shape, dtype=header.torch_dtype, device=device)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _line(error: Exception | None) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
