"""How our options reach the scheduler and the workers, which are other processes.

They travel inside vLLM's own ``VllmConfig.additional_config``.
"""

import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from vllm_mtp import __version__
from vllm_mtp.config import METHOD, ConfigError, MTPPlusConfig, parse_own_options
from vllm_mtp.integration.load.layout import Layout

SETTINGS_KEY = METHOD
"""Our key in ``additional_config``."""
LAYOUT_KEY = f"{METHOD}_layout"
"""Is there if the MTP weights are not loaded as vLLM would."""


class Carried(dict[str, Any]):
    """Our options on their way. Where they arrive, requests may come in, too."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (dict(self), __version__)


def _arrived(options: Mapping[str, Any], sent_by: str) -> Carried:
    if sent_by != (here := __version__):
        raise ConfigError(
            f"vllm-mtp {here} is installed on {platform.node()}, and {sent_by} where "
            "the engine was started: all machines of an engine need the same"
        )
    # Imported here: the front end's modules read settings.
    from vllm_mtp.integration.load import front_end

    front_end.install(parse_own_options(options))
    return Carried(options)


def settings_of(vllm_config: Any) -> MTPPlusConfig:
    """Our options, read back from the config that a process received."""
    return parse_own_options(vllm_config.additional_config[SETTINGS_KEY])


def set_layout(vllm_config: Any, layout: Layout) -> None:
    """How the MTP weights are loaded."""
    vllm_config.additional_config[LAYOUT_KEY] = asdict(layout)


def layout_of(vllm_config: Any) -> Layout:
    """How the MTP weights are loaded."""
    return Layout(**vllm_config.additional_config.get(LAYOUT_KEY, {}))


def trace_path(path: str, vllm_config: Any) -> str:
    """Where this rank's scheduler writes its trace: each has a file of its own."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size == 1:
        return path
    return f"{path}.rank{parallel.data_parallel_rank}"


def trace_header(vllm_config: Any) -> dict[str, Any]:
    """Where a trace comes from."""
    model, scheduler = vllm_config.model_config, vllm_config.scheduler_config
    return {
        "model": model.model,
        "dtype": str(model.dtype),
        "max_num_seqs": scheduler.max_num_seqs,
        "is_async": bool(scheduler.async_scheduling),
        "device": vllm_config.device_config.device_type,
        "vllm": version("vllm"),
        "options": settings_of(vllm_config).model_dump(mode="json"),
    }
