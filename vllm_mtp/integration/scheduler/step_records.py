"""One record of each engine step, from its schedule to its output and its drafts.

Steps overlap under async scheduling, so what is known when a step is scheduled waits in
a queue until the step's output comes back::

    schedule            open     what is scheduled
    output              close    time, verified drafts, shadow drafts
    drafts (sync)       drafted  how deep the worker drafted under a stop rule
    next schedule       take     everything that is closed, for `deliver`
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from vllm_mtp.integration.scheduler.copying import OfferOutcomes
from vllm_mtp.integration.scheduler.messages import Choice, CopyReport, CopyReports
from vllm_mtp.records import RequestOutcome, StepOutcome


@dataclass(slots=True)
class StepRecord:
    """A step on its way."""

    scheduled: StepOutcome
    """What is known beforehand; its time and its requests are still missing."""
    began_at_s: float
    is_decided: bool = True
    """False where the controller had said that no decision was needed."""
    step_time_s: float = 0.0
    verified: list[RequestOutcome] = field(default_factory=list)
    shadow_drafts: list[RequestOutcome] = field(default_factory=list)
    copies: OfferOutcomes | None = None

    def set_verified(
        self,
        scheduled: list[RequestOutcome],
        choices: Mapping[str, Choice],
        drafts: Mapping[str, Sequence[int]],
    ) -> None:
        """What became of draft tokens.

        Args:
            scheduled: As if all that were scheduled had been verified; without
                requests that have ended meanwhile.
            choices: By request id, where the device left some out.
            drafts: All that were scheduled, by request id.
        """
        self.verified = scheduled
        if choices:
            self.verified = [
                _as_chosen(outcome, choices[outcome.request_id])
                for outcome in scheduled
            ]
            num_rows = self.scheduled.num_scheduled_tokens
            num_rows -= sum(map(len, drafts.values()))
            num_rows += sum(choice.num_verified for choice in choices.values())
            self.scheduled = self.scheduled._replace(num_scheduled_tokens=num_rows)

    def set_copied(self, reports: CopyReports, copies: OfferOutcomes) -> None:
        """Which draft tokens were copied.

        Args:
            reports: Of the worker.
            copies: What became of offers.
        """
        self.copies = copies
        for known in reports:
            if known:
                self.verified = [
                    _as_copied(outcome, known.get(outcome.request_id))
                    for outcome in self.verified
                ]

    @property
    def outcome(self) -> StepOutcome:
        copies = self.copies or OfferOutcomes([], [])
        return self.scheduled._replace(
            step_time_s=self.step_time_s,
            requests=tuple(self.verified),
            shadow_drafts=tuple(self.shadow_drafts),
            copies=tuple(copies.behind_drafts),
            copied_drafts=tuple(copies.alone),
        )


def _as_chosen(outcome: RequestOutcome, choice: Choice) -> RequestOutcome:
    # Those that a grammar forbade are the last ones.
    verified = min(choice.num_verified, outcome.num_draft_tokens)
    left_out = outcome.num_draft_tokens - verified
    is_rejected = outcome.num_accepted_tokens < verified
    would_be_accepted = 0 if is_rejected else choice.num_would_be_accepted
    return outcome._replace(
        num_draft_tokens=verified,
        num_left_out=left_out,
        num_would_be_accepted=min(would_be_accepted, left_out),
        num_forbidden=choice.num_verified - verified,
    )


def _as_copied(outcome: RequestOutcome, report: CopyReport | None) -> RequestOutcome:
    if report is None or not report.num_verified:
        return outcome
    # Those that were left out or forbidden are the last ones.
    absent = outcome.num_left_out + outcome.num_forbidden
    return outcome._replace(num_copied=max(report.num_verified - absent, 0))


class StepRecords:
    """Times steps and puts together what came of them."""

    def __init__(self, drafts_after_output: bool) -> None:
        """Begin with nothing on the way.

        Args:
            drafts_after_output: A step's output is handed over before its drafts are
                made (async scheduling on a GPU), so that the time between two outputs
                contains the draft steps of the step before.
        """
        self._drafts_after_output = drafts_after_output
        self._under_way: deque[StepRecord] = deque()
        self._closed: list[StepRecord] = []
        self._last_opened: StepOutcome | None = None
        self._last_closed: StepOutcome | None = None
        self._last_output_at_s = 0.0
        self._scheduling_since_s: float | None = None

    def scheduling(self) -> None:
        """Scheduling begins. Deciding and learning are part of the step."""
        self._scheduling_since_s = time.monotonic()

    def open(self, scheduled: StepOutcome, is_decided: bool = True) -> None:
        """A step is scheduled; its time and its requests come later."""
        since_s, self._scheduling_since_s = self._scheduling_since_s, None
        began_at_s = since_s or time.monotonic()
        self._under_way.append(StepRecord(scheduled, began_at_s, is_decided))
        self._last_opened = scheduled

    def open_repeated(self) -> None:
        """A step of the same batch as the last one: a token more of each request."""
        last = self._last_opened
        assert last is not None
        context = last.num_context_tokens + last.num_requests
        self.open(last._replace(num_context_tokens=context), is_decided=False)

    def close(self) -> StepRecord:
        """The oldest step's output is here; what it brought may still be added."""
        record = self._under_way.popleft()
        scheduled, before = record.scheduled, self._last_closed
        self._last_closed = scheduled
        if self._drafts_after_output and before is not None:
            record.scheduled = scheduled._replace(
                draft_depth=before.draft_depth,
                num_backfill_tokens=before.num_backfill_tokens,
            )
        self._closed.append(record)
        self._time(record)
        return record

    def _time(self, record: StepRecord) -> None:
        now_s = time.monotonic()
        record.step_time_s = now_s - max(record.began_at_s, self._last_output_at_s)

    def updated(self, record: StepRecord) -> None:
        """The scheduler has taken up the output, which is part of the step."""
        self._time(record)
        self._last_output_at_s = time.monotonic()

    def drafted(self, depth: int) -> None:
        """The worker ended the drafts of the last closed step at this depth."""
        if self._closed:
            last = self._closed[-1]
            last.scheduled = last.scheduled._replace(draft_depth=depth)

    def take(self) -> Iterator[tuple[bool, list[StepOutcome]]]:
        """What was closed, in order, each once; decided steps and others apart."""
        closed, self._closed = self._closed, []
        for is_decided, records in groupby(closed, attrgetter("is_decided")):
            yield is_decided, [record.outcome for record in records]
