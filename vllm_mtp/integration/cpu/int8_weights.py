"""On a CPU: the weights that draft, quantized to 8 bits.

A draft step reads them for a few rows, so their size is its time; a pass over the
committed rows is arithmetic. The output stays the target's, whose own weights are not
touched: what is quantized is a proposal. Two ways of multiplying, by what the CPU has:

- Where the vector unit does four times as much in 8 bits (AVX512-VNNI), with vLLM's
  kernels for checkpoints whose weights and activations are in 8 bits; activations are
  scaled row by row, when they come. Measured on one core: a third of the time of
  float32 and three fifths of that of bfloat16.
- Elsewhere (AVX2) those take six times as long as float32, and torch's own for 8-bit
  weights and bfloat16 activations takes a quarter of its time for one row, half for
  four and four fifths for eight. More rows are multiplied by the weights as they are,
  which therefore stay.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import CpuArchEnum, current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

MIN_WEIGHTS = 2**20
"""Of a matrix that is quantized. Smaller ones lie in the caches, and scaling the
activations takes as long as it saves."""

MAX_FEW_ROWS = 8
"""That are multiplied by 8 bits where the vector unit gains nothing from them."""

Multiply = Callable[..., torch.Tensor]
"""A layer's ``cpu_linear``: of activations, the weight (for those that need it), and
the bias."""

_LARGEST = 127
_LEAST_SCALE = 1e-30
"""Of rows that are all zero."""


def multiplies_all_rows() -> bool:
    """Whether this CPU multiplies in 8 bits, weights and activations."""
    return _is_tried_cpu() and torch.cpu._is_vnni_supported()


def multiplies_few_rows() -> bool:
    """Whether weights in 8 bits pay for a few rows only."""
    return (
        _is_tried_cpu()
        and torch.cpu._is_avx2_supported()
        and not torch.cpu._is_vnni_supported()
    )


def _is_tried_cpu() -> bool:
    # With tiles (AMX) vLLM takes other kernels, which never were.
    return (
        current_platform.is_cpu()
        and current_platform.get_cpu_architecture() == CpuArchEnum.X86
        and not torch.cpu._is_amx_tile_supported()
    )


def make_int8(
    # [out_features, in_features] int8
    rows: torch.Tensor,
    # [out_features, 1] float32
    scales: torch.Tensor,
    dtype: torch.dtype,
    make_plain: Callable[[], Multiply],
) -> "Int8Linear | FewRowsLinear":
    """A matrix in 8 bits, as this CPU likes it.

    Args:
        rows: See `quantize_rows`.
        scales: See `quantize_rows`.
        dtype: Of activations and results.
        make_plain: What multiplies by the weights as they are; asked only if that is
            needed as well.
    """
    if multiplies_all_rows():
        return Int8Linear(rows, scales, dtype)
    return FewRowsLinear(rows, scales, make_plain())


class FewRowsLinear:
    """A matrix in 8 bits for a few rows, as it is for more."""

    def __init__(
        self,
        # [out_features, in_features] int8
        rows: torch.Tensor,
        # [out_features, 1] float32
        scales: torch.Tensor,
        plain: Multiply,
    ) -> None:
        """Nothing is copied.

        Args:
            rows: See `quantize_rows`.
            scales: See `quantize_rows`.
            plain: Multiplies by the weights as they are.
        """
        self._rows, self._plain = rows, plain
        self._scales = scales.flatten().bfloat16()

    def __call__(
        self,
        # [..., in_features]
        x: torch.Tensor,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``[..., out_features]``.

        Compiled, always by the weights as they are: what is compiled once for any
        number of rows cannot choose.
        """
        num_rows = x.numel() // x.shape[-1]
        if torch.compiler.is_compiling() or not 0 < num_rows <= MAX_FEW_ROWS:
            return self._plain(x, weight, bias)
        few = x.reshape(num_rows, -1).bfloat16().contiguous()
        product = torch._weight_int8pack_mm(few, self._rows, self._scales)
        product = product.to(x.dtype).view(*x.shape[:-1], -1)
        return product if bias is None else product + bias


class FewRowsProduct:
    """Of a few rows with a matrix in 8 bits, in place."""

    SCALE_DTYPE = torch.bfloat16
    ROUNDOFF = 1.01 * 2.0**-8
    """Share of itself by which a product may be off: it is quantized to bfloat16."""

    def __init__(
        self,
        # [out_features, in_features] int8
        rows: torch.Tensor,
        # [out_features, 1] float32, all of them bfloat16 numbers
        scales: torch.Tensor,
    ) -> None:
        """Nothing is copied.

        Args:
            rows: See `quantize_rows`.
            scales: See `quantize_rows`.
        """
        self._rows, self._scales = rows, scales.flatten().to(self.SCALE_DTYPE)

    def multiply_into(
        self,
        # [num_tokens, in_features] float32
        x: torch.Tensor,
        # [num_tokens, out_features] float32
        product: torch.Tensor,
    ) -> torch.Tensor:
        """``[num_tokens]``: norm of what rounding took off each row of activations."""
        few = x.bfloat16()
        product.copy_(torch._weight_int8pack_mm(few, self._rows, self._scales))
        return (x - few.float()).norm(dim=1)


class Int8Linear:
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
            rows: See `quantize_rows`.
            scales: See `quantize_rows`.
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

    def multiply_into(
        self,
        # [num_tokens, in_features] float32
        x: torch.Tensor,
        # [num_tokens, out_features] float32
        product: torch.Tensor,
    ) -> torch.Tensor:
        """``[num_tokens]``: norm of what rounding took off each row of activations."""
        x = x.contiguous()
        quantized, scales, _ = ops.onednn_scaled_int8_quant(x)
        handler, adjustment = self._kernel.dnnl_handler, self._layer.azp_adj
        ops.onednn_scaled_mm(
            handler, quantized, product, scales, None, adjustment, None
        )
        return (x - quantized.float() * scales).norm(dim=1)


def quantize_rows(
    # [out_features, in_features]
    weight: torch.Tensor,
    scale_dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in 8 bits, and what to multiply each by: ``[out_features, 1]`` float32.

    Args:
        weight: A matrix.
        scale_dtype: What the scales are numbers of.
    """
    weight = weight.detach().float()
    scales = weight.abs().amax(dim=1, keepdim=True).div_(_LARGEST)
    scales = scales.clamp_(min=_LEAST_SCALE).to(scale_dtype).float()
    quantized = weight.div(scales).round_().clamp_(-_LARGEST, _LARGEST)
    return quantized.to(torch.int8), scales


class _Int8Method(UnquantizedLinearMethod):
    """Loads weights as they are and keeps them in 8 bits."""

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight
        # MLA reads the weights of a layer that vLLM marks so.
        is_read = getattr(layer, "_cpu_skip_gemm_dispatch", False)
        if is_read or not is_large(weight):
            super().process_weights_after_loading(layer)
            return

        def make_plain() -> Multiply:
            super(_Int8Method, self).process_weights_after_loading(layer)
            plain: Multiply = layer.cpu_linear
            return plain

        quantized = make_int8(*quantize_rows(weight), weight.dtype, make_plain)
        layer.cpu_linear = quantized
        if isinstance(quantized, Int8Linear):
            layer.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)


class Int8DraftWeights(QuantizationConfig):
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
    def from_config(cls, config: dict[str, Any]) -> "Int8DraftWeights":
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        return _Int8Method() if isinstance(layer, LinearBase) else None


class _Int8(nn.Module):
    """In the place of a plain ``nn.Linear``, as MTP layers have one in front."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight
        self._multiply = make_int8(
            *quantize_rows(weight), weight.dtype, lambda: nn.functional.linear
        )
        self._shape, self._dtype = weight.shape, weight.dtype
        is_needed = isinstance(self._multiply, FewRowsLinear)
        self.weight = weight if is_needed else None
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self.weight, self.bias)

    def plain(self) -> nn.Linear:
        """A layer as it was, for weights that are to be loaded."""
        num_outputs, num_inputs = self._shape
        has_bias = self.bias is not None
        return nn.Linear(num_inputs, num_outputs, has_bias, dtype=self._dtype)


def restore_plain_layers(model: nn.Module) -> None:
    """Undo `quantize_plain_layers`; the weights are to be loaded."""
    for parent, name, child in _children(model):
        if isinstance(child, _Int8):
            setattr(parent, name, child.plain())


def _children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
    ]


def quantize_plain_layers(model: nn.Module) -> None:
    """Round what no quantization config knows of: torch's own linear layers."""
    for parent, name, child in _children(model):
        if type(child) is nn.Linear and is_large(child.weight):
            setattr(parent, name, _Int8(child))


def is_large(weight: torch.Tensor) -> bool:
    """Whether rounding a weight pays."""
    return weight.ndim == 2 and weight.numel() >= MIN_WEIGHTS
