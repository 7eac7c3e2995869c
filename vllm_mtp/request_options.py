"""What a single request may say about its own drafts.

Over HTTP a flat key, since vLLM's ``vllm_xargs`` takes no nested objects::

    {"prompt": ..., "vllm_xargs": {"mtp_plus_k": 0}}

and in Python either that or a mapping::

    SamplingParams(extra_args={"mtp_plus": {"k": 0}})

``k`` is the draft length K of this request in every step: 0 switches speculation off
for it, an integer up to ``num_speculative_tokens`` fixes it, ``"auto"`` (the default)
leaves it to the controller. The output does not depend on it: token for token when
greedy, in distribution when sampled. A sampled request with a ``seed`` is not drafted
for unless it fixes k, so that the same seed gives the same text again.

``record`` (``mtp_plus_record``): 0 keeps its tokens and hidden states from being
recorded, be it to adapt the MTP layers, to a folder or to be shown.
"""

from collections.abc import Mapping
from typing import Any

from vllm_mtp.config import METHOD, ConfigError

FLAT_KEY = f"{METHOD}_k"
RECORD_KEY = f"{METHOD}_record"
AUTO = "auto"


def pinned_draft_length(
    extra_args: Mapping[str, Any] | None, max_draft_length: int
) -> int | None:
    """The K that a request fixes, or None.

    Args:
        extra_args: ``SamplingParams.extra_args``, other keys are left alone.
        max_draft_length: Upper bound on K of this server.

    Raises:
        ConfigError: one sentence that names the key and what is allowed.
    """
    if not extra_args:
        return None
    given: dict[str, Any] = {}
    if FLAT_KEY in extra_args:
        given[FLAT_KEY] = extra_args[FLAT_KEY]
    if METHOD in extra_args:
        given[f"{METHOD}.k"] = _nested_k(extra_args[METHOD])
    if not given:
        return None
    key, value = next(iter(given.items()))
    if len(given) == 2 and value != given[f"{METHOD}.k"]:
        raise ConfigError(
            f"{FLAT_KEY}={value!r} contradicts {METHOD}.k={given[f'{METHOD}.k']!r}: "
            "give one of them."
        )
    if value == AUTO:
        return None
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or not 0 <= value <= max_draft_length
    ):
        raise ConfigError(
            f"{key}={value!r} is not allowed: must be {AUTO!r} or an integer from 0 to "
            f"{max_draft_length}, the server's num_speculative_tokens."
        )
    return value


def is_recorded(extra_args: Mapping[str, Any] | None) -> bool:
    """Whether a request may be recorded.

    Args:
        extra_args: ``SamplingParams.extra_args``, other keys are left alone.

    Raises:
        ConfigError: one sentence that names the key and what is allowed.
    """
    if not extra_args:
        return True
    nested = _checked(extra_args.get(METHOD, {})).get("record", True)
    flat = extra_args.get(RECORD_KEY, True)
    for key, value in ((RECORD_KEY, flat), (f"{METHOD}.record", nested)):
        if value not in (0, 1):
            raise ConfigError(
                f"{key}={value!r} is not allowed: must be 0 or 1, true or false."
            )
    return bool(flat and nested)


def _nested_k(options: Any) -> Any:
    return _checked(options).get("k", AUTO)


def _checked(options: Any) -> Mapping[str, Any]:
    if not isinstance(options, Mapping) or set(options) - {"k", "record"}:
        raise ConfigError(
            f"{METHOD}={options!r} is not allowed: must be a mapping with no keys but "
            "'k' and 'record'."
        )
    return options
