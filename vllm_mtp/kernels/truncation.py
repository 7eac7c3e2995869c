"""Top-k, top-p and min-p of proposals: a Triton kernel, inside the draft step's graph.

A proposal need not be cut exactly where the target's distribution is, because whatever
is left of it is what drafts are drawn from and tested against. So nothing is sorted: a
threshold is found by halving an interval, as near as a draft can use.
"""

import torch

from vllm_mtp.kernels import triton_kernels

MAX_COLUMNS = 32768
"""Of a row that one program holds in registers; longer ones are left as they are."""
_HALVINGS = 16
_SPAN = 32.0
"""Of logits: less than ``exp(-32)`` of the likeliest token's probability is nothing. So
a threshold is met within 0.0005."""


def truncate(
    # [num_rows, num_columns], mutated
    logits: torch.Tensor,
    # [num_rows] int64
    idx_mapping: torch.Tensor,
    # [max_num_reqs] each
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    """Cut off what requests' sampling parameters forbid.

    Args:
        logits: Before temperature; what is cut off becomes minus infinity.
        idx_mapping: Request of each row: an index into the other tensors, -1 for none.
        temperature: Rows of greedy requests, at 0, are left as they are.
        top_k: Columns that stay, at least.
        top_p: Share of the probability that stays, at least.
        min_p: Least probability, as a share of the likeliest token's.
    """
    num_rows, num_columns = logits.shape
    if num_rows == 0 or num_columns > MAX_COLUMNS:
        return
    columns = 1 << (num_columns - 1).bit_length()
    triton_kernels.truncate_rows[(num_rows,)](
        logits,
        logits.stride(0),
        num_columns,
        idx_mapping,
        temperature,
        top_k,
        top_p,
        min_p,
        COLUMNS=columns,
        HALVINGS=_HALVINGS,
        SPAN=_SPAN,
        num_warps=16 if columns > 4096 else 4,
    )
