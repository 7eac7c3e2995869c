"""Which draft lengths an engine is prepared for: the bound on K, and graph tiers."""

from vllm_mtp.config import (
    DEFAULT_DRAFT_LENGTH,
    DEFAULT_FIXED_DRAFT_LENGTH,
    ConfigError,
    MTPPlusConfig,
)

GRAPH_TIERS = (0, 1, 2, 3, 5, 8, 12, 16)
"""Draft lengths that have CUDA graphs of their own. Each costs a set of graphs at
start, so not every length has one; the gaps grow as survival falls."""


def graph_tiers(max_draft_length: int) -> tuple[int, ...]:
    """Draft lengths up to a bound that have CUDA graphs; the bound is one of them."""
    lower = (k for k in GRAPH_TIERS if k < max_draft_length)
    return (*lower, max_draft_length)


def tier_table(max_draft_length: int) -> list[tuple[int, int, int]]:
    """vLLM's table of draft lengths by batch size, made to name every tier.

    vLLM captures full CUDA graphs for the draft lengths in this table, up to the
    largest batch at which it names them. Which length a step has is the controller's
    affair, so the tiers simply take turns: whatever ``max_num_seqs`` is, each is named
    close below it.
    """
    tiers = graph_tiers(max_draft_length)[::-1]
    return [(n, n, tiers[(n - 1) % len(tiers)]) for n in range(1, 1025)]


def resolve_draft_length(
    own: MTPPlusConfig,
    num_mtp_layers: int,
    *,
    is_small: bool = False,
    is_common: bool = False,
) -> int:
    """The upper bound on K for a model, which vLLM takes memory and makes graphs for.

    vLLM runs several MTP layers in turn, so a draft length above their number must be
    a multiple of it. On Model Runner V2 a second turn overwrites keys and values of the
    first, which the next step reads: of two random layers' first draft tokens 71 % were
    accepted with one turn, 63 % with two and 28 % with four.

    Args:
        own: our options.
        num_mtp_layers: MTP layers of the checkpoint, >= 1.
        is_small: A large bound costs this model or device more than it brings.
        is_common: Ranks must draft equally deep, idle ones too, which vLLM has draft as
            deep as they can: the bound is then what is drafted.

    Raises:
        ConfigError: the user's value is not a multiple of ``num_mtp_layers``.
    """
    asked = own.num_speculative_tokens
    is_fixed = own.controller == "fixed"
    if asked is None:
        default = DEFAULT_DRAFT_LENGTH
        if is_fixed or is_small or is_common:
            default = DEFAULT_FIXED_DRAFT_LENGTH
        return default if num_mtp_layers == 1 else min(default, num_mtp_layers)
    if asked != _whole_rounds(asked, num_mtp_layers):
        raise ConfigError(
            f"speculative_config.num_speculative_tokens={asked} is not allowed: must "
            f"be at most {num_mtp_layers} or a multiple of {num_mtp_layers}, the "
            "model's number of MTP layers."
        )
    if is_common and not is_fixed:
        return _whole_rounds(min(asked, DEFAULT_FIXED_DRAFT_LENGTH), num_mtp_layers)
    return asked


def _whole_rounds(draft_length: int, num_mtp_layers: int) -> int:
    """As long at most, without a part of a round of all MTP layers after another."""
    if draft_length <= num_mtp_layers:
        return draft_length
    return draft_length - draft_length % num_mtp_layers
