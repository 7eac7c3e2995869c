"""Where passes of the MTP layer may be for keys and values alone, and what they do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.linear import LinearBase

from vllm_mtp.integration.worker.draft_model_gate import (
    DraftModelGate,
    gate_of,
    kv_only_layer,
)

NAMES = ["mtp.attn"]


def make_layer(**changes: Any) -> Any:
    written: list[str] = []
    settings = {
        "attn_backend": SimpleNamespace(forward_includes_kv_cache_update=False),
        "kv_sharing_target_layer_name": None,
        "impl": SimpleNamespace(
            do_kv_cache_update=written.append, forward=written.append
        ),
        "written": written,
    }
    return SimpleNamespace(**settings | changes)


def make_config(layer: Any, **changes: Any) -> Any:
    parallel = {
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "enable_eplb": False,
    }
    transfer = changes.pop("kv_transfer_config", None)
    mode = changes.pop("cudagraph_mode", CUDAGraphMode.NONE)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel | changes),
        kv_transfer_config=transfer,
        compilation_config=SimpleNamespace(
            cudagraph_mode=mode, static_forward_context={NAMES[0]: layer}
        ),
    )


def test_the_one_layer_that_writes_apart_is_found() -> None:
    layer = make_layer()
    assert kv_only_layer(make_config(layer), NAMES) is layer


@pytest.mark.parametrize(
    "changes",
    [
        {"data_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"enable_eplb": True},
        {"kv_transfer_config": "a connector"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_passes_are_whole_where_others_wait_for_them(
    changes: dict[str, Any],
) -> None:
    config = make_config(make_layer(), **changes)
    assert kv_only_layer(config, NAMES) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_sharing_target_layer_name": "layers.3.attn"},
        {"attn_backend": SimpleNamespace(forward_includes_kv_cache_update=True)},
        {"impl": SimpleNamespace()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_passes_are_whole_where_the_layer_does_not_write_apart(
    changes: dict[str, Any],
) -> None:
    config = make_config(make_layer(**changes))
    assert kv_only_layer(config, NAMES) is None


def test_passes_are_whole_where_a_layer_reads_anothers_output() -> None:
    config = make_config(make_layer())
    names = [*NAMES, "mtp.other"]
    assert kv_only_layer(config, names) is None


def test_models_in_graphs_and_compiled_ones_have_no_gate() -> None:
    graphs = make_config(make_layer(), cudagraph_mode=CUDAGraphMode.PIECEWISE)
    assert gate_of(graphs, nn.Linear(2, 2), NAMES) is None
    compiled = nn.Sequential(nn.Linear(2, 2))
    compiled[0].do_not_compile = False
    assert gate_of(make_config(make_layer()), compiled, NAMES) is None
    compiled[0].do_not_compile = True
    assert gate_of(make_config(make_layer()), compiled, NAMES) is not None


class Linear(LinearBase):
    """As much of vLLM's as a gate stands in front of."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.output_size, self.return_bias, self.calls = width, True, 0

    def forward(self, inputs: torch.Tensor) -> Any:
        self.calls += 1
        return inputs.new_ones(*inputs.shape[:-1], self.output_size), None


class Layer(nn.Module):
    """A projection, keys and values, attention, another projection."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = Linear(4), Linear(2)
        self.attention = make_layer()
        self.attention.impl.forward = self._attend
        self.attended = 0

    def _attend(self, output: torch.Tensor) -> torch.Tensor:
        self.attended += 1
        return output + 1

    def forward(self, *, hidden_states: torch.Tensor) -> torch.Tensor:
        values, _ = self.before(hidden_states)
        self.attention.impl.do_kv_cache_update(values)
        output = self.attention.impl.forward(output=values)
        return self.behind(output)[0]


def run(model: Layer) -> tuple[torch.Tensor, list[int]]:
    """What a pass returns, and what has run so far."""
    output = model(hidden_states=torch.full((3, 2), 7.0))
    counts = [model.before.calls, len(model.attention.written)]
    return output, [*counts, model.attended, model.behind.calls]


def test_a_pass_for_keys_and_values_runs_nothing_behind_them() -> None:
    model = Layer()
    gate = DraftModelGate(model, model.attention)
    assert run(model)[1] == [1, 1, 1, 1]
    with gate.kv_only():
        output, counts = run(model)
    assert counts == [2, 2, 1, 1]
    assert output.tolist() == [[0.0, 0.0]] * 3, "nobody reads it, but it is finite"
    assert torch.equal(model.attention.written[0], model.attention.written[1])
    with gate.kv_only(is_so=False):
        assert run(model)[1] == [3, 3, 2, 2]
    assert run(model)[1] == [4, 4, 3, 3]


def test_two_passes_for_keys_and_values_both_write_them() -> None:
    model = Layer()
    gate = DraftModelGate(model, model.attention)
    with gate.kv_only():
        run(model)
        assert run(model)[1] == [2, 2, 0, 0]


def test_an_error_on_the_way_leaves_the_gate_open() -> None:
    model = Layer()
    gate = DraftModelGate(model, model.attention)
    with pytest.raises(ValueError, match="broken"), gate.kv_only():
        raise ValueError("broken")
    assert run(model)[1] == [1, 1, 1, 1]


def test_a_closed_gate_hands_the_hidden_states_back() -> None:
    model = Layer()
    gate = DraftModelGate(model)
    assert not gate.can_be_kv_only
    gate.is_closed = True
    output, counts = run(model)
    assert counts == [0, 0, 0, 0]
    assert output.tolist() == [[7.0, 7.0]] * 3
    gate.is_closed = False
    assert run(model)[1] == [1, 1, 1, 1]


def test_a_closed_gate_returns_as_many_as_the_model() -> None:
    class Both(Layer):
        def forward(self, *, hidden_states: torch.Tensor) -> Any:
            return super().forward(hidden_states=hidden_states), hidden_states

    model = Both()
    gate = DraftModelGate(model)
    run(model)
    gate.is_closed = True
    first, second = run(model)[0]
    assert torch.equal(first, second)
