"""From what vLLM reports of a request's drafts to the counts of an evaluation."""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mtp.config import ConfigError
from vllm_mtp.tools.eval_file import PromptRecord
from vllm_mtp.tools.prompts import Prompt

METRICS_FLAG = "--per-request-spec-decode-metrics"


def record_of(
    prompt: Prompt,
    metrics: Mapping[str, Any] | None,
    draft_length: int | None,
    num_tokens: int,
    seconds: float,
) -> PromptRecord:
    """Counts of one request.

    Args:
        prompt: What was asked.
        metrics: vLLM's ``metrics.speculative_decoding``.
        draft_length: K that the request fixed; None for the controller's choice.
        num_tokens: New ones.
        seconds: From the request to its end.

    Raises:
        ConfigError: The metrics are missing or do not say enough.
    """
    if metrics is None:
        raise ConfigError(
            "server: its responses do not say what became of their drafts; serve with "
            f"method mtp_plus, or with {METRICS_FLAG} summary"
        )
    if metrics.get("per_step_drafted") is not None:
        steps = list(
            zip(metrics["per_step_drafted"], metrics["per_step_accepted"], strict=True)
        )
    else:
        steps = _steps_of(metrics, draft_length)
    longest = max((drafted for drafted, _ in steps), default=draft_length or 0)
    positions = range(1, longest + 1)
    return PromptRecord(
        id=prompt.id,
        category=prompt.category,
        num_tokens=num_tokens,
        num_drafts=len(steps),
        num_draft_tokens=sum(drafted for drafted, _ in steps),
        tested=tuple(
            sum(drafted >= j and accepted >= j - 1 for drafted, accepted in steps)
            for j in positions
        ),
        accepted=tuple(sum(accepted >= j for _, accepted in steps) for j in positions),
        seconds=seconds,
    )


def _steps_of(
    metrics: Mapping[str, Any], draft_length: int | None
) -> list[tuple[int, int]]:
    """(drafted, accepted) of each step, from a histogram of what was accepted."""
    num_steps, num_drafted = metrics["num_spec_steps"], metrics["num_draft_tokens"]
    if draft_length is None:
        raise ConfigError(
            "k: with auto drafts differ in length, so the server must list them: start "
            f"it with {METRICS_FLAG} detailed"
        )
    if num_drafted != draft_length * num_steps:
        raise ConfigError(
            f"k: {num_drafted} tokens in {num_steps} drafts are not {draft_length} "
            f"each, so the server must list them: start it with {METRICS_FLAG} detailed"
        )
    histogram: Sequence[int] = metrics["acceptance_histogram"]
    return [
        (draft_length, accepted)
        for accepted, count in enumerate(histogram)
        for _ in range(count)
    ]
