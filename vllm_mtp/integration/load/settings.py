"""How our options reach the scheduler and the workers, which are other processes.

They travel inside vLLM's own ``VllmConfig.additional_config``.
"""

from importlib.metadata import version
from typing import Any

from vllm_mtp.config import METHOD, MTPPlusConfig, parse_own_options

SETTINGS_KEY = METHOD
"""Our key in ``additional_config``."""
PLAIN_DRAFT_KEY = f"{METHOD}_plain_draft"
"""Is there if the MTP layers are not quantized, though the model is."""


def settings_of(vllm_config: Any) -> MTPPlusConfig:
    """Our options, read back from the config that a process received."""
    return parse_own_options(vllm_config.additional_config[SETTINGS_KEY])


def draft_is_plain(vllm_config: Any) -> bool:
    """Whether the MTP layers are not quantized, though the model is."""
    return bool(vllm_config.additional_config.get(PLAIN_DRAFT_KEY))


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
