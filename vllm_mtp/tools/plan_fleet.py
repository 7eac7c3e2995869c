"""The cheapest fleet for a demand: replicas, their GPUs, batch and draft length.

Every layout is worked out with the roofline of `plan_cost`: on each number of GPUs of a
replica, the batch and the draft length K with the most tokens per second that keep the
latency bound and fit into memory; then as many replicas as the demand takes. A dense
model is divided by tensor parallelism (TP) over its replica's GPUs; of a mixture of
experts these also hold the experts (EP). What is assumed beyond `plan_cost` is in
`ASSUMPTIONS`.

In a replica with batch B a step commits ``B * L(K)`` tokens, so ``B * L(K) / answer``
requests end in it and as many prompts are read for those that follow.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from vllm_mtp.acceptance import expected_acceptance_length
from vllm_mtp.config import ConfigError
from vllm_mtp.tools.option_checks import refuse
from vllm_mtp.tools.plan import MAX_BATCH, PlanOptions
from vllm_mtp.tools.plan_cost import Points, RooflineCost

ASSUMPTIONS = (
    "Of a fleet is assumed, too: requests wait at all times, so every batch is full; "
    "lengths of answers are geometric; two all-reduces a layer, 8 us each and their "
    "bytes over the link; prompts are read 8192 tokens at a time, with the arithmetic "
    "of the weights alone, by the replica that answers; weights and KV take at most "
    "90 % of the memory; replicas share nothing and are loaded alike; GPUs of a "
    "replica are in one NVLink domain (of H100 and H200 usually 8: larger replicas of "
    "them are slower than planned)."
)
MEMORY_SHARE = 0.9
ALL_REDUCE_S = 8e-6
"""Latency of one within an NVLink domain, a rounded estimate."""
PREFILL_ROWS = 8192
"""Of a chunk: vLLM's default on large GPUs."""
_WEIGHTS_OF_A_LAYER = 12
"""Of a dense transformer, in squares of its hidden size: gives that size."""
_MAX_DENSE_GPUS, _MAX_MOE_GPUS = 8, 64
"""Of a replica: a host, and an NVLink domain."""


@dataclass(frozen=True)
class FleetOptions:
    """What the fleet is for.

    Attributes:
        plan: Acceptance, accelerator and model; its batches and GPUs are not used.
        tokens_per_s: Output tokens of all users.
        prompt_tokens: Of a request.
        answer_tokens: Of a request.
        max_tpot_ms: Longest time per output token; None for no bound.
        gpu_hour_price: In any currency; None where only GPU hours are asked for.
    """

    plan: PlanOptions
    tokens_per_s: float
    prompt_tokens: int = 1024
    answer_tokens: int = 512
    max_tpot_ms: float | None = None
    gpu_hour_price: float | None = None

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ConfigError: One of them has a value that is not allowed.
        """
        limits: dict[str, tuple[str, float, float]] = {
            "tokens_per_s": ("demand", 1, 1e12),
            "prompt_tokens": ("prompt", 0, 10**7),
            "answer_tokens": ("answer", 1, 10**7),
            "max_tpot_ms": ("max-tpot-ms", 0.01, 1e6),
            "gpu_hour_price": ("gpu-hour-price", 0, 1e6),
        }
        for name, (option, low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                refuse(option, value, f"a number from {low:g} to {high:g}")
        if self.plan.is_measured:
            raise ConfigError(
                "probe: it was measured at one batch; a fleet is planned from "
                "--hardware and --model"
            )

    @property
    def context_tokens(self) -> float:
        """Mean of a request that is under way.

        Lengths of answers are taken to be geometric: long ones are under way for
        longer, so a mean answer's tokens are behind it.
        """
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True)
class ReplicaCost:
    """Of one replica, as the roofline has it, with its all-reduces; no noise."""

    roofline: RooflineCost

    def verify_s(
        self, num_requests: int, rows: Points, context: float, is_uniform: bool
    ) -> Points:
        """See `RooflineCost`."""
        layers = self.roofline.model.num_layers
        seconds: Points = self.roofline.verify_s(
            num_requests, rows, context, is_uniform
        ) + layers * self._all_reduces_s(np.asarray(rows, dtype=float))
        return seconds

    def draft_s(self, num_requests: int, depth: int, context: float) -> float:
        """See `RooflineCost`."""
        rows = np.asarray(float(num_requests))
        return self.roofline.draft_s(num_requests, depth, context) + (
            depth * float(self._all_reduces_s(rows))
        )

    def catch_up_s(self, num_tokens: int) -> float:
        """See `RooflineCost`."""
        rows = np.asarray(float(num_tokens))
        return self.roofline.catch_up_s(num_tokens) + float(self._all_reduces_s(rows))

    @property
    def prefill_token_s(self) -> float:
        """Seconds of a token of a prompt."""
        rows = np.array([float(PREFILL_ROWS)])
        return float(self.verify_s(1, rows, 0.0, True)[0]) / PREFILL_ROWS

    @property
    def hidden_size(self) -> float:
        """Given of a mixture of experts, else from the number of weights."""
        model = self.roofline.model
        if model.experts is not None:
            return float(model.experts.hidden_size)
        return math.sqrt(model.dense_weights / (_WEIGHTS_OF_A_LAYER * model.num_layers))

    @property
    def weight_bytes(self) -> float:
        """Of the model and its MTP layer, on all GPUs together."""
        model = self.roofline.model
        weights = model.dense_weights + model.draft_weights
        if model.experts is not None:
            of_a_layer = model.experts.num_experts * model.experts.weights_per_expert
            weights += (model.experts.num_layers + 1) * of_a_layer
        return weights * (1 if self.roofline.is_fp8 else model.bytes_per_weight)

    def max_batch(self, context_tokens: float) -> int:
        """Requests whose KV fits beside the weights; 0 if these alone do not."""
        hardware, num_gpus = self.roofline.hardware, self.roofline.num_gpus
        if hardware.memory_bytes is None:
            return MAX_BATCH
        room = MEMORY_SHARE * hardware.memory_bytes * num_gpus - self.weight_bytes
        kv_bytes = self.roofline.model.kv_bytes_per_token * context_tokens
        if room <= 0:
            return 0
        return min(MAX_BATCH, int(room / kv_bytes)) if kv_bytes else MAX_BATCH

    def _all_reduces_s(self, rows: Points) -> Points:
        """Of one layer."""
        num_gpus = self.roofline.num_gpus
        if num_gpus == 1:
            return np.zeros_like(rows)
        sent = 2 * (num_gpus - 1) / num_gpus * rows * self.hidden_size * 2
        result: Points = 2 * (
            ALL_REDUCE_S + sent / self.roofline.hardware.link_bytes_per_s
        )
        return result


class Layout(NamedTuple):
    """One way to serve the demand."""

    gpus_per_replica: int
    """Tensor parallel, and of a mixture of experts expert parallel, too."""
    batch: int
    """Requests at a time in a replica."""
    draft_length: int
    acceptance_length: float
    step_ms: float
    """Of a decode step, without prompts."""
    tpot_ms: float
    """Time per output token of a request, with the prompts of others."""
    replica_tokens_per_s: float
    replicas: int
    num_gpus: int
    """Of the fleet."""
    gpu_hours_per_million: float
    """Of all GPUs of the fleet, for a million output tokens of the demand."""
    cost_per_million: float | None


class Fleet(NamedTuple):
    """What the arithmetic says."""

    layouts: list[Layout]
    """The best of each number of GPUs of a replica that serves at all."""
    best: Layout
    without_speculation: Layout | None
    """The cheapest one with K = 0; None if it cannot keep the bound."""


def plan_fleet(options: FleetOptions) -> Fleet:
    """The cheapest layouts.

    Raises:
        ConfigError: None fits into memory and keeps the bound.
    """
    found = {n: list(layouts_of(options, n)) for n in _sizes(options)}
    best = [min(each, key=_cost) for each in found.values() if each]
    if not best:
        name = options.plan.model.name
        raise ConfigError(
            f"demand: no replica of up to {max(found)} GPUs holds {name} and keeps "
            "max-tpot-ms; take larger accelerators, or allow more"
        )
    plain = [each for n in found for each in found[n] if not each.draft_length]
    return Fleet(best, min(best, key=_cost), min(plain, key=_cost, default=None))


def _cost(layout: Layout) -> tuple[float, float, int]:
    """Fewest GPUs for the demand; then the most tokens of each; then short drafts."""
    each_s = layout.gpus_per_replica / layout.replica_tokens_per_s
    return layout.num_gpus, each_s, layout.draft_length


def _sizes(options: FleetOptions) -> list[int]:
    is_dense = options.plan.model.experts is None
    most = _MAX_DENSE_GPUS if is_dense else _MAX_MOE_GPUS
    return [2**i for i in range(int(math.log2(most)) + 1)]


def layouts_of(options: FleetOptions, gpus_per_replica: int) -> Iterator[Layout]:
    """All batches and draft lengths that keep the bound and fit into memory."""
    plan = options.plan
    cost = ReplicaCost(
        RooflineCost(plan.hardware, plan.model, gpus_per_replica, plan.is_fp8)
    )
    largest = cost.max_batch(options.context_tokens)
    for batch in sorted({min(b, largest) for b in _batches()} - {0}):
        for draft_length in range(plan.max_draft_length + 1):
            layout = _layout(options, cost, batch, draft_length)
            bound = options.max_tpot_ms
            if bound is None or layout.tpot_ms <= bound:
                yield layout


def _batches() -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 ... to the largest."""
    powers = [2**i for i in range(int(math.log2(MAX_BATCH)) + 1)]
    return sorted({*powers, *(3 * power // 2 for power in powers[1:-1])})


def _layout(
    options: FleetOptions, cost: ReplicaCost, batch: int, draft_length: int
) -> Layout:
    context = batch * options.context_tokens
    rows = np.array([float(batch * (draft_length + 1))])
    step_s = float(cost.verify_s(batch, rows, context, True)[0])
    step_s += cost.draft_s(batch, draft_length, context)
    length = expected_acceptance_length(options.plan.survival, draft_length)
    committed = batch * length
    prompts = committed / options.answer_tokens * options.prompt_tokens
    whole_s = step_s + prompts * cost.prefill_token_s
    tokens_per_s = committed / whole_s
    replicas = math.ceil(options.tokens_per_s / tokens_per_s)
    num_gpus = replicas * cost.roofline.num_gpus
    gpu_hours = num_gpus * 1e6 / options.tokens_per_s / 3600
    price = options.gpu_hour_price
    return Layout(
        cost.roofline.num_gpus,
        batch,
        draft_length,
        length,
        1e3 * step_s,
        1e3 * whole_s / length,
        tokens_per_s,
        replicas,
        num_gpus,
        gpu_hours,
        None if price is None else price * gpu_hours,
    )
