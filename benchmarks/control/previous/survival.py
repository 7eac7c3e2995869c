"""Which draft tokens will survive: estimates for every request and position.

Model (a Rasch model, as for exams: positions are the items, requests the persons)::

    log-odds of p_ij = profile[cell][j] + drift + shift_i + (j > 1) late_i

``p_ij`` is the conditional acceptance of position j in request i. ``profile`` belongs
to a *cell*, which is a bucket of context length and a regime (greedy or sampled, free
or constrained); ``drift`` is common to the engine and follows a change of the load
within steps; ``shift_i`` is the request's own, ``late_i`` what it does differently
after the first position; both are shrunk toward 0 (the running mean) with a strength
that the spread of past requests decides (empirical Bayes); how long they count, see
`request_memory`. Pooling positions like this is why a request that accepted little at
position 1 is not believed to do well at position 4, where it was never tried.

Evidence about a request is evidence about the drift only as far as its own shift does
not explain it, and the longer a request runs the less is left. Otherwise the drift
would follow whichever request runs at the moment, and the next one would inherit its
luck.

Censoring: with K drafted and A accepted, positions 1..A were accepted, position A + 1
was rejected if it was drafted, and all further ones say nothing.

Cost: O(1) for each request of an observation and O(K) for each distinct
(class, K, A) among them, or for each request where confidences are known. Memory: one
small record for each request seen lately.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.control.previous.beliefs import Beliefs
from benchmarks.control.previous.calibration import Calibration
from benchmarks.control.previous.confidence import sane
from benchmarks.control.previous.profiles import cell_of, is_sampled, regime_of
from benchmarks.control.previous.request_memory import (
    MEMORIES,
    Evidence,
    Memory,
    MemoryChoice,
    Prior,
    RequestState,
    cell_of_class,
    class_of_mean,
    evidence_of,
)
from vllm_mtp.acceptance import Interval, logistic
from vllm_mtp.records import DecodeRequest, RequestOutcome


class SurvivalOptions(NamedTuple):
    """How fast estimates learn and forget."""

    prior: tuple[float, ...] = (0.75, 0.65, 0.6, 0.55, 0.5)
    """Conditional acceptance by position before any draft; the last one repeats."""
    prior_precision: float = 2.0
    """Of a profile's log-odds: 2 is the weight of about 10 draft tokens."""
    memories: tuple[Memory, ...] = MEMORIES
    """How long a request's own past counts; the better one is found out."""
    profile_half_life_drafts: float = 1024.0
    drift_variance: float = 0.002
    """Growth of the drift's variance in each step, log-odds squared."""
    max_outcomes: int = 96
    """Requests that a step's estimates are updated with; bounds the time it takes."""
    alarm_sigmas: float = 3.5
    """Surprise after which the drift is taken to have jumped."""
    max_surprise: float = 2.5
    """Deviations that one request's step counts for at most: where nearly all is
    accepted, a single rejection is many of them, and nothing out of the ordinary."""
    alarm_precision: float = 0.25
    """Precision of the drift after that: a standard deviation of 2 log-odds."""


_Key = tuple[int, int, int, tuple[float, ...]]
"""(class, drafted, accepted, confidences)"""
_Groups = dict[_Key, list[str]]
"""Requests of a step that tell the same."""
_EvidenceOf = dict[_Key, Evidence]

_FIT_STEPS = 6


def _total(groups: _Groups, evidence: _EvidenceOf) -> tuple[float, float]:
    """Score and information of all requests."""
    score = information = 0.0
    for key, members in groups.items():
        score += len(members) * evidence[key].score
        information += len(members) * evidence[key].information
    return score, information


class SurvivalModel(Beliefs):
    """Learns acceptance from outcomes; what it believes of requests and classes.

    ``class_of`` is public and a plain dictionary because a controller looks up a
    whole batch in it at every step: request id -> class, an integer that
    `survival_of_class` understands.
    """

    def __init__(
        self, max_draft_length: int, options: SurvivalOptions | None = None
    ) -> None:
        self.options = options or SurvivalOptions()
        super().__init__(
            max_draft_length, self.options.prior, self.options.prior_precision
        )
        self.class_of: dict[str, int] = {}
        self.num_alarms = 0
        self.calibration = Calibration()
        self.shift_variance = 0.5
        self.late_variance = 0.25
        self.memory = MemoryChoice(self.options.memories)
        self._surprise = 0.0
        self._now_step = 0
        self._next_outcome = 0
        self._states: dict[str, RequestState] = {}
        # Precision is a sum of p (1 - p) <= 1/4 over the drafts not yet forgotten.
        weight = self.options.profile_half_life_drafts / math.log(2)
        self._max_precision = 0.2 * weight

    # -- requests -----------------------------------------------------------------

    def see(self, request: DecodeRequest) -> int:
        """Note a request's context length and regime; returns its class."""
        cell = cell_of(request)
        state = self._states.get(request.request_id)
        if state is None:
            state = RequestState(cell, self._prior(), self._now_step)
            self._states[request.request_id] = state
        state.cell = cell
        class_id = self.class_of[request.request_id] = state.class_id
        return class_id

    def _prior(self, memory: Memory | None = None) -> Prior:
        """What is believed of a new request, with the memory in use or another."""
        memory = memory or self.memory.current
        return Prior(
            1.0 / min(self.shift_variance, memory.max_shift_variance),
            1.0 / min(self.late_variance, memory.max_late_variance),
            0.5 ** (1.0 / memory.half_life_steps),
        )

    def keep_only(self, request_ids: Iterable[str]) -> None:
        """Forget every other request."""
        kept = set(request_ids)
        self._states = {i: s for i, s in self._states.items() if i in kept}
        self.class_of = {i: c for i, c in self.class_of.items() if i in kept}

    # -- answers ------------------------------------------------------------------

    def survival_of(self, request: DecodeRequest) -> list[float]:
        """``S_1`` .. ``S_K_max`` of a request, seen before or not."""
        return self.survival_of_class(self._class_for(request))

    def intervals_of(self, request: DecodeRequest, z: float = 1.96) -> list[Interval]:
        """Interval of each ``S_j``: ends of the request's log-odds, +- z deviations.

        Survival rises with the log-odds of every position, so the ends of theirs give
        the ends of its own.
        """
        state = self._states.get(request.request_id) or RequestState(
            cell_of(request), self._prior()
        )
        profile = self._profiles.of(state.cell)
        centre = self.drift + state.shift
        variance = 1.0 / state.precision + 1.0 / self.drift_precision
        confidence = self._confidence_in(state.cell)
        dampings, bias = confidence.dampings, confidence.first_bias
        lower = upper = 1.0
        intervals = []
        for position, logit in enumerate(profile.logits):
            if position == 1:
                centre += state.late
                variance += 1.0 / state.late_precision
            half = z * math.sqrt(variance + 1.0 / profile.precisions[position])
            damping = dampings[position]
            lower *= logistic(damping * (centre + logit - half) + bias)
            upper *= logistic(damping * (centre + logit + half) + bias)
            bias = 0.0
            intervals.append(Interval(lower, upper))
        return intervals

    def _class_for(self, request: DecodeRequest) -> int:
        found = self.class_of.get(request.request_id)
        if found is not None:
            return found
        return class_of_mean(cell_of(request))

    # -- learning -----------------------------------------------------------------

    def observe(
        self,
        outcomes: Sequence[RequestOutcome],
        num_steps: int = 1,
        max_outcomes: int | None = None,
    ) -> float:
        """Learn from the requests of a step, or of a few steps together.

        Args:
            outcomes: Of requests with drafts. Of a request several, the earlier first,
                if there are several steps.
            num_steps: As many have passed.
            max_outcomes: Most that are learned of, each time others; None: as many for
                each step as the options say.

        Returns:
            How far acceptance has just jumped, log-odds; 0 if it has not.
        """
        first_step = self._now_step
        self.wait(num_steps)
        limit = num_steps * self.options.max_outcomes
        if max_outcomes is not None:
            limit = min(limit, max_outcomes)
        groups = self._group(self._some(outcomes, limit))
        if not groups:
            return 0.0
        self._note_confidences(groups)
        self._compare_memories(outcomes, first_step)
        before = self.drift
        evidence = {key: self._evidence(*key) for key in groups}
        for key, members in groups.items():
            self.calibration.note(evidence[key].probabilities, key[2], len(members))
        alarm = self._is_surprised(groups, evidence)
        if alarm:
            self._doubt_everything()
            evidence = self._fit_drift(groups)
            moved = 0.0
        else:
            moved = self._update_drift(groups, evidence)
        self._update_profiles(groups, evidence, moved)
        for key, members in groups.items():
            self._update_requests(members, evidence[key], moved, first_step)
        return self.drift - before if alarm else 0.0

    def wait(self, num_steps: int = 1) -> None:
        """Steps have passed that tell nothing: acceptance may have drifted."""
        self._now_step += num_steps
        drifted = num_steps * self.options.drift_variance
        variance = 1.0 / self.drift_precision + drifted
        self.drift_precision = 1.0 / variance

    def _some(
        self, outcomes: Sequence[RequestOutcome], limit: int
    ) -> Sequence[RequestOutcome]:
        """All outcomes of a small batch, each time others of a large one."""
        if len(outcomes) <= limit:
            return outcomes
        self._next_outcome = (self._next_outcome + limit) % len(outcomes)
        first = self._next_outcome
        return (
            *outcomes[first : first + limit],
            *outcomes[: max(first + limit - len(outcomes), 0)],
        )

    def _group(self, outcomes: Sequence[RequestOutcome]) -> _Groups:
        """Request ids by (class, drafted, accepted); those without drafts left out."""
        groups: _Groups = {}
        class_of, limit = self.class_of, self.max_draft_length
        for request_id, drafted, accepted, confidences in outcomes:
            drafted = min(drafted, limit)
            if drafted <= 0:
                continue
            class_id = class_of.get(request_id)
            if class_id is None:
                class_id = self.see(DecodeRequest(request_id, 0))
            accepted = min(max(accepted, 0), drafted)
            key = (class_id, drafted, accepted, sane(confidences, drafted))
            members = groups.get(key)
            if members is None:
                groups[key] = [request_id]
            else:
                members.append(request_id)
        return groups

    def _note_confidences(self, groups: _Groups) -> None:
        expected_of: dict[int, float] = {}
        for (class_id, _, accepted, confidences), members in groups.items():
            if not confidences:
                continue
            confidence = self._confidence(class_id)
            # Of sampled requests those drafts are verified that seem good, and the
            # others not compared; greedy ones are all judged.
            if not is_sampled(regime_of(cell_of_class(class_id))):
                if class_id not in expected_of:
                    expected_of[class_id] = self.conditional_of_class(class_id, 1)[0]
                expected, number = expected_of[class_id], len(members)
                confidence.learn_first(expected, number * (accepted > 0), number)
            confidence.note(confidences)

    def _evidence(
        self,
        class_id: int,
        drafted: int,
        accepted: int,
        confidences: tuple[float, ...],
    ) -> Evidence:
        examined = min(accepted + 1, drafted)
        if not confidences:
            probabilities = self.conditional_of_class(class_id, examined)
        else:
            confidence = self._confidence(class_id)
            offsets = confidence.offsets(confidences[:examined])
            usual = self.log_odds_of_class(class_id)[:examined]
            probabilities = [
                logistic(a + b) for a, b in zip(usual, offsets, strict=True)
            ]
        return evidence_of(tuple(probabilities), accepted)

    def _compare_memories(
        self, outcomes: Sequence[RequestOutcome], first_step: int
    ) -> None:
        priors = [self._prior(memory) for memory in self.memory.memories]
        for outcome in self.memory.begin_step(outcomes, priors):
            state = self._states.get(outcome.request_id)
            drafted = min(outcome.num_draft_tokens, self.max_draft_length)
            if state is not None and drafted > 0:
                examined = min(max(outcome.num_accepted_tokens, 0) + 1, drafted)
                profile = self._profiles.of(state.cell)
                logits = [self.drift + logit for logit in profile.logits[:examined]]
                confidences = sane(outcome.confidences, examined)
                if confidences:
                    confidence = self._confidence_in(state.cell)
                    offsets = confidence.offsets(confidences[:examined])
                    logits = [a + b for a, b in zip(logits, offsets, strict=True)]
                num_steps = state.steps_since(first_step)
                self.memory.compare(outcome, logits, priors, num_steps)

    def _is_surprised(self, groups: _Groups, evidence: _EvidenceOf) -> bool:
        """Whether acceptance has changed abruptly."""
        score = information = 0.0
        of_cell: defaultdict[int, float] = defaultdict(float)
        for key, members in groups.items():
            _, one, *_ = evidence[key]
            most = self.options.max_surprise * math.sqrt(one)
            bounded = min(max(evidence[key].score, -most), most)
            # What is not known of the requests themselves surprises nobody.
            states = map(self._states.__getitem__, members)
            weight = sum(1.0 / (1.0 + one / state.precision) for state in states)
            score += weight * bounded
            information += weight * one
            of_cell[cell_of_class(key[0])] += weight * one
        # Nor does what is not known of their kind.
        deviation = math.sqrt(
            information
            + information * information / self.drift_precision
            + sum(
                i * i / self._profiles.of(c).precisions[0] for c, i in of_cell.items()
            )
        )
        # Sum of recent surprises, each of unit variance: one of five deviations
        # speaks at once, a run of smaller ones of the same sign soon after.
        self._surprise = 0.7 * self._surprise + score / deviation
        return abs(self._surprise) * math.sqrt(1 - 0.49) > self.options.alarm_sigmas

    def _doubt_everything(self) -> None:
        """Let the drift jump, and believe less of what is known of each request."""
        self._surprise = 0.0
        self.num_alarms += 1
        self.drift_precision = min(self.drift_precision, self.options.alarm_precision)
        prior, late_prior, _ = self._prior()
        for state in self._states.values():
            state.precision = max(prior, 0.3 * state.precision)
            state.late_precision = max(late_prior, 0.3 * state.late_precision)

    def _update_drift(self, groups: _Groups, evidence: _EvidenceOf) -> float:
        """Move what all requests have in common; returns how far."""
        score = information = 0.0
        prior = self._prior().shift_precision
        for key, members in groups.items():
            _, one, *_ = evidence[key]
            states = map(self._states.__getitem__, members)
            # The shift integrated out: what is left is less with all that is known.
            weight = sum(prior / (max(s.precision, prior) + one) for s in states)
            score += weight * evidence[key].score
            information += weight * one
        self.drift_precision += information
        # The gradient is that of a line; far from the truth it overshoots.
        return self._move_drift(score / self.drift_precision)

    def _fit_drift(self, groups: _Groups) -> _EvidenceOf:
        """Most likely drift by this step alone; returns the evidence that is left.

        Newton's method, where `_update_drift` takes one step: after a jump one is not
        enough, and the next evidence may be long in coming when drafting is off.
        """
        start, prior = self.drift, self.drift_precision
        # Of a request or two a single step makes enough of it.
        num_requests = sum(map(len, groups.values()))
        for _ in range(_FIT_STEPS if num_requests > 2 else 1):
            evidence = {key: self._evidence(*key) for key in groups}
            score, information = _total(groups, evidence)
            score -= prior * (self.drift - start)
            if abs(self._move_drift(score / (information + prior))) < 0.05:
                break
        evidence = {key: self._evidence(*key) for key in groups}
        self.drift_precision = prior + _total(groups, evidence)[1]
        return evidence

    def _move_drift(self, step: float) -> float:
        moved = min(max(step, -2.5), 2.5)
        moved = min(max(self.drift + moved, -8.0), 8.0) - self.drift
        self.drift += moved
        return moved

    def _update_profiles(
        self, groups: _Groups, evidence: _EvidenceOf, moved: float
    ) -> None:
        for key, members in groups.items():
            class_id, _, accepted, confidences = key
            probabilities = evidence[key].probabilities
            if confidences:
                confidence = self._confidence(class_id)
                for _ in members:
                    confidence.learn(probabilities, accepted, confidences)
            self._profiles.of(cell_of_class(class_id)).learn(
                probabilities, accepted, moved, len(members), self._max_precision
            )

    def _update_requests(
        self,
        members: Sequence[str],
        evidence: Evidence,
        moved: float,
        first_step: int,
    ) -> None:
        prior = self._prior()
        for request_id in members:
            state = self._states[request_id]
            state.learn(evidence, moved, prior, state.steps_since(first_step))
            state.heard_at_step = self._now_step
            self.class_of[request_id] = state.class_id
        has_late = evidence.late_information > 1e-5
        self._learn_spread(self._states[members[0]], has_late)

    def _learn_spread(self, state: RequestState, has_late: bool) -> None:
        """Expectation-maximisation of the spread among requests, from a sample."""
        spread = state.shift * state.shift + 1.0 / state.precision
        variance = self.shift_variance + 0.005 * (spread - self.shift_variance)
        self.shift_variance = min(max(variance, 0.02), 3.0)
        if has_late:
            spread = state.late * state.late + 1.0 / state.late_precision
            variance = self.late_variance + 0.005 * (spread - self.late_variance)
            self.late_variance = min(max(variance, 0.01), 3.0)
