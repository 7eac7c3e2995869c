"""Block verification of a batch, in a few tensor operations.

The same test as ``reference.block_test``, for requests of different draft lengths whose
rows lie one after another, with the random numbers handed in. Runs wherever torch does;
Model Runner V2 has vLLM's own kernel for it.
"""

import torch

from vllm_mtp.verification.drawing import draw

REJECTED = -1
"""Where an output has no token; also a draft token that may not be kept."""


def sample_block(
    # [num_tokens] int, REJECTED where a token may not be kept
    draft_token_ids: torch.Tensor,
    # [num_requests] int64: first row of each request; those without drafts have none
    first_rows: torch.Tensor,
    # [num_requests] int64
    num_draft_tokens: torch.Tensor,
    # [num_tokens, vocab_size]; None where draft tokens were chosen, not drawn
    proposal: torch.Tensor | None,
    # [num_tokens, vocab_size], which is overwritten
    target: torch.Tensor,
    # [num_requests] int
    bonus_token_ids: torch.Tensor,
    # [num_tokens], uniform in [0, 1)
    uniforms: torch.Tensor,
    # [num_requests] float64, uniform in [0, 1): for what follows a draft that is cut
    recovering: torch.Tensor,
) -> torch.Tensor:
    """Tokens of each request: those kept, then one more, then ``REJECTED``.

    Returns:
        ``[num_requests, longest draft + 1]`` int64.
    """
    num_requests, longest = len(first_rows), int(num_draft_tokens.max())
    places = torch.arange(longest, device=target.device)
    is_drafted = places < num_draft_tokens[:, None]
    last_row = len(draft_token_ids) - 1
    # [num_requests, longest]: rows of tokens; any row where there is none
    rows = (first_rows[:, None] + places).clamp(max=last_row)
    weights = _weights(_ratios(draft_token_ids, proposal, target)[rows], is_drafted)
    before = torch.ones_like(uniforms, dtype=target.dtype)
    before[rows[is_drafted]] = weights[:, :-1][is_drafted]
    missing = _missing(before, draft_token_ids, proposal, target)
    mass = missing.sum(dim=-1)
    # Of each row: whether a draft may be cut right in front of its token.
    passes_in_front = torch.nan_to_num(mass / (mass + 1.0 - before), nan=1.0)
    accepts = _accepts(weights, passes_in_front, rows, num_draft_tokens, uniforms)
    counts = torch.arange(longest + 1, device=target.device)
    num_accepted = (accepts * counts).amax(dim=-1)
    is_whole = num_accepted == num_draft_tokens
    row = (first_rows + num_accepted).clamp(max=last_row)
    recovered = draw(missing[row], recovering)
    following = torch.where(is_whole, bonus_token_ids.long(), recovered)
    output = draft_token_ids.new_full((num_requests, longest + 1), REJECTED).long()
    is_kept = counts < num_accepted[:, None]
    output[is_kept] = draft_token_ids[rows][is_kept[:, :-1]].long()
    return output.scatter_(1, num_accepted[:, None], following[:, None])


def _ratios(
    draft_token_ids: torch.Tensor, proposal: torch.Tensor | None, target: torch.Tensor
) -> torch.Tensor:
    """``[num_tokens]``: target over proposal of each draft token."""
    at = draft_token_ids.long().clamp(min=0)[:, None]
    ratios = target.gather(1, at)[:, 0]
    if proposal is not None:
        ratios = ratios / proposal.gather(1, at)[:, 0]
    return torch.where(draft_token_ids < 0, 0.0, ratios)


def _weights(
    # [num_requests, longest] each
    ratios: torch.Tensor,
    is_drafted: torch.Tensor,
) -> torch.Tensor:
    """``[num_requests, longest + 1]``: how much of a draft's start is worth keeping."""
    weights = [torch.ones_like(ratios[:, 0])]
    for ratio, exists in zip(ratios.unbind(1), is_drafted.unbind(1), strict=True):
        grown = (weights[-1] * ratio).clamp(max=1.0)
        weights.append(torch.where(exists, grown, weights[-1]))
    return torch.stack(weights, dim=1)


def _missing(
    # [num_tokens]
    before: torch.Tensor,
    draft_token_ids: torch.Tensor,
    proposal: torch.Tensor | None,
    target: torch.Tensor,
) -> torch.Tensor:
    """``[num_tokens, vocab_size]``: what the proposal has too little of. In place of
    the target."""
    missing = target.mul_(before[:, None])
    if proposal is not None:
        return missing.sub_(proposal).clamp_(min=0.0)
    # One-hot: its token alone has enough.
    at = draft_token_ids.long().clamp(min=0)[:, None]
    return missing.scatter_(1, at, 0.0)


def _accepts(
    # [num_requests, longest + 1]
    weights: torch.Tensor,
    # [num_tokens]
    passes_in_front: torch.Tensor,
    # [num_requests, longest]
    rows: torch.Tensor,
    # [num_requests]
    num_draft_tokens: torch.Tensor,
    # [num_tokens]
    uniforms: torch.Tensor,
) -> torch.Tensor:
    """``[num_requests, longest + 1]`` bool: whether 0, 1, .. tokens may be kept."""
    longest = rows.shape[1]
    counts = torch.arange(1, longest + 1, device=rows.device)
    is_last = counts == num_draft_tokens[:, None]
    exists = counts <= num_draft_tokens[:, None]
    # Cutting after token i is cutting in front of token i + 1, but after the last.
    following = rows[:, 1:] if longest > 1 else rows[:, :0]
    in_front = torch.nn.functional.pad(passes_in_front[following], (0, 1))
    passes = torch.where(is_last, weights[:, 1:], in_front)
    accepts = exists & (uniforms[rows] < passes)
    return torch.nn.functional.pad(accepts, (1, 0), value=True)
