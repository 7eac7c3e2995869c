"""The store of tokens that the MTP layers have not seen, against a plain dictionary."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_mtp.drafting.unseen_tokens import UnseenRows, UnseenTokens

HIDDEN_SIZE = 3
NAMES = "abcde"


def store(max_rows: int = 64) -> UnseenTokens:
    unseen = UnseenTokens(max_rows, HIDDEN_SIZE, torch.float32, torch.device("cpu"))
    for poisoned in (unseen._hidden_states, unseen._positions, unseen._next_token_ids):
        poisoned.fill_(-999)
    return unseen


def add(unseen: UnseenTokens, request_ids: Sequence[str], numbers: list[int]) -> None:
    values = torch.tensor(numbers)
    hidden_states = values[:, None].float().expand(-1, HIDDEN_SIZE) / 2
    unseen.add(request_ids, values, values + 1000, hidden_states)


def add_step(
    unseen: UnseenTokens, request_ids: Sequence[str], numbers: list[int]
) -> None:
    values = np.array(numbers)
    hidden_states = torch.tensor(numbers)[:, None].float().expand(-1, HIDDEN_SIZE) / 2
    unseen.add_step(request_ids, values, [n + 1000 for n in numbers], hidden_states)


def rows_by_request(
    rows: UnseenRows | None, request_ids: Sequence[str]
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
    st.tuples(st.just("add_step"), batches),
    st.tuples(st.just("take"), batches),
    st.tuples(st.just("forget"), batches),
    st.tuples(st.just("keep_only"), st.lists(st.sampled_from(NAMES), unique=True)),
)


@given(st.lists(actions, max_size=12))
def test_it_hands_out_what_came_in_by_request_and_oldest_first(
    history: list[tuple[str, list[str]]],
) -> None:
    unseen, expected = store(), defaultdict[str, list[int]](list)
    number = 0
    for action, names in history:
        if action.startswith("add"):
            numbers = list(range(number, number + len(names)))
            number += len(names)
            (add if action == "add" else add_step)(unseen, names, numbers)
            for name, value in zip(names, numbers, strict=True):
                expected[name].append(value)
        elif action == "take":
            taken = rows_by_request(unseen.take(names), names)
            assert taken == {n: expected[n] for n in names if expected.get(n)}
            for name in names:
                expected.pop(name, None)
        elif action == "forget":
            unseen.forget(names)
            for name in names:
                expected.pop(name, None)
        else:
            unseen.keep_only(names)
            expected = defaultdict(
                list, {n: v for n, v in expected.items() if n in names}
            )
        assert unseen.num_rows == sum(map(len, expected.values()))
    everything = rows_by_request(unseen.take(NAMES), NAMES)
    assert everything == {n: v for n, v in expected.items() if v}


def test_steps_are_copied_when_there_are_many_of_them() -> None:
    unseen = store(max_rows=256)
    for number in range(100):
        add_step(unseen, "ab", [2 * number, 2 * number + 1])
        assert len(unseen._uncopied) < 32, "memory that others could use"
    assert unseen.num_rows == 200
    expected = {"a": list(range(0, 200, 2)), "b": list(range(1, 200, 2))}
    assert rows_by_request(unseen.take("ab"), "ab") == expected


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), st.integers(1, 12)
)
def test_passes_hold_every_row_once_and_never_too_many(
    counts: list[int], max_rows: int
) -> None:
    total = sum(counts)
    rows = UnseenRows(
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


def test_a_full_store_drops_the_dead_first_then_catches_up() -> None:
    unseen, caught_up = store(max_rows=8), []

    def catch_up() -> None:
        caught_up.append(rows_by_request(unseen.take("abc"), "abc"))

    add(unseen, "ab", [1, 2])
    unseen.make_room(6, "ab", catch_up)
    assert unseen.num_rows == 2
    assert not caught_up
    add(unseen, "abcde", [3, 4, 5, 6, 7])
    unseen.make_room(3, "abc", catch_up)
    assert caught_up == [{"a": [1, 3], "b": [2, 4], "c": [5]}]
    assert unseen.num_rows == 0


def test_what_cannot_be_caught_up_is_dropped_rather_than_overrun() -> None:
    unseen = store(max_rows=4)
    add(unseen, "abcd", [1, 2, 3, 4])
    unseen.make_room(1, "abcd", lambda: None)
    assert unseen.num_rows == 0
    assert unseen.take("abcd") is None


def test_some_of_a_batch_are_handed_out_in_its_order() -> None:
    unseen = store()
    add(unseen, "abc", [1, 2, 3])
    add(unseen, "ac", [4, 5])
    assert unseen.counts("dcba") == {"d": 0, "c": 2, "b": 1, "a": 2}
    taken = rows_by_request(unseen.take("cba", chosen=["a", "c"]), "cba")
    assert taken == {"c": [3, 5], "a": [1, 4]}
    assert unseen.counts("abc") == {"a": 0, "b": 1, "c": 0}


def test_taken_rows_are_copies() -> None:
    unseen = store()
    add(unseen, "a", [1])
    taken = unseen.take("a")
    add(unseen, "b", [2])
    assert rows_by_request(taken, "a") == {"a": [1]}
