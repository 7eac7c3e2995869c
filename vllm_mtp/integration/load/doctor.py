"""What vLLM makes of a model and of this machine, before anything is loaded."""

from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers.utils.hub import cached_file
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_mtp.config import METHOD, VLLM_METHOD, ConfigError
from vllm_mtp.integration.cpu.recurrent_layers import check_recurrent_layers
from vllm_mtp.integration.load import checkpoint, compat
from vllm_mtp.integration.load.child import in_child
from vllm_mtp.integration.load.headers import find_headers, unlisted_headers
from vllm_mtp.integration.load.layer_types import restore_layer_types
from vllm_mtp.integration.load.trial import try_loading
from vllm_mtp.integration.load.weight_health import (
    MAX_BYTES_PER_TENSOR,
    Problem,
    weight_bytes,
)
from vllm_mtp.kernels.dispatch import available

GROUPS = ("core", "v1", "v2", "cpu")


@dataclass(frozen=True)
class ModelFacts:
    """Of a model's config, as vLLM reads it."""

    architecture: str
    draft_architecture: str
    num_mtp_layers: int
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    dtype_bytes: int
    refusal: str
    """Why it is not served on this machine; empty if it may be."""


def model_facts(model: str, head: str | None = None) -> ModelFacts:
    """Read a model's config.

    Args:
        model: Folder or hub name.
        head: Checkpoint that has the MTP layers; None for the model's own.

    Raises:
        ConfigError: vLLM cannot read it, or there are no MTP layers.
    """
    try:
        config = EngineArgs(model=model).create_model_config()
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"model: {model!r} cannot be read: {_first_line(error)}"
        ) from None
    num_layers = checkpoint.count_mtp_layers(config, head)
    draft = checkpoint.draft_hf_config(config, head)
    return ModelFacts(
        architecture=", ".join(config.architectures),
        draft_architecture=draft.architectures[0],
        num_mtp_layers=num_layers,
        num_hidden_layers=config.get_total_num_hidden_layers(),
        hidden_size=config.get_hidden_size(),
        vocab_size=config.get_vocab_size(),
        dtype_bytes=torch.empty(0, dtype=config.dtype).itemsize,
        refusal=_refusal(config),
    )


def _refusal(model_config: Any) -> str:
    if not current_platform.is_cpu():
        return ""
    try:
        check_recurrent_layers(model_config)
    except ConfigError as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class WeightFacts:
    """Of a checkpoint's safetensors files."""

    problems: list[Problem]
    num_bytes: int
    """Of the MTP layers, as stored."""
    num_by_file: dict[str, int]
    """MTP weights in each file."""
    layout: str
    """How they are stored unlike vLLM expects them; empty if they are not."""


def weight_facts(
    model: str, num_mtp_layers: int, head: str | None = None
) -> WeightFacts | str:
    """Look at the weights of MTP layers.

    Args:
        model: Folder or hub name.
        num_mtp_layers: That the config promises.
        head: Checkpoint that has them; None for the model's own.

    Returns:
        Why nothing was looked at, where that is so.

    Raises:
        ConfigError: A file is missing or cannot be read.
    """
    folder, own = _folder_of(model), _folder_of(head or model)
    headers = find_headers(str(own), None) if own else None
    if folder is None or own is None or not headers:
        return "no safetensors files on this machine"
    speculative = {
        "method": VLLM_METHOD,
        "num_speculative_tokens": num_mtp_layers,
        **({} if head is None else {"model": str(own)}),
    }
    try:
        config = EngineArgs(
            model=str(folder), speculative_config=speculative
        ).create_engine_config()
    except (ValueError, OSError, RuntimeError) as error:
        return f"vLLM does not serve it on this machine: {_first_line(error)}"
    restore_layer_types(config)
    tried = try_loading(config, headers)
    if isinstance(tried, str):
        return f"vLLM's draft model cannot be tried: {tried}"
    problems = list(
        checkpoint.examine_weights(str(own), tried, headers, MAX_BYTES_PER_TENSOR)
    )
    found = headers | unlisted_headers(str(own), tried.layout.files)
    files = Counter(each.file.name for n in tried.own if (each := found[n]).file)
    return WeightFacts(
        problems,
        weight_bytes(found, tried.own),
        dict(sorted(files.items())),
        tried.layout.describe(),
    )


@dataclass(frozen=True)
class GraphFacts:
    """Full CUDA graphs of a server with default settings."""

    num_for_any_mix: int
    """Where attention replays any mix of draft lengths, which is known once it is
    loaded."""
    num_for_equal_lengths: int
    """Where it does not."""


def graph_facts(model: str, head: str | None = None) -> GraphFacts | str:
    """Count the graphs that would be captured.

    Args:
        model: Folder or hub name, of a model that can be served.
        head: Checkpoint that has the MTP layers; None for the model's own.

    Returns:
        Why there are none to count, where that is so.
    """
    if current_platform.is_cpu():
        return "none on a CPU"
    try:
        config = EngineArgs(
            model=model,
            speculative_config={"method": METHOD, **({"model": head} if head else {})},
        ).create_engine_config()
    except (ValueError, OSError, RuntimeError) as error:
        return f"vLLM does not serve it on this machine: {_first_line(error)}"
    return graphs_of(config)


def graphs_of(config: VllmConfig) -> GraphFacts | str:
    """Count the graphs of an engine that has not been started.

    Args:
        config: Finished, of method ``mtp_plus``.

    Returns:
        Why there are none to count, where that is so.
    """
    mode = config.compilation_config.cudagraph_mode
    speculative = config.speculative_config
    if not config.use_v2_model_runner or not mode.separate_routine():
        return "vLLM's own, for Model Runner V1 or this cudagraph_mode"
    if speculative is not None and speculative.use_multi_module_mtp():
        return "vLLM's own, for several MTP layers"

    def count() -> tuple[int, int]:
        from vllm_mtp.integration.load.dry_build import single_rank
        from vllm_mtp.integration.v2.decode_graphs import count_graphs

        with single_rank(config) as alone:
            return count_graphs(alone)

    counts = in_child(count)
    return f"not counted: {counts}" if isinstance(counts, str) else GraphFacts(*counts)


def _folder_of(model: str) -> Path | None:
    if Path(model).is_dir():
        return Path(model)
    found = cached_file(
        model,
        "config.json",
        local_files_only=True,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found).parent


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


@dataclass(frozen=True)
class MachineFacts:
    """Of this installation."""

    vllm_version: str
    vllm_problems: list[str]
    """Empty where this package fits."""
    device: str
    kernels: dict[str, str | None]
    """Why each rollback backend cannot run here; None where it can."""


def machine_facts() -> MachineFacts:
    """Look at the installed vLLM, the device and the kernels."""
    return MachineFacts(
        version("vllm"),
        _vllm_problems(),
        current_platform.device_name or current_platform.device_type,
        available(torch.device(_torch_device())),
    )


def _torch_device() -> str:
    return "cpu" if current_platform.is_cpu() else str(current_platform.device_type)


def _vllm_problems() -> list[str]:
    try:
        compat.check(_groups())
    except compat.CompatibilityError as error:
        return [str(error)]
    return []


def _groups() -> tuple[str, ...]:
    """Of seams that this machine can have: V2 needs Triton, CPU workers a CPU."""
    from vllm.triton_utils import HAS_TRITON

    others: dict[str, Any] = {"v2": HAS_TRITON, "cpu": current_platform.is_cpu()}
    return tuple(group for group in GROUPS if others.get(group, True))
