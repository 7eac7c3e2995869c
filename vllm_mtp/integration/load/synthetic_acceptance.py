"""Synthetic acceptance: drafts kept by chance, for benchmarks of speed.

vLLM's ``rejection_sample_method: "synthetic"`` accepts draft tokens at rates that are
asked for, whatever they are. Text and drafts then say nothing about the model; how long
steps take does. What learns from texts or drafts is refused beside it.
"""

from typing import Any

from vllm.logger import init_logger

from vllm_mtp.config import SYNTHETIC, ConfigError, MTPPlusConfig
from vllm_mtp.integration.load.settings import settings_of

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")

_METHOD = f"rejection_sample_method={SYNTHETIC!r}"
_RATES, _LENGTH = "synthetic_acceptance_rates", "synthetic_acceptance_length"
_LEARN_FROM_TEXTS = ("adapt", "hidden_states_path")


def is_synthetic(vllm_config: Any) -> bool:
    """Whether an engine accepts draft tokens by chance.

    Args:
        vllm_config: With our options.
    """
    return settings_of(vllm_config).rejection_sample_method == SYNTHETIC


def check_synthetic(own: MTPPlusConfig) -> None:
    """Check what does not depend on the model.

    Raises:
        ConfigError: Rates without `synthetic`, or it without them or with too many.
    """
    given = [key for key in (_RATES, _LENGTH) if getattr(own, key) is not None]
    if own.rejection_sample_method != SYNTHETIC:
        if given:
            raise ConfigError(
                f"speculative_config.{given[0]}={getattr(own, given[0])!r} is not "
                f"allowed: it belongs to {_METHOD}."
            )
        return
    if len(given) != 1:
        raise ConfigError(
            f"speculative_config.{_METHOD} is not allowed: must come with exactly one "
            f"of {_RATES} and {_LENGTH}."
        )
    for key in _LEARN_FROM_TEXTS:
        if getattr(own, key):
            raise ConfigError(
                f"speculative_config.{key}={getattr(own, key)!r} is not allowed: with "
                f"{_METHOD} the text is not the target's; remove one of them."
            )


def check_rates(own: MTPPlusConfig, draft_length: int) -> None:
    """Check what is asked for against the draft length.

    Args:
        own: our options.
        draft_length: ``K_max``, resolved.

    Raises:
        ConfigError: No such rates or length are possible.
    """
    rates, length = own.synthetic_acceptance_rates, own.synthetic_acceptance_length
    if length is not None and not 1.0 <= length <= draft_length + 1:
        _refuse(_LENGTH, length, f"a number from 1 to {draft_length + 1}", draft_length)
    if rates is not None and not _are_possible(rates, draft_length):
        numbers = f"{draft_length} numbers from 0 to 1, none above the one before"
        _refuse(_RATES, rates, numbers, draft_length)


def _are_possible(rates: list[float], draft_length: int) -> bool:
    steps = zip([1.0, *rates], [*rates, 0.0], strict=True)
    return len(rates) == draft_length and all(a >= b for a, b in steps)


def _refuse(key: str, value: object, allowed: str, draft_length: int) -> None:
    raise ConfigError(
        f"speculative_config.{key}={value!r} is not allowed: must be {allowed}, at "
        f"num_speculative_tokens={draft_length}."
    )


def announce(vllm_config: Any) -> None:
    """Say in the log that an engine's text is worth nothing."""
    if is_synthetic(vllm_config):
        logger.warning(
            "%s: draft tokens are accepted by chance and the text is NOT the target's; "
            "for benchmarks alone.",
            _METHOD,
        )
