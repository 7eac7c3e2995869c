"""The store of pending tokens, against a plain dictionary."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_mtp.drafting.pending_tokens import PendingRows, PendingTokens

HIDDEN_SIZE = 3
NAMES = "abcde"


def store(max_rows: int = 64) -> PendingTokens:
    pending = PendingTokens(max_rows, HIDDEN_SIZE, torch.float32, torch.device("cpu"))
    for poisoned in (
        pending._hidden_states,
        pending._positions,
        pending._next_token_ids,
    ):
        poisoned.fill_(-999)
    return pending


def add(pending: PendingTokens, request_ids: Sequence[str], numbers: list[int]) -> None:
    values = torch.tensor(numbers)
    hidden_states = values[:, None].float().expand(-1, HIDDEN_SIZE) / 2
    pending.add(request_ids, values, values + 1000, hidden_states)


def rows_by_request(
    rows: PendingRows | None, request_ids: Sequence[str]
) -> dict[str, list[int]]:
    if rows is None:
        return {}
    positions = rows.positions.tolist()
    assert rows.next_token_ids.tolist() == [p + 1000 for p in positions]
    assert rows.hidden_states.tolist() == [[p / 2] * HIDDEN_SIZE for p in positions]
    result, first = {}, 0
    for request_id, count in zip(request_ids, rows.num_tokens.tolist(), strict=True):
        if count:
            result[request_id] = positions[first : first + count]
        first += count
    assert first == len(positions)
    return result


batches = st.lists(st.sampled_from(NAMES), unique=True, min_size=1)
actions = st.one_of(
    st.tuples(st.just("add"), batches),
    st.tuples(st.just("take"), batches),
    st.tuples(st.just("forget"), batches),
    st.tuples(st.just("keep_only"), st.lists(st.sampled_from(NAMES), unique=True)),
)


@given(st.lists(actions, max_size=12))
def test_it_hands_out_what_came_in_by_request_and_oldest_first(
    history: list[tuple[str, list[str]]],
) -> None:
    pending, expected = store(), defaultdict[str, list[int]](list)
    number = 0
    for action, names in history:
        if action == "add":
            numbers = list(range(number, number + len(names)))
            number += len(names)
            add(pending, names, numbers)
            for name, value in zip(names, numbers, strict=True):
                expected[name].append(value)
        elif action == "take":
            taken = rows_by_request(pending.take(names), names)
            assert taken == {n: expected[n] for n in names if expected.get(n)}
            for name in names:
                expected.pop(name, None)
        elif action == "forget":
            pending.forget(names)
            for name in names:
                expected.pop(name, None)
        else:
            pending.keep_only(names)
            expected = defaultdict(
                list, {n: v for n, v in expected.items() if n in names}
            )
        assert pending.num_rows == sum(map(len, expected.values()))
    everything = rows_by_request(pending.take(NAMES), NAMES)
    assert everything == {n: v for n, v in expected.items() if v}


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(1, 12)
)
def test_passes_hold_every_row_once_and_never_too_many(
    counts: list[int], max_rows: int
) -> None:
    total = sum(counts)
    rows = PendingRows(
        np.array(counts),
        torch.arange(total),
        torch.arange(total, dtype=torch.int32),
        torch.zeros(total, 1),
    )
    owners = np.repeat(np.arange(len(counts)), counts)
    seen: list[int] = []
    for part in rows.passes(max_rows):
        positions = part.positions.tolist()
        assert 0 < len(positions) == part.num_rows <= max_rows
        lengths = np.diff(part.query_start_loc)
        assert lengths.min() > 0
        assert part.max_query_len == lengths.max()
        assert np.repeat(part.requests, lengths).tolist() == owners[positions].tolist()
        assert part.last_rows().tolist() == (part.query_start_loc[1:] - 1).tolist()
        seen += positions
    assert seen == list(range(total))


def test_a_full_store_drops_the_dead_first_then_backfills() -> None:
    pending, backfilled = store(max_rows=8), []

    def backfill() -> None:
        backfilled.append(rows_by_request(pending.take("abc"), "abc"))

    add(pending, "ab", [1, 2])
    pending.make_room(6, "ab", backfill)
    assert pending.num_rows == 2
    assert not backfilled
    add(pending, "abcde", [3, 4, 5, 6, 7])
    pending.make_room(3, "abc", backfill)
    assert backfilled == [{"a": [1, 3], "b": [2, 4], "c": [5]}]
    assert pending.num_rows == 0


def test_what_cannot_be_backfilled_is_dropped_rather_than_overrun() -> None:
    pending = store(max_rows=4)
    add(pending, "abcd", [1, 2, 3, 4])
    pending.make_room(1, "abcd", lambda: None)
    assert pending.num_rows == 0
    assert pending.take("abcd") is None


def test_some_of_a_batch_are_handed_out_in_its_order() -> None:
    pending = store()
    add(pending, "abc", [1, 2, 3])
    add(pending, "ac", [4, 5])
    assert pending.counts("dcba") == {"d": 0, "c": 2, "b": 1, "a": 2}
    taken = rows_by_request(pending.take("cba", chosen=["a", "c"]), "cba")
    assert taken == {"c": [3, 5], "a": [1, 4]}
    assert pending.counts("abc") == {"a": 0, "b": 1, "c": 0}


def test_taken_rows_are_copies() -> None:
    pending = store()
    add(pending, "a", [1])
    taken = pending.take("a")
    add(pending, "b", [2])
    assert rows_by_request(taken, "a") == {"a": [1]}
