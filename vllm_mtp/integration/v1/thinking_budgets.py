"""Model Runner V1: thinking budgets that do not depend on how many tokens a step has.

A workaround of vLLM 0.32 and 0.33 (docs/upstream/thinking-budget.md). vLLM's state
machine counts steps: it is right where each step commits one token, or verifies as many
draft tokens as the engine ever does. Here it takes one token after the other, as in an
engine without speculation, and goes on for a moment over the draft tokens of a
verification, on copies.

Without speculation, too, vLLM leaves the state of a request that has ended where the
batch's last request moves to, which then is made to end its thinking.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

_NUM_SEEN = "num_seen"
"""Key of ours in a request's state: output tokens that it has taken."""


class ThinkingBudgets(ThinkingBudgetStateHolder):
    """Of the requests of a batch, by their place in it."""

    def __init__(
        self, reasoning_config: Any, max_num_rows: int, device: torch.device
    ) -> None:
        """Nobody has a budget yet.

        Args:
            reasoning_config: vLLM's.
            max_num_rows: Of a verification.
            device: Of the logits.
        """
        # As in an engine that drafts nothing.
        super().__init__(reasoning_config, max_num_rows, 0, device, False)

    def sync_batch(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that come, go and move."""
        process_dict_updates(self._state, batch_update, self._first_state)

    def _first_state(
        self, params: Any, prompt_token_ids: Any, output_token_ids: Any
    ) -> dict[str, Any] | None:
        if params.thinking_token_budget is None:
            return None
        state: dict[str, Any] = self._init_state_entry(
            prompt_token_ids, params.thinking_token_budget
        )
        return state

    def update_state(
        self,
        output_token_ids: Sequence[list[int]],
        spec_token_ids: Any = None,
        repeat_indices: Any = None,
    ) -> None:
        """Take the tokens that were committed since; draft tokens are no matter."""
        for index in list(self._state):
            self._take(self._state, index, output_token_ids[index])

    def of_rows(
        self,
        committed: Sequence[list[int]],
        drafts: Sequence[list[int]],
        starts: Sequence[int],
    ) -> "ThinkingBudgets":
        """The states of the rows of a verification.

        Args:
            committed: Output tokens of each request.
            drafts: Draft tokens of each.
            starts: First row of each.
        """
        self.update_state(committed)
        rows = copy.copy(self)
        rows._state, rows.cu_num_tokens = {}, {}
        for index, state in self._state.items():
            for position in range(len(drafts[index]) + 1):
                row = starts[index] + position
                rows._state[row] = state = dict(state)
                before = [*committed[index], *drafts[index][:position]]
                self._take(rows._state, row, before)
        return rows

    def _take(
        self, states: dict[int, dict[str, Any]], index: int, output: list[int]
    ) -> None:
        """Let a state take what is new in a request's output."""
        state = states[index]
        if state.get(_NUM_SEEN, -1) > len(output):  # tokens were taken back
            budget = state["thinking_token_budget"]
            state = self._init_state_entry(state["prompt_tok_ids"], budget)
            states[index] = state
        for length in range(state.get(_NUM_SEEN, -1) + 1, len(output) + 1):
            state["output_tok_ids"] = output[:length]
            state["spec_token_ids"], state["force_index"] = [], []
            self._update_think_state(state)
            state[_NUM_SEEN] = length


def replace_thinking_budgets(runner: Any) -> None:
    """Put ours where vLLM's was built.

    Args:
        runner: vLLM's V1 model runner, whose input batch is the final one.
    """
    batch = runner.input_batch
    if batch.thinking_budget_state_holder is not None:
        batch.thinking_budget_state_holder = ThinkingBudgets(
            runner.vllm_config.reasoning_config,
            runner.max_num_reqs * (runner.num_spec_tokens + 1),
            runner.device,
        )
        batch.sampling_metadata = batch._make_sampling_metadata()
