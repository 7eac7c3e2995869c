// CUDA implementation of greedy verification: one launch on the caller's stream,
// without allocation or synchronisation.
#include "greedy.h"

#include <cuda_runtime.h>

namespace vllm_mtp {
namespace {

constexpr int kWarpThreads = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kBlockWarps = 4;
constexpr int kBlockThreads = kBlockWarps * kWarpThreads;

// Of a request, the same in every lane of the calling warp: a lane looks at a row.
__device__ int64_t num_accepted_drafts(const GreedyStep& step,
                                       const GreedyRequest& request) {
  const int lane = threadIdx.x % kWarpThreads;
  for (int64_t base = 0; base < request.num_rows; base += kWarpThreads) {
    const unsigned others =
        __ballot_sync(kAllLanes, !agrees(step, request, base + lane));
    // The last row has no draft token, so its lane ends this at the latest.
    if (others != 0) return base + __ffs(static_cast<int>(others)) - 1;
  }
  return 0;
}

// One warp per request.
__global__ void __launch_bounds__(kBlockThreads)
    greedy_kernel(const GreedyStep step) {
  const int64_t index = int64_t{blockIdx.x} * kBlockWarps + threadIdx.x / kWarpThreads;
  if (index >= step.num_reqs) return;
  const int lane = threadIdx.x % kWarpThreads;
  const GreedyRequest request = greedy_request(step, index);
  const int64_t count =
      num_sampled_tokens(request, num_accepted_drafts(step, request));
  if (lane == 0) write_counts(step, index, request, count);
  for (int64_t column = lane; column < step.num_columns; column += kWarpThreads) {
    write_token(step, index, request, count, column);
  }
}

}  // namespace

const char* accept_greedily(const GreedyStep& step, void* stream) {
  if (step.num_reqs == 0) return nullptr;
  const int64_t blocks = (step.num_reqs + kBlockWarps - 1) / kBlockWarps;
  greedy_kernel<<<static_cast<unsigned>(blocks), kBlockThreads, 0,
                  static_cast<cudaStream_t>(stream)>>>(step);
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace vllm_mtp
