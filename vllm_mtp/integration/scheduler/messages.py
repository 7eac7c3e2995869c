"""What travels between scheduler and worker: in subclasses of vLLM's own messages.

===========================  ==============  ==================================
message                      to              carries
===========================  ==============  ==================================
`DirectedSchedulerOutput`    the worker      when to stop drafting
`ScoredDraftTokenIds`        the scheduler   how sure drafts are, how long
`ReportingOutput`            the scheduler   what a worker reports now and then
===========================  ==============  ==================================

Whoever stands between scheduler and worker may copy a message field by field. Tokens
are right all the same, but drafts would be longer than they pay: so it is logged where
ours do not arrive.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeVar

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds, ModelRunnerOutput

from vllm_mtp.records import StopRule

# Below "vllm", so that its log settings apply to our lines, too.
logger = init_logger("vllm.mtp_plus")

Message = TypeVar("Message")


def warn_lost(message: type) -> None:
    """Log once that messages arrive without our part.

    Args:
        message: The subclass that was sent.
    """
    logger.warning_once(
        "%s arrives as vLLM's plain %s: something between scheduler and worker copies "
        "it, and what mtp_plus sends with it is lost. The output is right, but drafts "
        "are not chosen as well as they could be.",
        message.__name__,
        message.__base__.__name__ if message.__base__ else "object",
    )


def _with(message_type: type[Message], theirs: Any, **ours: Any) -> Message:
    known = {item.name: getattr(theirs, item.name) for item in fields(theirs)}
    return message_type(**known | ours)


class CopyDirections(NamedTuple):
    """How far drafts may be continued from contexts."""

    draft_depth: int
    """Draft steps of the MTP layers; drafts may be longer."""
    chain_lengths: Mapping[str, int]
    """Draft tokens of the MTP layers that are verified, by request id. Which are is
    settled before they are drawn: else what the context says would favour some."""
    copy_lengths: Mapping[str, int]
    """Draft tokens that are verified where the context continues those."""
    acceptance: float
    """Of a copied token, if those before it are accepted, in the mean."""
    copied_drafts: Mapping[str, int] = {}
    """Draft tokens that are verified where a context offers them before anything is
    drafted, and nothing is drafted for that request."""

    @property
    def longest(self) -> dict[str, int]:
        """Most draft tokens of each request that may copy."""
        behind, alone = self.copy_lengths, self.copied_drafts
        return {i: max(behind.get(i, 0), alone.get(i, 0)) for i in {**behind, **alone}}


@dataclass
class DirectedSchedulerOutput(SchedulerOutput):
    """A step with directions for its drafts."""

    stop_rule: StopRule | None = None
    """Drafting may stop before ``num_spec_tokens_to_schedule`` steps."""
    copying: "CopyDirections | None" = None
    """Contexts may continue drafts; None where they are not looked into."""


def directed(
    output: SchedulerOutput,
    stop_rule: StopRule | None,
    copying: CopyDirections | None = None,
) -> DirectedSchedulerOutput:
    """The same step with directions; without any as well, so that none is missed."""
    return _with(DirectedSchedulerOutput, output, stop_rule=stop_rule, copying=copying)


def copying_of(output: SchedulerOutput) -> CopyDirections | None:
    """How far drafts of a step may be continued, in an engine where they may be."""
    if isinstance(output, DirectedSchedulerOutput):
        return output.copying
    if output.num_spec_tokens_to_schedule:
        warn_lost(DirectedSchedulerOutput)
    return None


def stop_rule_of(output: SchedulerOutput) -> StopRule | None:
    """The rule of a step in an engine whose drafting may stop early."""
    if isinstance(output, DirectedSchedulerOutput):
        return output.stop_rule
    if output.num_spec_tokens_to_schedule:
        warn_lost(DirectedSchedulerOutput)
    return None


@dataclass
class ScoredDraftTokenIds(DraftTokenIds):
    """Drafts, and what their proposals said of them."""

    # num_reqs x draft steps that were made
    confidences: list[tuple[float, ...]]
    # [num_reqs]: tokens that are worth verifying; None where no rule was given
    lengths: list[int] | None


class VocabularyState(NamedTuple):
    """What has become of the draft vocabulary."""

    coverage: float | None
    """Share of the tokens committed lately that it holds; None while unknown."""
    is_in_use: bool


class Choice(NamedTuple):
    """What the device has made of a request's draft tokens."""

    num_verified: int
    num_would_be_accepted: int
    """Of the next ones, drawn by how sure they were, should all of those be."""


class CopyReport(NamedTuple):
    """What a request's context has offered behind drafts, or in the place of one. All
    are numbers of tokens."""

    num_offered: int = 0
    """When it was last looked for, verified or not; behind a draft in accord with it.
    0 if it was none."""
    num_examined: int = 0
    """Of the offer before, that stood where tokens have been committed since. A draft
    in front of it is one of them."""
    num_matched: int = 0
    """Of those, up to the first that was another."""
    num_verified: int = 0
    """Draft tokens of this step beyond those of the MTP layers."""


class CopyReports(NamedTuple):
    """By request id, where there is anything to say."""

    behind_drafts: Mapping[str, CopyReport] = {}
    alone: Mapping[str, CopyReport] = {}


class DraftedTokens(NamedTuple):
    """Draft tokens of a step whose scheduler only counts them.

    On their way to the host; right once the step's output is here.
    """

    # [num_reqs], in the order of the output
    num_drafts: Sequence[int] | np.ndarray
    # [num_tokens or more]
    token_ids: np.ndarray
    # [num_reqs]: other tokens that come before a request's drafts; None: there are none
    num_before: np.ndarray | None = None

    def of(self, place: int, number: int) -> list[int]:
        """The first draft tokens of a request.

        Args:
            place: Of the request in the output.
            number: Of tokens.
        """
        first = int(sum(self.num_drafts[:place]))
        if self.num_before is not None:
            first += int(self.num_before[: place + 1].sum())
        tokens: list[int] = self.token_ids[first : first + number].tolist()
        return tokens


class WorkerReport(NamedTuple):
    """What a worker has to say beside a step's output; most often nothing."""

    vocabulary: VocabularyState | None = None
    shadow_drafts: Mapping[str, bool] = {}
    """Whether drafts that were not verified would have been accepted, by request id."""
    failed_part: str | None = None
    """The part of drafting that has just failed."""
    mixes_draft_lengths: bool = False
    """Said once: CUDA graphs serve any mix of draft lengths."""
    new_weights: Collection[str] = ()
    """Whose have changed: ``target``, ``draft``."""
    choices: Mapping[str, Choice] = {}
    """By request id, where draft tokens were left out on the device."""
    levels: Mapping[str, float] = {}
    """States to be reported (``metrics/stats.py``)."""
    drafted: DraftedTokens | None = None
    """Where somebody wants to see them (``show_rounds``)."""
    copies: CopyReports = CopyReports()
    """Where drafts may be copied."""


NOTHING = WorkerReport()


@dataclass
class ReportingOutput(ModelRunnerOutput):
    """A step's output with a report."""

    report: WorkerReport = field(default=NOTHING)


class VerifiedDrafts(NamedTuple):
    """What the device has chosen of a step's drafts, on its way to the host."""

    request_ids: list[str]
    # [2, num_reqs], the fields of `Choice`; right once the step's output is here
    counts: np.ndarray

    @property
    def choices(self) -> dict[str, Choice]:
        """By request id."""
        choices = map(Choice._make, self.counts.T.tolist())
        return dict(zip(self.request_ids, choices, strict=True))


class OfferedCopies(NamedTuple):
    """What contexts offered in the step before, on its way to the host, and what of
    earlier offers is verified in this one."""

    request_ids: list[str]
    # [3, num_reqs], the first fields of `CopyReport`; right once the step's output is
    # here
    counts: np.ndarray
    num_verified: Mapping[str, int]
    are_alone: bool = False
    """They were looked for where nothing was drafted, nor verified afterwards."""

    @property
    def reports(self) -> CopyReports:
        """Where there is anything to say."""
        counts = (CopyReport(*each) for each in self.counts.T.tolist())
        offers = dict(zip(self.request_ids, counts, strict=True))
        none = CopyReport()
        reports = {
            i: offers.get(i, none)._replace(num_verified=self.num_verified.get(i, 0))
            for i in {**offers, **self.num_verified}
        }
        found = {i: report for i, report in reports.items() if any(report)}
        return CopyReports(alone=found) if self.are_alone else CopyReports(found)


class _AsyncReportingOutput(AsyncModelRunnerOutput):
    """An output that is still being copied to the host, with a report."""

    def __init__(
        self,
        inner: AsyncModelRunnerOutput,
        report: WorkerReport,
        verified: VerifiedDrafts | None,
        copies: OfferedCopies | None,
    ) -> None:
        self._inner, self._report = inner, report
        self._verified, self._copies = verified, copies

    def get_output(self) -> ModelRunnerOutput:
        output, report = self._inner.get_output(), self._report
        if self._verified is not None:
            report = report._replace(choices=self._verified.choices)
        if self._copies is not None:
            report = report._replace(copies=self._copies.reports)
        return _with(ReportingOutput, output, report=report)


def with_report(
    output: Any,
    report: WorkerReport,
    is_first: bool = False,
    verified: VerifiedDrafts | None = None,
    copies: OfferedCopies | None = None,
) -> Any:
    """The same output with a report, if it can carry one and there is any.

    Args:
        output: What a runner returns from ``sample_tokens``; None on ranks that sample
            nothing.
        report: What the worker has to say.
        is_first: Of this worker: it carries a report anyhow, and that it arrives is how
            the scheduler knows that later ones would.
        verified: Where draft tokens were left out; of async outputs.
        copies: Where texts may continue drafts; the same.
    """
    is_late = verified is not None or copies is not None
    if report == NOTHING and not is_first and not is_late:
        return output
    if isinstance(output, AsyncModelRunnerOutput):
        return _AsyncReportingOutput(output, report, verified, copies)
    if not isinstance(output, ModelRunnerOutput):
        return output
    return _with(ReportingOutput, output, report=report)


def report_of(output: Any) -> WorkerReport:
    """The report that came with an output."""
    report: WorkerReport = getattr(output, "report", NOTHING)
    return report
