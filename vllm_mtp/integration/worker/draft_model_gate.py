"""Passes of the draft model that compute no more than somebody reads.

*KV only.* Where nothing is drafted the MTP layer runs only to fill its KV cache: over
prompts while drafting is disabled, and over pending tokens when it resumes. With a
single attention layer these keys and values depend on the inputs alone. What comes
behind them in the layer (attention over the whole context, output projection, MLP or
experts) makes hidden states that nobody reads, and is most of the layer's time. vLLM
writes keys and values in a call of their own; behind it the heavy modules of the layer
return zeros.

*Closed.* vLLM's draft loop makes as many steps as its argument says. When no
further draft token pays, its remaining steps get the hidden states back that they give.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.runner.moe_runner_interface import (
    MoERunnerInterface,
)
from vllm.model_executor.layers.linear import LinearBase

from vllm_mtp.integration.worker import drafting_disabled


class DraftModelGate:
    """Stands in front of a draft model, and behind the keys and values it writes."""

    def __init__(self, model: nn.Module, layer: Any = None) -> None:
        """Let everything through.

        Args:
            model: The drafter's, with its weights; no Python may be compiled away.
            layer: Its attention layer, see `kv_only_layer`; None if its passes never
                are for the keys and values alone.
        """
        self.is_closed = False
        self.can_be_kv_only = layer is not None
        self._is_kv_only = False
        self._has_written = False
        self._returns_tuple = False
        self._wrap_model(model)
        if layer is not None:
            self._note_writes(layer.impl)
            skips = self._skips
            if not isinstance(layer, MLAAttention):
                self._wrap(layer.impl, "forward", skips, _output_given)
            for module in model.modules():
                if isinstance(module, LinearBase):
                    self._wrap(module, "forward", skips, _zeros_of(module))
                elif isinstance(module, MoERunnerInterface):
                    self._wrap(module, "forward", skips, _hidden_states_given)

    def _wrap_model(self, model: nn.Module) -> None:
        forward = model.forward

        def gated(*args: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
            if self.is_closed:
                # Some families return what the head reads and what comes back in apart.
                same = hidden_states
                return (same, same) if self._returns_tuple else same
            self._has_written = False
            output = forward(*args, hidden_states=hidden_states, **kwargs)
            self._returns_tuple = isinstance(output, tuple)
            return output

        model.forward = gated

    def _skips(self) -> bool:
        return self._is_kv_only and self._has_written

    @staticmethod
    def _wrap(
        owner: Any,
        name: str,
        skips: Callable[[], bool],
        instead: Callable[..., Any],
    ) -> None:
        original = getattr(owner, name)

        def gated(*args: Any, **kwargs: Any) -> Any:
            return (instead if skips() else original)(*args, **kwargs)

        setattr(owner, name, gated)

    def _note_writes(self, impl: Any) -> None:
        write = impl.do_kv_cache_update

        def write_and_note(*args: Any, **kwargs: Any) -> Any:
            written = write(*args, **kwargs)
            self._has_written = True
            return written

        impl.do_kv_cache_update = write_and_note

    @contextmanager
    def kv_only(self, is_so: bool = True) -> Iterator[None]:
        """In here passes write keys and values, and what they return is undefined.

        Where that cannot be (`can_be_kv_only`), or unless ``is_so``, they are whole.
        """
        self._is_kv_only = is_so and self.can_be_kv_only
        try:
            yield
        finally:
            self._is_kv_only = False


def _hidden_states_given(
    *args: Any, hidden_states: torch.Tensor | None = None, **kwargs: Any
) -> Any:
    return args[0] if hidden_states is None else hidden_states


def _output_given(*args: Any, output: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return output


def _zeros_of(linear: LinearBase) -> Callable[..., Any]:
    """What a linear layer returns, without its work."""
    width = getattr(linear, "output_size_per_partition", linear.output_size)

    def zeros(inputs: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = inputs.new_zeros(*inputs.shape[:-1], width)
        return (outputs, None) if linear.return_bias else outputs

    return zeros


def gate_of(
    vllm_config: VllmConfig, model: nn.Module, names: Collection[str]
) -> DraftModelGate | None:
    """The gate of a drafter's model; None where no Python runs inside its passes.

    Args:
        vllm_config: of the engine.
        model: of the drafter, with its weights.
        names: of the drafter's attention layers.
    """
    if vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE or any(
        _is_compiled(module) for module in model.modules()
    ):
        return None
    return DraftModelGate(model, kv_only_layer(vllm_config, names))


def kv_only_layer(vllm_config: VllmConfig, names: Collection[str]) -> Any:
    """The drafter's attention layer if passes may be for its keys and values alone.

    None where they may not:

    - several attention layers, of which a later one reads what an earlier one made;
    - attention that writes keys and values itself, or shares another layer's;
    - whoever else waits for the layer (`drafting_disabled.may_disable`; a KV connector
      is called by its attention) or counts what its experts do.

    Args:
        vllm_config: of the engine.
        names: of the drafter's attention layers.
    """
    if (
        len(names) != 1
        or not drafting_disabled.may_disable(vllm_config)
        or vllm_config.parallel_config.enable_eplb
    ):
        return None
    (name,) = names
    layer = vllm_config.compilation_config.static_forward_context[name]
    return layer if _writes_apart(layer) else None


def _is_compiled(module: nn.Module) -> bool:
    # vLLM's decorator of classes that it compiles sets this.
    return not getattr(module, "do_not_compile", True)


def _writes_apart(layer: Any) -> bool:
    if not hasattr(getattr(layer, "impl", None), "do_kv_cache_update"):
        return False
    return isinstance(layer, MLAAttention) or (
        not layer.attn_backend.forward_includes_kv_cache_update
        and layer.kv_sharing_target_layer_name is None
    )
