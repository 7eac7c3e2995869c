"""What the parts of a finished step took, by what is known of the cost."""

from vllm_mtp.control.step_times import Times
from vllm_mtp.records import StepOutcome


def step_parts(
    outcome: StepOutcome, times: Times, max_draft_length: int
) -> tuple[float, float, float]:
    """Seconds of the target alone, of verifying drafts, and of drafting.

    Args:
        outcome: Of a step that only decoded, at least one request.
        times: Expected step times for its batch.
        max_draft_length: Upper bound on K.
    """
    num_requests = outcome.num_decode_requests
    off_s = times.seconds(0.0, 0)
    extra = max(outcome.num_scheduled_tokens - num_requests, 0)
    if not extra and not outcome.draft_depth:
        return off_s, 0.0, 0.0
    verified = min(extra / num_requests, float(max_draft_length))
    depth = min(outcome.draft_depth, max_draft_length)
    all_s = times.seconds(verified, depth, verified.is_integer())
    drafting_s = times.seconds(0.0, depth) - off_s
    return off_s, max(all_s - off_s - drafting_s, 0.0), max(drafting_s, 0.0)
