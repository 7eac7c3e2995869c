"""Which draft tokens will be accepted: hierarchical log-odds with one discount.

::

    log-odds of p_ij = engine + position[j] + cell[c] + request[i]   (+ confidence)

``p_ij`` is the conditional acceptance of position ``j`` of request ``i``. Every term is
a Gaussian belief (`evidence`); an outcome updates all of them by one Newton step, from
the engine's to the request's, each with what is left to explain.

Discount (West and Harrison, Bayesian Forecasting and Dynamic Models, 1997): with each
step precisions fade by one factor, so beliefs follow a load that changes, and what is
not seen becomes uncertain. A request's term also returns to 0, the mean of its cell. An
abrupt change lets levels be learned anew at once.

Censoring: with K drafted and A accepted, positions 1..A were accepted, position A + 1
was rejected if it was drafted, and later ones say nothing.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from random import Random
from typing import NamedTuple

from vllm_mtp.acceptance import log_odds, logistic
from vllm_mtp.control.acceptance_classes import (
    cell_of,
    cell_of_class,
    class_of,
    shift_of_class,
)
from vllm_mtp.control.calibration import Calibration
from vllm_mtp.control.confidence import ConfidenceModel, sane
from vllm_mtp.control.evidence import (
    PRIOR_PRECISION,
    Evidence,
    RequestTerm,
    Surprise,
    Term,
    total_of,
)
from vllm_mtp.records import DecodeRequest, DraftChances, RequestOutcome

PRIOR_ACCEPTANCE = (0.75, 0.65, 0.6, 0.55, 0.5)
"""Conditional acceptance by position before any draft, of copied tokens, too; the last
one repeated. Between MTP layers trained for one step and for several (FastMTP: 0.81,
0.69, 0.64)."""
HALF_LIFE_STEPS = 64.0
"""Steps after which an outcome counts half. Tuning worlds: 32 loses, 128 is as good."""

_Key = tuple[int, int, int, tuple[float, ...]]
"""(class, drafted, accepted, confidences)"""


class Draw(NamedTuple):
    """One sample of what is common to many requests: differences to the means."""

    common: float
    cells: Mapping[int, float]
    positions: list[float]


class SurvivalModel:
    """Learns acceptance from outcomes; what it believes of requests and classes.

    ``class_of`` is public and a plain dictionary because a controller needs a whole
    batch of it at every step: request id -> class.
    """

    copies: "SurvivalModel | None" = None
    """Of tokens that are copied after those of the MTP layers, where they may be."""

    def __init__(self, max_draft_length: int) -> None:
        self.max_draft_length = max_draft_length
        self.class_of: dict[str, int] = {}
        self.confidences: dict[int, ConfidenceModel] = {}
        """Of each cell seen so far."""
        self.calibration = Calibration()
        self._engine = Term(0.0, PRIOR_PRECISION / 2)
        last = len(PRIOR_ACCEPTANCE) - 1
        self._positions = [
            Term(log_odds(PRIOR_ACCEPTANCE[min(j, last)]), PRIOR_PRECISION)
            for j in range(max_draft_length)
        ]
        self._cells: dict[int, Term] = {}
        self._requests: dict[str, RequestTerm] = {}
        self._surprise = Surprise()
        self._now_step = 0
        self._next_outcome = 0
        self._keep = 0.5 ** (1.0 / HALF_LIFE_STEPS)

    # -- requests -----------------------------------------------------------------

    def see(self, request: DecodeRequest) -> int:
        """Note what is known of a request; returns its class."""
        cell = cell_of(request)
        term = self._requests.get(request.request_id)
        if term is None:
            term = RequestTerm(request.request_id, cell, self._now_step)
            self._requests[request.request_id] = term
        term.cell = cell
        found = self.class_of[request.request_id] = class_of(cell, term.mean)
        return found

    def copied_class(self, request: DecodeRequest) -> int | None:
        """Class of what its context offers; None where it offers nothing."""
        if self.copies is None or not request.is_copying:
            return None
        return self.copies.see(request) if request.pinned_draft_length is None else None

    def keep_only(self, request_ids: Iterable[str]) -> None:
        """Forget every other request."""
        kept = set(request_ids)
        if self.copies is not None:
            self.copies.keep_only(kept)
        self._requests = {i: s for i, s in self._requests.items() if i in kept}
        self.class_of = {i: c for i, c in self.class_of.items() if i in kept}

    # -- answers ------------------------------------------------------------------

    def survival_of_class(self, class_id: int, draw: Draw | None = None) -> list[float]:
        """``S_1`` .. ``S_K_max`` of a class, in the mean or in a sample."""
        return list(accumulate(self.conditional_of_class(class_id, draw), mul))

    def survival_of_copies(self, copied_class: int | None) -> list[float]:
        """The same of a draft that the context agrees with, and of copied tokens."""
        if self.copies is None or copied_class is None:
            return []
        return self.copies.survival_of_class(copied_class)

    def conditional_of_class(
        self, class_id: int, draw: Draw | None = None
    ) -> list[float]:
        """``p_1`` .. ``p_K_max`` of a class before its confidences are known."""
        logits = self.log_odds_of_class(class_id)
        if draw is not None:
            added = draw.common + draw.cells.get(cell_of_class(class_id), 0.0)
            logits = [
                a + b + added for a, b in zip(logits, draw.positions, strict=True)
            ]
        offsets = self.confidence_offsets(class_id)
        if not offsets:
            return [logistic(logit) for logit in logits]
        return [
            sum(logistic(logit + o) for o in offsets) / len(offsets) for logit in logits
        ]

    def log_odds_of_class(self, class_id: int) -> list[float]:
        """Of each position, for a draft token of usual confidence."""
        added = self._engine.mean + shift_of_class(class_id)
        added += self._cell(cell_of_class(class_id)).mean
        return [added + position.mean for position in self._positions]

    def chances_of_class(self, class_id: int, depth: int) -> DraftChances:
        """What is believed of a class's first ``depth`` draft tokens."""
        confidence = self._confidence(class_id)
        usual = self.log_odds_of_class(class_id)[:depth]
        offsets = confidence.offsets([0.0] * depth)
        return DraftChances(
            [a + b for a, b in zip(usual, offsets, strict=True)],
            confidence.slope,
            self.conditional_of_class(class_id)[:depth],
        )

    @property
    def mean_acceptance(self) -> float:
        """Of the first token of a request of which nothing is known."""
        return logistic(self._engine.mean + self._positions[0].mean)

    def confidence_offsets(self, class_id: int) -> list[float]:
        """What a draft token's confidence may add to its log-odds, equally likely."""
        return self._confidence(class_id).usual_offsets()

    def draw(self, random: Random, request_ids: Iterable[str]) -> Draw:
        """A sample of the posterior, for a batch.

        Args:
            random: The only source of randomness.
            request_ids: Of the batch: what is not known of its requests is averaged.
        """
        terms = [t for i in request_ids if (t := self._requests.get(i)) is not None]
        variance = sum(1.0 / t.precision for t in terms) / max(len(terms), 1) ** 2
        common = self._engine.draw(random) + random.gauss(0.0, math.sqrt(variance))
        return Draw(
            common,
            {cell: term.draw(random) for cell, term in self._cells.items()},
            [position.draw(random) for position in self._positions],
        )

    # -- learning -----------------------------------------------------------------

    def wait(self, num_steps: int = 1) -> None:
        """Steps have passed: what was seen before them counts less."""
        self._now_step += num_steps
        keep = self._keep**num_steps
        self._engine.fade(keep, PRIOR_PRECISION / 2)
        for term in (*self._positions, *self._cells.values()):
            term.fade(keep, PRIOR_PRECISION)

    def observe(
        self,
        outcomes: Sequence[RequestOutcome],
        num_steps: int = 1,
        max_outcomes: int | None = None,
    ) -> None:
        """Learn from the requests of a step, or of a few steps together.

        Args:
            outcomes: Of requests with drafts; of one request, the earlier first.
            num_steps: As many have passed.
            max_outcomes: Most that are learned from, each time others; None for all.
        """
        self.wait(num_steps)
        by_cell: dict[int, list[Evidence]] = {}
        for key, members in self._group(self._some(outcomes, max_outcomes)).items():
            evidence = self._evidence(key, members)
            by_cell.setdefault(cell_of_class(key[0]), []).append(evidence)
        if not by_cell:
            return
        engine = 1.0 / self._engine.precision
        doubts = {cell: engine + 1.0 / self._cell(cell).precision for cell in by_cell}
        if self._surprise.observe(by_cell, doubts):
            self.doubt(by_cell)
        self._update_levels(by_cell)
        for found in by_cell.values():
            self._update_positions(found)
            for evidence in found:
                self._update_requests(evidence)

    def _some(
        self, outcomes: Sequence[RequestOutcome], limit: int | None
    ) -> Sequence[RequestOutcome]:
        if limit is None or len(outcomes) <= limit:
            return outcomes
        first = self._next_outcome = (self._next_outcome + limit) % len(outcomes)
        return (*outcomes[first:], *outcomes[:first])[:limit]

    def _group(self, outcomes: Sequence[RequestOutcome]) -> dict[_Key, list[str]]:
        groups: dict[_Key, list[str]] = {}
        for outcome in outcomes:
            request_id, drafted, accepted, confidences, left_out, would, *_ = outcome
            drafted += left_out - outcome.num_copied
            drafted = min(drafted, self.max_draft_length)
            if drafted <= 0:
                continue
            class_id = self.class_of.get(request_id)
            if class_id is None:
                class_id = self.see(DecodeRequest(request_id, 0))
            accepted = min(max(accepted + would, 0), drafted)
            key = class_id, drafted, accepted, sane(confidences, drafted)
            groups.setdefault(key, []).append(request_id)
        return groups

    def _evidence(self, key: _Key, members: Sequence[str]) -> Evidence:
        class_id, drafted, accepted, confidences = key
        examined = min(accepted + 1, drafted)
        if confidences:
            confidence = self._confidence(class_id)
            confidence.note(confidences, len(members))
            usual = self.log_odds_of_class(class_id)[:examined]
            known = confidence.offsets(confidences)
            chances = [logistic(a + b) for a, b in zip(usual, known, strict=False)]
            for _ in members:
                confidence.learn(chances, accepted, confidences)
        else:
            chances = self.conditional_of_class(class_id)[:examined]
        self.calibration.note(chances, accepted, len(members))
        return Evidence([self._requests[i] for i in members], chances, accepted)

    def doubt(self, cells: Iterable[int] | None = None) -> None:
        """Take what is known of levels for old; positions keep their differences."""
        self._engine.precision = min(self._engine.precision, PRIOR_PRECISION / 8)
        for cell in self._cells if cells is None else cells:
            self._cell(cell).precision = PRIOR_PRECISION
        for term in self._requests.values():
            term.precision = min(term.precision, PRIOR_PRECISION)

    def _update_levels(self, by_cell: Mapping[int, Sequence[Evidence]]) -> None:
        """Move the engine's term by all evidence, then each cell's by what is left."""
        totals = {cell: total_of(found) for cell, found in by_cell.items()}
        score = sum(total.score for total in totals.values())
        information = sum(total.information for total in totals.values())
        beside = sum(
            (total.information / information) ** 2 / self._cell(cell).precision
            for cell, total in totals.items()
        )
        moved = self._engine.update(score, information, beside)
        for cell, found in by_cell.items():
            for evidence in found:
                evidence.explain(moved)
            total = total_of(found)
            moved_cell = self._cell(cell).update(total.score, total.information)
            for evidence in found:
                evidence.explain(moved_cell)

    def _update_positions(self, found: Sequence[Evidence]) -> None:
        """Move the term of each position by what is left of its score."""
        for evidence in found:
            count = len(evidence.terms)
            for j, p in enumerate(evidence.chances):
                score, information = (j < evidence.accepted) - p, p * (1.0 - p) + 1e-6
                self._positions[j].update(count * score, count * information)

    def _update_requests(self, evidence: Evidence) -> None:
        for term in evidence.terms:
            elapsed = max(self._now_step - term.learned_at, 0)
            term.learned_at = self._now_step
            term.return_to_mean(self._keep**elapsed)
            term.update(evidence.score, evidence.one)
            self.class_of[term.request_id] = class_of(term.cell, term.mean)

    def _cell(self, cell: int) -> Term:
        return self._cells.setdefault(cell, Term(0.0, PRIOR_PRECISION))

    def _confidence(self, class_id: int) -> ConfidenceModel:
        cell = cell_of_class(class_id)
        found = self.confidences.get(cell)
        if found is None:
            found = self.confidences[cell] = ConfidenceModel(self.max_draft_length)
        return found
