"""Meta's layout to ours: every weight, and attention that gives the same scores."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from vllm_mtp.cli.main import app
from vllm_mtp.tools.convert_heads import _INSIDE

HIDDEN, INNER, VOCAB, NUM_HEADS, NUM_KV_HEADS = 16, 24, 40, 4, 2
PARAMS = {
    "dim": HIDDEN,
    "n_layers": 4,
    "n_heads": NUM_HEADS,
    "n_kv_heads": NUM_KV_HEADS,
    "norm_eps": 1e-6,
    "vocab_size": -1,
    "n_future_tokens": 3,
}
"""Two layers and two extra heads: Meta counts all of them."""
Weights = dict[str, torch.Tensor]


def meta_weights() -> Weights:
    shapes = {
        "attention.wq": (HIDDEN, HIDDEN),
        "attention.wk": (HIDDEN * NUM_KV_HEADS // NUM_HEADS, HIDDEN),
        "attention.wv": (HIDDEN * NUM_KV_HEADS // NUM_HEADS, HIDDEN),
        "attention.wo": (HIDDEN, HIDDEN),
        "feed_forward.w1": (INNER, HIDDEN),
        "feed_forward.w2": (HIDDEN, INNER),
        "feed_forward.w3": (INNER, HIDDEN),
        "attention_norm": (HIDDEN,),
        "ffn_norm": (HIDDEN,),
    }
    generator = torch.Generator().manual_seed(0)
    weights = {
        f"{place}.{part}.weight": torch.randn(shape, generator=generator)
        for place in ("layers.0", "layers.1", "extra_heads.0", "extra_heads.1")
        for part, shape in shapes.items()
    }
    for name, shape in (
        ("tok_embeddings", (VOCAB, HIDDEN)),
        ("norm", (HIDDEN,)),
        ("output", (VOCAB, HIDDEN)),
    ):
        weights[f"{name}.weight"] = torch.randn(shape, generator=generator)
    return weights | {"rope.freqs": torch.randn(HIDDEN // NUM_HEADS // 2)}


def convert(folder: Path, weights: Weights, params: Any = PARAMS) -> Any:
    source = folder / "meta"
    source.mkdir()
    torch.save(weights, source / "consolidated.pth")
    (source / "params.json").write_text(json.dumps(params))
    return CliRunner().invoke(app, ["convert-heads", str(source), str(folder / "ours")])


@pytest.fixture
def converted(tmp_path: Path) -> tuple[Weights, dict[str, Any]]:
    result = convert(tmp_path, meta_weights())
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    return load_file(tmp_path / "ours" / "model.safetensors"), config


def test_every_weight_has_its_place(converted: tuple[Weights, dict[str, Any]]) -> None:
    weights, config = converted
    meta = meta_weights()
    places = {
        "layers.0": "model.layers.0",
        "layers.1": "model.layers.1",
        "extra_heads.0": "extra_heads.0",
        "extra_heads.1": "extra_heads.1",
    }
    for theirs, ours in places.items():
        for part, new_part in _INSIDE.items():
            if part not in ("attention.wq", "attention.wk"):
                new = weights[f"{ours}.{new_part}.weight"]
                assert torch.equal(new, meta[f"{theirs}.{part}.weight"]), part
    assert torch.equal(weights["lm_head.weight"], meta["output.weight"])
    assert len(weights) == len(meta) - 1  # rotary frequencies
    assert config["architectures"] == ["LlamaExtraHeadsForCausalLM"]
    assert (config["num_hidden_layers"], config["n_future_tokens"]) == (2, 3)
    assert (config["intermediate_size"], config["vocab_size"]) == (INNER, VOCAB)
    assert config["rms_norm_eps"] == 1e-6


def angles(position: int) -> torch.Tensor:
    """Of each pair of a head."""
    head_dim = HIDDEN // NUM_HEADS
    return position * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)


def scores_of_neighbours(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Meta's: numbers 2i and 2i + 1 of a head are one complex number."""
    turned = [
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        * torch.polar(torch.ones(2), angles(at))
        for x, at in ((query, 5), (key, 2))
    ]
    return (turned[0] * turned[1].conj()).real.sum(-1)


def scores_of_halves(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Hugging Face's: numbers i and i + head_dim / 2 are a pair."""
    turned = []
    for x, at in ((query, 5), (key, 2)):
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles(at).cos(), angles(at).sin()
        turned.append(torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1))
    return (turned[0] * turned[1]).sum(-1)


def test_attention_scores_are_the_same(
    converted: tuple[Weights, dict[str, Any]],
) -> None:
    weights, meta = converted[0], meta_weights()
    hidden = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))

    def heads(weight: torch.Tensor, row: int) -> torch.Tensor:
        return (weight @ hidden[row]).unflatten(0, (-1, HIDDEN // NUM_HEADS))

    def scores(of: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        grouped = heads(key, 1).repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 0)
        result: torch.Tensor = of(heads(query, 0), grouped)
        return result

    theirs, ours = "extra_heads.1.attention", "extra_heads.1.self_attn"
    wq, wk = meta[f"{theirs}.wq.weight"], meta[f"{theirs}.wk.weight"]
    expected = scores(scores_of_neighbours, wq, wk)
    new = (weights[f"{ours}.q_proj.weight"], weights[f"{ours}.k_proj.weight"])
    torch.testing.assert_close(scores(scores_of_halves, *new), expected)
    # Without the new order it is another attention.
    assert (scores(scores_of_halves, wq, wk) - expected).abs().max() > 0.1


def test_what_is_not_such_a_checkpoint_is_refused(tmp_path: Path) -> None:
    weights = meta_weights()
    cases: dict[str, tuple[Any, Any, str]] = {
        "lost": (
            {n: w for n, w in weights.items() if not n.startswith("extra_heads.1")},
            PARAMS,
            "promises 2 extra heads; consolidated.pth holds 1",
        ),
        "plain": (weights, {"n_heads": NUM_HEADS}, "promises 0 extra heads"),
        "other": (
            weights | {"layers.0.router.weight": torch.zeros(2)},
            PARAMS,
            "layers.0.router.weight is not a weight of a Llama",
        ),
    }
    for name, (given, params, words) in cases.items():
        (tmp_path / name).mkdir()
        result = convert(tmp_path / name, given, params)
        assert result.exit_code == 2, result.output
        assert words in " ".join(result.output.split())
