"""The counts of an interval in words, for the server's log."""

from vllm_mtp.metrics.stats import (
    COVERAGE,
    DRAFT,
    HAS_DRIFTED,
    REASONS,
    SYNTHETIC_ACCEPTANCE,
    TARGET,
    VERIFY,
    SpeculationStats,
)


def describe(stats: SpeculationStats, max_reasons: int = 2) -> str | None:
    """What happened, in one line; None where no request decoded.

    Args:
        stats: Counts of the interval.
        max_reasons: Reasons for K = 0 to name, most frequent first.
    """
    mean_k = stats.mean_draft_length
    if mean_k is None:
        return None
    parts = [_draft_lengths(stats, mean_k)]
    if off := _without_draft(stats, max_reasons):
        parts.append(off)
    if stats.num_drafts:
        parts.append(_acceptance(stats))
    parts += _speed(stats)
    coverage = stats.levels.get(COVERAGE)
    if coverage is not None:
        parts.append(f"the draft vocabulary covers {100 * coverage:.1f} %")
    if stats.levels.get(SYNTHETIC_ACCEPTANCE):
        parts.append("acceptance is synthetic, the text is NOT the target's")
    if stats.failures:
        parts.append(f"drafting is off for good: {' and '.join(stats.failures)} failed")
    if stats.levels.get(HAS_DRIFTED):
        parts.append("acceptance lies below what it used to be")
    return "; ".join(parts)


def _draft_lengths(stats: SpeculationStats, mean_k: float) -> str:
    return f"K {mean_k:.1f} on average over {stats.num_request_steps} request-steps"


def _without_draft(stats: SpeculationStats, max_reasons: int) -> str:
    total = stats.num_request_steps
    ranked = sorted(stats.without_draft.items(), key=lambda item: (-item[1], item[0]))
    # What is hardly ever so is not worth a reader's time.
    named = [
        f"{100 * count / total:.0f} % because {REASONS[reason]}"
        for reason, count in ranked[:max_reasons]
        if count >= 0.01 * total
    ]
    return f"no draft in {' and '.join(named)}" if named else ""


def _acceptance(stats: SpeculationStats) -> str:
    by_position = [
        f"{100 * accepted / drafted:.0f}"
        for accepted, drafted in zip(stats.accepted, stats.drafted, strict=True)
        if drafted
    ]
    return (
        f"a draft brings {stats.acceptance_length:.2f} tokens "
        f"({'/'.join(by_position)} % accepted by position)"
    )


def _speed(stats: SpeculationStats) -> list[str]:
    found, seconds = [], stats.decode_seconds
    split = [stats.seconds.get(part, 0.0) for part in (TARGET, VERIFY, DRAFT)]
    known = sum(split)
    if seconds and stats.num_tokens:
        realised = f"{stats.num_tokens / seconds:.0f} tokens/s in decode"
        # Plans promise nothing for steps whose parts are not known.
        planned = f" ({stats.promised_tokens / known:.0f} planned)" if known else ""
        found.append(realised + planned)
    if known:
        target, verify, draft = (f"{100 * part / known:.0f}" for part in split)
        found.append(f"time {target} % target, {verify} % verify, {draft} % draft")
        word = "saved" if stats.saved_seconds >= 0 else "lost"
        found.append(f"about {abs(stats.saved_seconds):.1f} s {word}")
    return found
