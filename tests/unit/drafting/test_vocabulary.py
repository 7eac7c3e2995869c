"""Which rows a draft vocabulary has, and that its head's rows are always those."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mtp.drafting.vocabulary import (
    HALF_LIFE_TOKENS,
    ROW_MULTIPLE,
    DraftVocabulary,
    Shard,
    default_num_rows,
    round_num_rows,
)

CPU = torch.device("cpu")
VOCAB_SIZE = 40
ONE_SHARD = [Shard(0, VOCAB_SIZE)]
TWO_SHARDS = [Shard(0, 24), Shard(24, VOCAB_SIZE)]


def members(vocabulary: DraftVocabulary) -> set[int]:
    return set(vocabulary.token_ids.tolist())


def commit(vocabulary: DraftVocabulary, *token_ids: int, times: int = 1) -> None:
    for _ in range(times):
        vocabulary.observe(torch.tensor(token_ids))


def test_it_begins_with_the_lowest_ids_and_those_never_left_out() -> None:
    vocabulary = DraftVocabulary(8, ONE_SHARD, {39, 2}, CPU)
    assert members(vocabulary) == {0, 1, 2, 3, 4, 5, 6, 39}


def test_every_shard_has_the_same_number_of_rows_in_order() -> None:
    vocabulary = DraftVocabulary(8, TWO_SHARDS, {30}, CPU)
    commit(vocabulary, 20, 21, 22, 23, 19, 18, times=3)
    vocabulary.refresh()
    first, second = vocabulary.token_ids.view(2, 4)
    assert all(0 <= i < 24 for i in first.tolist())
    assert set(second.tolist()) == {24, 25, 26, 30}


def test_what_is_committed_most_comes_in_and_what_is_not_goes() -> None:
    vocabulary = DraftVocabulary(4, ONE_SHARD, set(), CPU)
    commit(vocabulary, 10, 11, 12, times=2)
    commit(vocabulary, 13, 14)
    commit(vocabulary, 13)
    assert members(vocabulary) == {0, 1, 2, 3}, "rows move when they are told to"
    vocabulary.refresh()
    assert members(vocabulary) == {10, 11, 12, 13}


def test_prompts_count_once_for_each_token() -> None:
    vocabulary = DraftVocabulary(4, ONE_SHARD, set(), CPU)
    vocabulary.expect(torch.tensor([20, 20, 20, 21, -1, VOCAB_SIZE]))
    commit(vocabulary, 22, 23, 24, times=2)
    vocabulary.refresh()
    assert members(vocabulary) >= {22, 23, 24}
    assert len(members(vocabulary) & {20, 21}) == 1


def test_it_follows_a_change_of_the_traffic() -> None:
    vocabulary = DraftVocabulary(4, ONE_SHARD, set(), CPU)
    commit(vocabulary, 10, 11, 12, 13, times=100)
    vocabulary.refresh()
    others = torch.tensor([30, 31, 32, 33])
    for _ in range(8):
        vocabulary.observe(others.repeat(HALF_LIFE_TOKENS // 8))
        vocabulary.refresh()
    assert members(vocabulary) == {30, 31, 32, 33}
    assert vocabulary.coverage()[0] > 0.9


def test_what_is_no_token_does_not_count() -> None:
    vocabulary = DraftVocabulary(2, ONE_SHARD, set(), CPU)
    vocabulary.observe(torch.tensor([7, 8, -1, VOCAB_SIZE, -1]).int())
    assert vocabulary.coverage() == (0.0, 2.0)
    vocabulary.refresh()
    assert members(vocabulary) == {7, 8}


def test_coverage_is_of_the_rows_that_were_there() -> None:
    vocabulary = DraftVocabulary(2, ONE_SHARD, set(), CPU)
    commit(vocabulary, 0, 1, 5, 6)
    assert vocabulary.coverage() == (0.5, 4.0)
    commit(vocabulary, 5, 6, times=2)
    vocabulary.refresh()
    commit(vocabulary, 5, 6)
    share, num_tokens = vocabulary.coverage()
    assert share == pytest.approx(0.4, abs=0.01)
    assert num_tokens == pytest.approx(10, abs=0.1)


def test_values_of_rows_are_spread_to_their_token_ids() -> None:
    vocabulary = DraftVocabulary(2, ONE_SHARD, set(), CPU)
    commit(vocabulary, 30, 31)
    vocabulary.refresh()
    whole = vocabulary.spread(torch.tensor([[0.25, 0.75]]), 0.0)
    assert whole.shape == (1, VOCAB_SIZE)
    values = dict(zip(vocabulary.token_ids.tolist(), [0.25, 0.75], strict=True))
    assert {i: whole[0, i].item() for i in (30, 31)} == values
    assert whole.sum() == 1.0
    assert torch.equal(
        vocabulary.to_target(torch.tensor([[1, 0]])),
        vocabulary.token_ids[torch.tensor([[1, 0]])],
    )


def test_a_list_is_taken_as_it_is_and_filled_up_shard_by_shard() -> None:
    vocabulary = DraftVocabulary(8, TWO_SHARDS, {39}, CPU)
    vocabulary.prefer([23, 22, 21, 20, 19, 30])
    assert members(vocabulary) == {23, 22, 21, 20, 30, 39, 24, 25}


steps = st.lists(
    st.tuples(
        st.lists(st.integers(-1, VOCAB_SIZE), min_size=1, max_size=6), st.booleans()
    ),
    max_size=12,
)


@settings(max_examples=200, deadline=None)
@given(steps=steps, shards=st.sampled_from([ONE_SHARD, TWO_SHARDS]))
def test_a_head_that_follows_always_has_the_rows_of_the_ids(
    steps: list[tuple[list[int], bool]], shards: list[Shard]
) -> None:
    vocabulary = DraftVocabulary(8, shards, {1}, CPU)
    rows = vocabulary.token_ids.clone()

    def follow(slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        rows[slots] = token_ids

    vocabulary.on_rows_changed.append(follow)
    same_tensor = vocabulary.token_ids
    for token_ids, is_refreshed in steps:
        commit(vocabulary, *token_ids)
        if is_refreshed:
            vocabulary.refresh()
        assert torch.equal(rows, vocabulary.token_ids)
        assert vocabulary.token_ids is same_tensor
        assert len(members(vocabulary)) == 8
        assert 1 in members(vocabulary)
        for i, (first, end) in enumerate(shards):
            own = vocabulary.token_ids.view(len(shards), -1)[i]
            assert bool(((own >= first) & (own < end)).all())


@pytest.mark.parametrize(
    ("vocab_size", "num_shards", "num_rows"),
    [
        (16384, 1, 4096),
        (32768, 1, 8192),
        (151_936, 1, 16384),
        (151_936, 8, 16384),
        (151_936, 3, 16512),
        (4095, 1, None),
        (4096, 1, 1024),
    ],
)
def test_the_usual_size(vocab_size: int, num_shards: int, num_rows: int | None) -> None:
    assert default_num_rows(vocab_size, num_shards) == num_rows
    if num_rows:
        assert num_rows % (ROW_MULTIPLE * num_shards) == 0


def test_a_wished_size_is_rounded_up() -> None:
    assert round_num_rows(1, 1) == ROW_MULTIPLE
    assert round_num_rows(257, 2) == 512


def test_it_covers_what_comes_as_well_as_a_list_of_what_came() -> None:
    random = np.random.default_rng(0)
    size, num_rows = 4096, 1024
    names = random.permutation(size)
    law = 1.0 / np.arange(1, size + 1) ** 1.2
    text = torch.from_numpy(names[random.choice(size, 40_000, p=law / law.sum())])
    vocabulary = DraftVocabulary(num_rows, [Shard(0, size)], set(), CPU)
    for piece in text[:20_000].split(64):
        vocabulary.observe(piece)
        vocabulary.refresh()
    counts = torch.bincount(text[:20_000], minlength=size)
    rest = text[20_000:]
    listed = torch.isin(rest, counts.topk(num_rows).indices).float().mean()
    learnt = torch.isin(rest, vocabulary.token_ids).float().mean()
    assert listed > 0.9
    assert learnt > listed - 0.01


def test_rows_stay_while_others_would_hardly_be_worth_more() -> None:
    """Each change costs a CPU another packing of all rows."""
    vocabulary = DraftVocabulary(4, ONE_SHARD, set(), CPU)
    commit(vocabulary, 10, 11, 12, times=2000)
    commit(vocabulary, 13)
    vocabulary.refresh()
    assert members(vocabulary) == {10, 11, 12, 13}
    refreshes = 0
    while 14 not in members(vocabulary):
        vocabulary.expect(torch.tensor([10, 11, 12, 14]))
        vocabulary.refresh()
        refreshes += 1
    assert 3 < refreshes < 60, "of prompts, a few tokens of thousands; but they add up"
    commit(vocabulary, 15, times=2 * refreshes)
    vocabulary.refresh()
    assert members(vocabulary) == {10, 11, 12, 15}, "missed: at once"


def test_another_number_of_rows_goes_to_the_best_and_everyone_is_told() -> None:
    vocabulary = DraftVocabulary(8, TWO_SHARDS, {39}, CPU)
    told: list[tuple[list[int], list[int]]] = []
    vocabulary.on_rows_changed.append(
        lambda slots, ids: told.append((slots.tolist(), ids.tolist()))
    )
    commit(vocabulary, 10, 11, 30, times=5)
    commit(vocabulary, 12, 31)
    assert vocabulary.share_of_best(4) == pytest.approx(16 / 17)
    vocabulary.resize(4)
    assert members(vocabulary) == {10, 11, 30, 39}
    assert told == [([0, 1, 2, 3], vocabulary.token_ids.tolist())]
    assert vocabulary.coverage() == (0.0, 0.0), "that was of other rows"
    commit(vocabulary, 10, 12)
    assert vocabulary.coverage()[0] == pytest.approx(0.5)
    vocabulary.resize(8)
    assert {10, 11, 12, 30, 31, 39} <= members(vocabulary)
    values = torch.arange(8.0)[None]
    whole = vocabulary.spread(values, -1.0)
    assert whole[0, vocabulary.token_ids].tolist() == values[0].tolist()
