"""Which requests the MTP layers catch up on."""

from hypothesis import given
from hypothesis import strategies as st

from vllm_mtp.control.kv_backfill import backfilled_now, most_caught_up_now


@given(st.lists(st.integers(0, 300), min_size=1, max_size=64))
def test_what_a_step_catches_up_on_is_bounded(counts: list[int]) -> None:
    """By the price that a controller sets on it, which is not far above."""
    waiting = {f"r{i}": count for i, count in enumerate(counts)}
    chosen = backfilled_now(waiting)
    total = sum(waiting[request_id] for request_id in chosen)
    bound = most_caught_up_now(counts)
    assert total <= bound
    left = [count for i, count in waiting.items() if i not in chosen]
    if left:
        assert total + min(left) > bound or total == min(filter(None, counts))
        assert max(waiting[i] for i in chosen) <= min(left)
    else:
        assert total == sum(counts) == bound
