"""Lets a model runner's output carry what its drafter has to say."""

from typing import Any

from vllm_mtp.integration.scheduler.messages import with_report


class Reports:
    """Mixin of model runners: the Ray executor goes past the worker."""

    _has_reported = False

    def with_report(self, output: Any, drafter: Any) -> Any:
        """A step's output, with the report of a drafter (`take_report`)."""
        reported = with_report(output, drafter.take_report(), not self._has_reported)
        # It may have had no output to give.
        self._has_reported = self._has_reported or reported is not output
        return reported
