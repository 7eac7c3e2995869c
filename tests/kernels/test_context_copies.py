"""Continuations of drafts, against vLLM's own search and a statement in Python."""

import random
from itertools import product

import numpy as np
import pytest
import torch

from tests.kernels.conftest import EVERYWHERE
from tests.support.context_matches import find_continuation
from vllm_mtp.kernels import context_copies
from vllm_mtp.kernels.context_copies import (
    FILLER,
    ContextCopies,
    MatchLimits,
    Texts,
)

LIMITS = MatchLimits(beside_draft=3, with_draft=16, alone=8)
MAX_MODEL_LEN, MAX_NUM_REQS, MAX_DRAFTS = 120, 12, 7
POISON = -999

Tokens = list[int]


class Requests:
    """Texts of all that could run, in rows of vLLM's kind, and their last drafts."""

    def __init__(self, device: torch.device, limits: MatchLimits = LIMITS) -> None:
        self.device, self.limits = device, limits
        self.copies = ContextCopies(
            MAX_NUM_REQS, MAX_DRAFTS, MAX_MODEL_LEN, limits, device
        )
        self.texts: dict[int, Tokens] = {}
        self.drafts: dict[int, tuple[Tokens, Tokens]] = {}
        """The chain, and what was offered behind it."""

    def step(
        self,
        committed: dict[int, Tokens],
        chains: dict[int, Tokens],
        search: bool = True,
    ) -> tuple[dict[int, Tokens], dict[int, tuple[int, int, int]]]:
        """What is written behind the chain of each request, and its counts."""
        slots = list(committed)
        for slot, tokens in committed.items():
            self.texts.setdefault(slot, []).extend(tokens)
        (num_drafts,) = {len(chain) for chain in chains.values()}
        token_ids = np.full((MAX_NUM_REQS, MAX_MODEL_LEN + 8), POISON, dtype=np.int32)
        total_len = np.zeros(MAX_NUM_REQS, dtype=np.int32)
        for slot, text in self.texts.items():
            token_ids[slot, : len(text)] = text
            total_len[slot] = len(text)
        drafts = torch.full((len(slots), MAX_DRAFTS), POISON, dtype=torch.int64)
        for row, slot in zip(drafts, slots, strict=True):
            row[:num_drafts] = torch.tensor(chains[slot])
        drafts = drafts.to(self.device)
        texts = Texts(
            self._tensor(token_ids),
            self._tensor(total_len),
            self._tensor(np.array(slots, dtype=np.int64)),
            self._tensor(np.array([len(committed[s]) for s in slots], dtype=np.int32)),
        )
        longest = max(len(self.texts[slot]) for slot in slots) if search else 0
        counts = self.copies.continue_drafts(texts, drafts, num_drafts, longest)
        written = dict(zip(slots, drafts.tolist(), strict=True))
        assert all(written[slot][:num_drafts] == chains[slot] for slot in slots)
        return (
            {slot: row[num_drafts:] for slot, row in written.items()},
            dict(zip(slots, map(tuple, counts.T.tolist()), strict=True)),
        )

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def wanted(text: Tokens, chain: Tokens, limits: MatchLimits = LIMITS) -> Tokens:
    """As vLLM continues it."""
    least = limits.beside_draft + len(chain) if chain else limits.alone
    most, room = max(limits.with_draft, least), MAX_DRAFTS - len(chain)
    return find_continuation(text + chain, least, most, MAX_MODEL_LEN, room)


def judged(chain: Tokens, offer: Tokens, committed: Tokens) -> tuple[int, int]:
    """Tokens of an offer that could be compared, and that were right; the chain in
    front of it is one of them."""
    before = committed[: len(chain)]
    if not offer:
        return 0, 0
    if before != chain[: len(before)]:
        return 1, 0
    if len(before) < len(chain):
        return 0, 0
    matched = 1
    for ours, theirs in zip(offer, committed[len(chain) :], strict=False):
        if ours != theirs:
            return matched + 1, matched
        matched += 1
    return matched, matched


def filled(offer: Tokens, num_drafts: int) -> Tokens:
    return offer + [FILLER] * (MAX_DRAFTS - num_drafts - len(offer))


@pytest.fixture(params=[p for p in EVERYWHERE if p.id.startswith("triton")])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The kernels are Triton's alone."""
    return torch.device(request.param[1])


@pytest.fixture(params=[32, 1024])
def places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of many blocks, more than are compared at once, and of one."""
    monkeypatch.setattr(context_copies, "_PLACES_PER_PROGRAM", request.param)
    monkeypatch.setattr(context_copies, "_BLOCKS_AT_ONCE", 2)


def random_text(rng: random.Random) -> Tokens:
    alphabet = range(1, 1 + rng.choice([1, 2, 3, 5]))
    longest = MAX_MODEL_LEN - 1
    length = rng.choice([rng.randint(1, 8), rng.randint(9, 100), longest, longest - 3])
    if rng.random() < 0.4:  # periodic
        period = [rng.choice(alphabet) for _ in range(rng.randint(1, 9))]
        return (period * length)[:length]
    return [rng.choice(alphabet) for _ in range(length)]


def random_chain(rng: random.Random, text: Tokens, num_drafts: int) -> Tokens:
    """Often one that the text goes on with somewhere."""
    if len(text) > num_drafts and rng.random() < 0.7:
        start = rng.randrange(len(text) - num_drafts)
        return text[start : start + num_drafts]
    return [rng.choice(text) for _ in range(num_drafts)]


@pytest.mark.parametrize("num_drafts", [0, 1, 2, 3])
@pytest.mark.usefixtures("places")
def test_drafts_go_on_as_vllm_continues_them(
    num_drafts: int, device: torch.device
) -> None:
    rng, num_offers = random.Random(num_drafts), 0
    for limits in (LIMITS, MatchLimits(1, 2, 3), MatchLimits(2, 5, 4)):
        for _ in range(5):
            requests = Requests(device, limits)
            slots = rng.sample(range(MAX_NUM_REQS), rng.randint(3, 6))
            texts = {slot: random_text(rng) for slot in slots}
            chains = {s: random_chain(rng, t, num_drafts) for s, t in texts.items()}
            written, counts = requests.step(texts, chains)
            for slot in slots:
                offer = wanted(texts[slot], chains[slot], limits)
                assert written[slot] == filled(offer, num_drafts)
                # A prompt is no answer to an offer.
                assert counts[slot] == (len(offer), 0, 0)
                num_offers += bool(offer)
    assert num_offers > 15


@pytest.mark.usefixtures("places")
def test_a_text_that_repeats_itself_goes_on_into_the_draft(
    device: torch.device,
) -> None:
    text, chain = [1, 2, 3] * 4, [1, 2]
    written, _ = Requests(device).step({3: text}, {3: chain})
    offer = wanted(text, chain)
    # Of 14 tokens 11 stand three places before.
    assert offer == [3, 1, 2]
    assert written[3] == filled(offer, 2)


def test_near_the_end_of_the_model_less_is_offered(device: torch.device) -> None:
    for left, num_drafts in product(range(8), (1, 3)):
        text = ([1, 2, 3, 4, 5] * MAX_MODEL_LEN)[: MAX_MODEL_LEN - left]
        chain = [(len(text) + i) % 5 + 1 for i in range(num_drafts)]
        written, counts = Requests(device).step({0: text}, {0: chain})
        offer = wanted(text, chain)
        assert len(offer) == max(0, min(MAX_DRAFTS, left) - num_drafts)
        assert written[0] == filled(offer, num_drafts)
        assert counts[0] == (len(offer), 0, 0)


def test_requests_that_sample_nothing_are_offered_nothing(
    device: torch.device,
) -> None:
    requests = Requests(device)
    requests.texts = {0: [1, 2, 3, 4] * 4, 1: [1, 2, 3, 4] * 4}
    written, counts = requests.step({0: [], 1: [1]}, {0: [1], 1: [2]})
    assert written[0] == filled([], 1)
    assert counts[0] == (0, 0, 0)
    assert counts[1] == (len(wanted([1, 2, 3, 4] * 4 + [1], [2])), 0, 0)


def test_texts_that_are_not_searched_leave_fillers_and_judgements(
    device: torch.device,
) -> None:
    requests = Requests(device)
    requests.texts = {0: [1, 2, 3, 4] * 4}
    requests.step({0: [1]}, {0: [2]})
    written, counts = requests.step({0: [2, 3, 4, 1]}, {0: [2]}, search=False)
    assert written[0] == filled([], 1)
    assert counts[0] == (0, 4, 4)
    # That was an offer of nothing.
    assert requests.step({0: [2, 3, 4]}, {0: [1]})[1][0][1:] == (0, 0)


@pytest.mark.usefixtures("places")
def test_offers_are_judged_by_what_was_committed_since(device: torch.device) -> None:
    rng, requests, seen = random.Random(5), Requests(device), set()
    period = [1, 2, 3, 1, 2, 4]
    requests.texts = {slot: period * 3 for slot in (2, 7, 4)}
    offers: dict[int, tuple[Tokens, Tokens]] = {}
    for step in range(16):
        num_drafts = rng.choice([1, 2])
        slots = rng.sample(sorted(requests.texts), rng.randint(1, 3))
        committed = {}
        for slot in slots:
            chain, offer = offers.get(slot, ([], []))
            draft = chain + offer
            count = rng.randint(0 if step % 5 == 4 else 1, MAX_DRAFTS)
            tokens = (draft + period)[:count]
            if tokens and rng.random() < 0.4:
                tokens[rng.randrange(len(tokens))] = rng.randint(1, 5)
            room = MAX_MODEL_LEN - len(requests.texts[slot]) - 1
            committed[slot] = tokens[: max(room, 0)]
        chains = {}
        for slot in slots:
            text = requests.texts[slot] + committed[slot]
            chains[slot] = random_chain(rng, text, num_drafts)
        written, counts = requests.step(committed, chains)
        for slot in slots:
            expected = (0, 0)
            if slot in offers and committed[slot]:
                expected = judged(*offers[slot], committed[slot])
            assert counts[slot][1:] == expected
            seen.add(expected)
            offer = written[slot][: counts[slot][0]]
            offers[slot] = chains[slot], offer
    assert {(0, 0), (1, 0)} < seen
    assert any(matched > 1 for _, matched in seen)


def test_the_next_request_of_a_slot_is_not_judged_by_the_offer_before(
    device: torch.device,
) -> None:
    requests = Requests(device)
    requests.texts = {0: [1, 2, 3, 4] * 4}
    _, counts = requests.step({0: [1]}, {0: [2]})
    assert counts[0][0] > 2
    for length in range(14, 20):
        # Its lengths go on where those of the request before it ended.
        requests.texts = {0: [5] * length}
        written, counts = requests.step({0: [2]}, {0: [3]})
        assert counts[0] == (0, 0, 0)
        assert written[0] == filled([], 1)


def test_a_step_that_drafts_nothing_ends_an_offer(device: torch.device) -> None:
    requests = Requests(device)
    requests.texts = {0: [1, 2, 3, 4] * 4}
    requests.step({0: [1]}, {0: [2]})
    requests.texts[0] += [2]  # without the kernel
    _, counts = requests.step({0: [2, 3, 4]}, {0: [1]})
    assert counts[0][1:] == (0, 0)


def test_how_many_were_drawn_is_known_for_each_request(device: torch.device) -> None:
    requests = Requests(device)
    assert requests.copies.num_drawn.tolist() == [MAX_DRAFTS] * MAX_NUM_REQS
    requests.step({3: [1, 2, 3]}, {3: [1, 2]})
    requests.step({5: [1, 2, 3]}, {5: [1]})
    assert requests.copies.num_drawn[3:6].tolist() == [2, MAX_DRAFTS, 1]
