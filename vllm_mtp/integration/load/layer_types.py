"""Workaround for vLLM 0.32 and 0.33: Step-3.5's MTP layers have no layer types.

The checkpoint lists them behind the decoder layers'. vLLM's config class cuts the list
off, and its draft model then ends in an ``IndexError`` (docs/upstream/layer-types.md).
"""

from typing import Any

from vllm.transformers_utils.config import get_hf_file_to_dict

_ARCHITECTURE = "Step3p5MTP"


def restore_layer_types(config: Any) -> None:
    """Give the draft model's config the layer types that its checkpoint lists.

    Args:
        config: vLLM's ``VllmConfig``, finished, with a speculative config.
    """
    draft = config.speculative_config.draft_model_config
    layer_types = getattr(draft.hf_config, "layer_types", None)
    if _ARCHITECTURE not in draft.architectures or not layer_types:
        return
    written = get_hf_file_to_dict("config.json", draft.model, draft.revision) or {}
    listed = written.get("text_config", written).get("layer_types", ())
    if len(listed) > len(layer_types):
        draft.hf_config.layer_types = list(listed)
