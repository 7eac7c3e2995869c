"""What a decode step costs by the data sheet: `RooflineCost`.

It answers three questions, without noise: the seconds of verifying some rows, of
drafting some steps deep, and of the catch-up pass of the MTP layers after a pause. It
assumes, and a real engine deviates from it accordingly:

- a pass takes the longer of reading weights and multiplying matrices, plus reading the
  KV cache, plus a constant for launches and the scheduler; no overlap of these three;
- bandwidth and FLOP/s reach a fixed share of the data sheet (70 % and 60 %);
- rows of the target are padded to the next captured CUDA graph (1, 2, 4, then multiples
  of 8 to 256, of 16 to 512, none beyond); a batch of unequal draft lengths runs without
  a full graph, which costs `mixed_launch_s` more, and rows beyond 512 cost no more
  launches than others (at that size they hide behind the work);
- verification reads each request's KV once, whatever its rows: attention over K + 1
  queries is bound by bandwidth. With latent attention (671B) it is near the compute
  bound already, so there long contexts make verifying dearer than modelled;
- a draft step reads one layer, the head over the whole vocabulary, and one layer's
  share of the KV cache; its launches are not hidden and its rows, one for each request,
  not padded. That the first one also runs over the verified rows is neglected;
- tensor parallelism divides weights, KV and FLOPs evenly (with experts the dense part,
  too, where deployments often copy it); its two all-reduces a layer are a constant
  within `launch_s`, which is true of few rows only;
- mixture of experts: rows choose `top_k` of `num_experts` independently and evenly, so
  a pass touches ``1 - (1 - top_k / num_experts)^rows`` of the expert weights: with
  few rows every further one reads new experts. Real routers are skewed (fewer experts
  touched, some ranks overloaded). Experts lie spread over the ranks; each layer sends
  its rows out and back once (`all_to_all_s`), latency plus bytes over a link that is
  equally fast between all accelerators (it is about nine times slower between hosts,
  if they are not in one NVLink domain);
- FP8 brings all weights to one byte, halves what is sent and doubles FLOP/s; KV stays
  as it is (`kv_bytes_per_token`, 16 bits in the models below). A model described with
  fewer bytes a weight is read faster, its arithmetic stays that of bfloat16.

Batches to 1,024 requests, 9,216 rows, are within these formulas; how memory for their
KV is found is not asked.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, NonNegativeFloat, PositiveFloat, PositiveInt

# [num_points] seconds or rows
Points = NDArray[Any]

_STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Of what users describe in files of their own."""


@dataclass(frozen=True)
class Hardware:
    """One accelerator, data-sheet figures."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    bytes_per_s: PositiveFloat
    flops_per_s: PositiveFloat
    """Dense bfloat16."""
    link_bytes_per_s: PositiveFloat
    """To the other accelerators, one direction."""
    memory_bytes: PositiveFloat | None = None
    """None where it is not asked whether a model fits."""


H100 = Hardware("H100", 3.35e12, 0.99e15, 450e9, 80e9)
H200 = Hardware("H200", 4.8e12, 0.99e15, 450e9, 141e9)
B200 = Hardware("B200", 8.0e12, 2.25e15, 900e9, 180e9)

BANDWIDTH_SHARE = 0.7
FLOPS_SHARE = 0.6


@dataclass(frozen=True)
class Experts:
    """The routed part of a mixture of experts."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    num_experts: PositiveInt
    top_k: PositiveInt
    num_layers: PositiveInt
    weights_per_expert: PositiveFloat
    """Parameters of one expert in one layer."""
    hidden_size: PositiveInt

    def __post_init__(self) -> None:
        """Check what no field shows by itself.

        Raises:
            ValueError: A row would use more experts than there are.
        """
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k: {self.top_k}; at most num_experts")


@dataclass(frozen=True)
class Model:
    """What a pass reads and multiplies."""

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    dense_weights: PositiveFloat
    """Parameters that every row uses: all of a dense model."""
    kv_bytes_per_token: NonNegativeFloat
    num_layers: PositiveInt
    draft_weights: PositiveFloat
    """Dense parameters of one draft step: MTP layer and head."""
    head_weights: NonNegativeFloat
    """Parameters of the head alone, which a catch-up pass does without."""
    experts: Experts | None = None
    bytes_per_weight: PositiveFloat = 2.0

    def __post_init__(self) -> None:
        """Check what no field shows by itself.

        Raises:
            ValueError: The head would be larger than what it is a part of.
        """
        if self.head_weights > self.draft_weights:
            raise ValueError("head_weights: at most draft_weights, which include them")


DENSE_7B = Model("dense 7B", 7.6e9, 147e3, 36, 0.85e9, 0.63e9)
DENSE_70B = Model("dense 70B", 70e9, 328e3, 80, 1.9e9, 1.05e9)
MOE_671B = Model(
    "MoE 671B", 17e9, 70e3, 61, 1.4e9, 0.93e9, Experts(256, 8, 58, 44e6, 7168)
)


@dataclass(frozen=True)
class RooflineCost:
    """The model of the module's docstring."""

    hardware: Hardware
    model: Model
    num_gpus: int = 1
    is_fp8: bool = False
    launch_s: float = 0.6e-3
    draft_launch_s: float = 0.12e-3
    mixed_launch_s: float = 0.15e-3
    all_to_all_s: float = 15e-6
    """Latency of sending rows to their experts or back, for one layer."""

    def verify_s(
        self, num_requests: int, rows: Points, context: float, is_uniform: bool
    ) -> Points:
        padded = _pad_to_graph(np.asarray(rows, dtype=float))
        model = self.model
        weights, used = self._expert_weights(padded, model.experts)
        seconds: Points = (
            self._pass_s(model.dense_weights + weights, padded, used, model)
            + context * model.kv_bytes_per_token / self._bandwidth
            + self.launch_s
        )
        if model.experts is not None:
            seconds = seconds + model.experts.num_layers * self._exchange_s(padded)
        return seconds if is_uniform else seconds + self.mixed_launch_s

    def draft_s(self, num_requests: int, depth: int, context: float) -> float:
        if not depth:
            return 0.0
        return depth * (
            self._draft_pass_s(num_requests, self.model.draft_weights)
            + context
            * self.model.kv_bytes_per_token
            / (self.model.num_layers * self._bandwidth)
        )

    def catch_up_s(self, num_tokens: int) -> float:
        layer = self.model.draft_weights - self.model.head_weights
        return self._draft_pass_s(num_tokens, layer)

    def _draft_pass_s(self, num_rows: int, dense_weights: float) -> float:
        model, rows = self.model, np.asarray(float(num_rows))
        one_layer = model.experts and replace(model.experts, num_layers=1)
        weights, used = self._expert_weights(rows, one_layer)
        reading = (dense_weights + weights) * self._bytes_per_weight
        flops = 2 * (dense_weights + used) * rows
        seconds = np.maximum(reading / self._bandwidth, flops / self._flops)
        if model.experts is not None:
            seconds = seconds + self._exchange_s(rows)
        return float(seconds) + self.draft_launch_s

    def _pass_s(
        self, weights: Points, rows: Points, used_by_row: float, model: Model
    ) -> Points:
        reading = weights * self._bytes_per_weight / self._bandwidth
        flops = 2 * (model.dense_weights + used_by_row) * rows
        result: Points = np.maximum(reading, flops / self._flops)
        return result

    def _expert_weights(
        self, rows: Points, experts: Experts | None
    ) -> tuple[Points, float]:
        """Parameters of the experts that a pass touches, and those of one row."""
        if experts is None:
            return np.zeros_like(rows), 0.0
        every = experts.num_layers * experts.weights_per_expert
        missed = (1 - experts.top_k / experts.num_experts) ** rows
        return every * experts.num_experts * (1 - missed), every * experts.top_k

    def _exchange_s(self, rows: Points) -> Points:
        assert self.model.experts is not None
        sent = rows * self.model.experts.hidden_size * self.model.experts.top_k
        per_gpu = sent * (1 if self.is_fp8 else 2) / self.num_gpus
        result: Points = 2 * (
            self.all_to_all_s + per_gpu / self.hardware.link_bytes_per_s
        )
        return result

    @property
    def _bandwidth(self) -> float:
        return self.hardware.bytes_per_s * BANDWIDTH_SHARE * self.num_gpus

    @property
    def _flops(self) -> float:
        precision = 2 if self.is_fp8 else 1
        return self.hardware.flops_per_s * FLOPS_SHARE * self.num_gpus * precision

    @property
    def _bytes_per_weight(self) -> float:
        return 1 if self.is_fp8 else self.model.bytes_per_weight

    def in_fp8(self) -> "RooflineCost":
        """The same machine and model with weights in FP8."""
        return replace(self, is_fp8=True)


def _pad_to_graph(rows: Points) -> Points:
    small = 2.0 ** np.ceil(np.log2(np.maximum(rows, 1)))
    by_8 = np.ceil(rows / 8) * 8
    by_16 = np.ceil(rows / 16) * 16
    padded: Points = np.select(
        [rows <= 4, rows <= 256, rows <= 512], [small, by_8, by_16], rows
    )
    return padded
