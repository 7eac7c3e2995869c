"""The specification, in plain torch. Every fast backend must equal it.

Rows of one request with K draft tokens of which a were accepted::

    row            q          q+1 ..  q+a   q+a+1 ..  q+K      q = query_start_loc[i]
    token          committed  accepted      rejected
    KV slot        final      final         rejected: to be rolled back
    slot mapping   kept       kept          PADDING_SLOT
                                       ^ last valid row: its output is the recovered
                                         token (a < K) or the bonus token (a = K),
                                         the next token of the request

and in its sequence, of length s = seq_lens[i] with the step's rows::

    position       0 ..  s-K-1  s-K ..  s-K+a-1  s-K+a ..  s-1
                   committed    accepted         rejected
                                                 ^ seq_lens - num_rejected = s-K+a

A request in prefill (discarded) or without drafts has no rejected rows.
"""

import torch

from vllm_mtp.kernels.planes import SlotPlane, planes_of_table
from vllm_mtp.records import GreedyStep, RollbackPlan

NAME = "reference"
PADDING_SLOT = -1
"""Slot of a row whose keys and values are not written; vLLM's value."""
NOT_SAMPLED = -1
"""Token where none was sampled."""
NUM_OUTPUTS = 6
"""Rows of ``per_request``: the fields of ``RolledBack``, in order."""


def rollback_metadata(
    plan: RollbackPlan,
    # [6, num_reqs] int32, mutated
    per_request: torch.Tensor,
    # [num_rows or more] int64, mutated
    slot_mapping: torch.Tensor,
) -> None:
    """Count, roll back and pad, in one pass over a step's requests and rows.

    Args:
        plan: what the step verified.
        per_request: gets the fields of ``RolledBack``, a row each.
        slot_mapping: gets the plan's slots with ``PADDING_SLOT`` in rejected rows and
            in every row that no request owns, to its end. Not the plan's own memory.
    """
    num_reqs = plan.discarded.shape[0]
    tokens = plan.sampled_token_ids[:num_reqs].long()
    starts = plan.query_start_loc[:num_reqs].long()
    ends = plan.query_start_loc[1 : num_reqs + 1].long()
    if plan.cu_num_draft_tokens is None:
        num_drafts = torch.zeros_like(starts)
    else:
        cumulative = plan.cu_num_draft_tokens[:num_reqs].long()
        num_drafts = torch.diff(cumulative, prepend=cumulative.new_zeros(1))

    samples = ~plan.discarded & (ends > starts)
    valid = (tokens != -1) & (tokens < plan.vocab_size) & samples[:, None]
    num_sampled = valid.sum(1)
    num_accepted = torch.minimum((num_sampled - 1).clamp(min=0), num_drafts)
    num_rejected = num_drafts - num_accepted
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    last = torch.where(valid, columns, -1).amax(1).clamp(min=0)
    next_tokens = torch.where(
        num_sampled > 0,
        tokens.gather(1, last[:, None])[:, 0],
        plan.backup_next_token_ids[:num_reqs].long(),
    )
    outputs = (
        next_tokens,
        num_sampled,
        num_accepted,
        num_rejected,
        (ends - 1 - num_rejected).clamp(min=0),
        plan.seq_lens[:num_reqs].long() - num_rejected,
    )
    per_request.copy_(torch.stack(outputs).int())

    num_rows = plan.slot_mapping.shape[0]
    rows = torch.arange(num_rows, device=starts.device)
    keep = ((rows >= starts[:, None]) & (rows < (ends - num_rejected)[:, None])).any(0)
    slot_mapping[:num_rows] = torch.where(keep, plan.slot_mapping, PADDING_SLOT)
    slot_mapping[num_rows:] = PADDING_SLOT


def accept_greedily(
    step: GreedyStep,
    # [num_reqs, num_columns] int64, mutated; a column for each row of any request
    sampled_token_ids: torch.Tensor,
    # [num_reqs] int32, mutated
    num_sampled: torch.Tensor,
    # [num_reqs] int32, mutated
    num_rejected: torch.Tensor,
) -> None:
    """Verify the drafts of a step in which every request is greedy.

    A draft token is accepted if it and all before it are what the target chose in their
    place; then comes the target's next choice. Tokens that stand where a request could
    not draft yet, before its first sampled token, are placeholders and rejected.

    Args:
        step: what was computed.
        sampled_token_ids: gets each request's tokens, -1 behind them.
        num_sampled: gets their number, 0 while a request's prompt goes on.
        num_rejected: gets the rows that are left over, 0 likewise.
    """
    num_reqs, num_columns = sampled_token_ids.shape
    starts = step.cu_num_logits[:num_reqs].long()
    num_rows = step.cu_num_logits[1 : num_reqs + 1].long() - starts
    columns = torch.arange(num_columns, device=starts.device)
    rows = starts[:, None] + columns
    last_row = step.target_token_ids.shape[0] - 1
    tokens = step.input_ids[step.logits_indices].long()
    targets = step.target_token_ids[rows.clamp(max=last_row)]
    drafts = tokens[(rows + 1).clamp(max=last_row)]

    prefill_len = step.prefill_len[step.idx_mapping].long()
    has_drafted = step.positions[step.logits_indices[starts]] >= prefill_len
    is_draft = columns < (num_rows - 1)[:, None]
    agrees = is_draft & (drafts == targets) & has_drafted[:, None]
    num_accepted = agrees.int().cumprod(1).sum(1)
    samples = step.seq_lens[:num_reqs] >= prefill_len
    num_sampled.copy_(torch.where(samples, num_accepted + 1, 0))
    num_rejected.copy_(torch.where(samples, num_rows - num_accepted - 1, 0))
    counts = columns < num_sampled[:, None]
    sampled_token_ids.copy_(torch.where(counts, targets, NOT_SAMPLED))


def pad_rejected_rows(
    # [num_rows or more] int64, mutated
    slot_mapping: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_reqs] int32 or int64
    num_rejected_tokens: torch.Tensor,
) -> None:
    """Give the rejected rows of a step ``PADDING_SLOT``, in place.

    For a runner that has its counts already (Model Runner V2 fuses them elsewhere).
    """
    rows = rejected_rows(query_start_loc, num_rejected_tokens)
    slot_mapping[rows] = PADDING_SLOT


def scrub_rejected_slots(
    # one [num_bytes] uint8 tensor per storage, mutated
    kv_storages: list[torch.Tensor],
    # one [max_num_tokens] int64 tensor per cache group
    slot_mappings: list[torch.Tensor],
    # [num_planes, NUM_COLUMNS] int64
    planes: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_reqs] int32 or int64
    num_rejected_tokens: torch.Tensor,
) -> None:
    """Zero the rejected slots of all layers.

    Rows of a step, and what is done to the slot ``s`` of each::

        row                       slot                              done
        q .. e-r-1                committed or accepted             untouched
        e-r .. e-1  (rejected)    s < first_slot (padding or null)  untouched
                                  s >= num_slots                    untouched
                                  otherwise                         zeroed in all planes

        q = query_start_loc[i], e = query_start_loc[i + 1], r = num_rejected_tokens[i]

    So nothing below a committed length is touched, nor a block that other requests
    read: the target wrote each rejected slot in this very step, for this request.

    Args:
        kv_storages: the memory that the planes lie in, whole.
        slot_mappings: what the table's ``slot_mapping_address`` columns point at,
            before any row was padded.
        planes: table of ``planes.plane_table``.
        query_start_loc: first row of each request.
        num_rejected_tokens: rejected rows at the end of each request.
    """
    rows = rejected_rows(query_start_loc, num_rejected_tokens)
    by_address = {mapping.data_ptr(): mapping for mapping in slot_mappings}
    for plane in planes_of_table(planes):
        slots = by_address[plane.slot_mapping_address][rows]
        slots = slots[(slots >= max(plane.first_slot, 0)) & (slots < plane.num_slots)]
        storage, offset = _find(kv_storages, plane)
        storage[offset + byte_offsets(plane, slots)] = 0


def rejected_rows(
    query_start_loc: torch.Tensor, num_rejected_tokens: torch.Tensor
) -> torch.Tensor:
    """``[num_rejected]`` int64 rows of a step that were rejected, in order.

    Never more than a request's own rows, so that no count can reach another's.
    """
    num_reqs = num_rejected_tokens.shape[0]
    first = query_start_loc[:num_reqs].long()
    ends = query_start_loc[1 : num_reqs + 1].long()
    rows = torch.arange(int(query_start_loc[-1]), device=ends.device)
    starts = torch.maximum(ends - num_rejected_tokens.long(), first)
    rejected = (rows >= starts[:, None]) & (rows < ends[:, None])
    return rows[rejected.any(0)]


def byte_offsets(plane: SlotPlane, slots: torch.Tensor) -> torch.Tensor:
    """``[num_slots * slot_bytes]`` int64 offsets from a plane's base, of its slots."""
    blocks, offsets = slots // plane.block_size, slots % plane.block_size
    groups, in_group = offsets // plane.group_size, offsets % plane.group_size
    bytes_ = (
        blocks * plane.block_stride
        + groups * plane.group_stride
        + in_group * plane.slot_stride
    )
    for count, stride in (
        (plane.count_2, plane.stride_2),
        (plane.count_1, plane.stride_1),
        (plane.count_0, plane.stride_0),
        (plane.chunk_bytes, 1),
    ):
        steps = torch.arange(count, device=slots.device) * stride
        bytes_ = (bytes_[:, None] + steps).flatten()
    return bytes_


def _find(
    kv_storages: list[torch.Tensor], plane: SlotPlane
) -> tuple[torch.Tensor, int]:
    for storage in kv_storages:
        offset = plane.base_address - storage.data_ptr()
        if 0 <= offset < storage.numel():
            return storage, offset
    raise IndexError(f"no storage holds address {plane.base_address:#x}")
