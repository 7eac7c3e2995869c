"""Hybrid models on a CPU are refused: vLLM's kernels do not roll their states back.

Of 0.32: Mamba-2's convolution ignores how many draft tokens were accepted, that of the
gated delta rule wants K_max draft tokens of every request in every step, and prefix
caching with speculation calls a kernel that only Triton has. vLLM's own ``mtp`` writes
other tokens there or ends (``docs/upstream/hybrid-models-on-cpu.md``).
"""

from typing import Any

from vllm_mtp.config import METHOD, ConfigError


def check_recurrent_layers(model_config: Any) -> None:
    """Refuse a hybrid model where its layers have the kernels of a CPU.

    Raises:
        ConfigError: They do.
    """
    if model_config.is_hybrid and _are_those_of_a_cpu():
        raise ConfigError(
            f"model {model_config.model!r} has recurrent layers, whose states vLLM's "
            f"CPU kernels do not roll back after rejected draft tokens: method "
            f"{METHOD!r} needs a GPU for it; serve it without speculation here."
        )


def _are_those_of_a_cpu() -> bool:
    # Chosen when it is imported, which no other model needs.
    from vllm.model_executor.layers.mamba.ops import causal_conv1d

    return ".cpu." in causal_conv1d.causal_conv1d_update.__module__
