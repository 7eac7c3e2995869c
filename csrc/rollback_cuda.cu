// CUDA implementation. Every op is one launch on the caller's stream, without
// allocation or synchronisation, so that a CUDA graph can capture it. The host knows no
// counts: grids follow from sizes alone, and a thread block without work returns.
#include "rollback.h"

#include <cuda_runtime.h>

namespace vllm_mtp {
namespace {

constexpr int kWarpThreads = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kBlockWarps = 4;
constexpr int kBlockThreads = kBlockWarps * kWarpThreads;

// Metadata: a long prefill gets several thread blocks, one per this many rows of the
// step, each of which counts again rather than wait for another.
constexpr int64_t kRowsPerSplit = 1024;
constexpr int64_t kMaxSplits = 16;

// Scrub: about two waves of thread blocks on the largest GPUs; warps loop over the rest
// of the planes, whose rows they have read already.
constexpr int64_t kMaxScrubBlocks = 2048;
// Below this many (request, plane) pairs a block is one warp: as many SMs as possible.
constexpr int64_t kManyPairs = 1024;

int64_t ceil_div(int64_t value, int64_t divisor) {
  return (value + divisor - 1) / divisor;
}

const char* launch_error() {
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

struct Sampled {
  int64_t count = 0;
  int64_t last_token = kNotSampled;
};

// Of a request whose tokens count; the same in every lane of the calling warp.
template <typename Token>
__device__ Sampled sampled_tokens(const MetadataRollback<Token>& step,
                                  int64_t request, bool samples) {
  const Token* tokens = step.sampled_token_ids + request * step.sampled_row_stride;
  const int lane = threadIdx.x % kWarpThreads;
  Sampled sampled;
#pragma unroll 1
  for (int64_t base = 0; base < step.max_sampled; base += kWarpThreads) {
    const int64_t column = base + lane;
    // Read whether or not the request samples: the load need not wait for that.
    const int64_t token = column < step.max_sampled
                              ? int64_t{tokens[column * step.sampled_column_stride]}
                              : kNotSampled;
    const bool valid = samples && token != kNotSampled && token < step.vocab_size;
    const unsigned valid_lanes = __ballot_sync(kAllLanes, valid);
    if (valid_lanes == 0) continue;
    const int last_lane = kWarpThreads - 1 - __clz(static_cast<int>(valid_lanes));
    sampled.count += __popc(valid_lanes);
    sampled.last_token = __shfl_sync(kAllLanes, token, last_lane);
  }
  return sampled;
}

// Every `stride`-th of `rows`: its slot where it is kept, else padding. Several rows
// are read before they are written, so that the reads wait together.
__device__ void copy_slots(const int64_t* slots, RowRange kept, RowRange rows,
                           int64_t stride, int64_t* out) {
  constexpr int kBatch = 4;
#pragma unroll 1
  for (int64_t base = rows.first; base < rows.end; base += kBatch * stride) {
    int64_t batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t row = base + i * stride;
      const bool keeps = row >= kept.first && row < kept.end;
      batch[i] = keeps ? slots[row] : kPaddingSlot;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t row = base + i * stride;
      if (row < rows.end) out[row] = batch[i];
    }
  }
}

// Block (i, j): part j of request i's rows; i == num_reqs: rows that nobody owns.
template <typename Token>
__global__ void __launch_bounds__(kBlockThreads)
    metadata_kernel(const MetadataRollback<Token> step) {
  const int64_t request = blockIdx.x;
  const int64_t part = int64_t{blockIdx.y} * kBlockThreads;
  const int64_t stride = int64_t{gridDim.y} * kBlockThreads;
  if (request == step.num_reqs) {
    const int64_t first = request > 0 ? step.query_start_loc[request] : 0;
#pragma unroll 1
    for (int64_t row = first + part + threadIdx.x; row < step.num_out_rows;
         row += stride) {
      step.out_slot_mapping[row] = kPaddingSlot;
    }
    return;
  }

  const int64_t start = step.query_start_loc[request];
  const int64_t end = step.query_start_loc[request + 1];
  // Rows before the first request belong to nobody; it pads them.
  const int64_t first = request > 0 ? start : 0;
  if (blockIdx.y > 0 && first + part >= end) return;

  // Each warp counts for itself: cheaper than to share a count. Everything is read
  // before the vote of the lanes, which no read could be moved across.
  const int64_t num_drafts = num_draft_tokens(step, request);
  const bool samples = !step.discarded[request] & (end > start);
  const Sampled sampled = sampled_tokens(step, request, samples);
  const int64_t num_accepted = num_accepted_tokens(sampled.count, num_drafts);
  const int64_t num_rejected = num_drafts - num_accepted;
  if (blockIdx.y == 0 && threadIdx.x == 0) {
    write_outputs(step, request, sampled.count, num_accepted, num_rejected,
                  sampled.last_token);
  }

  const RowRange kept{start, at_most(end - num_rejected, step.num_rows)};
  const RowRange part_rows{first + part + threadIdx.x, at_most(end, step.num_out_rows)};
  copy_slots(step.slot_mapping, kept, part_rows, stride, step.out_slot_mapping);
}

// One warp per request.
template <typename Count>
__global__ void __launch_bounds__(kBlockThreads)
    pad_kernel(const RejectedRows<Count> rejected, int64_t* slot_mapping,
               const int64_t num_rows) {
  const int64_t request =
      int64_t{blockIdx.x} * kBlockWarps + threadIdx.x / kWarpThreads;
  if (request >= rejected.num_reqs) return;
  const RowRange rows = rejected_rows(rejected, request);
  const int64_t end = at_most(rows.end, num_rows);
  for (int64_t row = rows.first + threadIdx.x % kWarpThreads; row < end;
       row += kWarpThreads) {
    slot_mapping[row] = kPaddingSlot;
  }
}

// Byte offset of the plane's vector `index` from the address of its slot. 32 bits: a
// slot of 4 GiB does not exist, and 64-bit divisions are slow.
template <typename Vector>
__device__ int64_t vector_offset(const SlotPlane& plane, uint32_t index) {
  const auto chunk_vectors = static_cast<uint32_t>(plane.chunk_bytes / sizeof(Vector));
  const auto count_0 = static_cast<uint32_t>(plane.count_0);
  const auto count_1 = static_cast<uint32_t>(plane.count_1);
  const uint32_t chunk = index / chunk_vectors;
  const uint32_t in_chunk = index - chunk * chunk_vectors;
  const uint32_t outer = chunk / count_0;
  const uint32_t i_0 = chunk - outer * count_0;
  const uint32_t i_2 = outer / count_1;
  const uint32_t i_1 = outer - i_2 * count_1;
  return int64_t{in_chunk} * int64_t{sizeof(Vector)} + i_0 * plane.stride_0 +
         i_1 * plane.stride_1 + i_2 * plane.stride_2;
}

// Zeroes up to 32 slots of a plane: those whose lane is set in `slots`, at that lane's
// `address`. Rows are the inner loop, since an offset costs divisions and a row a
// shuffle.
template <typename Vector>
__device__ void zero_slots(const SlotPlane& plane, unsigned slots, int64_t address) {
  const int64_t num_chunks = plane.count_0 * plane.count_1 * plane.count_2;
  const auto num_vectors =
      static_cast<uint32_t>(num_chunks * (plane.chunk_bytes / sizeof(Vector)));
  const uint32_t lane = threadIdx.x % kWarpThreads;
  for (uint32_t base = 0; base < num_vectors; base += kWarpThreads) {
    const uint32_t index = base + lane;
    const int64_t offset = vector_offset<Vector>(plane, index);
    for (unsigned left = slots; left != 0; left &= left - 1) {
      // All lanes take part in the shuffle, also those past the last vector.
      const int64_t slot = __shfl_sync(kAllLanes, address, __ffs(left) - 1);
      if (index < num_vectors) {
        *reinterpret_cast<Vector*>(slot + offset) = Vector{};
      }
    }
  }
}

__device__ void zero_slots(const SlotPlane& plane, unsigned slots, int64_t address) {
  switch (plane.vector_bytes) {
    case 16: return zero_slots<uint4>(plane, slots, address);
    case 8: return zero_slots<uint2>(plane, slots, address);
    case 4: return zero_slots<uint32_t>(plane, slots, address);
    case 2: return zero_slots<uint16_t>(plane, slots, address);
    default: return zero_slots<uint8_t>(plane, slots, address);
  }
}

// A warp zeroes the rejected rows of one plane, 32 rows at a time.
__device__ void zero_rows(const SlotPlane& plane, RowRange rows) {
  const auto* mapping = reinterpret_cast<const int64_t*>(plane.slot_mapping_address);
  for (int64_t base = rows.first; base < rows.end; base += kWarpThreads) {
    const int64_t row = base + threadIdx.x % kWarpThreads;
    const int64_t slot = row < rows.end ? mapping[row] : kPaddingSlot;
    const bool scrubs = may_scrub(plane, slot);
    const unsigned slots = __ballot_sync(kAllLanes, scrubs);
    if (slots == 0) continue;
    const int64_t address = scrubs ? slot_address(plane, slot) : 0;
    // Divisions may have parted the lanes; the shuffles need all of them.
    __syncwarp();
    zero_slots(plane, slots, address);
  }
}

// Block (i, j): planes j * warps .. of request i, a warp each, and every gridDim.y-th
// such group after that.
template <typename Count>
__global__ void __launch_bounds__(kBlockThreads)
    scrub_kernel(const RejectedRows<Count> rejected,
                 const SlotPlane* __restrict__ planes, const int64_t num_planes) {
  const RowRange rows = rejected_rows(rejected, blockIdx.x);
  if (rows.first >= rows.end) return;
  const unsigned num_warps = blockDim.x / kWarpThreads;
  const unsigned warp = threadIdx.x / kWarpThreads;
  for (int64_t plane = int64_t{blockIdx.y} * num_warps + warp; plane < num_planes;
       plane += int64_t{gridDim.y} * num_warps) {
    // A copy, since the compiler cannot know that no store reaches the table.
    const SlotPlane copy = planes[plane];
    zero_rows(copy, rows);
  }
}

dim3 grid(int64_t x, int64_t y) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

}  // namespace

template <typename Token>
const char* rollback_metadata(const MetadataRollback<Token>& step, void* stream) {
  const int64_t splits =
      at_least(at_most(ceil_div(step.num_out_rows, kRowsPerSplit), kMaxSplits), 1);
  metadata_kernel<<<grid(step.num_reqs + 1, splits), kBlockThreads, 0,
                    static_cast<cudaStream_t>(stream)>>>(step);
  return launch_error();
}

template <typename Count>
const char* pad_rejected_rows(const RejectedRows<Count>& rejected,
                              int64_t* slot_mapping, int64_t num_rows, void* stream) {
  if (rejected.num_reqs == 0) return nullptr;
  const int64_t blocks = ceil_div(rejected.num_reqs, kBlockWarps);
  pad_kernel<<<grid(blocks, 1), kBlockThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      rejected, slot_mapping, num_rows);
  return launch_error();
}

template <typename Count>
const char* scrub_rejected_slots(const RejectedRows<Count>& rejected,
                                 const SlotPlane* planes, int64_t num_planes,
                                 void* stream) {
  if (rejected.num_reqs == 0 || num_planes == 0) return nullptr;
  const int64_t warps = rejected.num_reqs * num_planes < kManyPairs ? 1 : kBlockWarps;
  const int64_t max_groups = at_least(kMaxScrubBlocks / rejected.num_reqs, 1);
  const int64_t groups = at_most(ceil_div(num_planes, warps), max_groups);
  scrub_kernel<<<grid(rejected.num_reqs, groups),
                 static_cast<unsigned>(warps * kWarpThreads), 0,
                 static_cast<cudaStream_t>(stream)>>>(rejected, planes, num_planes);
  return launch_error();
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
