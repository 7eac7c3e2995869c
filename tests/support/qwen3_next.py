"""Qwen3-Next as its headers alone: a family that no engine of the tests runs."""

from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.families.family import HIDDEN_SIZE as WIDTH
from tests.support.families.family import MAX_POSITION, NUM_HIDDEN_LAYERS, VOCAB_SIZE
from tests.support.random_checkpoints import write_json, write_tokenizer

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
INNER, NUM_EXPERTS = 32, 4

CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": WIDTH,
    "num_hidden_layers": NUM_HIDDEN_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": 96,
    "vocab_size": VOCAB_SIZE,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": INNER,
    "shared_expert_intermediate_size": INNER,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": MAX_POSITION,
    "num_nextn_predict_layers": 1,
    "dtype": "float32",
}


def _layer(prefix: str) -> dict[str, tuple[int, ...]]:
    q_rows, kv_rows = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
        "self_attn.q_proj": (2 * q_rows, WIDTH),  # with the output's gate
        "self_attn.k_proj": (kv_rows, WIDTH),
        "self_attn.v_proj": (kv_rows, WIDTH),
        "self_attn.o_proj": (WIDTH, q_rows),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "mlp.gate": (NUM_EXPERTS, WIDTH),
        "mlp.shared_expert_gate": (1, WIDTH),
    }
    for expert in ("shared_expert", *(f"experts.{i}" for i in range(NUM_EXPERTS))):
        shapes[f"mlp.{expert}.gate_proj"] = (INNER, WIDTH)
        shapes[f"mlp.{expert}.up_proj"] = (INNER, WIDTH)
        shapes[f"mlp.{expert}.down_proj"] = (WIDTH, INNER)
    return {f"{prefix}.{name}.weight": shape for name, shape in shapes.items()}


def write_headers(folder: Path) -> list[str]:
    """Write a checkpoint, of the trunk its last layer alone.

    Returns:
        Names of the MTP layer's weights.
    """
    own = _layer("mtp.layers.0") | {
        "mtp.fc.weight": (WIDTH, 2 * WIDTH),
        "mtp.norm.weight": (WIDTH,),
        "mtp.pre_fc_norm_embedding.weight": (WIDTH,),
        "mtp.pre_fc_norm_hidden.weight": (WIDTH,),
    }
    shapes = own | _layer(f"model.layers.{NUM_HIDDEN_LAYERS - 1}")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        shapes[name] = (VOCAB_SIZE, WIDTH)
    tensors = {n: torch.arange(1.0, prod(s) + 1).view(s) for n, s in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", CONFIG)
    write_tokenizer(folder)
    return list(own)
