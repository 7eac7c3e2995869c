"""Metadata rollback: our kernels alone, our drafter's hooks, and vLLM's own chain."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.rollback import vllm_chain
from benchmarks.rollback.timing import (
    Contender,
    ContendersDifferError,
    Timing,
    measure,
)
from benchmarks.rollback.vllm_chain import DrafterHooks, HandedOver, UpstreamChain
from benchmarks.spread import Spread
from vllm_mtp.kernels import reference
from vllm_mtp.kernels.dispatch import Backend
from vllm_mtp.records import RollbackPlan, RolledBack

CHAIN = "vllm_chain"
AS_CALLED = "_as_called"
VOCAB_SIZE = 128_000
MAX_CONTEXT_TOKENS = 2048
SEED = 0


class MetadataCase(NamedTuple):
    """One step: all requests decode and verify equally many drafts."""

    batch: int
    draft_length: int

    @property
    def num_rows(self) -> int:
        return self.batch * (self.draft_length + 1)


@dataclass(frozen=True)
class MetadataResult:
    """What was measured of a case."""

    case: MetadataCase
    timings: dict[str, Timing]

    def ratio(self, backend: str) -> Spread | None:
        """Host time of our hooks over that of vLLM's chain, paired by repeat."""
        ours = self.timings.get(backend + AS_CALLED)
        theirs = self.timings.get(CHAIN)
        if ours is None or theirs is None:
            return None
        return Spread.of_ratio(ours.host_us, theirs.host_us)

    def as_json(self, backend: str) -> dict[str, Any]:
        """For the result file."""
        ratio = self.ratio(backend)
        return {
            **self.case._asdict(),
            "num_rows": self.case.num_rows,
            "contenders": {name: each.as_json() for name, each in self.timings.items()},
            "as_called_over_chain": ratio.as_json() if ratio else None,
        }


def measure_metadata(
    case: MetadataCase,
    backends: Sequence[Backend],
    num_repeats: int,
    device: torch.device,
) -> MetadataResult:
    """Check that all contenders agree on one step, then time them.

    Raises:
        ContendersDifferError: They do not agree.
    """
    plan = verified_plan(case, device)
    expected = rolled_back(plan, reference.rollback_metadata)
    contenders = [_kernel(plan, backend, expected) for backend in backends]
    # The reference is no contender for a drafter, unless there is nothing else.
    for backend in [b for b in backends if b.name != "reference"] or backends:
        hooks = DrafterHooks(plan, backend)
        name = backend.name + AS_CALLED
        check_handed_over(name, hooks(), expected, plan)
        waits = backend.name == "reference"
        contenders.append(Contender(name, [hooks], waits))
    if vllm_chain.why_unavailable(device) is None:
        chain = UpstreamChain(plan)
        check_handed_over(CHAIN, chain(), expected, plan)
        contenders.append(Contender(CHAIN, [chain]))
    return MetadataResult(case, measure(contenders, num_repeats, device))


def verified_plan(case: MetadataCase, device: torch.device) -> RollbackPlan:
    """A step whose requests accept 0 to K drafts, each number equally likely.

    Returns:
        The step as Model Runner V1 has it: int32 tokens, no request discarded.
    """
    batch, draft_length = case
    rng = torch.Generator().manual_seed(SEED)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=rng, dtype=torch.int32)

    tokens = integers(0, VOCAB_SIZE, batch, draft_length + 1)
    num_accepted = integers(0, draft_length + 1, batch, 1)
    tokens[torch.arange(draft_length + 1) > num_accepted] = -1
    requests = torch.arange(batch + 1, dtype=torch.int32)
    slots = torch.randperm(4 * case.num_rows, generator=rng)[: case.num_rows]
    return RollbackPlan(
        sampled_token_ids=tokens.to(device),
        cu_num_draft_tokens=(requests[1:] * draft_length).to(device),
        discarded=torch.zeros(batch, dtype=torch.bool, device=device),
        backup_next_token_ids=integers(0, VOCAB_SIZE, batch).to(device),
        query_start_loc=(requests * (draft_length + 1)).to(device),
        seq_lens=integers(MAX_CONTEXT_TOKENS // 8, MAX_CONTEXT_TOKENS, batch).to(
            device
        ),
        slot_mapping=slots.to(device),
        vocab_size=VOCAB_SIZE,
    )


class Expected(NamedTuple):
    """Outputs of the reference."""

    per_request: torch.Tensor
    slot_mapping: torch.Tensor


def rolled_back(
    plan: RollbackPlan,
    rollback_metadata: Callable[[RollbackPlan, torch.Tensor, torch.Tensor], None],
) -> Expected:
    """Fresh outputs of a kernel, poisoned before."""
    outputs = Expected(
        torch.full(
            (reference.NUM_OUTPUTS, plan.discarded.shape[0]),
            -999,
            dtype=torch.int32,
            device=plan.discarded.device,
        ),
        torch.full_like(plan.slot_mapping, -999),
    )
    rollback_metadata(plan, *outputs)
    return outputs


def check_handed_over(
    name: str, handed_over: HandedOver, expected: Expected, plan: RollbackPlan
) -> None:
    """Compare what drafting is given with the reference.

    Raises:
        ContendersDifferError: A value differs; in rejected rows slots may.
    """
    wanted = RolledBack(*expected.per_request.unbind(0))
    fields = [field for field in HandedOver._fields if field in RolledBack._fields]
    for field in fields:
        actual = getattr(handed_over, field)
        # None: nobody reads the lengths of a step with one draft token.
        if actual is not None:
            _check_equal(name, field, actual, getattr(wanted, field))
    kept = expected.slot_mapping != reference.PADDING_SLOT
    _check_equal(
        name, "slot_mapping", handed_over.slot_mapping[kept], plan.slot_mapping[kept]
    )


def _kernel(plan: RollbackPlan, backend: Backend, expected: Expected) -> Contender:
    actual = rolled_back(plan, backend.rollback_metadata)
    for field in Expected._fields:
        _check_equal(
            backend.name, field, getattr(actual, field), getattr(expected, field)
        )
    return Contender(
        backend.name,
        [lambda: backend.rollback_metadata(plan, *actual)],
        waits_for_device=backend.name == "reference",
    )


def _check_equal(
    name: str, field: str, actual: torch.Tensor, expected: torch.Tensor
) -> None:
    if not torch.equal(actual, expected):
        raise ContendersDifferError(
            f"{name} and the reference differ in {field} of {len(expected)} requests "
            "or rows; nothing was timed"
        )
