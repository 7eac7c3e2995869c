"""When the draft vocabulary is used."""

import pytest
import torch

from vllm_mtp.drafting.vocabulary import DraftVocabulary, Shard
from vllm_mtp.drafting.vocabulary_policy import (
    MIN_TOKENS,
    MIN_TOKENS_TO_COMPLAIN,
    STEPS_BEFORE_NEW_PROMPTS_COUNT,
    STEPS_BETWEEN_REFRESHES,
    VocabularyPolicy,
)

VOCAB_SIZE = 64


def make_policy(
    *, is_fixed: bool = False, may_switch: bool = True
) -> tuple[VocabularyPolicy, DraftVocabulary]:
    vocabulary = DraftVocabulary(8, [Shard(0, VOCAB_SIZE)], set(), torch.device("cpu"))
    return VocabularyPolicy(
        vocabulary, is_fixed=is_fixed, may_switch=may_switch
    ), vocabulary


def commit(vocabulary: DraftVocabulary, token_ids: list[int], num_tokens: int) -> None:
    repeats = num_tokens // len(token_ids)
    vocabulary.observe(torch.tensor(token_ids).repeat(repeats))


def draft(policy: VocabularyPolicy, num_passes: int = STEPS_BETWEEN_REFRESHES) -> None:
    for _ in range(num_passes):
        assert policy.before_drafting(lambda: None) is None


def test_the_whole_head_is_used_until_enough_is_known() -> None:
    policy, vocabulary = make_policy()
    draft(policy)
    assert not policy.is_active
    commit(vocabulary, [1, 2], MIN_TOKENS // 2)
    draft(policy)
    assert not policy.is_active, "all covered, but too little seen"
    commit(vocabulary, [1, 2], MIN_TOKENS)
    draft(policy)
    assert policy.is_active


def test_the_whole_head_comes_back_when_the_text_is_not_covered() -> None:
    policy, vocabulary = make_policy()
    commit(vocabulary, [1, 2], 4 * MIN_TOKENS)
    draft(policy)
    assert policy.is_active
    commit(vocabulary, [1] * 24 + [60], 4 * MIN_TOKENS)
    policy.before_drafting(lambda: None)
    assert policy.is_active, "96 %: below what begins, above what ends"
    draft(policy)
    commit(vocabulary, [40, 41, 42, 43, 44, 45, 46, 47, 48], 4 * MIN_TOKENS)
    draft(policy)
    assert not policy.is_active


def test_when_its_text_is_back_an_unused_vocabulary_is_soon_in_use() -> None:
    policy, vocabulary = make_policy()
    commit(vocabulary, [1, 2], 8192)
    draft(policy)
    commit(vocabulary, list(range(VOCAB_SIZE)), 2048)
    draft(policy)
    assert not policy.is_active
    num_tokens = 0
    while not policy.is_active:
        commit(vocabulary, [1, 2], 256)
        draft(policy)
        num_tokens += 256
    assert num_tokens <= 3072


def test_where_it_may_not_switch_it_is_always_in_use() -> None:
    policy, vocabulary = make_policy(may_switch=False)
    assert policy.is_active
    commit(vocabulary, [50, 51], 2 * MIN_TOKENS)
    draft(policy)
    assert policy.is_active
    assert {50, 51} <= set(vocabulary.token_ids.tolist())


def test_new_prompts_are_asked_about_sooner_but_not_at_once() -> None:
    policy, vocabulary = make_policy()
    draft(policy, 1)  # the first pass chooses rows
    policy.expect(torch.tensor([60]))
    draft(policy, STEPS_BEFORE_NEW_PROMPTS_COUNT - 1)
    assert 60 not in vocabulary.token_ids
    draft(policy, 1)
    assert 60 in vocabulary.token_ids
    commit(vocabulary, [61], 9)
    draft(policy, STEPS_BETWEEN_REFRESHES - 1)
    assert 61 not in vocabulary.token_ids
    draft(policy, 1)
    assert 61 in vocabulary.token_ids


def test_the_prompt_of_the_first_request_is_there_at_once() -> None:
    policy, vocabulary = make_policy()
    policy.expect(torch.tensor([60]))
    draft(policy, 1)
    assert 60 in vocabulary.token_ids


def test_a_list_stays_and_is_complained_about_if_it_is_poor() -> None:
    policy, vocabulary = make_policy(is_fixed=True)
    vocabulary.prefer([10, 11, 12, 13, 14, 15, 16, 17])
    policy.expect(torch.tensor([60]))
    commit(vocabulary, [10, 11, 12, 60], MIN_TOKENS_TO_COMPLAIN - 4)
    draft(policy)
    assert policy.is_active
    assert set(vocabulary.token_ids.tolist()) == set(range(10, 18))
    commit(vocabulary, [10, 11, 12, 60], 8)
    said = [
        policy.before_drafting(lambda: None) for _ in range(4 * STEPS_BETWEEN_REFRESHES)
    ]
    (complaint,) = filter(None, said)
    assert "covers only 75 % of the tokens" in complaint


def test_a_good_list_is_not_complained_about() -> None:
    policy, vocabulary = make_policy(is_fixed=True)
    commit(vocabulary, [1, 2, 3], 3 * MIN_TOKENS_TO_COMPLAIN)
    draft(policy)
    assert policy.is_active


@pytest.mark.parametrize("is_fixed", [False, True])
def test_committed_tokens_are_counted_where_they_matter(is_fixed: bool) -> None:
    """Before rows are chosen, or coverage is looked at: once in many passes."""
    policy, vocabulary = make_policy(is_fixed=is_fixed)
    num_counts = 0

    def count() -> None:
        nonlocal num_counts
        num_counts += 1
        commit(vocabulary, [1], MIN_TOKENS)

    for _ in range(STEPS_BETWEEN_REFRESHES):
        policy.before_drafting(count)
    assert num_counts == 1
    assert vocabulary.coverage()[1] > 0


@pytest.fixture
def sizing(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[VocabularyPolicy, DraftVocabulary]:
    """A policy that may choose how many rows there are, two at least."""
    monkeypatch.setattr("vllm_mtp.drafting.vocabulary_policy.FEWEST_ROWS", 2)
    vocabulary = DraftVocabulary(8, [Shard(0, VOCAB_SIZE)], set(), torch.device("cpu"))
    policy = VocabularyPolicy(
        vocabulary, is_fixed=False, may_switch=True, may_resize=True
    )
    return policy, vocabulary


def serve(
    sizing: tuple[VocabularyPolicy, DraftVocabulary],
    token_ids: list[int],
    refreshes: int,
) -> list[int]:
    """Refresh after refresh of the same text; how many rows there were after each."""
    policy, vocabulary = sizing
    found = []
    for _ in range(refreshes):
        commit(vocabulary, token_ids, 4 * MIN_TOKENS)
        draft(policy)
        found.append(vocabulary.num_rows)
    return found


def test_rows_that_nobody_needs_are_given_up(
    sizing: tuple[VocabularyPolicy, DraftVocabulary],
) -> None:
    policy, _ = sizing
    rows = serve(sizing, [1, 2, 3, 4], 8)
    assert rows[-1] == 4, "two would cover half"
    assert sorted(rows, reverse=True) == rows
    assert policy.is_active


def test_rows_come_back_when_they_are_missed_and_stay(
    sizing: tuple[VocabularyPolicy, DraftVocabulary],
) -> None:
    policy, vocabulary = sizing
    assert serve(sizing, [1, 2], 8)[-1] == 2
    # One token in 32 lies outside: enough to stay in use, too much to stay small.
    rows = serve(sizing, [1] * 16 + [2] * 15 + [30], 12)
    assert rows[-1] > 2
    assert policy.is_active
    commit(vocabulary, [1, 2], 2**16)
    assert serve(sizing, [1, 2], 6)[-1] == rows[-1], "not at once again"


def test_a_number_that_the_user_chose_stays() -> None:
    policy, vocabulary = make_policy()
    assert serve((policy, vocabulary), [1, 2], 8) == [8] * 8
