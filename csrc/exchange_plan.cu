// torch.ops.moe_ops_native.exchange_plan_*, called by moe_ops/kernels/exchange_nvlink.py: the operator exchange_plan.
//
// A first kernel tells every rank the experts of this one's tokens. The second counts, over all ranks' tokens, chunk by
// chunk. Once all CTAs have counted, each adds the counts up, so that it knows the places of its chunk's copies and
// rows, and writes its part of the plan. Chunks lie in the order of copies: by source rank, then by token. Nothing but
// ids crosses the link, and the host takes no part; where sizes are wanted there (exact mode), the two parts are
// kernels of their own, and a third in between adds the sizes up.

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <climits>
#include <cstdint>
#include <optional>

#include "device.h"
#include "exchange.cuh"
#include "slots.cuh"
#include "world.h"

namespace moe_ops::exchange {
namespace {

using slots::kThreads;
using slots::kWarps;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kWhat = "exchange_plan";
constexpr int kSenderThreads = 256;
constexpr int kIdsAtOnce = 8;
constexpr int kChunksAtOnce = 4;  // counts of chunks that a lane loads at once
constexpr int kManySteps = 4;     // of a tile, where a chunk may be long
constexpr int16_t kBadId = -2;

// Divides numbers below 2^16 by a divisor below 2^16.
struct Divisor {
  unsigned number, reciprocal;

  explicit Divisor(int64_t divisor)
      : number(static_cast<unsigned>(divisor)),
        reciprocal(static_cast<unsigned>(((int64_t{1} << 32) + divisor - 1) / divisor)) {}
  // NOTE: 1 has no reciprocal of 32 bits.
  __device__ int quotient(int value) const { return number == 1 ? value : int(__umulhi(unsigned(value), reciprocal)); }
};

struct Problem {
  int num_tokens, top_k, num_experts, experts_here, num_ranks;
  uint32_t digest;
  Divisor by_top_k, by_experts_here;

  // Columns: rows of each local expert, copies to each rank, slots to each rank, ids that are no experts.
  __host__ __device__ int copies_column() const { return experts_here; }
  __host__ __device__ int slots_column() const { return experts_here + num_ranks; }
  __host__ __device__ int bad_column() const { return experts_here + 2 * num_ranks; }
  __host__ __device__ int num_columns() const { return experts_here + 2 * num_ranks + 1; }
  __device__ int num_vectors() const { return (num_columns() + ChunkCounts::kSize - 1) / ChunkCounts::kSize; }
  __device__ int rank_of(int id) const { return by_experts_here.quotient(id); }
};

struct Plan {
  int *copy_of_token, *source_of_copy, *ids, *slot_of_row, *row_of_slot, *offsets, *counts, *overflow;
  int num_copies, num_rows;  // D, C
  int copy_limit;            // first place that no rank has: D, or none in exact mode, where D is this rank's own
};

// Tokens [begin, end) of rank `source`, and their ids.
struct Chunk {
  int source, begin, end;
  const int16_t* ids;
};

// Too many tokens (a fault that the host or the last kernel reports) count as none.
__device__ Chunk chunk_of(const World& world, const Problem& problem, int index, int chunks_per_rank, int tokens,
                          uint32_t epoch) {
  if (tokens > world.max_tokens) tokens = 0;
  const int source = index / chunks_per_rank;
  const int size = ((tokens + chunks_per_rank - 1) / chunks_per_rank + kLanes - 1) / kLanes * kLanes;
  const int begin = min((index - source * chunks_per_rank) * size, tokens);
  const int16_t* const ids = world.ids(world.rank, epoch, source) + int64_t(begin) * problem.top_k;
  return {source, begin, min(begin + size, tokens), ids};
}

// Once rank `source` has told it.
__device__ int num_tokens_of(const World& world, int source, uint32_t epoch) {
  return IdsArrived::tokens(
      __ldcg(reinterpret_cast<const unsigned long long*>(&world.control().ids_arrived[epoch & 1][source][0])));
}

// Apart from what waits for other ranks: a few small CTAs find room beside anything, so that no rank's wait hangs on
// another's finding room for a large kernel.
template <typename Id>
__global__ void __launch_bounds__(kSenderThreads)
    send_ids_kernel(const __grid_constant__ World world, const __grid_constant__ Problem problem, const Id* ids) {
  wait_for_previous_kernel();
  allow_next_kernel();
  const uint32_t epoch = world.control().plan_epoch + 1;
  const int64_t num_slots = int64_t(problem.num_tokens) * problem.top_k;
  if (problem.num_tokens <= world.max_tokens) {
    for (int64_t first = (int64_t(blockIdx.x) * kSenderThreads + threadIdx.x) * kIdsAtOnce; first < num_slots;
         first += int64_t(kIdSenders) * kSenderThreads * kIdsAtOnce) {
      alignas(uint4) int16_t narrow[kIdsAtOnce];
#pragma unroll
      for (int i = 0; i < kIdsAtOnce; ++i) {
        const Id id = first + i < num_slots ? ids[first + i] : Id{kNone};
        narrow[i] = -1 <= id && id < problem.num_experts ? static_cast<int16_t>(id) : kBadId;
      }
      for (int peer = 0; peer < world.num_ranks; ++peer) {
        *reinterpret_cast<uint4*>(world.ids(peer, epoch, world.rank) + first) = *reinterpret_cast<const uint4*>(narrow);
      }
    }
  }
  __syncthreads();
  const int peer = threadIdx.x;
  if (peer >= world.num_ranks) return;
  const int64_t tokens = min(int64_t(problem.num_tokens), world.max_tokens + 1);
  store_release(&world.control(peer).ids_arrived[epoch & 1][world.rank][blockIdx.x],
                IdsArrived::word(epoch, problem.digest, tokens));
}

// Tokens of rank `source`, once its ids are here, by a warp; more than max_tokens if they were too many to be sent.
__device__ int wait_for_ids(const World& world, const Problem& problem, int source, uint32_t epoch) {
  static_assert(kIdSenders == kLanes);
  const uint64_t* const word = &world.control().ids_arrived[epoch & 1][source][lane()];
  const uint64_t expected = IdsArrived::word(epoch, problem.digest, 0);
  wait_for(world, kWhat, source, word, IdsArrived::epoch(expected), IdsArrived::epoch);
  const uint64_t seen = load_acquire(word);
  if (IdsArrived::digest(seen) != IdsArrived::digest(expected)) {
    fail(world, kWhat, kOtherSettings, source, IdsArrived::digest(expected), IdsArrived::digest(seen));
  }
  return IdsArrived::tokens(__shfl_sync(kAllLanes, seen, 0));
}

// A column's counts, added up: over the chunks before this CTA's, over those before the next source rank's, over all.
struct Sums {
  int before, before_next, all;
};

struct Places {
  int warp_counts[kMaxRanks][kWarps];
  int next[kMaxRanks];          // place of the next copy of this chunk, by destination
  int copy_of_token[kThreads];  // of the tile, on this rank
};

// The first chunk whose copies do not all fit.
struct Limit {
  int num_whole;  // chunks before it
  int copies_before;
};

struct Shared {
  int num_tokens;  // of the chunk's rank
  int warp_sums[kWarps];
  int count[kThreads + ChunkCounts::kSize];  // of the chunk, by column
  Sums sums[kThreads + ChunkCounts::kSize];  // by column
  unsigned destinations[kThreads];           // of the tile's tokens: the ranks that one goes to, bit by bit
  Places places;
  int shift[kThreads];  // an expert's row of a slot - the slot's place among those of the tile
  Limit limit;
  int kept[kThreads];  // rows by local expert, of the chunk that is cut
  alignas(uint4) uint16_t starts[];

  static int bytes(int num_experts) { return sizeof(Shared) + kWarps * num_experts * sizeof(uint16_t); }
};

// As many of a chunk's tokens as a CTA looks at together, and their slots' ids, of which a thread holds kSteps.
template <int kSteps>
struct Tile {
  static constexpr int kSlots = kThreads * kSteps;
  int first, num_tokens;
  int16_t ids[kSteps];

  static __device__ int max_tokens(const Problem& problem) { return min(problem.by_top_k.quotient(kSlots), kThreads); }
  static __device__ int num_tiles_of(const Problem& problem, const Chunk& chunk) {
    const int size = max_tokens(problem);
    return (chunk.end - chunk.begin + size - 1) / size;
  }

  // Loads tile `number` of the chunk and notes its tokens' destinations. No barrier is needed before: a thread clears
  // only those that it alone reads.
  __device__ void load(const Problem& problem, const Chunk& chunk, int number, Shared& shared) {
    first = chunk.begin + number * max_tokens(problem);
    num_tokens = min(max_tokens(problem), chunk.end - first);
    const int num_slots = num_tokens * problem.top_k;
    const int16_t* const theirs = chunk.ids + int64_t(first - chunk.begin) * problem.top_k;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int slot = slots::slot_of_tile<kSteps>(step);
      ids[step] = slot < num_slots ? __ldcg(theirs + slot) : int16_t{kNone};
    }
    shared.destinations[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (ids[step] < 0) continue;
      const int token = problem.by_top_k.quotient(slots::slot_of_tile<kSteps>(step));
      atomicOr(shared.destinations + token, 1u << problem.rank_of(ids[step]));
    }
    __syncthreads();
  }
};

// Adds a tile to the counts of the chunk.
template <int kSteps>
__device__ void count_tile(const World& world, const Problem& problem, const Tile<kSteps>& tile, Shared& shared) {
  const int first_expert = int(world.rank) * problem.experts_here;
  uint64_t slots_of_rank = 0;  // a byte a rank
  int bad = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int id = tile.ids[step];
    bad += id == kBadId;
    if (id < 0) continue;
    const int rank = problem.rank_of(id);
    slots_of_rank += uint64_t{1} << (8 * rank);
    if (rank == world.rank) atomicAdd(shared.count + id - first_expert, 1);
  }
  const unsigned destinations = shared.destinations[threadIdx.x];
  for (int rank = 0; rank < world.num_ranks; ++rank) {
    const int copies = __popc(__ballot_sync(kAllLanes, destinations >> rank & 1));
    const int held = __reduce_add_sync(kAllLanes, int(slots_of_rank >> (8 * rank) & 0xFF));
    if (lane() == 0 && copies != 0) atomicAdd(shared.count + problem.copies_column() + rank, copies);
    if (lane() == 0 && held != 0) atomicAdd(shared.count + problem.slots_column() + rank, held);
  }
  bad = __reduce_add_sync(kAllLanes, bad);
  if (lane() == 0 && bad != 0) atomicAdd(shared.count + problem.bad_column(), bad);
}

// The counts of all chunks, each as soon as it is written, added up to shared.sums. A warp looks after a vector.
// NOTE: the wait for a chunk's counts needs no bound: its CTA writes them, or gives up waiting for ids, whose trap ends
// this CTA, too.
__device__ void add_up(const World& world, const Problem& problem, uint32_t epoch, int next_source_chunk,
                       Shared& shared) {
  const int num_chunks = gridDim.x;
  for (int vector = warp(); vector < problem.num_vectors(); vector += kWarps) {
    const ChunkCounts* const counts = world.counts(vector);
    Sums sums[ChunkCounts::kSize]{};
    for (int begin = lane(); begin < num_chunks; begin += kChunksAtOnce * kLanes) {
      ChunkCounts loaded[kChunksAtOnce];
#pragma unroll
      for (int i = 0; i < kChunksAtOnce; ++i) {
        if (begin + i * kLanes < num_chunks) loaded[i] = ChunkCounts::load(counts + begin + i * kLanes);
      }
#pragma unroll
      for (int i = 0; i < kChunksAtOnce; ++i) {
        const int chunk = begin + i * kLanes;
        if (chunk >= num_chunks) break;
        while (loaded[i].epoch != epoch) loaded[i] = ChunkCounts::load(counts + chunk);
#pragma unroll
        for (int j = 0; j < ChunkCounts::kSize; ++j) {
          if (chunk < int(blockIdx.x)) sums[j].before += loaded[i].values[j];
          if (chunk < next_source_chunk) sums[j].before_next += loaded[i].values[j];
          sums[j].all += loaded[i].values[j];
        }
      }
    }
#pragma unroll
    for (int j = 0; j < ChunkCounts::kSize; ++j) {
      const Sums total{__reduce_add_sync(kAllLanes, sums[j].before), __reduce_add_sync(kAllLanes, sums[j].before_next),
                       __reduce_add_sync(kAllLanes, sums[j].all)};
      if (lane() == 0) shared.sums[vector * ChunkCounts::kSize + j] = total;
    }
  }
  __syncthreads();
}

// One number of a chunk, once it is written.
__device__ int count_of(const World& world, int chunk, int column) {
  return ChunkCounts::load(world.counts(column / ChunkCounts::kSize) + chunk).values[column % ChunkCounts::kSize];
}

// totals [6][P]: copies sent and received, slots sent and received, bad ids, tokens; by rank.
__global__ void __launch_bounds__(kThreads)
    totals_kernel(const __grid_constant__ World world, const __grid_constant__ Problem problem, int chunks_per_rank,
                  int64_t* totals) {
  const int ranks = world.num_ranks;
  const int columns[] = {problem.copies_column(), problem.copies_column(), problem.slots_column(),
                         problem.slots_column(), problem.bad_column()};
  for (int item = warp(); item < 5 * ranks; item += kWarps) {
    const int row = item / ranks, rank = item % ranks;
    const bool sent = row == 0 || row == 2;
    const int source = sent ? world.rank : rank;
    const int column = columns[row] + (sent ? rank : row < 4 ? int(world.rank) : 0);
    int sum = 0;
    for (int i = lane(); i < chunks_per_rank; i += kLanes) {
      sum += count_of(world, source * chunks_per_rank + i, column);
    }
    sum = __reduce_add_sync(kAllLanes, sum);
    if (lane() == 0) totals[item] = sum;
  }
  const Control& here = world.control();
  if (int(threadIdx.x) < ranks) totals[5 * ranks + threadIdx.x] = num_tokens_of(world, threadIdx.x, here.plan_epoch);
}

// Places of the copies of up to kThreads tokens, one a thread, on the ranks of the bits of `wanted`. A barrier must lie
// between two calls.
template <typename Use>
__device__ void place_copies(Places& places, unsigned destinations, unsigned wanted, int num_ranks, Use use) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    const unsigned voters = __ballot_sync(kAllLanes, destinations >> rank & 1);
    if (lane() == 0) places.warp_counts[rank][warp()] = __popc(voters);
  }
  __syncthreads();
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (!(wanted >> rank & 1)) continue;
    const unsigned voters = __ballot_sync(kAllLanes, destinations >> rank & 1);
    const int before = __reduce_add_sync(kAllLanes, lane() < warp() ? places.warp_counts[rank][lane()] : 0);
    const int place = places.next[rank] + before + __popc(voters & ((1u << lane()) - 1));
    use(rank, voters >> lane() & 1 ? place : kNone);
  }
  __syncthreads();
  if (warp() != 0) return;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int total = __reduce_add_sync(kAllLanes, places.warp_counts[rank][lane()]);
    if (lane() == 0) places.next[rank] += total;
  }
}

// Chunks up to the one in which the copies for this rank reach the capacity.
__device__ void find_limit(const World& world, const Problem& problem, int num_copies, Shared& shared) {
  const int column = problem.copies_column() + int(world.rank), chunk = threadIdx.x;
  const int copies = chunk < int(gridDim.x) ? count_of(world, chunk, column) : 0;
  int total;
  const int before = slots::exclusive_scan(copies, shared.warp_sums, total);
  if (before <= num_copies && num_copies < before + copies) shared.limit = {chunk, before};
  shared.kept[threadIdx.x] = 0;
  __syncthreads();
}

// Counts the rows of the chunk that is cut: those of its copies that fit.
__device__ void count_kept(const World& world, const Problem& problem, int chunks_per_rank, int num_copies,
                           uint32_t epoch, Shared& shared) {
  const int source = shared.limit.num_whole / chunks_per_rank, top_k = problem.top_k;
  const Chunk chunk =
      chunk_of(world, problem, shared.limit.num_whole, chunks_per_rank, num_tokens_of(world, source, epoch), epoch);
  if (threadIdx.x == 0) shared.places.next[world.rank] = shared.limit.copies_before;
  for (int first = chunk.begin; first < chunk.end; first += kThreads) {
    const int token = first + int(threadIdx.x);
    const int16_t* const ids = chunk.ids + int64_t(token - chunk.begin) * top_k;
    const int held = token < chunk.end ? top_k : 0;
    const auto is_here = [&](int id) { return id >= 0 && problem.rank_of(id) == world.rank; };
    bool wanted = false;
    for (int k = 0; k < held; ++k) wanted |= is_here(ids[k]);
    place_copies(shared.places, unsigned(wanted) << world.rank, 1u << world.rank, world.num_ranks, [&](int, int place) {
      if (place == kNone || place >= num_copies) return;
      for (int k = 0; k < held; ++k) {
        if (is_here(ids[k])) atomicAdd(shared.kept + ids[k] - int(world.rank) * problem.experts_here, 1);
      }
    });
    __syncthreads();
  }
}

// As add_up, of this thread's expert's rows, as far as their copies fit.
__device__ Sums add_up_kept(const World& world, int next_source_chunk, const Shared& shared) {
  Sums sums{};
  const int expert = threadIdx.x, num_whole = shared.limit.num_whole;
  for (int chunk = 0; chunk <= num_whole; ++chunk) {
    const int rows = chunk < num_whole ? count_of(world, chunk, expert) : shared.kept[expert];
    if (chunk < int(blockIdx.x)) sums.before += rows;
    if (chunk < next_source_chunk) sums.before_next += rows;
    sums.all += rows;
  }
  return sums;
}

__device__ void clear(int* numbers, int64_t begin, int64_t end) {
  for (int64_t i = begin + blockIdx.x * kThreads + threadIdx.x; i < end; i += gridDim.x * kThreads) numbers[i] = kNone;
}

__device__ void clear_tails(const Plan& plan, int top_k, int held_copies, int held_rows) {
  const int64_t copies = held_copies, all_copies = plan.num_copies;
  clear(plan.ids, copies * top_k, all_copies * top_k);
  clear(plan.row_of_slot, copies * top_k, all_copies * top_k);
  clear(plan.source_of_copy, copies * 2, all_copies * 2);
  clear(plan.slot_of_row, held_rows, plan.num_rows);
}

// The copies of a tile's tokens, one a thread.
__device__ void write_copies(const World& world, const Plan& plan, const Chunk& chunk, int first, Shared& shared) {
  const int token = first + int(threadIdx.x);
  const bool own = chunk.source == world.rank;
  const unsigned wanted = own ? (1u << world.num_ranks) - 1 : 1u << world.rank;
  place_copies(shared.places, shared.destinations[threadIdx.x], wanted, world.num_ranks, [&](int rank, int place) {
    if (place >= plan.copy_limit) place = kNone;
    if (own && token < chunk.end) plan.copy_of_token[int64_t(token) * world.num_ranks + rank] = place;
    if (rank != world.rank) return;
    shared.places.copy_of_token[threadIdx.x] = place;
    if (place != kNone) *reinterpret_cast<int2*>(plan.source_of_copy + int64_t(place) * 2) = {chunk.source, token};
  });
}

// The rows of a tile's slots, of which thread e's expert gets `next_row` and on; starts are cleared.
template <int kSteps>
__device__ void write_rows(const World& world, const Problem& problem, const Plan& plan, const Tile<kSteps>& tile,
                           int& next_row, Shared& shared) {
  const int top_k = problem.top_k, num_experts = problem.experts_here, expert = threadIdx.x;
  const int first_expert = int(world.rank) * num_experts;
  int experts[kSteps], places[kSteps];
  const auto copy_of = [&](int step, int& k) {
    const int slot = slots::slot_of_tile<kSteps>(step), token = problem.by_top_k.quotient(slot);
    k = slot - token * top_k;
    return token < tile.num_tokens ? shared.places.copy_of_token[token] : kNone;
  };
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    int k;
    const int id = tile.ids[step] - first_expert;
    experts[step] = 0 <= id && id < num_experts && copy_of(step, k) != kNone ? id : kNone;
  }
  slots::rank_in_warp(experts, num_experts, shared.starts, places);
  __syncthreads();
  if (expert < num_experts) {
    shared.shift[expert] = next_row;
    next_row += slots::counts_to_starts(shared.starts, num_experts, 0);
  }
  __syncthreads();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    int k;
    const int copy = copy_of(step, k);
    if (copy == kNone) continue;
    int row = kNone;
    if (experts[step] != kNone) {
      row = shared.shift[experts[step]] + shared.starts[warp() * num_experts + experts[step]] + places[step];
      if (row >= plan.num_rows) row = kNone;
    }
    const int64_t place = int64_t(copy) * top_k + k;
    plan.ids[place] = experts[step];
    plan.row_of_slot[place] = row;
    if (row != kNone) plan.slot_of_row[row] = static_cast<int>(place);
  }
}

// The plan's parts that follow from all counts: this CTA's share of them, and where its chunk's copies begin. Returns
// where rows of thread e's expert begin.
__device__ int place_chunk(const World& world, const Problem& problem, const Plan& plan, const Chunk& chunk,
                           int chunks_per_rank, uint32_t epoch, Shared& shared) {
  const int ranks = world.num_ranks, experts = problem.experts_here, thread = threadIdx.x;
  const int next_source_chunk = (chunk.source + 1) * chunks_per_rank;
  const bool is_first = int(blockIdx.x) == chunk.source * chunks_per_rank;  // of its rank
  add_up(world, problem, epoch, next_source_chunk, shared);
  Sums sums = shared.sums[thread];
  const int column = problem.copies_column(), bad = sums.before_next - sums.before;
  if (thread == problem.bad_column() && is_first && bad != 0) fail(world, kWhat, kBadIds, chunk.source, 0, bad);
  const int wanted_copies = shared.sums[column + world.rank].all;
  if (wanted_copies > plan.num_copies) {
    find_limit(world, problem, plan.num_copies, shared);
    count_kept(world, problem, chunks_per_rank, plan.num_copies, epoch, shared);
    __syncthreads();
  }
  if (column <= thread && thread < column + ranks) shared.places.next[thread - column] = sums.before;
  if (wanted_copies > plan.num_copies && thread < experts) sums = add_up_kept(world, next_source_chunk, shared);

  int wanted_rows;
  const int next_row =
      sums.before + slots::exclusive_scan(thread < experts ? sums.all : 0, shared.warp_sums, wanted_rows);
  const int held_rows = min(wanted_rows, plan.num_rows), held_copies = min(wanted_copies, plan.num_copies);
  if (blockIdx.x == 0) {
    if (thread < experts) plan.offsets[thread] = min(next_row + sums.all, plan.num_rows);
    if (thread == 0) plan.overflow[0] = wanted_copies - held_copies;
    if (thread == 0) plan.overflow[1] = wanted_rows - held_rows;
  }
  if (is_first && thread < experts) plan.counts[chunk.source * experts + thread] = sums.before_next - sums.before;
  clear_tails(plan, problem.top_k, held_copies, held_rows);
  return next_row;
}

// Both parts of the work, or, if the host wants the sizes in between, either.
template <bool kCounts, bool kPlaces, int kSteps>
__global__ void __launch_bounds__(kThreads)
    plan_kernel(const __grid_constant__ World world, const __grid_constant__ Problem problem,
                const __grid_constant__ Plan plan, int chunks_per_rank) {
  extern __shared__ uint4 shared_words[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_words);
  Control& here = world.control();
  const int thread = threadIdx.x, num_experts = problem.experts_here, source = int(blockIdx.x) / chunks_per_rank;
  // NOTE: before the wait below: send_ids_kernel allows this kernel only once the plan before has ended.
  const uint32_t epoch = load_acquire(&here.plan_epoch) + (kCounts ? 1 : 0);
  if (kPlaces) slots::clear_starts(shared.starts, num_experts);
  shared.count[thread] = 0;
  if (thread < ChunkCounts::kSize) shared.count[kThreads + thread] = 0;
  if (kCounts && warp() == 0) {
    const int tokens = wait_for_ids(world, problem, source, epoch);
    if (lane() == 0) shared.num_tokens = tokens;
  }
  __syncthreads();
  wait_for_previous_kernel();
  const int num_tokens = kCounts ? shared.num_tokens : num_tokens_of(world, source, epoch);
  const Chunk chunk = chunk_of(world, problem, blockIdx.x, chunks_per_rank, num_tokens, epoch);
  const int num_tiles = Tile<kSteps>::num_tiles_of(problem, chunk);
  Tile<kSteps> tile;
  if constexpr (kCounts) {
    for (int number = num_tiles - 1; number >= 0; --number) {  // the first last: its copies are placed first
      tile.load(problem, chunk, number, shared);
      count_tile(world, problem, tile, shared);
    }
    __syncthreads();
    if (thread < problem.num_vectors()) {
      const int* const count = shared.count + thread * ChunkCounts::kSize;
      ChunkCounts::store(world.counts(thread) + blockIdx.x, {{count[0], count[1], count[2]}, epoch});
    }
    // The last CTA counts the plan: all have read the epoch by then.
    if (thread == 0 && atomicAdd(&here.plan_ctas_done, 1) + 1 == epoch * gridDim.x) here.plan_epoch = epoch;
  }
  if constexpr (kPlaces) {
    if (num_tokens > world.max_tokens) fail(world, kWhat, kTooManyTokens, source, world.max_tokens, num_tokens);
    allow_next_kernel();
    int next_row = place_chunk(world, problem, plan, chunk, chunks_per_rank, epoch, shared);
    __syncthreads();
    for (int number = 0; number < num_tiles; ++number) {
      if (number > 0) {
        __syncthreads();
        slots::clear_starts(shared.starts, num_experts);
      }
      if (number > 0 || !kCounts) tile.load(problem, chunk, number, shared);
      write_copies(world, plan, chunk, tile.first, shared);
      write_rows(world, problem, plan, tile, next_row, shared);
    }
  }
}

// `num_copies` and `num_rows`: capacities, or 0 where the host reads sizes.
Problem problem_of(const World& world, int64_t num_tokens, int64_t top_k, int64_t num_experts, int64_t num_copies = 0,
                   int64_t num_rows = 0) {
  const int64_t experts_here = num_experts / world.num_ranks;
  STD_TORCH_CHECK(0 < top_k && top_k <= kMaxTopK, "exchange_plan: K must be 1 .. ", kMaxTopK, ", got ", top_k);
  STD_TORCH_CHECK(0 < experts_here && experts_here * world.num_ranks == num_experts && num_experts < 32768,
                  "exchange_plan: num_experts must be a multiple of the ranks and below 2^15, got ", num_experts);
  const Problem problem{static_cast<int>(num_tokens),
                        static_cast<int>(top_k),
                        static_cast<int>(num_experts),
                        static_cast<int>(experts_here),
                        static_cast<int>(world.num_ranks),
                        digest_of(Op::kPlan, top_k, num_experts, num_copies, num_rows),
                        Divisor(top_k),
                        Divisor(experts_here)};
  STD_TORCH_CHECK(problem.num_columns() <= World::kMaxColumns, "exchange_plan: experts of a rank must be at most ",
                  World::kMaxColumns - 2 * world.num_ranks - 1, ", got ", experts_here);
  return problem;
}

int chunks_per_rank(const World& world) { return static_cast<int>(world.num_plan_ctas / world.num_ranks); }

template <bool kCounts, bool kPlaces, int kSteps>
void launch(const World& world, const Problem& problem, const Plan& plan, Start start, cudaStream_t stream) {
  const int chunks = chunks_per_rank(world), ctas = chunks * static_cast<int>(world.num_ranks);
  moe_ops::launch(plan_kernel<kCounts, kPlaces, kSteps>, ctas, kThreads, Shared::bytes(problem.experts_here), start,
                  stream, world, problem, plan, chunks);
}

// With tiles no longer than this rank's chunks need.
void launch_whole(const World& world, const Problem& problem, const Plan& plan, cudaStream_t stream) {
  const int chunk_slots =
      ceil_div(ceil_div(problem.num_tokens, chunks_per_rank(world)), kLanes) * kLanes * problem.top_k;
  const auto launch_steps = chunk_slots <= Tile<1>::kSlots   ? launch<true, true, 1>
                            : chunk_slots <= Tile<2>::kSlots ? launch<true, true, 2>
                                                             : launch<true, true, kManySteps>;
  launch_steps(world, problem, plan, Start::kTogether, stream);
}

void send_ids(const World& world, const Problem& problem, const Tensor& ids, cudaStream_t stream) {
  if (ids.scalar_type() == ScalarType::Long) {
    moe_ops::launch(send_ids_kernel<int64_t>, kIdSenders, kSenderThreads, 0, Start::kEarly, stream, world, problem,
                    ids.const_data_ptr<int64_t>());
  } else {
    moe_ops::launch(send_ids_kernel<int>, kIdSenders, kSenderThreads, 0, Start::kEarly, stream, world, problem,
                    ids.const_data_ptr<int>());
  }
}

// Sends ids [T, K], contiguous, and counts all ranks', for the next two.
void exchange_plan_count(Tensor ids, Tensor world_numbers, int64_t num_experts) {
  const World world = world_of(world_numbers);
  const Problem problem = problem_of(world, ids.size(0), ids.size(1), num_experts);
  const OnDeviceOf device(ids);
  send_ids(world, problem, ids, device.stream());
  launch<true, false, kManySteps>(world, problem, Plan{}, Start::kPlain, device.stream());
}

// totals [6, P] int64: copies sent, copies received, slots sent, slots received, ids that are no experts, tokens.
void exchange_plan_totals(Tensor world_numbers, int64_t top_k, int64_t num_experts, Tensor totals) {
  const World world = world_of(world_numbers);
  const Problem problem = problem_of(world, 0, top_k, num_experts);
  const OnDeviceOf device(totals);
  moe_ops::launch(totals_kernel, 1, kThreads, 0, Start::kPlain, device.stream(), world, problem, chunks_per_rank(world),
                  totals.mutable_data_ptr<int64_t>());
}

// The plan's device tensors, in the order of layout.Plan: with `own_ids` all of the work, without (after
// exchange_plan_count) the rest of it.
void exchange_plan_place(std::optional<Tensor> own_ids, Tensor world_numbers, int64_t num_experts, Tensor copy_of_token,
                         Tensor source_of_copy, Tensor ids, Tensor slot_of_row, Tensor row_of_slot, Tensor offsets,
                         Tensor counts, Tensor overflow) {
  const World world = world_of(world_numbers);
  const int64_t num_tokens = copy_of_token.size(0), top_k = ids.size(1);
  const Problem problem = own_ids ? problem_of(world, num_tokens, top_k, num_experts, ids.size(0), slot_of_row.size(0))
                                  : problem_of(world, num_tokens, top_k, num_experts);
  const Plan plan{copy_of_token.mutable_data_ptr<int>(),
                  source_of_copy.mutable_data_ptr<int>(),
                  ids.mutable_data_ptr<int>(),
                  slot_of_row.mutable_data_ptr<int>(),
                  row_of_slot.mutable_data_ptr<int>(),
                  offsets.mutable_data_ptr<int>(),
                  counts.mutable_data_ptr<int>(),
                  overflow.mutable_data_ptr<int>(),
                  static_cast<int>(ids.size(0)),
                  static_cast<int>(slot_of_row.size(0)),
                  own_ids ? static_cast<int>(ids.size(0)) : INT_MAX};
  const OnDeviceOf device(ids);
  if (own_ids) {
    send_ids(world, problem, *own_ids, device.stream());
    launch_whole(world, problem, plan, device.stream());
  } else {
    launch<false, true, kManySteps>(world, problem, plan, Start::kPlain, device.stream());
  }
}

// Bytes of a rank's workspace.
int64_t exchange_workspace_bytes(Tensor world_numbers) { return world_of(world_numbers).num_bytes(); }

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops_native, m) {
  m.def("exchange_plan_count(Tensor ids, Tensor world, int num_experts) -> ()");
  m.def("exchange_plan_totals(Tensor world, int top_k, int num_experts, Tensor(a!) totals) -> ()");
  m.def(
      "exchange_plan_place(Tensor? own_ids, Tensor world, int num_experts, Tensor(a!) copy_of_token, Tensor(b!)"
      " source_of_copy, Tensor(c!) ids, Tensor(d!) slot_of_row, Tensor(e!) row_of_slot, Tensor(f!) offsets, Tensor(g!)"
      " counts, Tensor(h!) overflow) -> ()");
  m.def("exchange_workspace_bytes(Tensor world) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CUDA, m) {
  m.impl("exchange_plan_count", TORCH_BOX(&exchange_plan_count));
  m.impl("exchange_plan_totals", TORCH_BOX(&exchange_plan_totals));
  m.impl("exchange_plan_place", TORCH_BOX(&exchange_plan_place));
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CPU, m) {
  m.impl("exchange_workspace_bytes", TORCH_BOX(&exchange_workspace_bytes));
}

}  // namespace
}  // namespace moe_ops::exchange
