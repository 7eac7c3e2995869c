"""Lets a model runner's output carry what its drafter has to say."""

from functools import cached_property
from typing import Any

from vllm_mtp.integration.load.settings import settings_of
from vllm_mtp.integration.scheduler.messages import (
    DraftedTokens,
    OfferedCopies,
    VerifiedDrafts,
    with_report,
)
from vllm_mtp.metrics.stats import FAILED_DRAFTER


class Reports:
    """Mixin of model runners: the Ray executor goes past the worker."""

    vllm_config: Any
    _has_reported = False
    _drafted: DraftedTokens | None = None
    """Of the step whose tokens are being sampled, if they are sent."""

    @cached_property
    def sends_drafts(self) -> bool:
        """Whether draft tokens are to be shown of which the scheduler knows none."""
        config = self.vllm_config
        return bool(settings_of(config).show_rounds) and (
            config.use_v2_model_runner or config.scheduler_config.async_scheduling
        )

    def begin_reports(self) -> None:
        """The next output is the first that a scheduler sees."""
        self._has_reported = False

    def with_report(
        self,
        output: Any,
        drafter: Any,
        verified: VerifiedDrafts | None = None,
        copies: OfferedCopies | None = None,
    ) -> Any:
        """A step's output, with the report of a drafter (`take_report`).

        Args:
            output: vLLM's.
            drafter: Ours.
            verified: Where draft tokens were left out.
            copies: Where texts may continue drafts.
        """
        report, is_first = drafter.take_report(), not self._has_reported
        if self._drafted is not None:
            report = report._replace(drafted=self._drafted)
            self._drafted = None
        if is_first:
            report = report._replace(
                mixes_draft_lengths=drafter.mixes_draft_lengths,
                failed_part=FAILED_DRAFTER if drafter.has_failed else None,
            )
        reported = with_report(output, report, is_first, verified, copies)
        # It may have had no output to give.
        self._has_reported = self._has_reported or reported is not output
        return reported
