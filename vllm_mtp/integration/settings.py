"""How our options reach the scheduler and the workers, which are other processes.

They travel inside vLLM's own ``VllmConfig.additional_config``.
"""

from typing import Any

from vllm_mtp.config import METHOD, MTPPlusConfig, parse_own_options

SETTINGS_KEY = METHOD
"""Our key in ``additional_config``."""


def settings_of(vllm_config: Any) -> MTPPlusConfig:
    """Our options, read back from the config that a process received."""
    return parse_own_options(vllm_config.additional_config[SETTINGS_KEY])
