"""The draft vocabulary: which token ids the MTP layers can propose.

A draft step multiplies by the whole head, though nearly all text is made of a few
thousand tokens. Here the draft head has ``num_rows`` rows of the target's, and row
``i`` proposes ``token_ids[i]``. Verification is not concerned: it uses the whole
vocabulary, and a token outside the draft vocabulary has draft probability 0.

Which rows is a matter of *scores*: how often a token was committed lately, and in
which prompts it stands. Everything is on the device and nothing waits for it; only
``refresh`` reads the scores, and between two of them rows stay as they are.

Tensor parallelism: the head's rows lie in shards, a range of token ids on each rank,
and every rank can multiply by its own only. Each gets the same number of rows, or the
fullest would make the others wait.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch

from vllm_mtp.config import FULL, MTPPlusConfig

HALF_LIFE_TOKENS = 16384
"""Committed tokens after which a token that did not come again counts half."""
COVERAGE_HALF_LIFE_TOKENS = 2048
"""Committed tokens after which whether rows held them counts half."""
LEAST_SCORE = 0.05
"""Of a token that came once, and again not for four half-lives."""
ROW_MULTIPLE = 128
"""Rows on each rank: a multiple of what matrix units take at a time."""

MAX_MISSED_TOKENS = 1.0
"""Committed tokens that rows did not hold, and those that better rows are expected to
hold until the next refresh, before rows are changed. On a CPU the draft head is packed
anew for any change, which takes as long as a step or a part of one; elsewhere asking
would cost more than moving."""
MIN_TOKENS_BETWEEN_REFRESHES = 16
"""As many count at least: at first only prompts are known, and nothing is committed."""

RowsChanged = Callable[[torch.Tensor, torch.Tensor], None]
"""Called with ``slots`` and the ``token_ids`` there from now on, both int64."""


class Shard(NamedTuple):
    """Token ids ``first`` to ``end - 1`` of the head lie on one rank."""

    first: int
    end: int


class DraftVocabulary:
    """Scores of all token ids, and the ids of the rows."""

    def __init__(
        self,
        num_rows: int,
        shards: Sequence[Shard],
        always: Collection[int],
        device: torch.device,
    ) -> None:
        """Begin with the lowest token ids: tokenizers merge frequent pairs first.

        Args:
            num_rows: Of all ranks together, a multiple of their number.
            shards: Of each rank, in order, without gaps.
            always: Token ids that are never left out, such as end of sequence.
            device: Of the tensors.
        """
        self.vocab_size = shards[-1].end
        self.num_rows = num_rows
        self._shards = shards
        self._rows_per_shard = num_rows // len(shards)
        # What comes last takes what is no token.
        shape = (self.vocab_size + 1,)
        self._scores = torch.zeros(shape, device=device)
        self._is_member = torch.zeros(shape, dtype=torch.bool, device=device)
        low_ids_first = torch.linspace(1e-3, 0.0, self.vocab_size, device=device)
        self._prior = low_ids_first
        if always:
            pinned = torch.tensor(sorted(always), device=device)
            self._prior[pinned] = torch.inf
        self._num_seen = torch.zeros((), device=device)
        """Committed tokens since the last refresh."""
        self._missed = 0.0
        """Tokens that better rows would have held, as far as scores say."""
        self._num_missed = torch.zeros((), device=device)
        """Committed tokens that rows did not hold, since they changed last."""
        # Committed tokens, and those of them that were members, both fading.
        self._covered = torch.zeros(2, device=device)
        self.on_rows_changed: list[RowsChanged] = []
        self.token_ids = self._best_ids()
        """``[num_rows]`` int64: the token that each row proposes. The same tensor
        until ``resize``, so that a CUDA graph may hold it."""
        self._is_member[self.token_ids] = True

    # -- what is asked --------------------------------------------------------------

    def to_target(
        self,
        # any shape, int64
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """Token ids of rows."""
        return self.token_ids[rows]

    def spread(
        self,
        # [num_tokens, num_rows]
        values: torch.Tensor,
        fill: float,
    ) -> torch.Tensor:
        """``[num_tokens, vocab_size]``: each value at its token id, else ``fill``."""
        whole = values.new_full((values.shape[0], self.vocab_size), fill)
        return whole.index_copy_(1, self.token_ids, values)

    def coverage(self) -> tuple[float, float]:
        """Share of the tokens committed lately that rows could have proposed.

        Returns:
            The share, and of how many tokens it is. Waits for the device.
        """
        num_tokens, num_members = self._covered.tolist()
        return num_members / max(num_tokens, 1.0), num_tokens

    # -- what is learnt -------------------------------------------------------------

    def observe(
        self,
        # [num_tokens] int32 or int64; what is no token id does not count
        token_ids: torch.Tensor,
    ) -> None:
        """Count tokens that were committed."""
        ids = token_ids.long()
        is_token = (ids >= 0) & (ids < self.vocab_size)
        ids = ids.masked_fill(~is_token, self.vocab_size)
        weights = is_token.float()
        self._scores.index_add_(0, ids, weights)
        num_tokens = weights.sum()
        num_members = (weights * self._is_member[ids]).sum()
        self._num_seen += num_tokens
        self._num_missed += num_tokens - num_members
        self._covered += torch.stack((num_tokens, num_members))

    def expect(
        self,
        # [num_tokens] int64, on the host
        token_ids: torch.Tensor,
    ) -> None:
        """Count each token of a prompt once: it is likely to come again."""
        is_token = (token_ids >= 0) & (token_ids < self.vocab_size)
        distinct = torch.unique(token_ids[is_token])
        self._scores[distinct.to(self._scores.device, non_blocking=True)] += 1.0

    def refresh(
        self, coverage_half_life_tokens: float = COVERAGE_HALF_LIFE_TOKENS
    ) -> None:
        """Give the rows to the tokens with the highest scores.

        Args:
            coverage_half_life_tokens: How long it counts what rows have held.
        """
        best = self._best_ids()
        if best.is_cuda or self._have_missed_much(best):
            self._move_rows(best)
        self._scores *= torch.exp2(-self._num_seen / HALF_LIFE_TOKENS)
        self._covered *= torch.exp2(-self._num_seen / coverage_half_life_tokens)
        self._num_seen.zero_()

    def resize(self, num_rows: int) -> None:
        """Have another number of rows, for the tokens with the highest scores.

        What is known of the coverage is forgotten: it was that of other rows.

        Args:
            num_rows: Of all ranks together, a multiple of their number.
        """
        self.num_rows = num_rows
        self._rows_per_shard = num_rows // len(self._shards)
        self.token_ids = self._best_ids()
        self._is_member = torch.zeros_like(self._is_member)
        self._is_member[self.token_ids] = True
        self._covered.zero_()
        slots = torch.arange(num_rows, device=self.token_ids.device)
        for notify in self.on_rows_changed:
            notify(slots, self.token_ids)

    def share_of_best(self, num_rows: int) -> float:
        """Share of all scores that the best rows of another number would have.

        Of the past that chose them, so more than they will cover. Waits for the device.
        """
        scores, per_shard = self._scores[:-1], num_rows // len(self._shards)
        held = [scores[first:end].topk(per_shard)[0] for first, end in self._shards]
        return float(torch.cat(held).sum() / scores.sum().clamp(min=1.0))

    def prefer(self, token_ids: Sequence[int]) -> None:
        """Begin with a list that was made beforehand.

        Args:
            token_ids: The more worth a row the earlier. What rows are left in a shard
                go to its lowest ids.
        """
        ids = torch.tensor(token_ids, device=self._scores.device)
        falling = torch.linspace(2.0, 1.0, len(token_ids), device=self._scores.device)
        self._scores[ids] = falling
        self._move_rows(self._best_ids())

    def ranked_token_ids(self, limit: int) -> list[int]:
        """Token ids of the highest scores, the best first. Waits for the device.

        Args:
            limit: At most so many, and none that has not come up for long.
        """
        scores, ids = self._scores[:-1].topk(min(limit, self.vocab_size))
        found: list[int] = ids[scores >= LEAST_SCORE].tolist()
        return found

    def _best_ids(self) -> torch.Tensor:
        """``[num_rows]`` int64, shard by shard."""
        ranks = self._scores[:-1] + self._prior
        return torch.cat(
            [
                ranks[first:end].topk(self._rows_per_shard, sorted=False).indices
                + first
                for first, end in self._shards
            ]
        )

    def _have_missed_much(self, best_ids: torch.Tensor) -> bool:
        """Whether the rows in use are so much worse by now that changing them pays."""
        more = self._scores[best_ids].sum() - self._scores[self.token_ids].sum()
        share = more / self._scores[:-1].sum().clamp(min=1.0)
        num_tokens = self._num_seen.clamp(min=MIN_TOKENS_BETWEEN_REFRESHES)
        self._missed += float(share * num_tokens)
        if more <= 0.0 or self._missed + self._num_missed < MAX_MISSED_TOKENS:
            return False
        self._missed = 0.0
        self._num_missed.zero_()
        return True

    def _move_rows(self, token_ids: torch.Tensor) -> None:
        """Only rows that change move, where asking which ones costs nothing."""
        is_member = torch.zeros_like(self._is_member)
        is_member[token_ids] = True
        if token_ids.is_cuda:
            slots = torch.arange(self.num_rows, device=token_ids.device)
        else:
            slots = (~is_member[self.token_ids]).nonzero()[:, 0]
            newcomers = is_member[token_ids] & ~self._is_member[token_ids]
            token_ids = token_ids[newcomers]
        self._is_member = is_member
        self.token_ids[slots] = token_ids
        for notify in self.on_rows_changed:
            notify(slots, token_ids)


def default_num_rows(vocab_size: int, num_shards: int) -> int | None:
    """Rows of a draft vocabulary that nobody chose; None where none would pay.

    A quarter of the vocabulary, at most 16384: FastMTP found 16k of 152k rows to cost
    1 % of the acceptance length, with a list that was made beforehand and for all.

    Args:
        vocab_size: Of the target.
        num_shards: Ranks that share the head.
    """
    num_rows = min(vocab_size // 4, 16384)
    return round_num_rows(num_rows, num_shards) if num_rows >= 1024 else None


def choose_num_rows(
    own: MTPPlusConfig, listed: Sequence[int] | None, vocab_size: int, num_shards: int
) -> int | None:
    """Rows of the draft vocabulary of an engine, None where it has none.

    Args:
        own: What the user asked for.
        listed: Token ids of the user's list; None without one.
        vocab_size: Of the target.
        num_shards: Ranks that share the head.
    """
    if own.draft_vocab == FULL:
        return None
    wanted = own.draft_vocab_size or (listed and len(listed))
    if wanted:
        return round_num_rows(wanted, num_shards)
    return default_num_rows(vocab_size, num_shards)


def round_num_rows(num_rows: int, num_shards: int) -> int:
    """Up to a number that gives all ranks the same number of whole tiles."""
    multiple = ROW_MULTIPLE * num_shards
    return -(-num_rows // multiple) * multiple
