"""Counts of an engine's speculation, as plain numbers.

The scheduler fills a `SpeculationStats` and hands it over once a second; whoever
shows it adds it to what came before. A *request-step* is one request in one step in
which it decodes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

TARGET, VERIFY, DRAFT = "target", "verify", "draft"
WHOLE, PREFILL = "whole", "prefill"
PARTS: Mapping[str, str] = {
    TARGET: "what the same step would take without speculation",
    VERIFY: "what verifying draft tokens adds",
    DRAFT: "what drafting adds",
    WHOLE: "steps that the cost model could not divide",
    PREFILL: "whole steps in which some request was in prefill",
}
"""Of step time, and what they mean."""

UNPROFITABLE, UNSURE, PINNED = "unprofitable", "unsure", "pinned"
EXPLORATION = "exploration"
KV_BACKFILL, FIRST_STEP, DROPPED = "kv_backfill", "first_step", "dropped"
FAILED, OTHER = "failed", "other"
REASONS: Mapping[str, str] = {
    UNPROFITABLE: "drafting would cost more time than it saves",
    EXPLORATION: "drafting is being tried on other requests",
    UNSURE: "its draft was too unlikely to be worth verifying",
    PINNED: "the request switched it off, or has a seed",
    KV_BACKFILL: "the MTP layers have not read its pending tokens",
    FIRST_STEP: "nothing was drafted in its last step: it was in prefill, or waited",
    DROPPED: "its draft did not fit or broke its grammar",
    FAILED: "a part of drafting broke, which switched drafting off for good",
    OTHER: "the controller has reasons of its own",
}
"""Why a request-step had no draft (K = 0)."""

FAILED_DRAFTER, FAILED_CONTROLLER = "drafter", "controller"
FAILED_PARTS: Mapping[str, str] = {
    FAILED_DRAFTER: "makes the drafts, in the worker",
    FAILED_CONTROLLER: "chooses draft lengths, in the scheduler",
}
"""What of drafting can break without ending the engine."""


@dataclass
class SpeculationStats:
    """Sums over the steps since the last ones were handed over."""

    # [K_max + 1]: request-steps by draft tokens verified; [0] is those without a draft
    draft_lengths: list[int]
    # [K_max]: draft tokens at each position, verified and accepted
    drafted: list[int]
    accepted: list[int]
    without_draft: dict[str, int] = field(default_factory=dict)
    """Request-steps without a draft, by why (`REASONS`)."""
    num_copied: int = 0
    """Draft tokens that were copied from contexts, or stand where one was expected to
    go on; among the others, and how many of them were accepted."""
    num_copied_accepted: int = 0
    num_rejected_slots: int = 0
    """KV slots of draft tokens that were not accepted, rolled back."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Step time by part (`PARTS`). Measured as a whole; how it divides is estimated."""
    num_tokens: int = 0
    """Brought by steps that only decode, those beyond a request's end included, ..."""
    promised_tokens: float = 0.0
    """... and as many as the plans in force promised for the time of these steps."""
    saved_seconds: float = 0.0
    """What the same tokens would have taken without speculation, less what they took:
    estimated, negative where speculation was slower."""
    num_alarms: int = 0
    """Times that acceptance fell below its own past."""
    failures: dict[str, int] = field(default_factory=dict)
    """Parts of drafting that broke (`FAILED_PARTS`)."""
    levels: dict[str, float] = field(default_factory=dict)
    """What is no sum but a state: the last value counts (`LEVELS`)."""

    @classmethod
    def empty(cls, max_draft_length: int) -> Self:
        """Nothing counted.

        Args:
            max_draft_length: ``K_max``, >= 1.
        """
        return cls(
            [0] * (max_draft_length + 1), [0] * max_draft_length, [0] * max_draft_length
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """What `to_dict` gave, after a journey between processes."""
        return cls(**data)

    def to_dict(self) -> dict[str, Any]:
        """Lists, dicts and numbers only."""
        return asdict(self)

    def add(self, other: "SpeculationStats") -> None:
        """Add later counts; their levels replace these."""
        for name in ("draft_lengths", "drafted", "accepted"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine[:] = [a + b for a, b in zip(mine, theirs, strict=True)]
        for name in ("without_draft", "seconds", "failures"):
            counts = getattr(self, name)
            for key, value in getattr(other, name).items():
                counts[key] = counts.get(key, 0) + value
        self.num_copied += other.num_copied
        self.num_copied_accepted += other.num_copied_accepted
        self.num_rejected_slots += other.num_rejected_slots
        self.num_tokens += other.num_tokens
        self.promised_tokens += other.promised_tokens
        self.saved_seconds += other.saved_seconds
        self.num_alarms += other.num_alarms
        self.levels |= other.levels

    @property
    def num_request_steps(self) -> int:
        return sum(self.draft_lengths)

    @property
    def num_drafts(self) -> int:
        return self.num_request_steps - self.draft_lengths[0]

    @property
    def decode_seconds(self) -> float:
        """Of steps that only decode."""
        return sum(s for part, s in self.seconds.items() if part != PREFILL)

    @property
    def mean_draft_length(self) -> float | None:
        """Draft tokens of a request-step, those without a draft included."""
        if not self.num_request_steps:
            return None
        total = sum(k * count for k, count in enumerate(self.draft_lengths))
        return total / self.num_request_steps

    @property
    def acceptance_length(self) -> float | None:
        """Tokens that a draft brings, the recovered or bonus token included."""
        return 1.0 + sum(self.accepted) / self.num_drafts if self.num_drafts else None


SYNTHETIC_ACCEPTANCE = "synthetic_acceptance"
CALIBRATION_ERROR = "calibration_error"
COVERAGE, VOCABULARY_IN_USE = "draft_vocab_coverage", "draft_vocab_in_use"
BASELINE, RECENT, HAS_DRIFTED = (
    "first_acceptance_baseline",
    "first_acceptance_recent",
    "acceptance_has_drifted",
)
ADAPTING, ADAPTED_HEAD, ADAPTED_TOKENS = (
    "adapting",
    "adapted_head",
    "adapted_tokens",
)
HEADS_ADOPTED, HEADS_TAKEN_BACK = "adapted_heads_adopted", "adapted_heads_taken_back"
LENGTH_SERVED, LENGTH_FIRST, LENGTH_TRAINED = (
    "adapting_length_served",
    "adapting_length_first",
    "adapting_length_trained",
)
LEVELS: Mapping[str, str] = {
    SYNTHETIC_ACCEPTANCE: "1 if draft tokens are accepted by chance, for a benchmark: "
    "the text is not the target's then.",
    CALIBRATION_ERROR: "Mean difference between the chance that a draft token was "
    "given and how often such tokens were accepted, 0 to 1.",
    COVERAGE: "Share of the tokens committed lately that the draft vocabulary holds.",
    VOCABULARY_IN_USE: "1 while the MTP layers draft from a part of the vocabulary.",
    BASELINE: "Acceptance of first draft tokens that this server is used to.",
    RECENT: "Acceptance of first draft tokens over the last requests.",
    HAS_DRIFTED: "1 while acceptance lies significantly below what it used to be.",
    ADAPTING: "1 while MTP layers are adapted to the traffic.",
    ADAPTED_HEAD: "Number of the adapted head that is served, 0 for the one of the "
    "start.",
    ADAPTED_TOKENS: "Tokens that heads were trained on, repetitions counted.",
    HEADS_ADOPTED: "Adapted heads that were found to be better, and served.",
    HEADS_TAKEN_BACK: "Times that the head of the start was served again.",
    LENGTH_SERVED: "Acceptance length of the served head on the newest texts, drafts "
    "of 3 tokens at temperature 1.",
    LENGTH_FIRST: "The same of the head of the start.",
    LENGTH_TRAINED: "The same of the weights in training.",
}
"""States that are reported, and what they mean."""
