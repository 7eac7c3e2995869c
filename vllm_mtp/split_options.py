"""The user's speculative config, divided into our options and vLLM's."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from vllm_mtp.config import (
    AUTO,
    METHOD,
    OWN_KEYS,
    VLLM_METHOD,
    ConfigError,
    MTPPlusConfig,
    parse_own_options,
)
from vllm_mtp.draft_lengths import tier_table

SHARED_KEYS = frozenset(
    {
        "num_speculative_tokens",
        "draft_sample_method",
        "rejection_sample_method",
        "synthetic_acceptance_rates",
        "synthetic_acceptance_length",
    }
)
"""Options that are vLLM's too: validated here, then handed on to vLLM."""

REFUSED_KEYS: Mapping[str, str] = {
    "num_speculative_tokens_per_batch_size": (
        "mtp_plus chooses the draft length itself; remove it"
    ),
    "enable_adaptive_verification": (
        "mtp_plus verifies adaptively by itself where that works; remove it"
    ),
    "disable_padded_drafter_batch": (
        "mtp_plus rolls rejected slots back in the padded drafter batch; remove it"
    ),
    "tensor_parallel_size": "use draft_tensor_parallel_size",
    **dict.fromkeys(
        (
            "parallel_drafting",
            "use_heterogeneous_vocab",
            "prompt_lookup_max",
            "prompt_lookup_min",
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
            "dspark_draft_topk",
        ),
        "it belongs to another speculative method, not to MTP layers; remove it",
    ),
    **dict.fromkeys(
        (
            "target_model_config",
            "target_parallel_config",
            "draft_model_config",
            "draft_parallel_config",
        ),
        "vLLM fills it in; remove it",
    ),
}
"""Keys of vLLM's speculative config that contradict ``mtp_plus``, and why."""


KEEPS_CACHED_BLOCK = "disable_eagle_block_drop"
"""vLLM's option to use prefix-cache hits to their last block.

vLLM drops that block by default because the MTP layer's keys and values of its last
position know the token that followed when the block was written, which may be another
now. The target's do not, so the output is the same; one position of the MTP layer out
of a whole context is (sometimes) stale. A block of prompt computed again for every
request is what costs: not speculating does not pay it. With several MTP layers the
stale positions are several and vLLM writes them again: there its default stays.
"""


class SplitOptions(NamedTuple):
    """The user's speculative config, divided once at the edge."""

    own: MTPPlusConfig
    passthrough: dict[str, Any]
    """vLLM's own options, untouched."""

    def vllm_options(self, draft_length: int, num_mtp_layers: int) -> dict[str, Any]:
        """The speculative config that vLLM gets.

        Args:
            draft_length: resolved upper bound on K.
            num_mtp_layers: MTP layers of the model, >= 1.
        """
        shared = self.own.model_dump(include=set(SHARED_KEYS), exclude_none=True)
        if shared["draft_sample_method"] == AUTO:
            # Drawn drafts are ours; on V2 it is decided when all is known.
            shared["draft_sample_method"] = "greedy"
        if shared["rejection_sample_method"] == AUTO:
            shared["rejection_sample_method"] = "standard"
        options = {
            KEEPS_CACHED_BLOCK: num_mtp_layers == 1,
            **self.passthrough,
            **shared,
            "method": VLLM_METHOD,
            "num_speculative_tokens": draft_length,
        }
        if self.own.controller != "fixed":
            options["num_speculative_tokens_per_batch_size"] = tier_table(draft_length)
        return options


def split_options(
    options: Mapping[str, Any], vllm_keys: Collection[str]
) -> SplitOptions:
    """Divide a speculative config into our options and vLLM's.

    Args:
        options: the user's dict, ``method`` included; ``-`` and ``_`` in keys are
            the same, as in vLLM.
        vllm_keys: names that vLLM's ``SpeculativeConfig`` accepts.

    Raises:
        ConfigError: unknown or refused key, wrong type, value out of range.
    """
    given = {key.replace("-", "_"): value for key, value in options.items()}
    given.pop("method", None)
    own: dict[str, Any] = {}
    passthrough: dict[str, Any] = {}
    for key, value in given.items():
        if key in OWN_KEYS:
            own[key] = value
        elif key in REFUSED_KEYS:
            if value not in (None, False):
                raise ConfigError(
                    f"speculative_config.{key}={value!r} cannot be combined with "
                    f"method {METHOD!r}: {REFUSED_KEYS[key]}."
                )
        elif key in vllm_keys:
            passthrough[key] = value
        else:
            raise ConfigError(_unknown_key_message(key, vllm_keys))
    return SplitOptions(parse_own_options(own), passthrough)


def _unknown_key_message(key: str, vllm_keys: Collection[str]) -> str:
    passing = sorted(set(vllm_keys) - OWN_KEYS - set(REFUSED_KEYS) - {"method"})
    return (
        f"speculative_config.{key} is not an option of method {METHOD!r}: allowed are "
        f"{', '.join(sorted(OWN_KEYS))}, and of vLLM's own {', '.join(passing)}."
    )
