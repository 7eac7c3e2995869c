"""The store of pending tokens, against a plain dictionary."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.blocking_copies import BlockingCopies
from vllm_mtp.drafting import pending_tokens
from vllm_mtp.drafting.pending_tokens import PendingRows, PendingTokens

HIDDEN_SIZE = 3
NAMES = "abcde"


def store(max_rows: int = 64) -> PendingTokens:
    pending = PendingTokens(max_rows, HIDDEN_SIZE, torch.float32, torch.device("cpu"))
    for poisoned in (
        pending.hidden_states,
        pending.positions,
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


@pytest.fixture
def worked_off() -> list[dict[str, list[int]]]:
    """What was backfilled to make room, call by call."""
    return []


@pytest.fixture
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_tokens, "ROWS_WORKED_OFF", 4)


@pytest.mark.usefixtures("few_at_once")
def test_a_full_store_drops_the_dead_first_then_backfills_the_oldest(
    worked_off: list[dict[str, list[int]]],
) -> None:
    pending = store(max_rows=8)

    def backfill(rows: np.ndarray) -> None:
        worked_off.append(rows_by_request(pending.take("abc", None, rows), "abc"))

    for numbers in ([1, 2, 3], [4, 5, 6]):
        pending.make_room(3, "abd", backfill)
        add(pending, "abd", numbers)
    # Two rows are left, and those of a step are not torn: it begins in front.
    pending.make_room(3, "ab", backfill)
    assert worked_off == [{"a": [1, 4], "b": [2]}]
    assert pending.counts("abd") == {"a": 0, "b": 1, "d": 0}
    add(pending, "abc", [7, 8, 9])
    taken = rows_by_request(pending.take("abc"), "abc")
    assert taken == {"a": [7], "b": [5, 8], "c": [9]}


@pytest.mark.usefixtures("few_at_once")
@given(st.lists(batches, min_size=1, max_size=30))
def test_a_ring_that_is_always_full_keeps_the_newest(history: list[list[str]]) -> None:
    pending, expected = store(max_rows=12), defaultdict[str, list[int]](list)

    def backfill(rows: np.ndarray) -> None:
        for name, gone in rows_by_request(
            pending.take(NAMES, None, rows), NAMES
        ).items():
            assert expected[name][: len(gone)] == gone
            del expected[name][: len(gone)]

    for number, names in enumerate(history):
        pending.make_room(len(names), NAMES, backfill)
        numbers = list(range(10 * number, 10 * number + len(names)))
        add(pending, names, numbers)
        for name, value in zip(names, numbers, strict=True):
            expected[name].append(value)
        assert pending.num_rows == sum(map(len, expected.values())) <= 12
    left = rows_by_request(pending.take(NAMES), NAMES)
    assert left == {name: rows for name, rows in expected.items() if rows}


@pytest.mark.usefixtures("few_at_once")
def test_what_cannot_be_backfilled_is_dropped_rather_than_overrun() -> None:
    pending = store(max_rows=5)
    add(pending, "abcde", [1, 2, 3, 4, 5])
    pending.make_room(1, "abcde", lambda rows: None)
    assert rows_by_request(pending.take("abcde"), "abcde") == {"e": [5]}


def test_nothing_waits_for_a_device() -> None:
    """A GPU's copies from pageable memory do; the meta device says what would be."""
    meta = torch.device("meta")
    pending = PendingTokens(64, HIDDEN_SIZE, torch.float32, meta)
    waits = BlockingCopies()
    for _ in range(3):
        rows = pending.reserve("abc")
        assert pending.hidden_states[rows].shape == (3, HIDDEN_SIZE)
    with waits:
        taken = pending.take("cab", chosen="ac")
        assert taken is not None
        for part in taken.passes(4):
            part.last_rows()
    assert waits.num_copies == 3
    assert not waits.found
    with waits:
        torch.zeros(3).to(meta)
    assert waits.found == ["aten._to_copy.default"]


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
