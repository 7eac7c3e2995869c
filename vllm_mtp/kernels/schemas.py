"""The torch ops: schemas (what is mutated) and fake implementations.

Defined here, once, whether or not a native library was built: the C++ libraries of
``csrc/`` only add implementations for their device. The Triton backend has ops of its
own, so that both can exist, and be compared, on one GPU.
"""

import torch

NAMESPACE = "vllm_mtp"

SCHEMAS = {
    "rollback_metadata": (
        "(Tensor sampled_token_ids, Tensor? cu_num_draft_tokens, Tensor discarded, "
        "Tensor backup_next_token_ids, Tensor query_start_loc, Tensor seq_lens, "
        "Tensor slot_mapping, int vocab_size, "
        "Tensor(a!) per_request, Tensor(b!) out_slot_mapping) -> ()"
    ),
    "pad_rejected_rows": (
        "(Tensor(a!) slot_mapping, Tensor query_start_loc, "
        "Tensor num_rejected_tokens) -> ()"
    ),
    "scrub_rejected_slots": (
        "(Tensor(a!)[] kv_storages, Tensor[] slot_mappings, Tensor planes, "
        "Tensor query_start_loc, Tensor num_rejected_tokens) -> ()"
    ),
    "accept_greedily": (
        "(Tensor target_token_ids, Tensor input_ids, Tensor positions, "
        "Tensor logits_indices, Tensor cu_num_logits, Tensor seq_lens, "
        "Tensor idx_mapping, Tensor prefill_len, Tensor(a!) sampled_token_ids, "
        "Tensor(b!) num_sampled, Tensor(c!) num_rejected) -> ()"
    ),
}

TRITON_SUFFIX = "_triton"

library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


def _fake(*args: object) -> None:
    """Nothing is returned; the schema says what is mutated."""


for _name, _schema in SCHEMAS.items():
    for _suffix in ("", TRITON_SUFFIX):
        library.define(  # type: ignore[no-untyped-call]
            f"{_name}{_suffix}{_schema}"
        )
        torch.library.register_fake(
            f"{NAMESPACE}::{_name}{_suffix}", _fake, lib=library
        )
