"""What a server's knowledge belongs to: a model, options and hardware."""

import hashlib
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from vllm_mtp.integration.load.settings import settings_of

FORMAT = "1"
"""Of the files; another one has other names."""
_IRRELEVANT = {
    *("trace_path", "hidden_states_path", "warm_start_path", "controller_seed"),
    *("adapt_device", "adapt_memory_mib", "adapt_share"),
    "show_rounds",
}
"""Options that change neither acceptance nor cost."""


def identity_of(vllm_config: Any) -> dict[str, str]:
    """Whatever differs here makes a server start cold.

    Weights under the same name are taken to be the same: acceptance of others is
    learned anew within a hundred steps.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    options = settings_of(vllm_config).model_dump(mode="json", exclude=_IRRELEVANT)
    return {
        "format": FORMAT,
        "model": _name(model.model, model.revision),
        "draft_model": _name(draft.model, draft.revision),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "max_draft_length": str(speculative.num_speculative_tokens),
        "options": json.dumps(options, sort_keys=True),
        "ranks": f"{parallel.tensor_parallel_size}x{parallel.pipeline_parallel_size}",
        "runner": "v2" if vllm_config.use_v2_model_runner else "v1",
        "eager": str(model.enforce_eager),
        "hardware": hardware(),
        "vllm": version("vllm"),
    }


def file_name(identity: dict[str, str], what: str) -> str:
    """Of a state: readable, and different for all that differ."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode())
    model = Path(identity["model"].partition("@")[0]).name[:40]
    return f"{model}-{digest.hexdigest()[:16]}-{what}.json"


def hardware() -> str:
    """The device, or the processor and the cores that this process may use."""
    if not current_platform.is_cpu():
        return _device()
    return f"{_processor()} x{len(os.sched_getaffinity(0))}"


def _device() -> str:
    try:
        return str(current_platform.get_device_name())
    except Exception:
        # With workers in Ray's actors a scheduler may run where no GPU is; what its
        # driver raises then is the driver's affair.
        return "elsewhere"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _name(model: str, revision: str | None) -> str:
    return f"{model}@{revision}" if revision else model
