"""Model Runner V1: steps in which the MTP layers rest go as if nobody ever drafted.

Such a step takes vLLM's path for engines without speculation: on a CPU the other one
costs half a millisecond more. What we have to hear of it ourselves (tokens, hidden
states) costs the more, the oftener it is done: after a pass of the target the caches
hold nothing of ours. So steps that follow each other with the same batch go past all
our wrappers, and what was kept of them is handed out when something else comes, or
after a few dozen.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from vllm_mtp.drafting.unseen_tokens import Rows
from vllm_mtp.integration.worker import drafting_disabled

RESTING_ATTRIBUTES = (
    "execute_model",
    "execute_model_state",
    "input_batch",
    "model_config",
    "requests",
    "sample_tokens",
    "speculative_config",
    "use_async_scheduling",
)

MAX_STEPS = 32
"""That are kept. Then one takes the long way, on which news are told, too."""


class _Kept(NamedTuple):
    """What the drafter will want to know of a step."""

    # [num_reqs]
    token_ids: Sequence[int]
    # [num_reqs, hidden_size]
    hidden_states: torch.Tensor


class _Streak:
    """Steps of one batch in a row, one row and one token of each request."""

    def __init__(
        self,
        scheduled_ids: Sequence[str],
        request_ids: Sequence[str],
        # [num_reqs] int64
        positions: Rows,
    ) -> None:
        """The step before it has just ended.

        Args:
            scheduled_ids: The batch as the scheduler names it.
            request_ids: The same in the order of the runner's rows.
            positions: Of the rows of that step.
        """
        self.scheduled_ids = list(scheduled_ids)
        self.request_ids = list(request_ids)
        self.kept: list[_Kept] = []
        self._positions = positions

    def goes_on(self, scheduler_output: Any) -> bool:
        """Whether a step is like those before it: all decode, and nothing is new."""
        return (
            scheduler_output.num_spec_tokens_to_schedule == 0
            and len(self.kept) < MAX_STEPS
            and not scheduler_output.finished_req_ids
            and drafting_disabled.repeats(scheduler_output, self.scheduled_ids)
        )

    def hand_out(self, drafter: Any) -> None:
        """Tell a drafter of all steps that were kept."""
        kept, self.kept = self.kept, []
        for step in kept:
            self._positions = self._positions + 1
            drafter.keep_unseen(
                self.request_ids, self._positions, step.token_ids, step.hidden_states
            )
        # The last ones apart: vLLM's lists do not have them yet, and only them.
        for some in (kept[:-1], kept[-1:]):
            if some:
                committed = torch.tensor([step.token_ids for step in some]).T
                drafter.hear(self.request_ids, committed.to(drafter.device))


class StepMethods(NamedTuple):
    """The two methods of a runner that make a step."""

    execute_model: Callable[..., Any]
    sample_tokens: Callable[..., Any]

    @classmethod
    def of(cls, runner: Any) -> Self:
        """As they are now, others' decorators included."""
        return cls(runner.execute_model, runner.sample_tokens)


class RestingRunner:
    """Takes the place of a runner's two methods that make a step."""

    def __init__(self, runner: Any, drafter: Any, theirs: StepMethods) -> None:
        """Nothing rests yet.

        Args:
            runner: vLLM's V1 model runner; its methods are wrapped already.
            drafter: ours, already in its place.
            theirs: The runner's methods as they were before we wrapped them.
        """
        self._runner, self._drafter = runner, drafter
        self._configured = runner.speculative_config
        self._ours, self._theirs = StepMethods.of(runner), theirs
        self._scheduled_ids: Sequence[str] = ()
        self._streak: _Streak | None = None

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's, without speculation where the MTP layers rest."""
        execute_model = self._ours.execute_model
        if self._goes_on(scheduler_output):
            execute_model = self._theirs.execute_model
        else:
            self._end_streak()
            if not _only_decodes(self._runner, self._drafter, scheduler_output):
                return execute_model(scheduler_output, *args, **kwargs)
            self._scheduled_ids = scheduler_output.scheduled_cached_reqs.req_ids
        # What vLLM asks to choose its path; `sample_tokens` ends the step.
        self._runner.speculative_config = None
        try:
            return execute_model(scheduler_output, *args, **kwargs)
        except BaseException:
            self._runner.speculative_config = self._configured
            raise

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's; keeps what the MTP layers have not seen."""
        runner, streak = self._runner, self._streak
        if runner.speculative_config is not None:
            return self._ours.sample_tokens(grammar_output)
        hidden_states = runner.execute_model_state.hidden_states
        self._drafter.hears_later = streak is not None
        try:
            methods = self._ours if streak is None else self._theirs
            output = methods.sample_tokens(grammar_output)
        finally:
            runner.speculative_config = self._configured
            self._drafter.hears_later = False
        token_ids = [sampled[0] for sampled in output.sampled_token_ids]
        rows = self._drafter.own_rows(hidden_states, len(token_ids))
        if streak is None:
            self._begin_streak(token_ids, rows)
        else:
            streak.kept.append(_Kept(token_ids, rows))
        return output

    def _goes_on(self, scheduler_output: Any) -> bool:
        streak = self._streak
        return (
            streak is not None
            and streak.goes_on(scheduler_output)
            and self._drafter.has_room_for_unseen(
                (len(streak.kept) + 1) * len(streak.scheduled_ids)
            )
        )

    def _begin_streak(self, token_ids: Sequence[int], rows: torch.Tensor) -> None:
        """A step on the long way has rested; those after it may be like it."""
        batch = self._runner.input_batch
        # The one row's position: vLLM counts it in the next step.
        positions = batch.num_computed_tokens_cpu[: len(token_ids)].astype(np.int64)
        self._drafter.keep_unseen(batch.req_ids, positions, token_ids, rows)
        self._streak = _Streak(self._scheduled_ids, batch.req_ids, positions)

    def hand_out(self) -> None:
        """Tell the drafter now what was kept for later."""
        if self._streak is not None:
            self._streak.hand_out(self._drafter)

    def _end_streak(self) -> None:
        self.hand_out()
        self._streak = None


def rest_like_a_target_alone(runner: Any, drafter: Any, theirs: StepMethods) -> None:
    """Run steps in which the MTP layers rest as if speculation was not configured.

    Args:
        runner: vLLM's V1 model runner; nobody else wraps its methods after this.
        drafter: ours, already in its place.
        theirs: The runner's methods as they were before we wrapped them.
    """
    # Where scheduling is async the next step reads what drafting has prepared; layers
    # with a recurrent state find theirs on the speculative path only.
    if (
        runner.use_async_scheduling
        or not drafter.rests_while_off
        or runner.model_config.is_hybrid
    ):
        return
    resting = RestingRunner(runner, drafter, theirs)
    runner.execute_model = resting.execute_model
    runner.sample_tokens = resting.sample_tokens


def _only_decodes(runner: Any, drafter: Any, scheduler_output: Any) -> bool:
    """Whether each request has one row, whose next token will be sampled.

    False also where the MTP layers must catch up first, and for models that hand over
    something else than their hidden states.
    """
    requests = scheduler_output.scheduled_cached_reqs
    num_reqs = len(requests.req_ids)
    if (
        not num_reqs
        or scheduler_output.scheduled_new_reqs
        or requests.resumed_req_ids
        or not drafting_disabled.mtp_layers_rest(
            scheduler_output.num_spec_tokens_to_schedule,
            num_reqs,
            scheduler_output.total_num_scheduled_tokens,
            len(scheduler_output.scheduled_spec_decode_tokens),
        )
        or not drafter.has_room_for_unseen(num_reqs)
        or hasattr(runner.model, "get_mtp_target_hidden_states")
    ):
        return False
    # Of a prompt's chunk that ends before the prompt does, nothing is sampled.
    return all(
        num_computed + 1 == runner.requests[request_id].num_tokens
        for request_id, num_computed in zip(
            requests.req_ids, requests.num_computed_tokens, strict=True
        )
    )
