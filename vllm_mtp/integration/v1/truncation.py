"""Model Runner V1: top-k and top-p, where a CPU sorts only the rows that need it."""

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p


def truncate(
    # [num_rows, num_columns] float32, changed in place
    logits: torch.Tensor,
    # [num_rows] each
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
) -> torch.Tensor:
    """As vLLM's function, which sorts all rows if any of them asks for top-p.

    Sorting 131,072 tokens takes a CPU longer than all else that sampling does.
    """
    if top_p is None or logits.device.type != "cpu":
        return _truncated(logits, top_k, top_p)
    rows = (top_p < 1.0).nonzero()[:, 0]
    if len(rows) == len(logits):
        return _truncated(logits, top_k, top_p)
    sorted_k = None if top_k is None else top_k[rows]
    of_rows = _truncated(logits[rows], sorted_k, top_p[rows])
    logits = _truncated(logits, top_k, None)
    logits[rows] = of_rows
    return logits


def _truncated(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    cut: torch.Tensor = apply_top_k_top_p(logits, top_k, top_p)
    return cut
