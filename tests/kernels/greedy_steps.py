"""Random steps of greedy requests, and memory for what verification makes of them."""

import random
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from tests.kernels.plans import Guarded
from vllm_mtp.records import GreedyStep

MAX_COLUMNS = 40
"""More than the lanes of a warp."""
NUM_FREE_STATES = 3


class Request(NamedTuple):
    """One request of a step."""

    num_drafts: int = 0
    num_agreeing: int = 0
    """Draft tokens, from the first, that the target would choose, too."""
    late_agreement: bool = False
    """Tokens behind the first that differs agree again."""
    num_prompt_rows: int = 0
    """Tokens before its newest one that are computed in this step as well."""
    prompt_left: int = 0
    """Tokens of the prompt that this step does not reach."""
    placeholders: bool = False
    """Its prompt ends in this step, so its drafts are nobody's."""

    def agrees(self, draft: int) -> bool:
        """Whether a draft token is what the target would choose."""
        is_late = draft > self.num_agreeing
        return draft < self.num_agreeing or (is_late and self.late_agreement)


REQUESTS = st.builds(
    Request,
    num_drafts=st.integers(0, MAX_COLUMNS - 1),
    num_agreeing=st.integers(0, MAX_COLUMNS),
    late_agreement=st.booleans(),
    num_prompt_rows=st.integers(0, 5),
    prompt_left=st.sampled_from((0, 0, 0, 2)),
    placeholders=st.sampled_from((False, False, False, True)),
)


def step_of(requests: list[Request], seed: int = 0, device: str = "cpu") -> GreedyStep:
    rng = random.Random(seed)
    input_ids, positions, indices, targets, starts = [], [], [], [], [0]
    seq_lens, prefill_len = [], [0] * (len(requests) + NUM_FREE_STATES)
    states = rng.sample(range(len(prefill_len)), len(requests))
    for request, state in zip(requests, states, strict=True):
        first = rng.randrange(100)
        input_ids += [rng.randrange(50) for _ in range(request.num_prompt_rows)]
        positions += range(first, first + request.num_prompt_rows)
        newest = first + request.num_prompt_rows
        chosen = [rng.randrange(50) for _ in range(request.num_drafts + 1)]
        drafts = [
            token + (not request.agrees(i)) for i, token in enumerate(chosen[:-1])
        ]
        indices += range(len(input_ids), len(input_ids) + len(chosen))
        input_ids += [rng.randrange(50), *drafts]
        positions += range(newest, newest + len(chosen))
        targets += chosen
        starts.append(len(targets))
        seq_lens.append(newest + len(chosen))
        prefill_len[state] = newest + request.placeholders
        if request.prompt_left:
            prefill_len[state] = seq_lens[-1] + request.prompt_left

    def tensor(values: list[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    # The last elements are a CUDA graph's padding.
    return GreedyStep(
        target_token_ids=tensor(targets, torch.int64),
        input_ids=tensor([*input_ids, 0, 0], torch.int32),
        positions=tensor([*positions, 0, 0], torch.int64),
        logits_indices=tensor(indices, torch.int64),
        cu_num_logits=tensor(starts, torch.int32),
        seq_lens=tensor([*seq_lens, 0], torch.int32),
        idx_mapping=tensor(states, torch.int64),
        prefill_len=tensor(prefill_len, torch.int32),
    )


class Outputs:
    """Memory for a step's outputs, guarded on both sides."""

    def __init__(self, num_reqs: int, num_columns: int, device: str = "cpu") -> None:
        self.tokens = Guarded((num_reqs, num_columns), torch.int64, device)
        self.counts = [Guarded((num_reqs,), torch.int32, device) for _ in range(2)]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [each.tensor for each in (self.tokens, *self.counts)]

    def lists(self) -> list[list[object]]:
        self.tokens.assert_guards_intact("sampled_token_ids")
        for each in self.counts:
            each.assert_guards_intact("counts")
        return [tensor.tolist() for tensor in self.tensors]
