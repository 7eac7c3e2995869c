"""When the draft vocabulary is used, and when its rows are chosen anew.

Counted in draft passes and decided by what every rank sees alike, never by a clock:
ranks of one model must multiply by the same rows in the same step.
"""

from collections.abc import Callable, Sequence

import torch

from vllm_mtp.drafting.vocabulary import (
    COVERAGE_HALF_LIFE_TOKENS,
    DraftVocabulary,
)

STEPS_BETWEEN_REFRESHES = 64
STEPS_BEFORE_NEW_PROMPTS_COUNT = 16
"""Fewer while requests come in whose prompts the scores have not been asked about."""
STEPS_BETWEEN_WARNINGS = 16384

MIN_TOKENS = 256
"""Committed tokens before a coverage is believed."""
ENOUGH_COVERAGE, TOO_LITTLE_COVERAGE = 0.97, 0.95
"""A draft of three tokens, each covered with 0.97, loses at most 3 % of its acceptance
length at 0.8 per token; the smaller head makes up for it where drafting is a tenth of
a step or more. Apart, so that it does not thrash."""
UNUSED_COVERAGE_HALF_LIFE_TOKENS = 512
"""Shorter while the whole head is used: rows follow the traffic meanwhile, so what they
did not hold some time ago says little."""
ROOMY_COVERAGE, TIGHT_COVERAGE = 0.998, 0.993
"""Above the first, half as many rows will do; below the second, twice as many are
better. A missed token costs a draft about two: 0.7 % of them, 1 % of the acceptance
length or a little more."""
MIN_TOKENS_TO_RESIZE = 1024
FEWEST_ROWS = 1024
REFRESHES_BEFORE_SHRINKING_AGAIN = 64
"""After it was too tight."""
POOR_COVERAGE, MIN_TOKENS_TO_COMPLAIN = 0.9, 4096
"""Of a list that a user made."""


class VocabularyPolicy:
    """Keeps a vocabulary up to date and says whether to draft from it."""

    def __init__(
        self,
        vocabulary: DraftVocabulary,
        *,
        is_fixed: bool,
        may_switch: bool,
        may_resize: bool = False,
    ) -> None:
        """Nothing is known of the traffic yet.

        Args:
            vocabulary: Whose rows are chosen.
            is_fixed: Its rows are a list that stays.
            may_switch: Drafting may go back to the whole head. Not where CUDA graphs
                have been made of it.
            may_resize: The rows may become fewer, and as many as now again.
        """
        self.vocabulary = vocabulary
        self.is_active = is_fixed or not may_switch
        self.known_coverage: float | None = None
        """Share of the tokens committed lately that it holds, when it was last asked.
        Never where nothing depends on it: asking waits for the device."""
        self._may_resize = may_resize and may_switch and not is_fixed
        self._most_rows = vocabulary.num_rows
        self._refreshes_to_shrinking = 0
        self._is_fixed = is_fixed
        self._may_switch = may_switch and not is_fixed
        self._steps_to_refresh = 0
        self._steps_to_warning = 0
        self._has_new_prompts = False

    def expect(
        self,
        # [num_tokens] int64, on the host
        prompt_token_ids: torch.Tensor,
    ) -> None:
        """A request with this prompt is about to run."""
        if not self._is_fixed:
            self.vocabulary.expect(prompt_token_ids)
            self._has_new_prompts = True

    def begin_with(
        self, token_ids: Sequence[int], num_rows: int, is_active: bool
    ) -> None:
        """Go on as another server has left off.

        Args:
            token_ids: The more worth a row the earlier.
            num_rows: That were enough there.
            is_active: Whether they covered what was committed.
        """
        if self._is_fixed or not token_ids:
            return
        self.vocabulary.prefer(token_ids)
        is_smaller = FEWEST_ROWS <= num_rows < self._most_rows
        if self._may_resize and is_smaller and self._most_rows % num_rows == 0:
            self.vocabulary.resize(num_rows)
        if self._may_switch:
            self.is_active = is_active

    def before_drafting(self, count: Callable[[], None]) -> str | None:
        """Prepare a draft pass; nothing else may move rows.

        Args:
            count: Counts tokens that were committed meanwhile. Called
                where they are about to matter: most passes go without.

        Returns:
            What the user should know, in a sentence, now and then.
        """
        self._steps_to_warning -= 1
        if self._is_fixed:
            return self._complaint(count)
        self._steps_to_refresh -= 1
        num_spared = STEPS_BETWEEN_REFRESHES - STEPS_BEFORE_NEW_PROMPTS_COUNT
        if self._steps_to_refresh <= (num_spared if self._has_new_prompts else 0):
            self._steps_to_refresh = STEPS_BETWEEN_REFRESHES
            self._has_new_prompts = False
            count()
            self.vocabulary.refresh(
                COVERAGE_HALF_LIFE_TOKENS
                if self.is_active
                else UNUSED_COVERAGE_HALF_LIFE_TOKENS
            )
            if self._may_switch:
                self._switch()
        return None

    def _switch(self) -> None:
        share, num_tokens = self.vocabulary.coverage()
        if num_tokens < MIN_TOKENS:
            return
        needed = TOO_LITTLE_COVERAGE if self.is_active else ENOUGH_COVERAGE
        self.is_active = share >= needed
        self.known_coverage = share
        if self._may_resize and num_tokens >= MIN_TOKENS_TO_RESIZE:
            self._resize(share)

    def _resize(self, share: float) -> None:
        """Fewer rows where they cover as much, more where they cover too little."""
        self._refreshes_to_shrinking -= 1
        num_rows = self.vocabulary.num_rows
        if share < TIGHT_COVERAGE:
            self._refreshes_to_shrinking = REFRESHES_BEFORE_SHRINKING_AGAIN
            if num_rows < self._most_rows:
                self.vocabulary.resize(min(2 * num_rows, self._most_rows))
        elif (
            share > ROOMY_COVERAGE
            and self._refreshes_to_shrinking <= 0
            and num_rows % 2 == 0
            and num_rows // 2 >= FEWEST_ROWS
            and self.vocabulary.share_of_best(num_rows // 2) > ROOMY_COVERAGE
        ):
            self.vocabulary.resize(num_rows // 2)

    def _complaint(self, count: Callable[[], None]) -> str | None:
        if self._steps_to_warning > 0:
            return None
        self._steps_to_warning = STEPS_BETWEEN_REFRESHES
        count()
        share, num_tokens = self.vocabulary.coverage()
        self.known_coverage = share
        if num_tokens < MIN_TOKENS_TO_COMPLAIN or share >= POOR_COVERAGE:
            return None
        self._steps_to_warning = STEPS_BETWEEN_WARNINGS
        return (
            f"the draft vocabulary covers only {100 * share:.0f} % of the tokens that "
            'were committed lately: make another list, or set draft_vocab to "auto"'
        )
