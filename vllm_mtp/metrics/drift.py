"""Notices when acceptance falls below its own past.

A broken or stale MTP head changes no answer, so nobody notices it: only acceptance
falls. The unit is a request, not a draft token: tokens of one text rise and fall
together, and tests that take them for independent cry wolf.

The past is a running mean over requests with its spread, slow and deaf while there is
an alarm; the present is the mean of the last few. It is called a fall when the present
lies both ``MIN_DROP`` and ``SIGMAS`` standard errors below the past. With requests that
differ as those of one domain do, a server that changes nothing raises a false alarm
less than once in 100,000 requests (a test simulates it). A change of traffic raises
one, too: it is a true fall, and the first of the likely causes that the warning names.
"""

import math
from collections import deque
from collections.abc import Collection

MIN_EXAMINED = 8
"""First draft tokens of a request before its rate counts."""
WARM_UP_REQUESTS = 64
"""Before there is a past to fall below."""
RECENT_REQUESTS = 32
HALF_LIFE_REQUESTS = 512
"""Of the past."""
SIGMAS = 5.0
MIN_DROP = 0.05
RECOVERED = 0.5
"""Share of the drop that must be made up for before the alarm ends."""

CAUSES = (
    "other traffic than before (language, domain, temperature); weights of the "
    "target that were updated without its MTP layers; damaged or quantized MTP "
    "weights (`vllm-mtp doctor MODEL` checks them, `vllm-mtp eval` measures). "
    "Answers are not affected, only speed"
)
TARGET_ALONE = (
    "the weights of the target were updated since, those of its MTP layers were not: "
    "update them, too (vLLM: start_draft_weight_update). Answers are not affected, "
    "only speed"
)


class DriftAlarm:
    """The past and the present of the acceptance of first draft tokens."""

    def __init__(self) -> None:
        """Nothing is known."""
        self.is_raised = False
        self.num_alarms = 0
        self._recent: deque[float] = deque(maxlen=RECENT_REQUESTS)
        self._mean = self._variance = 0.0
        self._num_requests = 0
        self._level_at_alarm = 0.0
        self._causes = CAUSES
        self._awaits_target = False
        """The MTP layers' weights were updated before the target's, as it seems."""

    def weights_changed(self, changed: Collection[str]) -> None:
        """The past was that of other weights.

        Args:
            changed: ``target``, ``draft``: with the target's alone, acceptance should
                not fall for that, and if it does it is known why.
        """
        if "draft" in changed or self._awaits_target:
            self.__init__()  # type: ignore[misc]
            self._awaits_target = "target" not in changed
        else:
            self._causes = TARGET_ALONE

    @property
    def baseline(self) -> float | None:
        """What this server is used to; None before it is used to anything."""
        return self._mean if self._num_requests >= WARM_UP_REQUESTS else None

    @property
    def recent(self) -> float | None:
        """Mean over the last requests; None before there are enough."""
        if len(self._recent) < RECENT_REQUESTS:
            return None
        return sum(self._recent) / len(self._recent)

    def observe(self, num_examined: int, num_accepted: int) -> str | None:
        """A request has ended.

        Args:
            num_examined: Its first draft tokens that the target verified.
            num_accepted: Those of them that it kept.

        Returns:
            A warning in a sentence when acceptance has just fallen, else None.
        """
        if num_examined < MIN_EXAMINED:
            return None
        if len(self._recent) == RECENT_REQUESTS and not self.is_raised:
            # What leaves the present becomes past: the present is never in both.
            self._learn(self._recent[0])
        self._recent.append(num_accepted / num_examined)
        baseline, recent = self.baseline, self.recent
        if baseline is None or recent is None:
            return None
        if self.is_raised:
            halfway = baseline - RECOVERED * (baseline - self._level_at_alarm)
            if recent >= halfway:
                self.is_raised = False
            return None
        error = math.sqrt(self._variance * (1 / RECENT_REQUESTS + 1 / self._memory))
        if recent >= baseline - max(MIN_DROP, SIGMAS * error):
            return None
        self.is_raised, self._level_at_alarm = True, recent
        self.num_alarms += 1
        return (
            f"acceptance has fallen: of the first draft tokens {100 * recent:.0f} % "
            f"were accepted in the last {RECENT_REQUESTS} requests, "
            f"{100 * baseline:.0f} % before. Likely causes: {self._causes}."
        )

    @property
    def _memory(self) -> float:
        """Requests that the past amounts to."""
        return min(self._num_requests, HALF_LIFE_REQUESTS / math.log(2))

    def _learn(self, rate: float) -> None:
        self._num_requests += 1
        share = 1.0 / max(self._memory, 1.0)
        away = rate - self._mean
        self._mean += share * away
        self._variance += share * ((1.0 - share) * away * away - self._variance)
