"""Copies of rows in one launch where torch would need several."""

import torch

from vllm_mtp.kernels import triton_kernels

_COLUMNS_PER_PROGRAM = 1024


def keep_rows(
    # [num_rows, hidden_size]
    hidden_states: torch.Tensor,
    # [num_rows] int64
    positions: torch.Tensor,
    # [num_rows, hidden_size], mutated
    kept_hidden_states: torch.Tensor,
    # [num_rows] int64, mutated
    kept_positions: torch.Tensor,
) -> None:
    """Copy hidden states and positions."""
    num_rows, num_columns = kept_hidden_states.shape
    num_blocks = -(-num_columns // _COLUMNS_PER_PROGRAM)
    triton_kernels.keep_rows[(num_rows, num_blocks)](
        hidden_states,
        hidden_states.stride(0),
        positions,
        kept_hidden_states,
        kept_positions,
        num_columns,
        COLUMNS=_COLUMNS_PER_PROGRAM,
    )
