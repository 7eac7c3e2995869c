// Greedy verification, without torch: arguments, and what the CPU and the CUDA
// implementation share. vllm_mtp/kernels/reference.py is the specification.
#pragma once

#include "rollback.h"

namespace vllm_mtp {

// The fields of vllm_mtp.records.GreedyStep, and what is written.
struct GreedyStep {
  const int64_t* target_token_ids;  // [num_rows]
  const int32_t* input_ids;         // [num_tokens]
  const int64_t* positions;         // [num_tokens]
  const int64_t* logits_indices;    // [num_rows]
  const int32_t* cu_num_logits;     // [num_reqs + 1]
  const int32_t* seq_lens;          // [num_reqs]
  const int64_t* idx_mapping;       // [num_reqs]
  const int32_t* prefill_len;       // [max_num_reqs]
  int64_t num_reqs;
  int64_t num_columns;
  int64_t* sampled_token_ids;  // [num_reqs, num_columns]
  int32_t* num_sampled;        // [num_reqs]
  int32_t* num_rejected;       // [num_reqs]
};

// Returns null, or why nothing was done. `stream` as in rollback.h.
const char* accept_greedily(const GreedyStep& step, void* stream);

// What is known of a request before its tokens are looked at.
struct GreedyRequest {
  int64_t start;     // its first row
  int64_t num_rows;  // that of its newest token, and its drafts
  bool has_drafted;  // else its drafts are placeholders
  bool samples;      // else its prompt goes on
};

VLLM_MTP_HOST_DEVICE GreedyRequest greedy_request(const GreedyStep& step,
                                                  int64_t request) {
  const int64_t start = step.cu_num_logits[request];
  const int64_t end = step.cu_num_logits[request + 1];
  const int64_t prefill_len = step.prefill_len[step.idx_mapping[request]];
  return {start, end - start,
          step.positions[step.logits_indices[start]] >= prefill_len,
          step.seq_lens[request] >= prefill_len};
}

// Whether the draft token behind row `column` of a request is what the target chose.
VLLM_MTP_HOST_DEVICE bool agrees(const GreedyStep& step, const GreedyRequest& request,
                                 int64_t column) {
  if (!request.has_drafted || column + 1 >= request.num_rows) return false;
  const int64_t row = request.start + column;
  return step.input_ids[step.logits_indices[row + 1]] == step.target_token_ids[row];
}

VLLM_MTP_HOST_DEVICE int64_t num_sampled_tokens(const GreedyRequest& request,
                                                int64_t num_accepted) {
  return request.samples ? num_accepted + 1 : 0;
}

VLLM_MTP_HOST_DEVICE void write_counts(const GreedyStep& step, int64_t index,
                                       const GreedyRequest& request, int64_t count) {
  step.num_sampled[index] = static_cast<int32_t>(count);
  step.num_rejected[index] =
      request.samples ? static_cast<int32_t>(request.num_rows - count) : 0;
}

// Column `column` of a request's tokens.
VLLM_MTP_HOST_DEVICE void write_token(const GreedyStep& step, int64_t index,
                                      const GreedyRequest& request, int64_t count,
                                      int64_t column) {
  step.sampled_token_ids[index * step.num_columns + column] =
      column < count ? step.target_token_ids[request.start + column] : kNotSampled;
}

}  // namespace vllm_mtp
