// CPU implementation. One thread: the work is microseconds, and the OpenMP threads
// belong to vLLM's CPU engine.
#include "rollback.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace vllm_mtp {
namespace {

struct Sampled {
  int64_t count = 0;
  int64_t last_token = kNotSampled;
};

template <typename Token>
Sampled sampled_tokens(const MetadataRollback<Token>& step, int64_t request) {
  const int64_t num_rows =
      step.query_start_loc[request + 1] - int64_t{step.query_start_loc[request]};
  Sampled sampled;
  if (step.discarded[request] || num_rows <= 0) return sampled;
  const Token* tokens = step.sampled_token_ids + request * step.sampled_row_stride;
  for (int64_t column = 0; column < step.max_sampled; ++column) {
    const int64_t token = tokens[column * step.sampled_column_stride];
    if (token == kNotSampled || token >= step.vocab_size) continue;
    ++sampled.count;
    sampled.last_token = token;
  }
  return sampled;
}

template <typename Count>
std::vector<RowRange> all_rejected_rows(const RejectedRows<Count>& rejected) {
  std::vector<RowRange> ranges;
  for (int64_t request = 0; request < rejected.num_reqs; ++request) {
    const RowRange rows = rejected_rows(rejected, request);
    if (rows.first < rows.end) ranges.push_back(rows);
  }
  return ranges;
}

struct Memset {
  size_t num_bytes;
  void operator()(char* chunk) const { std::memset(chunk, 0, num_bytes); }
};

// One store; memcpy because a plane promises no alignment to the compiler.
template <typename Word>
struct Store {
  void operator()(char* chunk) const {
    const Word zero = 0;
    std::memcpy(chunk, &zero, sizeof zero);
  }
};

template <typename ZeroChunk>
void zero_slot(const SlotPlane& plane, char* slot, ZeroChunk zero_chunk) {
  for (int64_t i_2 = 0; i_2 < plane.count_2; ++i_2) {
    for (int64_t i_1 = 0; i_1 < plane.count_1; ++i_1) {
      char* chunk = slot + i_2 * plane.stride_2 + i_1 * plane.stride_1;
      for (int64_t i_0 = 0; i_0 < plane.count_0; ++i_0, chunk += plane.stride_0) {
        zero_chunk(chunk);
      }
    }
  }
}

template <typename ZeroChunk>
void zero_rows(const SlotPlane& plane, const std::vector<RowRange>& ranges,
               ZeroChunk zero_chunk) {
  const auto* slots = reinterpret_cast<const int64_t*>(plane.slot_mapping_address);
  for (const RowRange& rows : ranges) {
    for (int64_t row = rows.first; row < rows.end; ++row) {
      if (!may_scrub(plane, slots[row])) continue;
      auto* slot = reinterpret_cast<char*>(slot_address(plane, slots[row]));
      zero_slot(plane, slot, zero_chunk);
    }
  }
}

// vLLM packs CPU keys for vector units: a chunk is one element, or two.
void zero_rows(const SlotPlane& plane, const std::vector<RowRange>& ranges) {
  switch (plane.chunk_bytes) {
    case 1: return zero_rows(plane, ranges, Store<uint8_t>{});
    case 2: return zero_rows(plane, ranges, Store<uint16_t>{});
    case 4: return zero_rows(plane, ranges, Store<uint32_t>{});
    case 8: return zero_rows(plane, ranges, Store<uint64_t>{});
    default:
      return zero_rows(plane, ranges, Memset{static_cast<size_t>(plane.chunk_bytes)});
  }
}

}  // namespace

template <typename Token>
const char* rollback_metadata(const MetadataRollback<Token>& step, void*) {
  std::fill_n(step.out_slot_mapping, step.num_out_rows, kPaddingSlot);
  const int64_t num_rows = std::min(step.num_rows, step.num_out_rows);
  for (int64_t request = 0; request < step.num_reqs; ++request) {
    const Sampled sampled = sampled_tokens(step, request);
    const int64_t num_drafts = num_draft_tokens(step, request);
    const int64_t num_accepted = num_accepted_tokens(sampled.count, num_drafts);
    const int64_t num_rejected = num_drafts - num_accepted;
    write_outputs(step, request, sampled.count, num_accepted, num_rejected,
                  sampled.last_token);
    const int64_t first = at_least(step.query_start_loc[request], 0);
    const int64_t end =
        at_most(step.query_start_loc[request + 1] - num_rejected, num_rows);
    if (first >= end) continue;
    std::copy(step.slot_mapping + first, step.slot_mapping + end,
              step.out_slot_mapping + first);
  }
  return nullptr;
}

template <typename Count>
const char* pad_rejected_rows(const RejectedRows<Count>& rejected,
                              int64_t* slot_mapping, int64_t num_rows, void*) {
  for (int64_t request = 0; request < rejected.num_reqs; ++request) {
    const RowRange rows = rejected_rows(rejected, request);
    const int64_t end = std::min(rows.end, num_rows);
    if (rows.first >= end) continue;
    std::fill(slot_mapping + rows.first, slot_mapping + end, kPaddingSlot);
  }
  return nullptr;
}

template <typename Count>
const char* scrub_rejected_slots(const RejectedRows<Count>& rejected,
                                 const SlotPlane* planes, int64_t num_planes, void*) {
  const std::vector<RowRange> ranges = all_rejected_rows(rejected);
  if (ranges.empty()) return nullptr;
  for (int64_t plane = 0; plane < num_planes; ++plane) {
    zero_rows(planes[plane], ranges);
  }
  return nullptr;
}

#define INSTANTIATE(Integer)                                                          \
  template const char* rollback_metadata(const MetadataRollback<Integer>&, void*);    \
  template const char* pad_rejected_rows(const RejectedRows<Integer>&, int64_t*,      \
                                         int64_t, void*);                             \
  template const char* scrub_rejected_slots(const RejectedRows<Integer>&,             \
                                            const SlotPlane*, int64_t, void*);
INSTANTIATE(int32_t)
INSTANTIATE(int64_t)
#undef INSTANTIATE

}  // namespace vllm_mtp
