"""Checkpoints with extra heads that lack something are refused in a sentence."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm.engine.arg_utils import EngineArgs

from tests.integration.test_lost_weights import bend_each, lose_each
from tests.support.extra_heads import NUM_HEADS, write_as_llama, write_model
from vllm_mtp.config import ConfigError
from vllm_mtp.integration.load.checkpoint import find_headers
from vllm_mtp.integration.load.child import in_child
from vllm_mtp.integration.load.plugin import register

HEADS = "extra_heads."


@pytest.fixture(scope="module", autouse=True)
def plugin() -> None:
    register()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def config_of(model: Path, **spec: Any) -> Any:
    return EngineArgs(
        model=str(model), max_model_len=64, speculative_config=spec
    ).create_engine_config()


def refusal(model: Path, **spec: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(model, method="mtp_plus", **spec)
    return str(caught.value)


def change_config(model: Path, **values: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_every_weight_of_a_head_that_is_lost_or_has_another_shape_is_named(
    family: str, model: Path, tmp_path: Path
) -> None:
    if family == "llama":
        model = write_as_llama(model, tmp_path / "llama")
    headers = find_headers(str(model), None)
    own = [name for name in headers if name.startswith(HEADS)]
    own.append("model.norm.weight")
    config = config_of(model, method="mtp", num_speculative_tokens=NUM_HEADS)
    for ask in (lose_each, bend_each):
        assert in_child(partial(ask, config, headers, own)) == []


def test_a_head_that_is_missing_is_named(model: Path) -> None:
    path = model / "model.safetensors"
    weights = load_file(path)
    kept = {n: w for n, w in weights.items() if not n.startswith(f"{HEADS}2.")}
    save_file(kept, path, metadata={"format": "pt"})
    sentence = refusal(model)
    assert f"{HEADS}2.self_attn.q_proj.weight" in sentence
    assert f"{HEADS}1." not in sentence
    # Two draft tokens need two heads.
    config = config_of(model, method="mtp_plus", num_speculative_tokens=2)
    assert config.speculative_config.num_speculative_tokens == 2


def test_cached_prefixes_are_used_to_their_last_block(model: Path) -> None:
    """Several MTP layers have vLLM drop it; heads look no token ahead."""
    config = config_of(model, method="mtp_plus")
    assert not config.speculative_config.use_eagle_block_drop()


def test_more_draft_tokens_than_heads_are_refused(model: Path) -> None:
    sentence = refusal(model, num_speculative_tokens=2 * NUM_HEADS)
    assert f"num_speculative_tokens={2 * NUM_HEADS}" in sentence
    assert f"at most {NUM_HEADS}" in sentence


def test_states_to_train_heads_on_are_not_recorded(model: Path) -> None:
    sentence = refusal(model, hidden_states_path="/anywhere")
    assert "hidden_states_path is not allowed with extra heads" in sentence


@pytest.mark.parametrize("num_tokens", [None, 1, "4"])
def test_a_model_without_heads_has_nothing_to_draft_with(
    num_tokens: Any, model: Path
) -> None:
    change_config(model, n_future_tokens=num_tokens)
    assert "has no MTP layers" in refusal(model)
