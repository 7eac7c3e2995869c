"""The Triton kernels that `triton_ops`, `truncation` and others launch.

Counts stay on the device: a program looks up its own request and returns when it has
nothing to do, so that launches can be captured into CUDA graphs. Without Triton they
are plain functions that nobody calls.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
    tl = SimpleNamespace(constexpr=object)  # All that definitions need of it.


def _kernel(*varying: str) -> Callable[[Callable[..., None]], Any]:
    """``triton.jit``, if there is Triton.

    Args:
        varying: integers that change from step to step; no kernel of its own for
            those that happen to be 1 or a multiple of 16.
    """

    def compile_later(function: Callable[..., None]) -> Any:
        if triton is None:
            return function
        return triton.jit(function, do_not_specialize=varying)

    return compile_later


@_kernel(
    "num_reqs",
    "vocab_size",
    "token_row_stride",
    "max_sampled",
    "num_rows",
    "field_stride",
    "num_padded_rows",
)
def rollback_metadata(
    num_reqs: int,
    vocab_size: int,
    # [num_reqs, max_sampled] int32 or int64, any strides
    sampled_token_ids: "torch.Tensor",
    token_row_stride: int,
    token_column_stride: int,
    max_sampled: int,
    # [num_reqs] int32; anything unless HAS_DRAFTS
    cu_num_draft_tokens: "torch.Tensor",
    # [num_reqs] bool
    discarded: "torch.Tensor",
    # [num_reqs] int32
    backup_next_token_ids: "torch.Tensor",
    # [num_reqs + 1] int32
    query_start_loc: "torch.Tensor",
    # [num_reqs] int32
    seq_lens: "torch.Tensor",
    # [num_rows] int64
    slot_mapping: "torch.Tensor",
    num_rows: int,
    # [6, num_reqs] int32, mutated
    per_request: "torch.Tensor",
    field_stride: int,
    request_stride: int,
    # [num_padded_rows] int64, mutated
    out_slot_mapping: "torch.Tensor",
    num_padded_rows: int,
    PADDING: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program ``i < num_reqs`` rolls back request ``i``, the others pad the tail."""
    request = tl.program_id(0)
    if request >= num_reqs:
        tail_program = request - num_reqs
        num_tail_programs = tl.num_programs(0) - num_reqs
        tail_start = tl.load(query_start_loc + num_reqs)
        for first in range(
            tail_start + tail_program * ROWS, num_padded_rows, num_tail_programs * ROWS
        ):
            rows = first + tl.arange(0, ROWS)
            tl.store(out_slot_mapping + rows, PADDING, mask=rows < num_padded_rows)
    else:
        start = tl.load(query_start_loc + request)
        end = tl.load(query_start_loc + request + 1)
        num_drafts = start - start
        if HAS_DRAFTS:
            before = tl.load(cu_num_draft_tokens + request - 1, request > 0, other=0)
            num_drafts = tl.load(cu_num_draft_tokens + request) - before

        columns = tl.arange(0, COLUMNS)
        row = sampled_token_ids + request.to(tl.int64) * token_row_stride
        tokens = tl.load(
            row + columns * token_column_stride, columns < max_sampled, other=-1
        )
        samples = (tl.load(discarded + request) == 0) & (end > start)
        valid = (tokens != -1) & (tokens < vocab_size) & samples
        # Not `columns < max_sampled`: what lies beyond was loaded as -1.
        num_sampled = tl.sum(valid.to(tl.int32), 0)
        last = tl.max(tl.where(valid, columns, -1), 0)
        last_token = tl.sum(tl.where(columns == last, tokens, 0), 0).to(tl.int32)
        backup = tl.load(backup_next_token_ids + request)
        num_accepted = tl.minimum(tl.maximum(num_sampled - 1, 0), num_drafts)
        num_rejected = num_drafts - num_accepted

        field = per_request + request * request_stride
        tl.store(field, tl.where(num_sampled > 0, last_token, backup))
        tl.store(field + field_stride, num_sampled)
        tl.store(field + 2 * field_stride, num_accepted)
        tl.store(field + 3 * field_stride, num_rejected)
        tl.store(field + 4 * field_stride, tl.maximum(end - 1 - num_rejected, 0))
        tl.store(field + 5 * field_stride, tl.load(seq_lens + request) - num_rejected)

        kept_end = tl.minimum(end - num_rejected, num_rows)
        for first in range(start, tl.minimum(end, num_padded_rows), ROWS):
            rows = first + tl.arange(0, ROWS)
            slots = tl.load(slot_mapping + rows, rows < kept_end, other=PADDING)
            owned = (rows < end) & (rows < num_padded_rows)
            tl.store(out_slot_mapping + rows, slots, mask=owned)


@_kernel("num_rows")
def pad_rejected_rows(
    # [num_rows] int64, mutated
    slot_mapping: "torch.Tensor",
    num_rows: int,
    # [num_reqs + 1] int32
    query_start_loc: "torch.Tensor",
    # [num_reqs] int32 or int64
    num_rejected_tokens: "torch.Tensor",
    PADDING: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Program ``i`` pads the rejected rows of request ``i``."""
    request = tl.program_id(0)
    num_rejected = tl.load(num_rejected_tokens + request).to(tl.int32)
    own = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1)
    start = tl.maximum(end - num_rejected, own)
    end = tl.minimum(end, num_rows)
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        tl.store(slot_mapping + rows, PADDING, mask=rows < end)


@_kernel()
def _zero_chunks(
    slot_address: int,
    # [NUM_COLUMNS] int64, the plane
    plane: "torch.Tensor",
    WORD: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Zero all chunks of one slot, in words of one width."""
    WORD_BYTES: tl.constexpr = WORD.primitive_bitwidth // 8
    count_0 = tl.load(plane + 9).to(tl.int32)
    stride_0 = tl.load(plane + 10)
    count_1 = tl.load(plane + 11).to(tl.int32)
    stride_1 = tl.load(plane + 12)
    count_2 = tl.load(plane + 13).to(tl.int32)
    stride_2 = tl.load(plane + 14)
    chunk_words = (tl.load(plane + 15) // WORD_BYTES).to(tl.int32)
    num_words = count_0 * count_1 * count_2 * chunk_words
    for first in range(0, num_words, WORDS):
        word = first + tl.arange(0, WORDS)
        chunk = word // chunk_words
        outer = chunk // count_0
        offset = (
            (word % chunk_words) * WORD_BYTES
            + (chunk % count_0).to(tl.int64) * stride_0
            + (outer % count_1).to(tl.int64) * stride_1
            + (outer // count_1).to(tl.int64) * stride_2
        )
        address = (slot_address + offset).to(tl.pointer_type(WORD))
        tl.store(address, tl.zeros([WORDS], WORD), mask=word < num_words)


@_kernel()
def scrub_rejected_slots(
    # [num_planes, NUM_COLUMNS] int64
    planes: "torch.Tensor",
    # [num_reqs + 1] int32
    query_start_loc: "torch.Tensor",
    # [num_reqs] int32 or int64
    num_rejected_tokens: "torch.Tensor",
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
) -> None:
    """Program ``(i, p)`` zeroes the rejected slots of request ``i`` in plane ``p``.

    The literal numbers are columns of the table, the fields of ``SlotPlane`` in order.
    """
    request = tl.program_id(0)
    plane = planes + tl.program_id(1) * COLUMNS
    num_rejected = tl.load(num_rejected_tokens + request).to(tl.int32)
    own = tl.load(query_start_loc + request)
    end = tl.load(query_start_loc + request + 1)
    for row in range(tl.maximum(end - num_rejected, own), end):
        slots = tl.load(plane + 1).to(tl.pointer_type(tl.int64))
        slot = tl.load(slots + row)
        first_slot = tl.maximum(tl.load(plane + 2), 0)
        if (slot >= first_slot) & (slot < tl.load(plane + 3)):
            block_size = tl.load(plane + 4)
            group_size = tl.load(plane + 6)
            offset = slot % block_size
            address = (
                tl.load(plane)
                + slot // block_size * tl.load(plane + 5)
                + offset // group_size * tl.load(plane + 7)
                + offset % group_size * tl.load(plane + 8)
            )
            vector_bytes = tl.load(plane + 16)
            if vector_bytes >= 8:
                _zero_chunks(address, plane, tl.int64, WORDS)
            elif vector_bytes == 4:
                _zero_chunks(address, plane, tl.int32, WORDS)
            elif vector_bytes == 2:
                _zero_chunks(address, plane, tl.int16, WORDS)
            else:
                _zero_chunks(address, plane, tl.int8, WORDS)


@_kernel("num_columns")
def accept_greedily(
    # [num_rows] int64
    target_token_ids: "torch.Tensor",
    # [num_tokens] int32
    input_ids: "torch.Tensor",
    # [num_tokens] int64
    positions: "torch.Tensor",
    # [num_rows] int64
    logits_indices: "torch.Tensor",
    # [num_reqs + 1] int32
    cu_num_logits: "torch.Tensor",
    # [num_reqs] int32
    seq_lens: "torch.Tensor",
    # [num_reqs] int64
    idx_mapping: "torch.Tensor",
    # [max_num_reqs] int32
    prefill_len: "torch.Tensor",
    # [num_reqs, num_columns] int64, mutated
    sampled_token_ids: "torch.Tensor",
    num_columns: int,
    # [num_reqs] int32, mutated
    num_sampled: "torch.Tensor",
    # [num_reqs] int32, mutated
    num_rejected: "torch.Tensor",
    NOTHING: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Program ``i`` verifies request ``i``."""
    request = tl.program_id(0)
    start = tl.load(cu_num_logits + request)
    num_rows = tl.load(cu_num_logits + request + 1) - start
    length = tl.load(prefill_len + tl.load(idx_mapping + request))
    first_position = tl.load(positions + tl.load(logits_indices + start))

    columns = tl.arange(0, COLUMNS)
    targets = tl.load(target_token_ids + start + columns, columns < num_rows, other=-1)
    is_draft = columns + 1 < num_rows
    indices = tl.load(logits_indices + start + columns + 1, is_draft, other=0)
    drafts = tl.load(input_ids + indices, is_draft, other=-1)
    agrees = is_draft & (drafts == targets) & (first_position >= length)
    # The first that does not: at most the last row's, which has no draft token.
    num_accepted = tl.min(tl.where(agrees, COLUMNS, columns), 0)
    samples = tl.load(seq_lens + request) >= length
    count = tl.where(samples, num_accepted + 1, 0)
    tl.store(num_sampled + request, count)
    tl.store(num_rejected + request, tl.where(samples, num_rows - count, 0))
    tl.store(
        sampled_token_ids + request.to(tl.int64) * num_columns + columns,
        tl.where(columns < count, targets, NOTHING),
        mask=columns < num_columns,
    )


@_kernel("num_columns")
def truncate_rows(
    # [num_rows, num_columns], mutated
    logits: "torch.Tensor",
    row_stride: int,
    num_columns: int,
    # [num_rows] int64: of each its request, -1 for none
    idx_mapping: "torch.Tensor",
    # [max_num_reqs] each
    temperature: "torch.Tensor",
    top_k: "torch.Tensor",
    top_p: "torch.Tensor",
    min_p: "torch.Tensor",
    COLUMNS: tl.constexpr,
    HALVINGS: tl.constexpr,
    SPAN: tl.constexpr,
) -> None:
    """Program ``i`` cuts row ``i``."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(idx_mapping + row)
    is_request = request >= 0
    heat = tl.load(temperature + request, mask=is_request, other=0.0)
    most = tl.load(top_k + request, mask=is_request, other=num_columns)
    share = tl.load(top_p + request, mask=is_request, other=1.0)
    least = tl.load(min_p + request, mask=is_request, other=0.0)
    cuts = (most < num_columns) | (share < 1.0) | (least > 0.0)
    if (heat > 0.0) & cuts:
        columns = tl.arange(0, COLUMNS)
        places = logits + row * row_stride + columns
        is_column = columns < num_columns
        values = tl.load(places, mask=is_column, other=float("-inf")).to(tl.float32)
        values = (values - tl.max(values, axis=0)) / heat
        low = tl.maximum(tl.where(least > 0.0, tl.log(least), -SPAN), -SPAN)
        if most < num_columns:
            high = low * 0.0
            for _ in range(HALVINGS):
                middle = 0.5 * (low + high)
                is_enough = tl.sum((values >= middle).to(tl.int32), axis=0) >= most
                low = tl.where(is_enough, middle, low)
                high = tl.where(is_enough, high, middle)
        if share < 1.0:
            weights = tl.where(values >= low, tl.exp(values), 0.0)
            wanted = share * tl.sum(weights, axis=0)
            high = low * 0.0
            for _ in range(HALVINGS):
                middle = 0.5 * (low + high)
                held = tl.sum(tl.where(values >= middle, weights, 0.0), axis=0)
                low = tl.where(held >= wanted, middle, low)
                high = tl.where(held >= wanted, high, middle)
        tl.store(places, float("-inf"), mask=is_column & (values < low))


@_kernel("row_stride", "num_columns")
def keep_rows(
    # [num_rows, num_columns]
    hidden_states: "torch.Tensor",
    row_stride: int,
    # [num_rows] int64
    positions: "torch.Tensor",
    # [num_rows, num_columns], mutated
    kept_hidden_states: "torch.Tensor",
    # [num_rows] int64, mutated
    kept_positions: "torch.Tensor",
    num_columns: int,
    COLUMNS: tl.constexpr,
) -> None:
    """Program ``(i, b)`` copies the ``b``-th block of row ``i``."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    values = tl.load(hidden_states + row * row_stride + columns, mask=is_column)
    place = kept_hidden_states + row * num_columns + columns
    tl.store(place, values, mask=is_column)
    if block == 0:
        tl.store(kept_positions + row, tl.load(positions + row))


@_kernel("token_stride", "draft_stride", "num_drafts")
def score_matches(
    # [max_num_reqs, max_model_len] int32
    token_ids: "torch.Tensor",
    token_stride: int,
    # [max_num_reqs] int32
    total_len: "torch.Tensor",
    # [num_reqs] int64
    idx_mapping: "torch.Tensor",
    # [num_reqs] int32
    num_sampled: "torch.Tensor",
    # [num_reqs, num_drafts or more] int64
    draft_tokens: "torch.Tensor",
    draft_stride: int,
    num_drafts: int,
    # [num_reqs, num_blocks] int64, mutated
    scores: "torch.Tensor",
    MIN_MATCH: tl.constexpr,
    MAX_MATCH: tl.constexpr,
    PLACES: tl.constexpr,
) -> None:
    """Program ``(i, b)`` scores the places of block ``b`` of request ``i``.

    A score is the length of a match, then how far in front it ends; 0 for none.
    """
    request, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = tl.load(idx_mapping + request)
    length = tl.load(total_len + index)
    tokens = token_ids + index * token_stride
    chain = draft_tokens + request * draft_stride
    samples = tl.load(num_sampled + request) > 0
    end = tl.where(samples, length + num_drafts, 0)
    starts = block * PLACES + 1 + tl.arange(0, PLACES)
    agrees = starts < end
    matched = tl.zeros([PLACES], tl.int32)
    most = tl.maximum(MAX_MATCH, MIN_MATCH + num_drafts)
    step = num_drafts * 0
    # Tokens may lie in the host's memory: nothing is read behind the first difference.
    while (step < most) & (tl.max(agrees.to(tl.int32), axis=0) > 0):
        step += 1
        last = end - step
        wanted = tl.load(tokens + last, mask=last < length, other=0)
        drafted = tl.load(chain + (last - length), mask=last >= length, other=0)
        wanted = tl.where(last < length, wanted, drafted.to(tl.int32))
        places = starts - step
        is_token = agrees & (places >= 0) & (places < length)
        is_drafted = agrees & (places >= length)
        found = tl.load(tokens + places, mask=is_token, other=0)
        drafts = tl.load(chain + (places - length), mask=is_drafted, other=0)
        found = tl.where(is_drafted, drafts.to(tl.int32), found)
        agrees = (is_token | is_drafted) & (found == wanted)
        matched += agrees.to(tl.int32)
    score = matched.to(tl.int64) * 4294967296 + (2147483648 - starts.to(tl.int64))
    score = tl.where(matched >= MIN_MATCH + num_drafts, score, 0)
    place = scores + request * tl.num_programs(1) + block
    tl.store(place, tl.max(score, axis=0))


@_kernel(
    "token_stride",
    "draft_stride",
    "num_drafts",
    "num_columns",
    "num_blocks",
    "max_model_len",
    "num_reqs",
)
def continue_drafts(
    # [max_num_reqs, max_model_len] int32
    token_ids: "torch.Tensor",
    token_stride: int,
    # [max_num_reqs] int32
    total_len: "torch.Tensor",
    max_model_len: int,
    # [num_reqs] int64
    idx_mapping: "torch.Tensor",
    # [num_reqs] int32
    num_sampled: "torch.Tensor",
    # [num_reqs, num_columns] int64, mutated
    draft_tokens: "torch.Tensor",
    draft_stride: int,
    num_drafts: int,
    num_columns: int,
    # [num_reqs, num_blocks] int64
    scores: "torch.Tensor",
    num_blocks: int,
    # [max_num_reqs, num_columns] int32, mutated
    kept_tokens: "torch.Tensor",
    # [max_num_reqs] int32, mutated
    kept_total_len: "torch.Tensor",
    # [max_num_reqs] int32, mutated
    kept_num_drafts: "torch.Tensor",
    # [max_num_reqs] int32, mutated
    kept_num_offered: "torch.Tensor",
    # [3, num_reqs] int32, mutated
    counts: "torch.Tensor",
    num_reqs: int,
    FILLER: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Program ``i`` judges the offer before of request ``i`` and makes the next."""
    request = tl.program_id(0).to(tl.int64)
    index = tl.load(idx_mapping + request)
    length = tl.load(total_len + index)
    tokens = token_ids + index * token_stride
    sampled = tl.load(num_sampled + request)
    columns = tl.arange(0, COLUMNS)
    is_column = columns < num_columns
    kept = kept_tokens + index * num_columns + columns

    depth = tl.load(kept_num_drafts + index)
    is_next = tl.load(kept_total_len + index) + sampled == length
    num_offered = tl.load(kept_num_offered + index)
    is_known = is_next & (num_offered > 0)
    num_known = tl.where(is_known, tl.minimum(sampled, depth + num_offered), 0)
    is_known = is_column & (columns < num_known)
    before = tl.load(kept, mask=is_column, other=-1)
    committed = tl.load(tokens + (length - sampled) + columns, mask=is_known, other=-1)
    num_same = tl.min(tl.where(is_known & (committed != before), columns, num_known), 0)
    # The draft in front of an offer counts as one: where it was wrong, both were.
    is_right = (num_known > 0) & (num_same >= depth)
    is_wrong = num_same < tl.minimum(num_known, depth)
    matched = tl.where(is_right, 1 + num_same - depth, 0)
    examined = tl.where(is_right, tl.minimum(num_known - depth, matched) + 1, 0)
    examined = tl.where(is_wrong, 1, examined)

    score = tl.zeros((), tl.int64)
    for first in range(0, num_blocks, BLOCKS):
        blocks = first + tl.arange(0, BLOCKS)
        place = scores + request * num_blocks + blocks
        found = tl.load(place, mask=blocks < num_blocks, other=0)
        score = tl.maximum(score, tl.max(found, axis=0))
    start = (2147483648 - score % 4294967296).to(tl.int32)
    end = length + num_drafts
    room = tl.minimum(num_columns - num_drafts, max_model_len - end)
    offered = tl.maximum(tl.minimum(room, end - start), 0)
    offered = tl.where(score > 0, offered, 0)

    # It may go on into the draft itself, where texts repeat themselves.
    chain = draft_tokens + request * draft_stride
    is_new = is_column & (columns >= num_drafts)
    is_offered = is_new & (columns < num_drafts + offered)
    places = start + columns - num_drafts
    from_text = is_offered & (places < length)
    text = tl.load(tokens + places, mask=from_text, other=FILLER)
    drafted = tl.where(is_offered, places - length, columns)
    from_chain = (is_offered & (places >= length)) | (columns < num_drafts)
    from_chain = is_column & from_chain
    chosen = tl.load(chain + drafted, mask=from_chain, other=FILLER)
    chosen = tl.where(from_text, text.to(tl.int64), chosen)

    tl.store(chain + columns, chosen, mask=is_new)
    tl.store(kept, chosen.to(tl.int32), mask=is_column)
    tl.store(kept_total_len + index, length)
    tl.store(kept_num_drafts + index, num_drafts)
    tl.store(kept_num_offered + index, offered)
    tl.store(counts + request, offered)
    tl.store(counts + num_reqs + request, examined)
    tl.store(counts + 2 * num_reqs + request, matched)
