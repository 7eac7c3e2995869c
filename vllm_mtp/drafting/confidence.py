"""How sure a proposal is of its first choice: its logit minus that of the second."""

import torch

_FEW_COLUMNS = 32768
"""Up to so many one operation for the two largest is faster than two that each look for
the largest, because what an operation costs beside its work is paid once."""


def take_first_choice(
    # [num_requests, vocab_size]
    logits: torch.Tensor,
) -> tuple[torch.Tensor, list[float]]:
    """First choice and confidence of each row. The logits may be spoilt.

    Returns:
        ``[num_requests]`` int64, and ``[num_requests]`` on the host.
    """
    if logits.shape[-1] <= _FEW_COLUMNS:
        largest, token_ids = logits.topk(2, dim=-1)
        return token_ids[:, 0], _leads(largest)
    first, token_ids = logits.max(dim=-1, keepdim=True)
    second = logits.scatter_(-1, token_ids, -torch.inf).amax(dim=-1, keepdim=True)
    return token_ids[:, 0], _leads(torch.cat((first, second), dim=-1))


def confidences_of(
    # [num_requests, vocab_size]
    logits: torch.Tensor,
) -> list[float]:
    """``[num_requests]`` on the host; the logits stay as they are."""
    return _leads(logits.topk(2, dim=-1).values)


def _leads(
    # [num_requests, 2]
    largest: torch.Tensor,
) -> list[float]:
    return [first - second for first, second in largest.tolist()]
