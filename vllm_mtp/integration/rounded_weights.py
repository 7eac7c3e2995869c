"""On a CPU: the weights that draft, rounded to 8 bits.

A draft step reads them for a few rows, so their size is its time; a pass over the
committed rows is arithmetic, of which the vector unit does four times as much in
8 bits. Measured on one core: a third of the time of float32 and three fifths of that of
bfloat16. The output stays the target's, whose own weights are not touched: what is
rounded is a proposal.

The kernels are vLLM's, as for checkpoints whose weights and activations are in 8 bits;
activations are scaled row by row, when they come.
"""

from typing import Any

import torch
from torch import nn
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.utils.torch_utils import set_default_torch_dtype

MIN_WEIGHTS = 2**20
"""Of a matrix that is rounded. Smaller ones lie in the caches, and scaling the
activations takes as long as it saves."""

_LARGEST = 127
_LEAST_SCALE = 1e-30
"""Of rows that are all zero."""


class RoundedLinear:
    """A matrix in 8 bits, to be multiplied by."""

    def __init__(
        self,
        # [out_features, in_features] int8
        rows: torch.Tensor,
        # [out_features, 1] float32
        scales: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Copy it as the kernel likes it.

        Args:
            rows: See `round_rows`.
            scales: See `round_rows`.
            dtype: Of activations and results.
        """
        layer: Any = nn.Module()
        layer.logical_widths = [len(rows)]
        layer.weight = nn.Parameter(rows, requires_grad=False)
        layer.weight_scale = nn.Parameter(scales, requires_grad=False)
        layer.input_scale = layer.input_zero_point = layer.azp_adj = layer.bias = None
        self._kernel = init_int8_linear_kernel(True, False, True, "MTP layers")
        with set_default_torch_dtype(dtype):  # the kernel's results are of this one
            self._kernel.process_weights_after_loading(layer)
        self._layer = layer

    def __call__(
        self,
        # [..., in_features]
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[..., out_features]``; ``weight`` is only what vLLM hands over as well."""
        product: torch.Tensor
        product = self._kernel.apply_weights(self._layer, x.contiguous(), bias)
        return product


def round_rows(
    # [out_features, in_features]
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in 8 bits, and what to multiply each by: ``[out_features, 1]`` float32."""
    weight = weight.detach().float()
    scales = weight.abs().amax(dim=1, keepdim=True).div_(_LARGEST)
    scales.clamp_(min=_LEAST_SCALE)
    return weight.div(scales).round_().to(torch.int8), scales


class _RoundedMethod(UnquantizedLinearMethod):
    """Loads weights as they are and keeps them in 8 bits."""

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight
        # MLA reads the weights of a layer that vLLM marks so.
        is_read = getattr(layer, "_cpu_skip_gemm_dispatch", False)
        if is_read or not is_large(weight):
            super().process_weights_after_loading(layer)
            return
        layer.cpu_linear = RoundedLinear(*round_rows(weight), weight.dtype)
        layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)


class RoundedDrafts(QuantizationConfig):
    """Of a draft model: its linear layers in 8 bits, all others as they are."""

    @classmethod
    def get_name(cls) -> Any:
        return "mtp_plus_int8"

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "RoundedDrafts":
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return _RoundedMethod() if isinstance(layer, LinearBase) else None


class _Rounded(nn.Module):
    """In the place of a plain ``nn.Linear``, as MTP layers have one in front."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight
        self._multiply = RoundedLinear(*round_rows(weight), weight.dtype)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, None, self.bias)


def round_plain_layers(model: nn.Module) -> None:
    """Round what no quantization config knows of: torch's own linear layers."""
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and is_large(child.weight)
    ]
    for parent, name, child in found:
        setattr(parent, name, _Rounded(child))


def is_large(weight: torch.Tensor) -> bool:
    """Whether rounding a weight pays."""
    return weight.ndim == 2 and weight.numel() >= MIN_WEIGHTS
