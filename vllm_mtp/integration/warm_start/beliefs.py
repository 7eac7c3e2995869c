"""What `GoodputController` has learned, as plain numbers, and back.

Kept: acceptance (all but the terms of single requests), confidences, step times and
the margins of stop rules. Not kept: plans, which follow from these.

What is taken over is believed less than it was: acceptance as after `DOUBT_STEPS` more
steps, and the speed of the machine hardly at all, since another one may be busier. How
dear kinds of steps are beside each other stays.
"""

from typing import NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from vllm_mtp.control.confidence import NUM_RECENT, ConfidenceModel
from vllm_mtp.control.cost import CostModel, _Block
from vllm_mtp.control.evidence import Term
from vllm_mtp.control.goodput import GoodputController
from vllm_mtp.control.grouping import BatchKind
from vllm_mtp.control.step_times import ROWS, SPEED
from vllm_mtp.control.stopping import STEP_MARGIN
from vllm_mtp.control.survival import SurvivalModel
from vllm_mtp.integration.warm_start.state_file import State

DOUBT_STEPS = 16
"""A quarter of the half-life of what is known of acceptance. Another load is noticed as
it would be without: by outcomes that surprise."""
MAX_BLOCKS = 48
"""Sizes of batch that are kept, those learned last: two for each bucket up to 2048."""
MAX_MARGINS = 4 * MAX_BLOCKS
"""Each size of batch with constrained requests or without, or with some of both."""
OTHER_MACHINE_VARIANCE = 0.1
"""Added to that of log speed: another machine of this kind, or a neighbour on it, may
be a third faster or slower."""
_MAX_LOG = 50.0
"""No logarithm of seconds and no log-odds is beyond."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Belief(NamedTuple):
    """A `Term`."""

    mean: float = Field(ge=-_MAX_LOG, le=_MAX_LOG)
    precision: float = Field(gt=0.0)


class ConfidenceBelief(_Part):
    """A `ConfidenceModel`."""

    slope: float = Field(ge=0.0)
    precision: float = Field(gt=0.0)
    centres: list[float]
    counts: list[float]
    recent: list[float] = Field(max_length=NUM_RECENT)


class BlockBelief(_Part):
    """Step times of one kind of batch."""

    num_requests: int = Field(ge=1)
    is_greedy: bool
    num_plain: int = Field(ge=0)
    mean: list[float]
    covariance: list[float]
    """Lower triangle, row by row."""


class MarginBelief(_Part):
    """What a draft step must earn in one kind of batch, beside its price."""

    size: int = Field(ge=1)
    is_greedy: bool
    constrained: list[bool] = Field(max_length=2)
    margin: float = Field(ge=STEP_MARGIN / 2.5, le=2.5 * STEP_MARGIN)


class ControllerState(State):
    """A `GoodputController`."""

    engine: Belief
    positions: list[Belief]
    cells: dict[int, Belief] = Field(max_length=4)
    confidences: dict[int, ConfidenceBelief] = Field(max_length=4)
    noise: float = Field(gt=0.0)
    backfill_s: float = Field(ge=0.0)
    backfill_tokens: float = Field(ge=0.0)
    blocks: list[BlockBelief] = Field(max_length=MAX_BLOCKS)
    margins: list[MarginBelief] = Field(max_length=MAX_MARGINS)


# -- out -------------------------------------------------------------------------------


def take(controller: GoodputController, identity: dict[str, str]) -> ControllerState:
    """A copy of what it has learned."""
    survival, cost = controller.survival, controller.cost
    known = [item for item in cost._blocks.items() if item[1].updated_at]
    known.sort(key=lambda item: item[1].updated_at, reverse=True)
    return ControllerState.model_construct(
        identity=identity,
        engine=_belief(survival._engine),
        positions=[_belief(term) for term in survival._positions],
        cells={cell: _belief(term) for cell, term in survival._cells.items()},
        confidences={
            cell: ConfidenceBelief.model_construct(
                slope=each.slope,
                precision=each._precision,
                centres=list(each.centres),
                counts=list(each._counts),
                recent=list(each._recent),
            )
            for cell, each in survival.confidences.items()
        },
        noise=cost.noise,
        backfill_s=cost._backfill_s,
        backfill_tokens=cost._backfill_tokens,
        margins=_margins(controller),
        blocks=[
            BlockBelief.model_construct(
                num_requests=num_requests,
                is_greedy=is_greedy,
                num_plain=block.num_plain,
                mean=block.mean.tolist(),
                covariance=block.covariance[np.tril_indices(len(block.mean))].tolist(),
            )
            for (num_requests, is_greedy), block in known[:MAX_BLOCKS]
        ],
    )


def _margins(controller: GoodputController) -> list[MarginBelief]:
    learned = list(controller._stopping._margins._margins.items())[-MAX_MARGINS:]
    return [
        MarginBelief.model_construct(
            size=kind.size,
            is_greedy=kind.is_greedy,
            constrained=sorted(kind.constrained),
            margin=margin,
        )
        for kind, margin in learned
        if isinstance(kind, BatchKind)
    ]


def _belief(term: Term) -> Belief:
    return Belief(term.mean, term.precision)


# -- in --------------------------------------------------------------------------------


def restore(controller: GoodputController, state: ControllerState) -> None:
    """Let a new controller begin with a state.

    Raises:
        ValueError: The state does not fit; the controller is as it was.
    """
    length = controller.max_draft_length
    # Both are built before either is put in place.
    survival, cost = _survival(state, length), _cost(state, length)
    for name in ("_engine", "_positions", "_cells", "confidences"):
        setattr(controller.survival, name, getattr(survival, name))
    controller.survival.wait(DOUBT_STEPS)
    controller._stopping._margins._margins = {
        BatchKind(each.size, each.is_greedy, frozenset(each.constrained)): each.margin
        for each in state.margins
    }
    for name in ("noise", "_backfill_s", "_backfill_tokens", "_blocks", "_num_steps"):
        setattr(controller.cost, name, getattr(cost, name))


def _survival(state: ControllerState, max_draft_length: int) -> SurvivalModel:
    _check_length("positions", state.positions, max_draft_length)
    survival = SurvivalModel(max_draft_length)
    survival._engine = Term(*state.engine)
    survival._positions = [Term(*belief) for belief in state.positions]
    survival._cells = {cell: Term(*belief) for cell, belief in state.cells.items()}
    for cell, belief in state.confidences.items():
        _check_length("centres", belief.centres, max_draft_length)
        _check_length("counts", belief.counts, max_draft_length)
        model = survival.confidences[cell] = ConfidenceModel(max_draft_length)
        model.slope, model._precision = belief.slope, belief.precision
        model.centres, model._counts = list(belief.centres), list(belief.counts)
        model._recent.extend(belief.recent)
    return survival


def _cost(state: ControllerState, max_draft_length: int) -> CostModel:
    cost = CostModel(max_draft_length)
    cost.noise, cost._backfill_s = state.noise, state.backfill_s
    cost._backfill_tokens = state.backfill_tokens
    # A block that was never learned has 0 there.
    cost._num_steps = 1
    for belief in state.blocks:
        block = _block(belief, ROWS + max_draft_length)
        block.num_plain, block.updated_at = belief.num_plain, 1
        cost._blocks[belief.num_requests, belief.is_greedy] = block
    return cost


def _block(belief: BlockBelief, size: int) -> _Block:
    _check_length("mean", belief.mean, size)
    _check_length("covariance", belief.covariance, size * (size + 1) // 2)
    mean, covariance = np.array(belief.mean), np.zeros((size, size))
    if np.abs(mean).max() > _MAX_LOG:
        raise ValueError("mean: no time is that long")
    covariance[np.tril_indices(size)] = belief.covariance
    covariance += np.tril(covariance, -1).T
    covariance[SPEED, SPEED] += OTHER_MACHINE_VARIANCE
    if np.linalg.eigvalsh(covariance).min() < -1e-6:
        raise ValueError("covariance: is none")
    return _Block(mean, covariance)


def _check_length(name: str, values: list[Belief] | list[float], length: int) -> None:
    if len(values) != length:
        raise ValueError(f"{name}: has {len(values)} values; expected {length}")
