"""Weights in 8 bits multiply nearly like those that they were quantized from."""

from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase

from vllm_mtp.integration.cpu.int8_drafts import has_kernel
from vllm_mtp.integration.cpu.int8_weights import (
    MAX_FEW_ROWS,
    MIN_WEIGHTS,
    FewRowsLinear,
    FewRowsProduct,
    Int8DraftWeights,
    Int8Linear,
    make_int8,
    multiplies_all_rows,
    quantize_plain_layers,
    quantize_rows,
)
from vllm_mtp.verification.prefilter import rounding_norms

pytestmark = pytest.mark.skipif(
    not has_kernel(), reason="no x86 CPU with AVX2 and without AMX"
)

SIZE = (1024, 1024)
assert SIZE[0] * SIZE[1] == MIN_WEIGHTS
ERROR = 0.02
"""Of a product, relative to its norm."""


def random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def all_rows(weight: torch.Tensor) -> Int8Linear:
    if not multiplies_all_rows():
        pytest.skip("no AVX512-VNNI")
    return Int8Linear(*quantize_rows(weight), weight.dtype)


def few_rows(weight: torch.Tensor) -> FewRowsLinear:
    def plain(x: Any, _: Any, bias: Any) -> torch.Tensor:
        return nn.functional.linear(x, weight, bias)

    return FewRowsLinear(*quantize_rows(weight), plain)


@pytest.mark.parametrize("make", [all_rows, few_rows])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 7, MAX_FEW_ROWS, 33])
def test_a_product_is_nearly_the_same(
    make: Any, dtype: torch.dtype, num_rows: int
) -> None:
    weight, bias = random(*SIZE), random(SIZE[0], seed=1)
    weight[5] = 0.0
    quantized = make(weight.to(dtype))
    x = random(num_rows, SIZE[1], seed=2)
    found = quantized(x.to(dtype), None, bias.to(dtype))
    assert found.dtype == dtype
    off = error(found, nn.functional.linear(x, weight, bias))
    is_plain = make is few_rows and num_rows > MAX_FEW_ROWS
    if is_plain and dtype == torch.float32:
        assert off == 0.0
    else:
        assert 1e-4 < off < ERROR
    assert torch.equal(found[:, 5], bias.to(dtype)[5].expand(num_rows))


@pytest.mark.parametrize("make", [all_rows, few_rows])
def test_rows_of_another_form_are_taken(make: Any) -> None:
    weight = random(*SIZE)
    quantized = make(weight)
    x = random(SIZE[1], 6, seed=3).t()
    assert not x.is_contiguous()
    assert error(quantized(x), x @ weight.t()) < ERROR
    assert torch.equal(quantized(x.reshape(2, 3, -1)).reshape(6, -1), quantized(x))
    # Padding is zeros.
    assert torch.equal(quantized(torch.zeros(2, SIZE[1])), torch.zeros(2, SIZE[0]))


def prefiltered_by_all_rows() -> tuple[Any, torch.Tensor, float]:
    weight = random(*SIZE)
    product = all_rows(weight)
    return product.multiply_into, rounding_norms(weight, *quantize_rows(weight)), 0.0


def prefiltered_by_few_rows() -> tuple[Any, torch.Tensor, float]:
    weight = random(*SIZE)
    quantized = quantize_rows(weight, FewRowsProduct.SCALE_DTYPE)
    multiply = FewRowsProduct(*quantized).multiply_into
    return multiply, rounding_norms(weight, *quantized), FewRowsProduct.ROUNDOFF


@pytest.mark.parametrize("make", [prefiltered_by_all_rows, prefiltered_by_few_rows])
def test_what_rounding_took_off_is_known(make: Any) -> None:
    """So that no product is farther from the true one than the norms allow."""
    multiply, norms, roundoff = make()
    weight, x = random(*SIZE), random(MAX_FEW_ROWS, SIZE[1], seed=2)
    x[4, 7] = 50.0  # an outlier makes all else of its row coarse
    product = torch.empty(MAX_FEW_ROWS, SIZE[0])
    errors = multiply(x, product)
    assert errors[4] > errors.median()
    bounds = torch.outer(x.norm(dim=1), norms.errors)
    bounds += torch.outer(errors, norms.sizes) + roundoff * product.abs()
    off = (product.double() - x.double() @ weight.double().t()).abs()
    assert (off <= bounds).all()
    assert off.max() > 0.05 * bounds.max(), "or the bounds say nothing"


def test_rows_whose_scale_was_rounded_stay_within_8_bits() -> None:
    weight = random(*SIZE)
    rows, scales = quantize_rows(weight, torch.bfloat16)
    assert torch.equal(scales, scales.bfloat16().float())
    assert rows.abs().max() == 127
    off = (rows.float() * scales - weight).abs() / scales
    assert off.max() <= 0.51 + 127 * 2.0**-8


def test_what_is_compiled_for_any_number_of_rows_takes_the_weights_as_they_are() -> (
    None
):
    weight, x = random(*SIZE), random(3, SIZE[1], seed=1)
    quantized = few_rows(weight)
    compiled = torch.compile(lambda x: quantized(x), backend="eager", fullgraph=True)
    assert error(quantized(x), x @ weight.t()) > 1e-4
    assert error(compiled(x), x @ weight.t()) < 1e-6


def test_weights_as_they_are_stay_only_where_they_are_needed() -> None:
    weight, asked = random(*SIZE), []

    def make_plain() -> Any:
        asked.append(True)
        return nn.functional.linear

    quantized = make_int8(*quantize_rows(weight), weight.dtype, make_plain)
    needs_plain = isinstance(quantized, FewRowsLinear)
    assert bool(asked) == needs_plain == (not multiplies_all_rows())


def layer(weight: torch.Tensor, **attributes: Any) -> Any:
    """As much of a linear layer as vLLM's method asks for."""
    found = nn.Module()
    found.weight = nn.Parameter(weight.clone(), requires_grad=False)
    for name, value in attributes.items():
        setattr(found, name, value)
    return found


def method() -> Any:
    linear = object.__new__(LinearBase)
    return Int8DraftWeights().get_quant_method(linear, "model.mtp.qkv_proj")


def test_a_large_layer_is_rounded_and_a_small_one_is_not() -> None:
    for size, least, most in [(SIZE, 1e-4, ERROR), ((512, 1024), 0.0, 1e-5)]:
        weight, x = random(*size), random(3, size[1], seed=1)
        loaded, how = layer(weight), method()
        how.process_weights_after_loading(loaded)
        assert not loaded.weight.numel(), "nobody needs it any more"
        assert least <= error(how.apply(loaded, x), x @ weight.t()) < most


def test_a_layer_whose_weights_are_read_is_left_alone() -> None:
    weight = random(*SIZE)
    loaded = layer(weight, _cpu_skip_gemm_dispatch=True)
    method().process_weights_after_loading(loaded)
    assert torch.equal(loaded.weight, weight)


def test_what_is_no_linear_layer_of_vllms_has_no_method_of_ours() -> None:
    for other in (nn.Module(), nn.Linear(4, 4), nn.Embedding(4, 4)):
        assert Int8DraftWeights().get_quant_method(other, "any") is None


def test_plain_layers_of_torch_are_rounded_if_large() -> None:
    model = nn.Sequential(
        nn.Linear(2048, 512), SimpleModule(nn.Linear(512, 64)), nn.Linear(64, 8)
    )
    x = random(5, 2048)
    wanted = model(x)
    small = model[2]
    quantize_plain_layers(model)
    assert type(model[0]) is not nn.Linear
    assert model[2] is small
    with torch.no_grad():
        assert 1e-4 < error(model(x), wanted) < ERROR


class SimpleModule(nn.Module):
    """A layer inside of another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)
