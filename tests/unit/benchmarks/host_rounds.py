"""What engines count in a round of the host benchmark."""

from typing import Any


def figures(schedule_s: float, update_s: float, tokens: int = 100) -> dict[str, Any]:
    """Of 50 decode steps of one request, 5 ms each."""
    split = {"schedule": schedule_s, "update": update_s, "worker": 0.1}
    return {
        "decode_split_seconds": split,
        "decode_steps": 50,
        "decode_seconds": 0.25,
        "decode_tokens": tokens,
        "decode_request_steps": 50,
    }


def host_round(mtp_plus_s: float) -> dict[str, dict[str, Any]]:
    """``mtp`` takes 300 us a step."""
    return {
        "none": figures(0.005, 0.005, 50),
        "mtp": figures(0.005, 0.010),
        "mtp_plus": figures(0.005, mtp_plus_s, 150),
    }
