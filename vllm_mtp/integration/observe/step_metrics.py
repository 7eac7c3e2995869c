"""What the scheduler knows, turned into counts for people.

Counts travel to the server's front end inside vLLM's own ``SchedulerStats``, whose
``kv_connector_stats`` is a dictionary for plugins: under a key of ours, which our
logger takes out again before vLLM's loggers read it (`stat_logger`). Once a second
only, and when nothing runs any more: a step pays for adding numbers.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from vllm.logger import init_logger

from vllm_mtp.config import METHOD
from vllm_mtp.metrics.drift import DriftAlarm
from vllm_mtp.metrics.stats import (
    BASELINE,
    CALIBRATION_ERROR,
    COVERAGE,
    DRAFT,
    DROPPED,
    EXPLORATION,
    FAILED,
    FIRST_STEP,
    HAS_DRIFTED,
    KV_BACKFILL,
    OTHER,
    PINNED,
    PREFILL,
    RECENT,
    TARGET,
    UNPROFITABLE,
    UNSURE,
    VERIFY,
    VOCABULARY_IN_USE,
    WHOLE,
    SpeculationStats,
)
from vllm_mtp.records import DraftDecision, RequestOutcome, StepOutcome

STATS_KEY = METHOD
"""Of our counts among the plugins' ones."""
ROUNDS_KEY = f"{METHOD}_rounds"
"""Of changes of `page/rounds.py`, beside our counts."""

_HAND_OVER_S = 1.0
"""Between two hand-overs while requests run."""

_STEPS_COUNTED_AT_ONCE = 8
"""Code that has just run runs faster than after a pass of the target."""

_REASON_OF = {
    "off": UNPROFITABLE,
    "exploit": UNPROFITABLE,
    "explore": EXPLORATION,
    "probe": EXPLORATION,
    "prefill": FIRST_STEP,
    FAILED: FAILED,
}
"""Why a controller chose K = 0, by the reason that its decision gives."""

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")


class StepMetrics:
    """Counts one scheduler's steps."""

    STEP_METHODS = (
        "decided",
        "decoding_without_draft",
        "finished",
        "ended",
        "vocabulary",
        "levels",
        "drafting_failed",
        "new_weights",
        "take",
    )
    """All that a step may call."""

    def __init__(self, controller: Any, max_draft_length: int) -> None:
        """Nothing is counted.

        Args:
            controller: Asked for its estimates, if it has any.
            max_draft_length: ``K_max``.
        """
        # A trace is written by a controller around the one that decides.
        deciding = getattr(controller, "controller", controller)
        self._estimate = getattr(deciding, "estimate", lambda outcome: None)
        self._controller = deciding
        self._max_draft_length = max_draft_length
        self._stats = SpeculationStats.empty(max_draft_length)
        self._decision = DraftDecision(0, {}, "prefill")
        """Of the step before the one that is being scheduled."""
        self._still_waiting: Collection[str] = ()
        self._alarms = {True: DriftAlarm(), False: DriftAlarm()}
        """By whether requests are greedy: the others accept less."""
        self._first_tokens: dict[str, list[int]] = {}
        """By request: first draft tokens verified and accepted."""
        self._handed_over_at_s = 0.0
        self._waiting: list[StepOutcome] = []
        """Steps that are not counted yet."""

    # -- a step is scheduled ------------------------------------------------------

    def decided(self, decision: DraftDecision, still_waiting: Collection[str]) -> None:
        """What the drafts of the step just scheduled will be, and for whom not."""
        self._decision, self._still_waiting = decision, still_waiting

    def decoding_without_draft(
        self,
        request_ids: Iterable[str],
        pinned: Collection[str],
        num_steps: int = 1,
    ) -> None:
        """These requests decode in the step being scheduled, with K = 0.

        Args:
            request_ids: They.
            pinned: Requests that fix K = 0.
            num_steps: So many steps, of the same reasons.
        """
        counts = self._stats.without_draft
        for request_id in request_ids:
            reason = PINNED if request_id in pinned else self._why(request_id)
            counts[reason] = counts.get(reason, 0) + num_steps
            self._stats.draft_lengths[0] += num_steps

    def _why(self, request_id: str) -> str:
        chosen = self._decision.num_draft_tokens.get(request_id)
        if request_id in self._still_waiting:
            return KV_BACKFILL
        if chosen is None:
            return FIRST_STEP
        if chosen > 0:
            return DROPPED if self._decision.stop_rule is None else UNSURE
        return _REASON_OF.get(self._decision.reason, OTHER)

    # -- its output is here -------------------------------------------------------

    def finished(self, outcome: StepOutcome) -> None:
        """The step as a whole."""
        self._waiting.append(outcome)
        # After a prompt the batch is another one, of which estimates will be then.
        if outcome.num_prefill_tokens or len(self._waiting) == _STEPS_COUNTED_AT_ONCE:
            self._count_waiting()

    def _count_waiting(self) -> None:
        for outcome in self._waiting:
            self._count(outcome)
        verified = [each for outcome in self._waiting for each in outcome.requests]
        shadow = [each for outcome in self._waiting for each in outcome.shadow_drafts]
        self._waiting.clear()
        self._count_drafts(verified)
        for request_id, drafted, accepted, *_ in verified + shadow:
            if drafted:
                first = self._first_tokens.setdefault(request_id, [0, 0])
                first[0] += 1
                first[1] += accepted > 0

    def _count_drafts(self, verified: Sequence[RequestOutcome]) -> None:
        stats = self._stats
        kinds = Counter(map(itemgetter(1, 2, 6, 7), verified))
        for (drafted, accepted, forbidden, copied), number in kinds.items():
            num_rows = drafted + forbidden
            stats.draft_lengths[num_rows] += number
            if not num_rows:
                stats.without_draft[UNSURE] = (
                    stats.without_draft.get(UNSURE, 0) + number
                )
            stats.num_rejected_slots += number * (num_rows - accepted)
            if copied:
                chain = drafted - copied
                stats.num_copied += number * copied
                stats.num_copied_accepted += number * max(accepted - chain, 0)
            for position in range(drafted):
                stats.drafted[position] += number
            for position in range(accepted):
                stats.accepted[position] += number

    def _count(self, outcome: StepOutcome) -> None:
        seconds, stats = outcome.step_time_s, self._stats
        if outcome.num_prefill_tokens or not outcome.num_decode_requests:
            _add(stats.seconds, PREFILL, seconds)
            return
        num_tokens = outcome.num_decode_requests + outcome.num_accepted_tokens
        stats.num_tokens += num_tokens
        known = self._estimate(outcome)
        expected_s = known.target_s + known.verify_s + known.draft_s if known else 0.0
        if known is None or expected_s <= 0.0:
            _add(stats.seconds, WHOLE, seconds)
            return
        stats.promised_tokens += seconds * known.goodput
        # The machine may be slower or faster now than what was learnt of it.
        scale = seconds / expected_s
        _add(stats.seconds, TARGET, scale * known.target_s)
        _add(stats.seconds, VERIFY, scale * known.verify_s)
        _add(stats.seconds, DRAFT, scale * known.draft_s)
        steps_without = num_tokens / outcome.num_decode_requests
        stats.saved_seconds += steps_without * scale * known.target_s - seconds

    def ended(self, request_id: str, is_greedy: bool) -> None:
        """A request is gone."""
        self._count_waiting()
        verified = self._first_tokens.pop(request_id, None)
        if verified is not None:
            warning = self._alarms[is_greedy].observe(*verified)
            if warning is not None:
                self._stats.num_alarms += 1
                logger.warning("%s", warning)

    def vocabulary(self, coverage: float | None, is_in_use: bool) -> None:
        """What has become of the draft vocabulary."""
        levels = self._stats.levels
        levels[VOCABULARY_IN_USE] = float(is_in_use)
        if coverage is not None:
            levels[COVERAGE] = coverage

    def levels(self, found: Mapping[str, float]) -> None:
        """States that a worker has reported."""
        self._stats.levels |= found

    def new_weights(self, changed: Collection[str]) -> None:
        """These models have other weights by now (``target``, ``draft``)."""
        for alarm in self._alarms.values():
            alarm.weights_changed(changed)

    def drafting_failed(self, part: str) -> None:
        """A part of drafting broke (`FAILED_PARTS`), and drafting is off for good."""
        failures = self._stats.failures
        failures[part] = failures.get(part, 0) + 1

    # -- handing over -------------------------------------------------------------

    def take(self, is_idle: bool) -> dict[str, Any] | None:
        """The counts since the last ones; None while it is too early for new ones.

        Args:
            is_idle: No request is left, so nothing may ever come after this.
        """
        now_s = time.monotonic()
        if not is_idle and now_s - self._handed_over_at_s < _HAND_OVER_S:
            return None
        self._handed_over_at_s = now_s
        self._count_waiting()
        taken, self._stats = self._stats, SpeculationStats.empty(self._max_draft_length)
        taken.levels |= self._levels()
        return taken.to_dict()

    def _levels(self) -> Mapping[str, float]:
        # Greedy requests accept more; where both run, the worse of the two counts.
        alarm = max(
            self._alarms.values(), key=lambda a: (a.is_raised, a.baseline is not None)
        )
        found = {
            CALIBRATION_ERROR: getattr(self._controller, "calibration_error", None),
            BASELINE: alarm.baseline,
            RECENT: alarm.recent,
            HAS_DRIFTED: float(any(a.is_raised for a in self._alarms.values())),
        }
        return {name: level for name, level in found.items() if level is not None}


def _add(sums: dict[str, float], key: str, value: float) -> None:
    sums[key] = sums.get(key, 0.0) + value
