"""Passes of the MTP layer that are over once its keys and values are written.

Where nothing is drafted the MTP layer runs only to fill its KV cache: over prompts
while drafting is off, and over what it missed when drafting resumes. With a single
attention layer these keys and values depend on the inputs alone. What comes behind them
in the layer (attention over the whole context, output projection, MLP or experts,
norms) makes hidden states that nobody reads, and is most of the layer's time.

vLLM writes keys and values in a call of their own before it attends to them. The pass
is left there by an exception: all that should happen has happened.
"""

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from torch import nn
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.model_executor.layers.attention.mla_attention import MLAAttention

from vllm_mtp.integration.worker import drafting_disabled


class _Written(Exception):
    """Keys and values are in the cache."""


class KeyValuePasses:
    """Ends passes of one attention layer's model, when asked to."""

    def __init__(self, layer: Any) -> None:
        """Hear of what the layer writes.

        Args:
            layer: vLLM's attention layer, see `key_value_layer`.
        """
        self._are_asked_for = False
        write = layer.impl.do_kv_cache_update

        def write_and_leave(*args: Any, **kwargs: Any) -> Any:
            written = write(*args, **kwargs)
            if self._are_asked_for:
                raise _Written
            return written

        layer.impl.do_kv_cache_update = write_and_leave

    @contextmanager
    def asked_for(self) -> Iterator[None]:
        """Whatever runs the model in here stops when keys and values are written.

        Goes on behind the ``with`` then.
        """
        self._are_asked_for = True
        try:
            with suppress(_Written):
                yield
        finally:
            self._are_asked_for = False


class WritesKeysAndValues:
    """Mixin of drafters of both runners."""

    vllm_config: VllmConfig
    model: nn.Module
    _key_value_passes: KeyValuePasses | None = None

    def prepare_to_end_passes(self, names: Collection[str]) -> None:
        """The weights are loaded.

        Args:
            names: of the drafter's attention layers.
        """
        layer = key_value_layer(self.vllm_config, self.model, names)
        if layer is not None:
            self._key_value_passes = KeyValuePasses(layer)

    @property
    def can_end_passes(self) -> bool:
        return self._key_value_passes is not None

    def writing_only(self, is_so: bool = True) -> AbstractContextManager[None]:
        """In here passes end behind the keys and values, if they may and ``is_so``."""
        if self._key_value_passes is None or not is_so:
            return nullcontext()
        return self._key_value_passes.asked_for()


def key_value_layer(
    vllm_config: VllmConfig, model: nn.Module, names: Collection[str]
) -> Any:
    """The drafter's attention layer if passes may end behind its keys and values.

    None where they may not:

    - several attention layers, of which a later one reads what an earlier one made;
    - compiled models and CUDA graphs, where no Python runs between the two;
    - attention that writes keys and values itself, or shares another layer's;
    - whoever else waits for the layer (`drafting_disabled.may_rest`; a KV connector is
      called by its attention) or counts what its experts do.

    Args:
        vllm_config: of the engine.
        model: of the drafter, with its weights.
        names: of the drafter's attention layers.
    """
    if (
        len(names) != 1
        or vllm_config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        or any(_is_compiled(module) for module in model.modules())
        or not drafting_disabled.may_rest(vllm_config)
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
