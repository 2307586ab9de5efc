// The stable counting sort of a tile of slots by expert in shared memory, and what kernels around it share.
//
// The slots of a tile lie in the order warp, step, lane. Thread e looks after expert e.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch.cuh"

namespace moe_ops::slots {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kLanes;
constexpr int kSteps = 4;
constexpr int kTile = kThreads * kSteps;
constexpr int kMaxExperts = kThreads;
constexpr int kCountsAtOnce = 8;  // loads in flight of a thread

static_assert(kWarps == kLanes, "a warp's lanes hold one number a warp");

// What thread e counts, counts[c][e], over the chunks before `first`, before `second`, and over all.
struct Sums {
  int first, second, all;
};

struct Shared {
  int warp_sums[kWarps];
  int shift[kMaxExperts];   // an expert's row of a slot - the slot's place in the sorted tile
  int totals[kMaxExperts];  // slots of an expert
  Sums partial[kThreads];   // of some of the chunks
  unsigned sorted[kTile];   // expert * kTile + slot of the tile
  // [kWarps][num_experts]: slots of a warp, then where they start in the sorted tile.
  __device__ uint16_t* starts() { return reinterpret_cast<uint16_t*>(this + 1); }

  static int bytes(int num_experts) { return sizeof(Shared) + kWarps * num_experts * sizeof(uint16_t); }
};

static_assert(sizeof(Shared) % sizeof(uint4) == 0 && kWarps * sizeof(uint16_t) % sizeof(uint4) == 0,
              "starts are cleared as uint4");

// A tile as one thread sees it.
struct Tile {
  int experts[kSteps];  // of its slots, or kNone
  int places[kSteps];   // of its slots in the sorted tile
  int start, count;     // of its expert in the sorted tile
  int num_held;         // slots with an expert
};

__device__ inline int slot_of_tile(int step) { return (warp() * kSteps + step) * kLanes + lane(); }

// The sum of `value` over the threads before this one, and over all. A barrier must lie between two calls.
__device__ inline int exclusive_scan(int value, Shared& shared, int& total) {
  int sum = value;
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const int left = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane() >= distance) sum += left;
  }
  if (lane() == kLanes - 1) shared.warp_sums[warp()] = sum;
  __syncthreads();
  const int other = shared.warp_sums[lane()];
  total = __reduce_add_sync(kAllLanes, other);
  return __reduce_add_sync(kAllLanes, lane() < warp() ? other : 0) + sum - value;
}

// Places become those among the warp's slots of the same expert, and starts() the number of these.
__device__ inline void rank_in_warp(int num_experts, Shared& shared, Tile& tile) {
  uint16_t* const counts = shared.starts() + warp() * num_experts;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int expert = tile.experts[step];
    const unsigned peers = __match_any_sync(kAllLanes, expert);
    const unsigned peers_before = peers & ((1u << lane()) - 1);
    const int before = expert == kNone ? 0 : counts[expert];
    __syncwarp();
    if (expert != kNone && peers_before == 0) counts[expert] = static_cast<uint16_t>(before + __popc(peers));
    __syncwarp();
    tile.places[step] = before + __popc(peers_before);
  }
}

// From the numbers of an expert's slots in each warp to where these start.
__device__ inline void counts_to_starts(uint16_t* starts, int num_experts, int start) {
#pragma unroll
  for (int warp = 0; warp < kWarps; warp += kCountsAtOnce) {
    int counts[kCountsAtOnce];
#pragma unroll
    for (int i = 0; i < kCountsAtOnce; ++i) counts[i] = starts[(warp + i) * num_experts];
#pragma unroll
    for (int i = 0; i < kCountsAtOnce; ++i) {
      starts[(warp + i) * num_experts] = static_cast<uint16_t>(start);
      start += counts[i];
    }
  }
}

// Sorts a tile by expert in shared memory; nobody may still be reading shared.sorted. A barrier must follow.
__device__ inline void sort_tile(int num_experts, Shared& shared, Tile& tile) {
  uint4* const words = reinterpret_cast<uint4*>(shared.starts());
  constexpr int kWordsPerExpert = kWarps * sizeof(uint16_t) / sizeof(uint4);
  for (int i = threadIdx.x; i < num_experts * kWordsPerExpert; i += kThreads) words[i] = uint4{};
  __syncthreads();
  rank_in_warp(num_experts, shared, tile);
  __syncthreads();

  const int expert = threadIdx.x;
  uint16_t* const starts = shared.starts() + expert;  // of the warps, num_experts apart
  tile.count = 0;
  if (expert < num_experts) {
#pragma unroll
    for (int i = 0; i < kWarps; ++i) tile.count += starts[i * num_experts];
  }
  tile.start = exclusive_scan(tile.count, shared, tile.num_held);
  if (expert < num_experts) counts_to_starts(starts, num_experts, tile.start);
  __syncthreads();

#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (tile.experts[step] == kNone) continue;
    tile.places[step] += shared.starts()[warp() * num_experts + tile.experts[step]];
    shared.sorted[tile.places[step]] = tile.experts[step] * kTile + slot_of_tile(step);
  }
}

// A barrier must lie between two calls.
__device__ inline Sums add_up(const int* counts, int num_columns, int num_chunks, int first, int second,
                              Shared& shared) {
  // With few columns several threads share one's chunks.
  const int num_parts = min(kThreads / num_columns, kLanes);
  const int part = int(threadIdx.x) / num_columns, column = int(threadIdx.x) % num_columns;
  Sums sums{};
  for (int begin = part; part < num_parts && begin < num_chunks; begin += kCountsAtOnce * num_parts) {
    int loaded[kCountsAtOnce];
#pragma unroll
    for (int i = 0; i < kCountsAtOnce; ++i) {
      const int chunk = begin + i * num_parts;
      loaded[i] = chunk < num_chunks ? __ldcg(counts + chunk * num_columns + column) : 0;
    }
#pragma unroll
    for (int i = 0; i < kCountsAtOnce; ++i) {
      if (begin + i * num_parts < first) sums.first += loaded[i];
      if (begin + i * num_parts < second) sums.second += loaded[i];
      sums.all += loaded[i];
    }
  }
  shared.partial[threadIdx.x] = sums;
  __syncthreads();
  sums = {};
  if (int(threadIdx.x) < num_columns) {
    for (int i = 0; i < num_parts; ++i) {
      const Sums other = shared.partial[i * num_columns + threadIdx.x];
      sums.first += other.first;
      sums.second += other.second;
      sums.all += other.all;
    }
  }
  return sums;
}

}  // namespace moe_ops::slots
