"""Writes down what a controller was shown, what it chose and what came of it.

A trace is a text file of JSON lines, one object each::

    {"format": "vllm-mtp trace", "version": 2, "max_draft_length": 8,
     "provenance": {..}, "columns": {..}}
    {"decision": 0, "depth": 3, "reason": "exploit",
     "requests": [[0, 512, 1, null, 3, 0, 0], ..], "survival": [[0.8, 0.61, ..], ..]}
    {"outcome": 0, "step_time_s": 0.0123, .., "requests": [[0, 3, 2], ..],
     "shadow_drafts": [[1, 1, 0], ..]}

The header names the columns of ``requests``; ``compared`` has the same. Requests are
anonymous: numbers in the order in which they appeared. ``survival`` holds each distinct
estimate of the decision once, ``survival_index`` of a request is an index into it (null
without a survival model). The other fields of an outcome are those of `StepOutcome`.

Decisions and outcomes are numbered apart, each from 0: a decision's drafts are verified
in the step after it, a step that only prefills has an outcome but no decision, and
under async scheduling an outcome is known after the next decision. Lines stand in
the order in which the controller was called.

Cost: about a microsecond for each request and call, and every step is decided about and
written, also those that would go without while drafting is off: on a slow core, whose
caches hold nothing of this between two passes of the target, a millisecond for each.
Memory: the numbers of the last few thousand requests; one that was away for longer than
that gets a new one.
"""

import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TextIO

from vllm_mtp.config import ConfigError
from vllm_mtp.control.controller import Controller, DecidesEveryStep
from vllm_mtp.records import DecodeRequest, DraftDecision, StepOutcome

TRACE_FORMAT = "vllm-mtp trace"
TRACE_VERSION = 2

DECISION_COLUMNS = (
    "request",
    "num_context_tokens",
    "is_greedy",
    "pinned_draft_length",
    "num_draft_tokens",
    "survival_index",
    "is_constrained",
)
OUTCOME_COLUMNS = ("request", "num_draft_tokens", "num_accepted_tokens")
OUTCOME_FIELDS = (
    "num_requests",
    "num_scheduled_tokens",
    "draft_depth",
    "num_decode_requests",
    "num_prefill_tokens",
    "num_context_tokens",
    "num_backfill_tokens",
)
"""Whole numbers of `StepOutcome`, under their own names."""

_MAX_NUMBERS = 8192

_log = logging.getLogger(__name__)


class _Survival(Protocol):
    """What a controller's survival model is asked; see `SurvivalModel`."""

    class_of: dict[str, int]

    def survival_of_class(self, class_id: int) -> list[float]: ...


class TracingController(DecidesEveryStep):
    """Any controller, with every call written to a file.

    Decides exactly as the wrapped one. When the disk is full, the trace ends with a
    warning and serving goes on.
    """

    def __init__(
        self,
        controller: Controller,
        path: str | Path,
        header: Mapping[str, Any],
        max_draft_length: int,
    ) -> None:
        """Create the file and write its header.

        Args:
            controller: Who decides.
            path: File to create; its folder must exist, it must not.
            header: Where the trace comes from, anything that JSON can hold.
            max_draft_length: Upper bound on K.

        Raises:
            ConfigError: The file exists or cannot be created.
        """
        self.controller = controller
        self._survival: _Survival | None = getattr(controller, "survival", None)
        self._numbers = _Numbers()
        self._num_decisions = 0
        self._num_outcomes = 0
        self._file: TextIO | None = _create(Path(path))
        self._write(
            {
                "format": TRACE_FORMAT,
                "version": TRACE_VERSION,
                "max_draft_length": max_draft_length,
                "provenance": dict(header),
                "columns": {"decision": DECISION_COLUMNS, "outcome": OUTCOME_COLUMNS},
            }
        )

    def may_draft(self) -> bool:
        return self.controller.may_draft()

    def allow_any_mix(self) -> None:
        self.controller.allow_any_mix()

    def decide(self, requests: Sequence[DecodeRequest]) -> DraftDecision:
        decision = self.controller.decide(requests)
        if self._file is not None:
            self._write(self._decision_line(requests, decision))
            self._num_decisions += 1
        return decision

    def observe(self, outcome: StepOutcome) -> None:
        # Written first: should the controller fail, the trace says on what.
        if self._file is not None:
            self._write(self._outcome_line(outcome))
            self._num_outcomes += 1
        self.controller.observe(outcome)

    def close(self) -> None:
        """Stop writing; the controller goes on."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _decision_line(
        self, requests: Sequence[DecodeRequest], decision: DraftDecision
    ) -> dict[str, Any]:
        numbers, lengths = self._numbers, decision.num_draft_tokens
        estimates: list[list[float]] = []
        index_of_class: dict[int, int] = {}
        rows = []
        for request_id, context, is_greedy, pin, _, is_constrained, _ in requests:
            index = self._survival_index(request_id, index_of_class, estimates)
            length = lengths.get(request_id, 0)
            number = numbers.of(request_id)
            kind = int(is_constrained)
            rows.append((number, context, int(is_greedy), pin, length, index, kind))
        return {
            "decision": self._num_decisions,
            "depth": decision.draft_depth,
            "reason": decision.reason,
            "requests": rows,
            "survival": estimates,
        }

    def _survival_index(
        self,
        request_id: str,
        index_of_class: dict[int, int],
        estimates: list[list[float]],
    ) -> int | None:
        if self._survival is None:
            return None
        class_id = self._survival.class_of.get(request_id)
        if class_id is None:
            return None
        if class_id not in index_of_class:
            index_of_class[class_id] = len(estimates)
            survival = self._survival.survival_of_class(class_id)
            estimates.append([round(value, 3) for value in survival])
        return index_of_class[class_id]

    def _outcome_line(self, outcome: StepOutcome) -> dict[str, Any]:
        of = self._numbers.of
        return {
            "outcome": self._num_outcomes,
            "step_time_s": round(outcome.step_time_s, 7),
            **{name: getattr(outcome, name) for name in OUTCOME_FIELDS},
            "is_greedy": outcome.is_greedy,
            "requests": [(of(i), k, ok) for i, k, ok, *_ in outcome.requests],
            "shadow_drafts": [(of(i), k, ok) for i, k, ok, *_ in outcome.shadow_drafts],
        }

    def _write(self, line: Mapping[str, Any]) -> None:
        assert self._file is not None
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            _log.warning("The trace %s ends here: %s.", self._file.name, error.strerror)
            file, self._file = self._file, None
            # What could not be written is lost, as the warning says.
            with contextlib.suppress(OSError):
                file.close()


class _Numbers:
    """Running numbers for request ids; those not asked for any more are forgotten."""

    def __init__(self) -> None:
        self._next = 0
        self._recent: dict[str, int] = {}
        self._older: dict[str, int] = {}

    def of(self, request_id: str) -> int:
        number = self._recent.get(request_id)
        if number is not None:
            return number
        number = self._older.get(request_id)
        if number is None:
            number = self._next
            self._next += 1
        if len(self._recent) >= _MAX_NUMBERS:
            self._older, self._recent = self._recent, {}
        self._recent[request_id] = number
        return number


def check_path(path: str | Path) -> None:
    """See early whether a trace can be written, before weights are loaded.

    Raises:
        ConfigError: The file exists or cannot be created.
    """
    _create(Path(path)).close()
    Path(path).unlink()


def _create(path: Path) -> TextIO:
    """Open a new file, line by line, so that a killed server loses the last at most."""
    name = f"speculative_config.trace_path={str(path)!r}"
    try:
        return path.open("x", buffering=1, encoding="utf-8")
    except FileExistsError:
        raise ConfigError(
            f"{name} exists already: name a new file, or remove that one."
        ) from None
    except FileNotFoundError:
        raise ConfigError(
            f"{name} cannot be created: there is no folder {str(path.parent)!r}."
        ) from None
    except OSError as error:
        raise ConfigError(f"{name} cannot be created: {error.strerror}.") from None
