"""Where passes of the MTP layer may end behind its keys and values, and how they do."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from vllm.config import CUDAGraphMode

from vllm_mtp.integration.worker.kv_only_passes import KeyValuePasses, key_value_layer

NAMES = ["mtp.attn"]


def make_layer(**changes: Any) -> Any:
    written: list[str] = []
    settings = {
        "attn_backend": SimpleNamespace(forward_includes_kv_cache_update=False),
        "kv_sharing_target_layer_name": None,
        "impl": SimpleNamespace(do_kv_cache_update=written.append),
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
    assert key_value_layer(make_config(layer), nn.Linear(2, 2), NAMES) is layer


@pytest.mark.parametrize(
    "changes",
    [
        {"data_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"enable_eplb": True},
        {"kv_transfer_config": "a connector"},
        {"cudagraph_mode": CUDAGraphMode.PIECEWISE},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_passes_run_to_their_end_where_others_wait_for_them(
    changes: dict[str, Any],
) -> None:
    config = make_config(make_layer(), **changes)
    assert key_value_layer(config, nn.Linear(2, 2), NAMES) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_sharing_target_layer_name": "layers.3.attn"},
        {"attn_backend": SimpleNamespace(forward_includes_kv_cache_update=True)},
        {"impl": SimpleNamespace()},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_passes_run_to_their_end_where_the_layer_does_not_write_apart(
    changes: dict[str, Any],
) -> None:
    config = make_config(make_layer(**changes))
    assert key_value_layer(config, nn.Linear(2, 2), NAMES) is None


def test_passes_run_to_their_end_where_a_layer_reads_anothers_output() -> None:
    config = make_config(make_layer())
    names = [*NAMES, "mtp.other"]
    assert key_value_layer(config, nn.Linear(2, 2), names) is None


def test_passes_of_compiled_models_run_to_their_end() -> None:
    compiled = nn.Sequential(nn.Linear(2, 2))
    compiled[0].do_not_compile = False
    assert key_value_layer(make_config(make_layer()), compiled, NAMES) is None
    compiled[0].do_not_compile = True
    assert key_value_layer(make_config(make_layer()), compiled, NAMES) is not None


def test_a_pass_ends_only_where_it_was_asked_to() -> None:
    layer = make_layer()
    passes = KeyValuePasses(layer)
    layer.impl.do_kv_cache_update("before")
    with passes.asked_for():
        layer.impl.do_kv_cache_update("asked")
        layer.written.append("never reached")
    layer.impl.do_kv_cache_update("after")
    assert layer.written == ["before", "asked", "after"]


def test_an_error_on_the_way_is_not_taken_for_the_end() -> None:
    layer = make_layer()
    passes = KeyValuePasses(layer)
    with pytest.raises(ValueError, match="broken"), passes.asked_for():
        raise ValueError("broken")
    layer.impl.do_kv_cache_update("after")
    assert layer.written == ["after"]
