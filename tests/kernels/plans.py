"""Random steps for ``rollback_metadata``, and the comparison with the reference."""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from hypothesis import settings
from hypothesis import strategies as st

from vllm_mtp.kernels import reference, triton_ops
from vllm_mtp.records import RollbackPlan, RolledBack

POISON = -999
VOCAB_SIZE = 100
MAX_DRAFT_LENGTH = 16
NUM_GUARDS = 3
"""Elements on both sides of an output; odd, so that outputs are badly aligned, too."""


def examples(number: int) -> settings:
    """The same random examples each time; few where Triton is interpreted."""
    number = max(4, number // 4) if triton_ops.INTERPRETED else number
    return settings(deadline=None, derandomize=True, max_examples=number)


MAX_REQUESTS = 10 if triton_ops.INTERPRETED else 40


class Request(NamedTuple):
    """One request of a step."""

    num_rows: int
    num_drafts: int = 0
    # None where the sampler left a hole; VOCAB_SIZE and more are no tokens, either.
    sampled: tuple[int | None, ...] = ()
    discarded: bool = False


def decode(num_drafts: int, num_sampled: int, first_token: int = 1) -> Request:
    tokens = tuple(range(first_token, first_token + num_sampled))
    return Request(num_drafts + 1, num_drafts, tokens)


def prefill(num_rows: int) -> Request:
    return Request(num_rows, sampled=(7,), discarded=True)


PADDING = Request(0)


@dataclass(frozen=True)
class Step:
    """A step, from which tensors are made on any device."""

    requests: tuple[Request, ...]
    token_dtype: torch.dtype = torch.int32
    num_tail_rows: int = 0
    """Rows of the plan's slot mapping that no request owns."""
    num_extra_rows: int = 0
    """Rows of the output behind the plan's."""
    row_slack: int = 0
    """Elements between two rows of the sampled tokens."""
    without_drafts: bool = False
    """No ``cu_num_draft_tokens`` at all."""
    seed: int = 0

    def plan(self, device: str = "cpu") -> RollbackPlan:
        rng = random.Random(self.seed)
        starts, num_drafts = [0], []
        for request in self.requests:
            starts.append(starts[-1] + request.num_rows)
            num_drafts.append(sum(num_drafts[-1:]) + request.num_drafts)
        num_rows = starts[-1] + self.num_tail_rows
        slots = rng.sample(range(num_rows * 2), num_rows)
        slots = [-1 if rng.random() < 0.05 else slot for slot in slots]

        def int32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return RollbackPlan(
            sampled_token_ids=self._sampled(device),
            cu_num_draft_tokens=None if self.without_drafts else int32(num_drafts),
            discarded=torch.tensor(
                [request.discarded for request in self.requests],
                dtype=torch.bool,
                device=device,
            ),
            backup_next_token_ids=int32(
                [rng.randrange(VOCAB_SIZE) for _ in self.requests]
            ),
            query_start_loc=int32(starts),
            seq_lens=int32([r.num_rows + rng.randrange(50) for r in self.requests]),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            vocab_size=VOCAB_SIZE,
        )

    def _sampled(self, device: str) -> torch.Tensor:
        width = max((len(request.sampled) for request in self.requests), default=0) or 1
        shape = (len(self.requests), width + self.row_slack)
        # A valid token, to be found by whoever reads between the rows.
        whole = torch.full(shape, 3, dtype=self.token_dtype)
        for row, request in zip(whole, self.requests, strict=True):
            row[:width] = -1
            for column, token in enumerate(request.sampled):
                row[column] = -1 if token is None else token
        return whole.to(device)[:, :width]


@st.composite
def _requests(draw: st.DrawFn) -> Request:
    kind = draw(
        st.sampled_from(("decode", "holes", "prefill", "prompt end", "padding"))
    )
    token = st.integers(0, VOCAB_SIZE - 1)
    if kind == "prefill":
        return prefill(draw(st.integers(1, 300)))
    if kind == "prompt end":
        return Request(draw(st.integers(1, 300)), sampled=(draw(token),))
    if kind == "padding":
        return Request(0, sampled=tuple(draw(st.lists(token, max_size=2))))
    num_drafts = draw(st.integers(0, MAX_DRAFT_LENGTH))
    tokens = st.lists(token, max_size=num_drafts + 1)
    if kind == "decode":
        return Request(num_drafts + 1, num_drafts, tuple(draw(tokens)))
    no_token = st.sampled_from((None, VOCAB_SIZE, VOCAB_SIZE + 1))
    sampled = draw(
        st.permutations([*draw(tokens), *draw(st.lists(no_token, max_size=3))])
    )
    return Request(num_drafts + 1, num_drafts, tuple(sampled))


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Steps that a scheduler could make; the checked mode lets all of them pass."""
    requests = tuple(draw(st.lists(_requests(), max_size=MAX_REQUESTS)))
    no_drafts = not any(request.num_drafts for request in requests)
    return Step(
        requests=requests,
        token_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        num_tail_rows=draw(st.integers(0, 20)),
        num_extra_rows=draw(st.integers(0, 20)),
        row_slack=draw(st.integers(0, 3)),
        without_drafts=no_drafts and draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


class Guarded:
    """A poisoned output with poison on both sides.

    Attributes:
        tensor: the output.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        size = torch.Size(shape).numel() + 2 * NUM_GUARDS
        self._whole = torch.full((size,), POISON, dtype=dtype, device=device)
        self.tensor = self._whole[NUM_GUARDS : size - NUM_GUARDS].view(shape)

    def assert_guards_intact(self, name: str) -> None:
        guards = (*self._whole[:NUM_GUARDS], *self._whole[-NUM_GUARDS:])
        assert [int(guard) for guard in guards] == [POISON] * 2 * NUM_GUARDS, (
            f"something was written beside {name}"
        )


class Outputs(NamedTuple):
    """The outputs of ``rollback_metadata``."""

    per_request: Guarded
    slot_mapping: Guarded


def outputs_for(step: Step, plan: RollbackPlan) -> Outputs:
    device = str(plan.discarded.device)
    num_rows = plan.slot_mapping.shape[0] + step.num_extra_rows
    return Outputs(
        Guarded((reference.NUM_OUTPUTS, len(step.requests)), torch.int32, device),
        Guarded((num_rows,), torch.int64, device),
    )


def roll_back(backend, step: Step, plan: RollbackPlan) -> Outputs:
    """Fresh, poisoned outputs after a backend worked on them."""
    outputs = outputs_for(step, plan)
    backend.rollback_metadata(plan, *(output.tensor for output in outputs))
    return outputs


def assert_metadata_equals_reference(backend, step: Step, device: str = "cpu") -> None:
    """Every field, every row and the guards, and that inputs are only read."""
    plan = step.plan(device)
    actual = roll_back(backend, step, plan)
    for name, given, made in zip(plan._fields, plan, step.plan(device), strict=True):
        same = torch.equal(given, made) if torch.is_tensor(given) else given == made
        assert same, f"the input {name} was written"
    expected = roll_back(reference, step, plan)
    for field, row, expected_row in zip(
        RolledBack._fields,
        actual.per_request.tensor.tolist(),
        expected.per_request.tensor.tolist(),
        strict=True,
    ):
        assert row == expected_row, field
    slots, expected_slots = (o.slot_mapping.tensor.tolist() for o in (actual, expected))
    assert slots == expected_slots, "slot_mapping"
    actual.per_request.assert_guards_intact("per_request")
    actual.slot_mapping.assert_guards_intact("slot_mapping")
