"""Recurrent layers with the Triton kernels that they have on a GPU, interpreted.

vLLM replaces them on the CPU platform, by kernels that take bfloat16 only (Qwen's gated
delta rule) or that roll nothing back after rejected drafts (Mamba-2's convolution).
"""

import os
import sys
from functools import partial
from typing import Any
from unittest import mock

import torch

ENVIRONMENT = {"VLLM_TRITON_FORCE_FIRST_CONFIG": "1"}
"""Nothing is tuned: the interpreter has no clock for it."""

_DELTA_RULE = "vllm.third_party.flash_linear_attention.ops"
_OPS = "vllm.model_executor.layers.mamba.ops"


def take_triton_kernels() -> None:
    """Let modules of vLLM choose a GPU's kernels. Before a model is imported."""
    os.environ.update(ENVIRONMENT)
    from vllm.platforms import current_platform

    early = [name for name in sys.modules if name.startswith(f"{_OPS}.causal_conv1d")]
    assert not early, f"{early} chose the CPU's kernels"
    with mock.patch.object(type(current_platform), "is_cpu", return_value=False):
        from vllm.model_executor.layers.mamba import mamba_mixer2  # noqa: F401
        from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
        from vllm.model_executor.layers.mamba.ops import ssu_dispatch
        from vllm.v1.worker import mamba_utils

    delta_rule = qwen_gdn_linear_attn.QwenGatedDeltaNetAttention
    delta_rule.forward_cpu = delta_rule.forward_cuda
    qwen_gdn_linear_attn.fla_chunk_gated_delta_rule = _delta_rule
    backends = ssu_dispatch._BACKEND_REGISTRY
    cpu = ssu_dispatch.MambaBackendEnum.CPU
    backends[cpu] = backends[ssu_dispatch.MambaBackendEnum.TRITON]
    # One program copies a state: the interpreter's time goes by their number.
    mamba_utils._TEMPORAL_TILES = 1
    _name_operations()
    _take_arguments_from_grids()


def _delta_rule(
    *,
    q: torch.Tensor,  # [1, num_tokens, num_k_heads, K]; k alike
    k: torch.Tensor,
    v: torch.Tensor,  # [1, num_tokens, num_v_heads, V]
    g: torch.Tensor,  # [1, num_tokens, num_v_heads], log of the decay; beta alike
    beta: torch.Tensor,
    initial_state: torch.Tensor,  # [num_seqs, num_v_heads, V, K]
    cu_seqlens: torch.Tensor,  # [num_seqs + 1]
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule token by token, for prompts.

    In place of vLLM's kernels for chunks, which refuse float32 and which the
    interpreter cannot run. Equation 10 of Yang et al., arXiv:2412.06464.
    """
    repeats = v.shape[2] // k.shape[2]
    keys, queries = (x[0].repeat_interleave(repeats, dim=1) for x in (k, q))
    scale = k.shape[-1] ** -0.5
    output, states = torch.empty_like(v), initial_state.clone()
    for state, start, end in zip(states, cu_seqlens, cu_seqlens[1:], strict=False):
        for i in range(start, end):
            state *= g[0, i].exp()[:, None, None]
            error = v[0, i] - torch.einsum("hvk,hk->hv", state, keys[i])
            update = (beta[0, i][:, None] * error)[:, :, None]
            state += update * keys[i][:, None, :]
            output[0, i] = torch.einsum("hvk,hk->hv", state, queries[i]) * scale
    return output, states


def _name_operations() -> None:
    """The delta rule's kernels call operations of Triton by names of their own.

    The interpreter replaces what is called by its own name.
    """
    import triton.language as tl
    from triton.runtime.interpreter import interpreter_semantic

    for path in [path for path in sys.modules if path.startswith(_DELTA_RULE)]:
        module = sys.modules[path]
        for name in ("exp", "exp2", "log", "log2"):
            if hasattr(module, name):
                operation = partial(getattr(tl, name), _semantic=interpreter_semantic)
                setattr(module, name, operation)


def _take_arguments_from_grids() -> None:
    """The convolution's grid replaces two of its kernel's tensors when it is asked.

    That is after the interpreter has turned tensors into pointers.
    """
    from triton.runtime import interpreter

    class Executor(interpreter.GridExecutor):
        def __init__(self, fn: Any, arg_names: Any, grid: Any, *rest: Any) -> None:
            super().__init__(fn, arg_names, _converting(grid), *rest)

    def _converting(grid: Any) -> Any:
        if not callable(grid):
            return grid

        def size(arguments: dict[str, Any]) -> Any:
            result = grid(arguments)
            for name, value in arguments.items():
                if isinstance(value, torch.Tensor):
                    arguments[name] = interpreter._implicit_cvt(value)
            return result

        return size

    interpreter.GridExecutor = Executor
