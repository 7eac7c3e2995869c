// CPU implementation of greedy verification. One thread, like rollback_cpu.cpp.
#include "greedy.h"

namespace vllm_mtp {

const char* accept_greedily(const GreedyStep& step, void*) {
  for (int64_t index = 0; index < step.num_reqs; ++index) {
    const GreedyRequest request = greedy_request(step, index);
    int64_t num_accepted = 0;
    while (agrees(step, request, num_accepted)) ++num_accepted;
    const int64_t count = num_sampled_tokens(request, num_accepted);
    write_counts(step, index, request, count);
    for (int64_t column = 0; column < step.num_columns; ++column) {
      write_token(step, index, request, count, column);
    }
  }
  return nullptr;
}

}  // namespace vllm_mtp
