// Rollback of rejected draft tokens, without torch: arguments, and what the CPU and the
// CUDA implementation share. vllm_mtp/kernels/reference.py is the specification.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define VLLM_MTP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define VLLM_MTP_HOST_DEVICE inline
#endif

namespace vllm_mtp {

// Slot of a row whose keys and values are not written, and token that was not sampled.
constexpr int64_t kPaddingSlot = -1;
constexpr int64_t kNotSampled = -1;

// Rows of per_request: the fields of vllm_mtp.records.RolledBack, in order.
enum Output : int64_t {
  kNextTokenId,
  kNumSampled,
  kNumAccepted,
  kNumRejected,
  kLastValidRow,
  kSeqLen,
  kNumOutputs,
};

// A row of the plane table; the fields are those of vllm_mtp.kernels.planes.SlotPlane.
struct SlotPlane {
  int64_t base_address;
  int64_t slot_mapping_address;
  int64_t first_slot;
  int64_t num_slots;
  int64_t block_size;
  int64_t block_stride;
  int64_t group_size;
  int64_t group_stride;
  int64_t slot_stride;
  int64_t count_0;
  int64_t stride_0;
  int64_t count_1;
  int64_t stride_1;
  int64_t count_2;
  int64_t stride_2;
  int64_t chunk_bytes;
  int64_t vector_bytes;
};
constexpr int64_t kNumColumns = 17;
static_assert(sizeof(SlotPlane) == kNumColumns * sizeof(int64_t));
static_assert(offsetof(SlotPlane, vector_bytes) == 16 * sizeof(int64_t));

// Token is int32_t or int64_t. Strides are elements.
template <typename Token>
struct MetadataRollback {
  const Token* sampled_token_ids;  // [num_reqs, max_sampled]
  int64_t sampled_row_stride;
  int64_t sampled_column_stride;
  int64_t max_sampled;
  const int32_t* cu_num_draft_tokens;  // [num_reqs], or null: no request had drafts
  const bool* discarded;               // [num_reqs]
  const int32_t* backup_next_token_ids;  // [num_reqs]
  const int32_t* query_start_loc;        // [num_reqs + 1]
  const int32_t* seq_lens;               // [num_reqs]
  const int64_t* slot_mapping;           // [num_rows]
  int64_t num_reqs;
  int64_t num_rows;
  int64_t vocab_size;
  int32_t* per_request;  // [kNumOutputs, num_reqs]
  int64_t per_request_row_stride;
  int64_t per_request_column_stride;
  int64_t* out_slot_mapping;  // [num_out_rows], num_out_rows >= num_rows
  int64_t num_out_rows;
};

// Count is int32_t or int64_t.
template <typename Count>
struct RejectedRows {
  const int32_t* query_start_loc;    // [num_reqs + 1]
  const Count* num_rejected_tokens;  // [num_reqs]
  int64_t num_reqs;
};

// Rows first .. end - 1.
struct RowRange {
  int64_t first;
  int64_t end;
};

// Each returns null, or why nothing was done. `stream` is a cudaStream_t; the CPU has
// none. Implemented for both Token and both Count types.
template <typename Token>
const char* rollback_metadata(const MetadataRollback<Token>& step, void* stream);
template <typename Count>
const char* pad_rejected_rows(const RejectedRows<Count>& rejected,
                              int64_t* slot_mapping, int64_t num_rows, void* stream);
template <typename Count>
const char* scrub_rejected_slots(const RejectedRows<Count>& rejected,
                                 const SlotPlane* planes, int64_t num_planes,
                                 void* stream);

VLLM_MTP_HOST_DEVICE int64_t at_least(int64_t value, int64_t minimum) {
  return value > minimum ? value : minimum;
}

VLLM_MTP_HOST_DEVICE int64_t at_most(int64_t value, int64_t maximum) {
  return value < maximum ? value : maximum;
}

template <typename Token>
VLLM_MTP_HOST_DEVICE int64_t num_draft_tokens(const MetadataRollback<Token>& step,
                                              int64_t request) {
  if (step.cu_num_draft_tokens == nullptr) return 0;
  const int64_t before = request > 0 ? step.cu_num_draft_tokens[request - 1] : 0;
  return step.cu_num_draft_tokens[request] - before;
}

VLLM_MTP_HOST_DEVICE int64_t num_accepted_tokens(int64_t num_sampled,
                                                 int64_t num_drafts) {
  return at_most(at_least(num_sampled - 1, 0), num_drafts);
}

// `last_token` counts only where num_sampled > 0.
template <typename Token>
VLLM_MTP_HOST_DEVICE void write_outputs(const MetadataRollback<Token>& step,
                                        int64_t request, int64_t num_sampled,
                                        int64_t num_accepted, int64_t num_rejected,
                                        int64_t last_token) {
  const int64_t end = step.query_start_loc[request + 1];
  const int64_t stride = step.per_request_row_stride;
  int32_t* out = step.per_request + request * step.per_request_column_stride;
  out[kNextTokenId * stride] = num_sampled > 0
                                   ? static_cast<int32_t>(last_token)
                                   : step.backup_next_token_ids[request];
  out[kNumSampled * stride] = static_cast<int32_t>(num_sampled);
  out[kNumAccepted * stride] = static_cast<int32_t>(num_accepted);
  out[kNumRejected * stride] = static_cast<int32_t>(num_rejected);
  out[kLastValidRow * stride] =
      static_cast<int32_t>(at_least(end - 1 - num_rejected, 0));
  out[kSeqLen * stride] = static_cast<int32_t>(step.seq_lens[request] - num_rejected);
}

// Never more than a request's own rows, so that no count can reach another's.
template <typename Count>
VLLM_MTP_HOST_DEVICE RowRange rejected_rows(const RejectedRows<Count>& rejected,
                                            int64_t request) {
  const int64_t first = rejected.query_start_loc[request];
  const int64_t end = rejected.query_start_loc[request + 1];
  const int64_t count = rejected.num_rejected_tokens[request];
  return {at_least(end - count, first), end};
}

// Padding and the null block lie below, slots that do not exist at or above.
VLLM_MTP_HOST_DEVICE bool may_scrub(const SlotPlane& plane, int64_t slot) {
  return slot >= at_least(plane.first_slot, 0) && slot < plane.num_slots;
}

// Address of the slot's first chunk.
VLLM_MTP_HOST_DEVICE int64_t slot_address(const SlotPlane& plane, int64_t slot) {
  const int64_t block = slot / plane.block_size;
  const int64_t offset = slot - block * plane.block_size;
  // Most layouts have one group, and a 64-bit division costs more than the rest.
  const int64_t group = offset < plane.group_size ? 0 : offset / plane.group_size;
  const int64_t in_group = offset - group * plane.group_size;
  return plane.base_address + block * plane.block_stride + group * plane.group_stride +
         in_group * plane.slot_stride;
}

}  // namespace vllm_mtp
