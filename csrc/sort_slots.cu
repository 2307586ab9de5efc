// torch.ops.moe_ops_native.sort_slots, called by moe_ops/kernels/sort_slots.py: the stable counting sort of slots.
//
// Slots are cut into chunks of whole tiles, one chunk a CTA. The first kernel counts the experts of each chunk. In the
// second every CTA sorts a tile in shared memory, adds up the counts of all chunks, so that it knows the rows of its
// own slots, and writes both maps. Its first tile is sorted while the first kernel still runs.

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>

#include "device.h"
#include "slots.cuh"

namespace moe_ops::slots {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kSteps = 4;
constexpr int kTile = kThreads * kSteps;
constexpr int kCountsAtOnce = 8;  // loads in flight of a thread
constexpr int kMaxChunks = 1024;
constexpr int kMaxIndex = 1 << 30;  // of slots and of rows, so that the sum of two fits an int

template <typename Id>
struct Slots {
  const Id* ids;
  int num_slots, num_experts;
  int num_chunks, chunk_size;

  __device__ int chunk_begin() const { return blockIdx.x * chunk_size; }
  __device__ int chunk_end() const { return min(chunk_begin() + chunk_size, num_slots); }
};

struct Rows {
  int* slot_of_row;  // [num_rows]
  int* row_of_slot;  // [num_slots]
  int* offsets;      // [num_experts]
  int num_rows;
  int expert_capacity;  // kNone: experts' rows lie one after another

  __device__ bool padded() const { return expert_capacity != kNone; }
  __device__ int end(int expert) const { return padded() ? (expert + 1) * expert_capacity : num_rows; }
};

// What thread e counts, counts[c][e], over the chunks before this CTA's, and over all.
struct Sums {
  int before, all;
};

struct Shared {
  int warp_sums[kWarps];
  int shift[kMaxExperts];   // an expert's row of a slot - the slot's place in the sorted tile
  int totals[kMaxExperts];  // slots of an expert
  Sums partial[kThreads];   // over some of the chunks
  unsigned sorted[kTile];   // expert * kTile + slot of the tile
  __device__ uint16_t* starts() { return reinterpret_cast<uint16_t*>(this + 1); }

  static int bytes(int num_experts) { return sizeof(Shared) + kWarps * num_experts * sizeof(uint16_t); }
};

static_assert(sizeof(Shared) % sizeof(uint4) == 0, "starts are cleared as uint4");

// A tile as one thread sees it.
struct Tile {
  int experts[kSteps];  // of its slots, or kNone
  int places[kSteps];   // of its slots in the sorted tile
  int start, count;     // of its expert in the sorted tile
  int num_held;         // slots with an expert
};

template <typename Id>
__device__ void load_experts(const Slots<Id>& slots, int tile, int end, int (&experts)[kSteps]) {
  Id ids[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int slot = tile + slot_of_tile<kSteps>(step);
    ids[step] = slot < end ? __ldg(slots.ids + slot) : Id{kNone};
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    experts[step] = ids[step] >= 0 && ids[step] < slots.num_experts ? static_cast<int>(ids[step]) : kNone;
  }
}

// Sorts a tile by expert in shared memory; nobody may still be reading shared.sorted. A barrier must follow.
__device__ void sort_tile(int num_experts, Shared& shared, Tile& tile) {
  uint16_t* const starts = shared.starts();
  clear_starts(starts, num_experts);
  __syncthreads();
  rank_in_warp(tile.experts, num_experts, starts, tile.places);
  __syncthreads();

  const int expert = threadIdx.x;
  tile.count = 0;
  if (expert < num_experts) {
#pragma unroll
    for (int i = 0; i < kWarps; ++i) tile.count += starts[i * num_experts + expert];
  }
  tile.start = exclusive_scan(tile.count, shared.warp_sums, tile.num_held);
  if (expert < num_experts) counts_to_starts(starts, num_experts, tile.start);
  __syncthreads();

#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (tile.experts[step] == kNone) continue;
    tile.places[step] += starts[warp() * num_experts + tile.experts[step]];
    shared.sorted[tile.places[step]] = tile.experts[step] * kTile + slot_of_tile<kSteps>(step);
  }
}

// A barrier must lie between two calls.
__device__ Sums add_up(const int* counts, int num_experts, int num_chunks, Shared& shared) {
  // With few experts several threads share one's chunks.
  const int num_parts = min(kThreads / num_experts, kLanes);
  const int part = int(threadIdx.x) / num_experts, expert = int(threadIdx.x) % num_experts;
  Sums sums{};
  for (int begin = part; part < num_parts && begin < num_chunks; begin += kCountsAtOnce * num_parts) {
    int loaded[kCountsAtOnce];
#pragma unroll
    for (int i = 0; i < kCountsAtOnce; ++i) {
      const int chunk = begin + i * num_parts;
      loaded[i] = chunk < num_chunks ? __ldcg(counts + chunk * num_experts + expert) : 0;
    }
#pragma unroll
    for (int i = 0; i < kCountsAtOnce; ++i) {
      if (begin + i * num_parts < int(blockIdx.x)) sums.before += loaded[i];
      sums.all += loaded[i];
    }
  }
  shared.partial[threadIdx.x] = sums;
  __syncthreads();
  sums = {};
  if (int(threadIdx.x) < num_experts) {
    for (int i = 0; i < num_parts; ++i) {
      const Sums other = shared.partial[i * num_experts + threadIdx.x];
      sums.before += other.before;
      sums.all += other.all;
    }
  }
  return sums;
}

// Both maps for the slots of a tile, of which shared.shift says the rows.
__device__ void write_maps(const Rows& rows, const Tile& tile, const Shared& shared, int first, int end) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int slot = first + slot_of_tile<kSteps>(step), expert = tile.experts[step];
    int row = kNone;
    if (expert != kNone) {
      row = tile.places[step] + shared.shift[expert];
      if (row >= rows.end(expert)) row = kNone;
    }
    if (slot < end) rows.row_of_slot[slot] = row;
  }
  // In the order of rows, so that a warp writes few cache lines.
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int place = step * kThreads + int(threadIdx.x);
    if (place >= tile.num_held) break;
    const unsigned key = shared.sorted[place];
    const int expert = key / kTile, row = place + shared.shift[expert];
    if (row < rows.end(expert)) rows.slot_of_row[row] = first + key % kTile;
  }
}

// No slot for this CTA's share of the rows that get none.
__device__ void clear_unused_rows(const Rows& rows, const Shared& shared, int num_held) {
  const int begin = rows.padded() ? 0 : num_held, stride = gridDim.x * kThreads;
  for (int row = begin + blockIdx.x * kThreads + threadIdx.x; row < rows.num_rows; row += stride) {
    bool unused = true;
    if (rows.padded()) {
      const int expert = row / rows.expert_capacity;
      unused = row - expert * rows.expert_capacity >= shared.totals[expert];
    }
    if (unused) rows.slot_of_row[row] = kNone;
  }
}

template <typename Id>
__global__ void __launch_bounds__(kThreads) count_kernel(Slots<Id> slots, int* counts) {
  allow_next_kernel();
  __shared__ int count[kMaxExperts];
  count[threadIdx.x] = 0;
  __syncthreads();
  for (int first = slots.chunk_begin(); first < slots.chunk_end(); first += kTile) {
    int experts[kSteps];
    load_experts(slots, first, slots.chunk_end(), experts);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (experts[step] != kNone) atomicAdd(count + experts[step], 1);
    }
  }
  __syncthreads();
  const int expert = threadIdx.x;
  if (expert < slots.num_experts) counts[blockIdx.x * slots.num_experts + expert] = count[expert];
}

template <typename Id>
__global__ void __launch_bounds__(kThreads) place_kernel(Slots<Id> slots, const int* counts, Rows rows) {
  extern __shared__ uint4 shared_words[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_words);
  const int end = slots.chunk_end(), expert = threadIdx.x;
  int first = slots.chunk_begin();
  Tile tile;
  load_experts(slots, first, end, tile.experts);
  sort_tile(slots.num_experts, shared, tile);

  wait_for_previous_kernel();
  const Sums sums = add_up(counts, slots.num_experts, slots.num_chunks, shared);
  int num_held;
  int next_row = sums.before + exclusive_scan(sums.all, shared.warp_sums, num_held);
  shared.totals[expert] = sums.all;
  if (expert < slots.num_experts) {
    if (rows.padded()) next_row = sums.before + expert * rows.expert_capacity;
    if (blockIdx.x == 0)
      rows.offsets[expert] = rows.padded() ? rows.end(expert) : min(next_row + sums.all, rows.num_rows);
  }

  while (true) {
    shared.shift[expert] = next_row - tile.start;
    next_row += tile.count;
    __syncthreads();
    write_maps(rows, tile, shared, first, end);
    first += kTile;
    if (first >= end) break;
    load_experts(slots, first, end, tile.experts);
    sort_tile(slots.num_experts, shared, tile);
  }
  clear_unused_rows(rows, shared, num_held);
}

// Makes an SM keep as much shared memory as it can for `kernel`.
template <typename Kernel>
void share_memory(Kernel* kernel) {
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
      "cudaFuncSetAttribute");
}

template <typename Id>
void launch_both(Slots<Id> slots, const Rows& rows, const Tensor& workspace, cudaStream_t stream) {
  const int64_t counts_held = workspace.numel() / slots.num_experts;
  const int max_chunks = static_cast<int>(std::min<int64_t>(counts_held, kMaxChunks));
  const int num_tiles = std::max(ceil_div(slots.num_slots, kTile), 1);
  const int chunk_tiles = ceil_div(num_tiles, max_chunks);
  slots.chunk_size = chunk_tiles * kTile;
  slots.num_chunks = ceil_div(num_tiles, chunk_tiles);
  int* const counts = workspace.mutable_data_ptr<int>();
  // CTAs without a chunk help with the rows that get no slot.
  const int ctas = std::max(slots.num_chunks, std::min(ceil_div(rows.num_rows, kTile), max_chunks));
  // The same for both, so that an SM can run both at once.
  share_memory(count_kernel<Id>);
  share_memory(place_kernel<Id>);
  launch(count_kernel<Id>, slots.num_chunks, kThreads, 0, Start::kPlain, stream, slots, counts);
  launch(place_kernel<Id>, ctas, kThreads, Shared::bytes(slots.num_experts), Start::kEarly, stream, slots, counts,
         rows);
}

// The operator sort_slots, ids and outputs contiguous; expert_capacity -1 for none. The workspace, int32, holds a count
// of each expert for every chunk, so its size says into how many chunks the slots may be cut.
void sort_slots(Tensor ids, int64_t num_experts, int64_t expert_capacity, Tensor slot_of_row, Tensor row_of_slot,
                Tensor offsets, Tensor workspace) {
  const int64_t num_slots = ids.numel(), num_rows = slot_of_row.numel();
  STD_TORCH_CHECK(0 < num_experts && num_experts <= kMaxExperts, "sort_slots: num_experts must be 1 .. ", kMaxExperts,
                  ", got ", num_experts);
  STD_TORCH_CHECK(num_slots <= kMaxIndex && num_rows <= kMaxIndex,
                  "sort_slots: slots and rows must each be at most 2^30, got ", num_slots, " and ", num_rows);
  STD_TORCH_CHECK(workspace.numel() >= num_experts, "sort_slots: workspace must hold at least ", num_experts,
                  " counts, got ", workspace.numel());
  const OnDeviceOf device(ids);
  const Rows rows{slot_of_row.mutable_data_ptr<int>(), row_of_slot.mutable_data_ptr<int>(),
                  offsets.mutable_data_ptr<int>(), static_cast<int>(num_rows), static_cast<int>(expert_capacity)};
  const int slots = static_cast<int>(num_slots), experts = static_cast<int>(num_experts);
  if (ids.scalar_type() == ScalarType::Long) {
    launch_both<int64_t>({ids.const_data_ptr<int64_t>(), slots, experts}, rows, workspace, device.stream());
  } else {
    launch_both<int>({ids.const_data_ptr<int>(), slots, experts}, rows, workspace, device.stream());
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops_native, m) {
  m.def(
      "sort_slots(Tensor ids, int num_experts, int expert_capacity, Tensor(a!) slot_of_row, Tensor(b!) row_of_slot,"
      " Tensor(c!) offsets, Tensor(d!) workspace) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CUDA, m) { m.impl("sort_slots", TORCH_BOX(&sort_slots)); }

}  // namespace
}  // namespace moe_ops::slots
