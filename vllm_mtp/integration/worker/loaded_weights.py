"""Are all of the draft model's weights there once vLLM has loaded it?

Before a start only safetensors files can be asked, and of large weights only some rows
(`load/checkpoint.py`). What holds for every format: parameters are filled with NaN
before ``load_weights`` and looked at after it, before vLLM rearranges them. Quantized
layers are left alone: some of their parameters are vLLM's own.
"""

import functools
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import get_model_cls

from vllm_mtp.config import ConfigError
from vllm_mtp.integration.load.dry_load import is_plain, required_parameters
from vllm_mtp.integration.load.layout import USUAL, Layout, config_to_build_by

_PART_NUMBERS = 2**24
"""Of a parameter that are looked at in one go: what it takes in memory."""


@contextmanager
def checked_loading(model_config: Any, layout: Layout = USUAL) -> Iterator[None]:
    """The draft model is loaded in here, once.

    Args:
        model_config: Of the draft model.
        layout: Of its weights.

    Raises:
        ConfigError: names parameters that nothing was loaded into, or numbers that are
            not finite.
    """
    model_class: Any = get_model_cls(model_config)
    original, original_init = model_class.load_weights, model_class.__init__

    def load_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = dict(_fillable(self))
        for each in parameters.values():
            each.data.fill_(torch.nan)
        loaded = original(self, *args, **kwargs)
        lost = [n for n, each in _fillable(self) if n in parameters and _is_lost(each)]
        if lost:
            raise ConfigError(
                f"model {model_config.model!r}: nothing was loaded into these weights "
                "of its MTP layers, or numbers that are not finite: "
                f"{', '.join(lost)}. Use a checkpoint that kept them."
            )
        return loaded

    @functools.wraps(original_init)  # vLLM looks at its parameters
    def initialize(self: Any, *, vllm_config: Any, **kwargs: Any) -> None:
        config = config_to_build_by(vllm_config, layout.quantization)
        original_init(self, vllm_config=config, **kwargs)
        read_unlisted_files(
            self, model_config.model, model_config.revision, layout.files
        )
        if layout.prefix:
            _drop_prefix(self, layout.prefix)

    with (
        _replaced(model_class, "load_weights", load_weights),
        _replaced(model_class, "__init__", initialize),
    ):
        yield


def read_unlisted_files(
    model: Any, folder: str, revision: str | None, files: Collection[str]
) -> None:
    """Have vLLM's loader read files that a checkpoint's index does not list.

    Args:
        model: vLLM's draft model.
        folder: Of the checkpoint that is loaded next.
        revision: Of that checkpoint.
        files: Names; those that the folder lacks are left out.
    """
    if files:
        model.secondary_weights = [
            DefaultModelLoader.Source(folder, revision, allow_patterns_overrides=[file])
            for file in files
            if (Path(folder) / file).is_file()
        ]


def _drop_prefix(model: Any, prefix: str) -> None:
    """Names of weights may begin with it, now and when they are loaded again."""

    def load_weights(
        weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any
    ) -> Any:
        named = ((name.removeprefix(prefix), each) for name, each in weights)
        return type(model).load_weights(model, named, *args, **kwargs)

    model.load_weights = load_weights
    if hasattr(model, "is_unused_checkpoint_weight"):
        is_unused = model.is_unused_checkpoint_weight
        model.is_unused_checkpoint_weight = lambda name: is_unused(
            name.removeprefix(prefix)
        )


@contextmanager
def _replaced(owner: type, name: str, method: Any) -> Iterator[None]:
    own = vars(owner).get(name)
    setattr(owner, name, method)
    try:
        yield
    finally:
        if own is None:  # inherited
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _fillable(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, each in required_parameters(model):
        if each.dtype.is_floating_point and not each.is_meta and is_plain(model, name):
            yield name, each


def _is_lost(parameter: torch.Tensor) -> bool:
    """Whether numbers of the checkpoint are missing or not finite. What vLLM has padded
    a parameter with becomes zero."""
    data = parameter.data
    num_rows = max(1, _PART_NUMBERS * len(data) // data.numel()) if data.dim() else 1
    parts = data.split(num_rows) if data.dim() else [data]
    num_lost = sum(int((~torch.isfinite(part)).sum()) for part in parts)
    expected = getattr(parameter, "weight_loader_numel", data.numel())
    if num_lost > data.numel() - expected:
        return True
    if num_lost:
        data.nan_to_num_(0.0)
    return False
