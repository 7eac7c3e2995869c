// Registers one device's implementation of the ops that vllm_mtp/kernels/schemas.py
// defines. Compiled once for the CPU and, with USE_CUDA, once for CUDA. Only PyTorch's
// stable ABI is used, so that one build serves several versions of torch.
#include "greedy.h"
#include "rollback.h"

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

namespace vllm_mtp {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

#ifdef USE_CUDA
// Makes the tensor's device current and holds torch's stream on it.
class Launch {
 public:
  explicit Launch(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    // Not STABLE_TORCH_ERROR_CODE_CHECK, which headers before torch 2.13 lack.
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_));
  }
  void* stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

bool on_our_device(const Tensor& tensor) { return tensor.is_cuda(); }
#else
class Launch {
 public:
  explicit Launch(const Tensor&) {}
  void* stream() const { return nullptr; }
};

bool on_our_device(const Tensor& tensor) { return tensor.is_cpu(); }
#endif

template <typename T>
constexpr ScalarType kScalarType = ScalarType::Undefined;
template <>
constexpr ScalarType kScalarType<bool> = ScalarType::Bool;
template <>
constexpr ScalarType kScalarType<int32_t> = ScalarType::Int;
template <>
constexpr ScalarType kScalarType<int64_t> = ScalarType::Long;

// A wrong device would be a wild pointer: checked, like the dtype.
template <typename T>
T* data(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(on_our_device(tensor), name, " is not on the op's device");
  STD_TORCH_CHECK(tensor.scalar_type() == kScalarType<T>, name, " is ",
                  torch::headeronly::toString(tensor.scalar_type()), ", must be ",
                  torch::headeronly::toString(kScalarType<T>));
  return static_cast<T*>(tensor.data_ptr());
}

// For what the kernels read without strides.
template <typename T>
T* dense(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous");
  return data<T>(tensor, name);
}

template <typename Token>
void metadata(const Tensor& sampled, const std::optional<Tensor>& cu_num_drafts,
              const Tensor& discarded, const Tensor& backup,
              const Tensor& query_start_loc, const Tensor& seq_lens,
              const Tensor& slot_mapping, int64_t vocab_size,
              const Tensor& per_request, const Tensor& out_slot_mapping) {
  const MetadataRollback<Token> step{
      .sampled_token_ids = data<Token>(sampled, "sampled_token_ids"),
      .sampled_row_stride = sampled.stride(0),
      .sampled_column_stride = sampled.stride(1),
      .max_sampled = sampled.size(1),
      .cu_num_draft_tokens =
          cu_num_drafts ? dense<int32_t>(*cu_num_drafts, "cu_num_draft_tokens")
                        : nullptr,
      .discarded = dense<bool>(discarded, "discarded"),
      .backup_next_token_ids = dense<int32_t>(backup, "backup_next_token_ids"),
      .query_start_loc = dense<int32_t>(query_start_loc, "query_start_loc"),
      .seq_lens = dense<int32_t>(seq_lens, "seq_lens"),
      .slot_mapping = dense<int64_t>(slot_mapping, "slot_mapping"),
      .num_reqs = discarded.size(0),
      .num_rows = slot_mapping.size(0),
      .vocab_size = vocab_size,
      .per_request = data<int32_t>(per_request, "per_request"),
      .per_request_row_stride = per_request.stride(0),
      .per_request_column_stride = per_request.stride(1),
      .out_slot_mapping = dense<int64_t>(out_slot_mapping, "out_slot_mapping"),
      .num_out_rows = out_slot_mapping.size(0),
  };
  const Launch launch(out_slot_mapping);
  const char* error = rollback_metadata(step, launch.stream());
  STD_TORCH_CHECK(error == nullptr, error);
}

template <typename Count>
RejectedRows<Count> rejected(const Tensor& query_start_loc,
                             const Tensor& num_rejected) {
  return {dense<int32_t>(query_start_loc, "query_start_loc"),
          dense<Count>(num_rejected, "num_rejected_tokens"), num_rejected.size(0)};
}

template <typename Count>
void pad(const Tensor& slot_mapping, const Tensor& query_start_loc,
         const Tensor& num_rejected) {
  const auto rows = rejected<Count>(query_start_loc, num_rejected);
  auto* slots = dense<int64_t>(slot_mapping, "slot_mapping");
  const Launch launch(slot_mapping);
  const char* error =
      pad_rejected_rows(rows, slots, slot_mapping.size(0), launch.stream());
  STD_TORCH_CHECK(error == nullptr, error);
}

template <typename Count>
void scrub(const Tensor& planes, const Tensor& query_start_loc,
           const Tensor& num_rejected) {
  const auto rows = rejected<Count>(query_start_loc, num_rejected);
  STD_TORCH_CHECK(planes.size(1) == kNumColumns, "planes has ", planes.size(1),
                  " columns, must have ", kNumColumns);
  auto* table = reinterpret_cast<const SlotPlane*>(dense<int64_t>(planes, "planes"));
  const Launch launch(planes);
  const char* error =
      scrub_rejected_slots(rows, table, planes.size(0), launch.stream());
  STD_TORCH_CHECK(error == nullptr, error);
}

bool is_int64(const Tensor& tensor) { return tensor.scalar_type() == ScalarType::Long; }

void rollback_metadata_op(const Tensor& sampled,
                          const std::optional<Tensor>& cu_num_drafts,
                          const Tensor& discarded, const Tensor& backup,
                          const Tensor& query_start_loc, const Tensor& seq_lens,
                          const Tensor& slot_mapping, int64_t vocab_size,
                          const Tensor& per_request, const Tensor& out_slot_mapping) {
  const auto run = is_int64(sampled) ? metadata<int64_t> : metadata<int32_t>;
  run(sampled, cu_num_drafts, discarded, backup, query_start_loc, seq_lens,
      slot_mapping, vocab_size, per_request, out_slot_mapping);
}

void pad_rejected_rows_op(const Tensor& slot_mapping, const Tensor& query_start_loc,
                          const Tensor& num_rejected) {
  const auto run = is_int64(num_rejected) ? pad<int64_t> : pad<int32_t>;
  run(slot_mapping, query_start_loc, num_rejected);
}

// The table holds every address; the tensors are there so that torch knows what is read
// and mutated.
void scrub_rejected_slots_op(const std::vector<Tensor>&, const std::vector<Tensor>&,
                             const Tensor& planes, const Tensor& query_start_loc,
                             const Tensor& num_rejected) {
  const auto run = is_int64(num_rejected) ? scrub<int64_t> : scrub<int32_t>;
  run(planes, query_start_loc, num_rejected);
}

void accept_greedily_op(const Tensor& target_token_ids, const Tensor& input_ids,
                        const Tensor& positions, const Tensor& logits_indices,
                        const Tensor& cu_num_logits, const Tensor& seq_lens,
                        const Tensor& idx_mapping, const Tensor& prefill_len,
                        const Tensor& sampled, const Tensor& num_sampled,
                        const Tensor& num_rejected) {
  const GreedyStep step{
      .target_token_ids = dense<int64_t>(target_token_ids, "target_token_ids"),
      .input_ids = dense<int32_t>(input_ids, "input_ids"),
      .positions = dense<int64_t>(positions, "positions"),
      .logits_indices = dense<int64_t>(logits_indices, "logits_indices"),
      .cu_num_logits = dense<int32_t>(cu_num_logits, "cu_num_logits"),
      .seq_lens = dense<int32_t>(seq_lens, "seq_lens"),
      .idx_mapping = dense<int64_t>(idx_mapping, "idx_mapping"),
      .prefill_len = dense<int32_t>(prefill_len, "prefill_len"),
      .num_reqs = sampled.size(0),
      .num_columns = sampled.size(1),
      .sampled_token_ids = dense<int64_t>(sampled, "sampled_token_ids"),
      .num_sampled = dense<int32_t>(num_sampled, "num_sampled"),
      .num_rejected = dense<int32_t>(num_rejected, "num_rejected"),
  };
  const Launch launch(sampled);
  const char* error = accept_greedily(step, launch.stream());
  STD_TORCH_CHECK(error == nullptr, error);
}

#define REGISTER(ops)                                                     \
  ops.impl("rollback_metadata", TORCH_BOX(&rollback_metadata_op));        \
  ops.impl("pad_rejected_rows", TORCH_BOX(&pad_rejected_rows_op));        \
  ops.impl("scrub_rejected_slots", TORCH_BOX(&scrub_rejected_slots_op));  \
  ops.impl("accept_greedily", TORCH_BOX(&accept_greedily_op));

#ifdef USE_CUDA
STABLE_TORCH_LIBRARY_IMPL(vllm_mtp, CUDA, ops) { REGISTER(ops) }
#else
STABLE_TORCH_LIBRARY_IMPL(vllm_mtp, CPU, ops) { REGISTER(ops) }
#endif

}  // namespace
}  // namespace vllm_mtp
