"""Lets a model runner's output carry what its drafter has to say."""

from typing import Any

from vllm_mtp.integration.scheduler.messages import VerifiedDrafts, with_report
from vllm_mtp.metrics.stats import FAILED_DRAFTER


class Reports:
    """Mixin of model runners: the Ray executor goes past the worker."""

    _has_reported = False

    def begin_reports(self) -> None:
        """The next output is the first that a scheduler sees."""
        self._has_reported = False

    def with_report(
        self, output: Any, drafter: Any, verified: VerifiedDrafts | None = None
    ) -> Any:
        """A step's output, with the report of a drafter (`take_report`).

        Args:
            output: vLLM's.
            drafter: Ours.
            verified: Where draft tokens were left out.
        """
        report, is_first = drafter.take_report(), not self._has_reported
        if is_first:
            report = report._replace(
                mixes_draft_lengths=drafter.mixes_draft_lengths,
                failed_part=FAILED_DRAFTER if drafter.has_failed else None,
            )
        reported = with_report(output, report, is_first, verified)
        # It may have had no output to give.
        self._has_reported = self._has_reported or reported is not output
        return reported
