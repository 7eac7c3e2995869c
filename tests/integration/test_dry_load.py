"""What a dry load concludes from loaders of unusual kinds."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from vllm_mtp.integration.load.child import in_child
from vllm_mtp.integration.load.dry_load import UndecidedError, dry_load
from vllm_mtp.integration.load.weight_health import DryLoad, Header

Weights = Iterable[tuple[str, torch.Tensor]]
WHOLE = {"model.layers.0.q": (2, 4), "model.layers.0.k": (1, 4), "scale": (1,)}


class Model(torch.nn.Module):
    """``qk`` is packed, and its last row is padding."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.qk = torch.nn.Parameter(torch.empty(4, 4))
            self.scale = torch.nn.Parameter(torch.empty(1))
        self.qk.weight_loader_numel = 12

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            self.load(name, tensor)

    def load(self, name: str, tensor: torch.Tensor) -> None:
        if name == "scale":
            self.scale.data.fill_(tensor.item())
        elif name.endswith(".q"):
            assert tensor.shape == (2, 4)
            self.qk.data[:2].copy_(tensor)
        elif name.endswith(".k"):
            assert tensor.shape == (1, 4)
            self.qk.data[2:3].copy_(tensor)
        else:
            raise KeyError(name)


class WantsNumbers(Model):
    """Looks at a value, which a tensor without memory has not."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        super().load(name, tensor * tensor.flatten()[0].item())


class KeepsTensors(Model):
    """Raises about one tensor when it is given the next."""

    def load_weights(self, weights: Weights) -> None:
        kept: list[tuple[str, torch.Tensor]] = []
        for each in weights:
            if kept:
                self.load(*kept.pop())
            kept.append(each)


class CanOnlyGuess(Model):
    """Of a kind that needs memory in any case."""

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.qk.data[0, 0].item()


def tried(model: Model, shapes: dict[str, tuple[int, ...]]) -> DryLoad:
    headers = {name: Header("F32", shape, None) for name, shape in shapes.items()}
    return dry_load(model, headers, 2)


@pytest.mark.parametrize("model", [Model(), WantsNumbers()])
def test_padding_is_not_missing(model: Model) -> None:
    whole = tried(model, WHOLE)
    assert whole == DryLoad(type(model).__name__, list(WHOLE), [], [], {}, {})


def test_a_lost_part_has_the_name_that_another_layer_gives_it() -> None:
    shapes = {n: s for n, s in WHOLE.items() if not n.endswith(".k")}
    lost = tried(Model(), shapes | {"model.layers.1.k": (1, 4)})
    assert lost.missing == []  # the other layer's fits as well, and vLLM takes it
    lost = tried(Model(), shapes)
    assert lost.missing == []  # nothing in the checkpoint names it
    assert lost.nameless == ["qk"]


def test_a_parameter_without_a_name_is_called_as_vllm_does() -> None:
    class Renamed(Model):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            super().load(name.replace("factor", "scale"), tensor)

    shapes = {name: shape for name, shape in WHOLE.items() if name != "scale"}
    assert tried(Renamed(), shapes).missing == ["scale"]
    assert tried(Renamed(), shapes | {"factor": (1,)}).own[-1] == "factor"


def test_a_lost_part_has_the_name_of_the_module_it_belongs_to() -> None:
    whole = {"mtp.block.0.q": (2, 4), "mtp.block.0.k": (1, 4), "scale": (1,)}
    trunk = {"model.layers.0.attention.0.k": (1, 4)}

    class Buried(Model):
        def load(self, name: str, tensor: torch.Tensor) -> None:
            if not name.startswith("model."):
                assert name in whole
                super().load(name, tensor)

    shapes = {name: shape for name, shape in whole.items() if name != "mtp.block.0.k"}
    assert tried(Buried(), whole | trunk).is_whole
    assert tried(Buried(), shapes | trunk).missing == ["mtp.block.0.k"]


def test_what_has_no_place_is_told_from_what_has_another_shape() -> None:
    model = tried(Model(), WHOLE | {"model.layers.0.q": (3, 4), "more": (2,)})
    assert list(model.unknown) == ["model.layers.0.q", "more"]
    trunk = {"model.layers.1.q": (2, 4)}
    assert tried(Model(), trunk | WHOLE).unknown == {}


@pytest.mark.parametrize("model", [KeepsTensors(), CanOnlyGuess()])
def test_a_loader_that_cannot_be_asked_is_told(model: Any) -> None:
    with pytest.raises(UndecidedError):
        tried(model, {"more": (2,)} | WHOLE)


def test_a_child_that_ends_has_no_answer() -> None:
    def end() -> None:
        raise SystemExit

    assert in_child(lambda: 7) == 7
    assert in_child(end) == "the process that should have answered has ended"
    assert in_child(lambda: 1 // 0) == (
        "ZeroDivisionError: integer division or modulo by zero"
    )
