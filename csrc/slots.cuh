// What kernels that sort slots by expert share: a tile of slots in shared memory, ranked stably.
//
// The slots of a tile lie in the order warp, step, lane. Thread e looks after expert e.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch.cuh"

namespace moe_ops::slots {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kLanes;
constexpr int kMaxExperts = kThreads;

static_assert(kWarps == kLanes, "a warp's lanes hold one number a warp");

template <int kSteps>
__device__ int slot_of_tile(int step) {
  return (warp() * kSteps + step) * kLanes + lane();
}

// The sum of `value` over the threads before this one, and over all. A barrier must lie between two calls.
__device__ inline int exclusive_scan(int value, int (&warp_sums)[kWarps], int& total) {
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const int left = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane() >= distance) sum += left;
  }
  if (lane() == kLanes - 1) warp_sums[warp()] = sum;
  __syncthreads();
  const int other = warp_sums[lane()];
  total = __reduce_add_sync(kAllLanes, other);
  return __reduce_add_sync(kAllLanes, lane() < warp() ? other : 0) + sum - value;
}

// starts [kWarps][num_experts]: how many slots of an expert a warp has, later where they start. Zeroes them.
__device__ inline void clear_starts(uint16_t* starts, int num_experts) {
  constexpr int kWordsPerExpert = kWarps * sizeof(uint16_t) / sizeof(uint4);
  static_assert(kWarps * sizeof(uint16_t) % sizeof(uint4) == 0);
  uint4* const words = reinterpret_cast<uint4*>(starts);
  for (int i = threadIdx.x; i < num_experts * kWordsPerExpert; i += kThreads) words[i] = uint4{};
}

// places: of each slot among its warp's of the same expert. Their number goes into starts, which must be zero. Barriers
// before and after.
template <int kSteps>
__device__ void rank_in_warp(const int (&experts)[kSteps], int num_experts, uint16_t* starts, int (&places)[kSteps]) {
  uint16_t* const counts = starts + warp() * num_experts;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int expert = experts[step];
    const unsigned peers = __match_any_sync(kAllLanes, expert);
    const unsigned peers_before = peers & ((1u << lane()) - 1);
    const int before = expert == kNone ? 0 : counts[expert];
    __syncwarp();
    if (expert != kNone && peers_before == 0) counts[expert] = static_cast<uint16_t>(before + __popc(peers));
    __syncwarp();
    places[step] = before + __popc(peers_before);
  }
}

// From the numbers of this thread's expert's slots in each warp to where these start, the first of them at `start`.
// Returns where the last end.
__device__ inline int counts_to_starts(uint16_t* starts, int num_experts, int start) {
  constexpr int kAtOnce = 8;
  uint16_t* const of_warp = starts + threadIdx.x;
#pragma unroll
  for (int warp = 0; warp < kWarps; warp += kAtOnce) {
    int counts[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) counts[i] = of_warp[(warp + i) * num_experts];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      of_warp[(warp + i) * num_experts] = static_cast<uint16_t>(start);
      start += counts[i];
    }
  }
  return start;
}

}  // namespace moe_ops::slots
