"""What the parts of a finished step took, by what is known of the cost."""

from benchmarks.control.previous.expected_times import ExpectedTimes
from vllm_mtp.records import StepOutcome


def step_parts(
    outcome: StepOutcome, times: ExpectedTimes, max_draft_length: int
) -> tuple[float, float, float]:
    """Seconds of the target alone, of verifying drafts, and of drafting.

    Args:
        outcome: Of a step that only decoded, at least one request.
        times: Expected step times for its batch.
        max_draft_length: Upper bound on K.
    """
    num_requests = outcome.num_decode_requests
    off_s = times.uniform(0, 0).seconds
    if outcome.num_scheduled_tokens == num_requests and not outcome.draft_depth:
        return off_s, 0.0, 0.0
    # Halves, so that the answers of a plan are few and found again.
    twice = 2 * (outcome.num_scheduled_tokens - num_requests) / num_requests
    verified = min(round(twice) / 2, float(max_draft_length))
    depth = min(outcome.draft_depth, max_draft_length)
    if verified.is_integer():
        verify_s, all_s = (times.uniform(int(verified), d).seconds for d in (0, depth))
    else:
        verify_s, all_s = (times.mixed(verified, d).seconds for d in (0, depth))
    return off_s, max(verify_s - off_s, 0.0), max(all_s - verify_s, 0.0)
