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
using slots::kTile;
using slots::kWarps;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kWhat = "exchange_plan";
constexpr int kSenderThreads = 256;
constexpr int kIdsAtOnce = 8;
constexpr int16_t kBadId = -2;

struct Problem {
  int num_tokens, top_k, num_experts, experts_here, num_ranks;
  uint32_t digest;
  int* chunk_counts;  // [chunks][columns]

  // Columns: rows of each local expert, copies to each rank, slots to each rank, ids that are no experts.
  __host__ __device__ int copies_column() const { return experts_here; }
  __host__ __device__ int slots_column() const { return experts_here + num_ranks; }
  __host__ __device__ int bad_column() const { return experts_here + 2 * num_ranks; }
  __host__ __device__ int num_columns() const { return experts_here + 2 * num_ranks + 1; }
};

struct Plan {
  int *copy_of_token, *source_of_copy, *ids, *slot_of_row, *row_of_slot, *offsets, *counts, *overflow;
  int num_copies, num_rows;  // D, C
  int copy_limit;            // first place that no rank has: D, or none in exact mode, where D is this rank's own
};

// Tokens [begin, end) of rank `source`.
struct Chunk {
  int source, begin, end;
};

// Too many tokens (a fault that the host or the last kernel reports) count as none.
__device__ Chunk chunk_of(const World& world, int index, int chunks_per_rank, int tokens) {
  if (tokens > world.max_tokens) tokens = 0;
  const int size = ((tokens + chunks_per_rank - 1) / chunks_per_rank + kLanes - 1) / kLanes * kLanes;
  const int begin = min(index % chunks_per_rank * size, tokens);
  return {index / chunks_per_rank, begin, min(begin + size, tokens)};
}

// `use(id)` for each of a token's ids.
template <typename Use>
__device__ void for_each_id(const int16_t* ids, int top_k, Use use) {
  for (int first = 0; first < top_k; first += kIdsAtOnce) {
    int16_t some[kIdsAtOnce];
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) some[i] = first + i < top_k ? __ldcg(ids + first + i) : int16_t{kNone};
#pragma unroll
    for (int i = 0; i < kIdsAtOnce; ++i) {
      if (first + i < top_k) use(some[i]);
    }
  }
}

// The ranks that a token goes to, bit by bit.
__device__ unsigned destinations_of(const int16_t* ids, const Problem& problem) {
  unsigned destinations = 0;
  for_each_id(ids, problem.top_k, [&](int id) {
    if (id >= 0) destinations |= 1u << (unsigned(id) / unsigned(problem.experts_here));
  });
  return destinations;
}

// Once rank `source` has told it.
__device__ int num_tokens_of(const World& world, int source, uint32_t epoch) {
  return IdsArrived::tokens(
      __ldcg(reinterpret_cast<const unsigned long long*>(&world.control().ids_arrived[epoch & 1][source][0])));
}

// Apart from what waits for other ranks: a few small CTAs find room beside anything, so that no rank's wait hangs on
// another's finding room for a large kernel.
template <typename Id>
__global__ void __launch_bounds__(kSenderThreads) deliver_kernel(World world, Problem problem, const Id* ids) {
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
  if (lane() < kIdSenders) {
    const uint64_t* const word = &world.control().ids_arrived[epoch & 1][source][lane()];
    const uint64_t expected = IdsArrived::word(epoch, problem.digest, 0);
    wait_for(world, kWhat, source, word, IdsArrived::epoch(expected), IdsArrived::epoch);
    const uint32_t digest = IdsArrived::digest(*word);
    if (digest != IdsArrived::digest(expected)) {
      fail(world, kWhat, kOtherSettings, source, IdsArrived::digest(expected), digest);
    }
  }
  return num_tokens_of(world, source, epoch);
}

// The counts of this CTA's chunk, added up over its tokens.
__device__ void count_chunk(const World& world, const Problem& problem, const Chunk& chunk, const int16_t* theirs,
                            int* count) {
  const int first_expert = int(world.rank) * problem.experts_here;
  for (int first = chunk.begin; first < chunk.end; first += kThreads) {
    const int token = first + int(threadIdx.x);
    unsigned destinations = 0;
    uint64_t slots_of_rank = 0;  // a byte a rank
    int bad = 0;
    if (token < chunk.end) {
      for_each_id(theirs + int64_t(token) * problem.top_k, problem.top_k, [&](int id) {
        if (id < 0) {
          bad += id == kBadId;
          return;
        }
        const int rank = unsigned(id) / unsigned(problem.experts_here);
        destinations |= 1u << rank;
        slots_of_rank += uint64_t{1} << (8 * rank);
        if (rank == world.rank) atomicAdd(count + id - first_expert, 1);
      });
    }
    for (int rank = 0; rank < world.num_ranks; ++rank) {
      const int copies = __popc(__ballot_sync(kAllLanes, destinations >> rank & 1));
      const int held = __reduce_add_sync(kAllLanes, int(slots_of_rank >> (8 * rank) & 0xFF));
      if (lane() == 0 && held != 0) {
        atomicAdd(count + problem.copies_column() + rank, copies);
        atomicAdd(count + problem.slots_column() + rank, held);
      }
    }
    bad = __reduce_add_sync(kAllLanes, bad);
    if (lane() == 0 && bad != 0) atomicAdd(count + problem.bad_column(), bad);
  }
}

// totals [6][P]: copies sent and received, slots sent and received, bad ids, tokens; by rank.
__global__ void __launch_bounds__(kThreads)
    totals_kernel(World world, Problem problem, int chunks_per_rank, int64_t* totals) {
  const int ranks = world.num_ranks, num_columns = problem.num_columns();
  const int columns[] = {problem.copies_column(), problem.copies_column(), problem.slots_column(),
                         problem.slots_column(), problem.bad_column()};
  for (int item = warp(); item < 5 * ranks; item += kWarps) {
    const int row = item / ranks, rank = item % ranks;
    const bool sent = row == 0 || row == 2;
    const int source = sent ? world.rank : rank;
    const int column = columns[row] + (sent ? rank : row < 4 ? int(world.rank) : 0);
    int sum = 0;
    for (int i = lane(); i < chunks_per_rank; i += kLanes) {
      sum += problem.chunk_counts[(source * chunks_per_rank + i) * num_columns + column];
    }
    sum = __reduce_add_sync(kAllLanes, sum);
    if (lane() == 0) totals[item] = sum;
  }
  const Control& here = world.control();
  if (int(threadIdx.x) < ranks) totals[5 * ranks + threadIdx.x] = num_tokens_of(world, threadIdx.x, here.plan_epoch);
}

struct Places {
  int warp_counts[kMaxRanks][kWarps];
  int next[kMaxRanks];          // place of the next copy of this chunk, by destination
  int copy_of_token[kThreads];  // of the tile, on this rank
};

// Places of the copies of up to kThreads tokens, one a thread, on the ranks of the bits of `wanted`.
template <typename Use>
__device__ void place_copies(Places& places, unsigned destinations, unsigned wanted, int num_ranks, Use use) {
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (!(wanted >> rank & 1)) continue;
    const unsigned voters = __ballot_sync(kAllLanes, destinations >> rank & 1);
    if (lane() == 0) places.warp_counts[rank][warp()] = __popc(voters);
  }
  __syncthreads();
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (!(wanted >> rank & 1)) continue;
    const unsigned voters = __ballot_sync(kAllLanes, destinations >> rank & 1);
    const int of_warp = places.warp_counts[rank][lane()];
    const int before = __reduce_add_sync(kAllLanes, lane() < warp() ? of_warp : 0);
    const int place = places.next[rank] + before + __popc(voters & ((1u << lane()) - 1));
    use(rank, voters >> lane() & 1 ? place : kNone);
  }
  __syncthreads();
  if (int(threadIdx.x) < num_ranks) {
    for (int i = 0; i < kWarps; ++i) places.next[threadIdx.x] += places.warp_counts[threadIdx.x][i];
  }
  __syncthreads();
}

// The first chunk whose copies do not all fit.
struct Limit {
  int num_whole;  // chunks before it
  int copies_before;
};

struct PlaceShared {
  Places places;
  Limit limit;
  int kept[slots::kMaxExperts];  // rows by local expert, of the chunk that is cut
};

// Chunks up to the one in which the copies for this rank reach the capacity.
__device__ void find_limit(const World& world, const Problem& problem, int num_chunks, int num_copies,
                           PlaceShared& shared, slots::Shared& sort) {
  const int column = problem.copies_column() + int(world.rank), chunk = threadIdx.x;
  const int copies = chunk < num_chunks ? problem.chunk_counts[chunk * problem.num_columns() + column] : 0;
  int total;
  const int before = slots::exclusive_scan(copies, sort, total);
  if (before <= num_copies && num_copies < before + copies) shared.limit = {chunk, before};
  shared.kept[threadIdx.x] = 0;
  __syncthreads();
}

__device__ void count_kept(const World& world, const Problem& problem, int chunks_per_rank, int num_copies,
                           uint32_t epoch, PlaceShared& shared) {
  const int source = shared.limit.num_whole / chunks_per_rank;
  const Chunk chunk = chunk_of(world, shared.limit.num_whole, chunks_per_rank, num_tokens_of(world, source, epoch));
  const int16_t* const ids = world.ids(world.rank, epoch, chunk.source);
  if (threadIdx.x == 0) shared.places.next[world.rank] = shared.limit.copies_before;
  __syncthreads();
  for (int first = chunk.begin; first < chunk.end; first += kThreads) {
    const int token = first + int(threadIdx.x);
    const int16_t* const mine = ids + int64_t(token) * problem.top_k;
    const unsigned destinations = token < chunk.end ? destinations_of(mine, problem) : 0;
    place_copies(shared.places, destinations, 1u << world.rank, world.num_ranks, [&](int, int place) {
      if (place == kNone || place >= num_copies) return;
      for_each_id(mine, problem.top_k, [&](int id) {
        if (id >= 0 && id / problem.experts_here == world.rank) atomicAdd(shared.kept + id % problem.experts_here, 1);
      });
    });
  }
}

// As slots::add_up of the experts' rows, as far as their copies fit.
__device__ slots::Sums add_up_kept(const Problem& problem, int first, int second, const PlaceShared& shared) {
  slots::Sums sums{};
  const int expert = threadIdx.x, num_whole = shared.limit.num_whole;
  for (int chunk = 0; chunk <= num_whole; ++chunk) {
    const int rows =
        chunk < num_whole ? problem.chunk_counts[chunk * problem.num_columns() + expert] : shared.kept[expert];
    if (chunk < first) sums.first += rows;
    if (chunk < second) sums.second += rows;
    sums.all += rows;
  }
  return sums;
}

__device__ void clear_tails(const Plan& plan, int top_k, int held_copies, int held_rows) {
  const int first = blockIdx.x * kThreads + threadIdx.x, stride = gridDim.x * kThreads;
  for (int64_t i = int64_t(held_copies) * top_k + first; i < int64_t(plan.num_copies) * top_k; i += stride) {
    plan.ids[i] = plan.row_of_slot[i] = kNone;
  }
  for (int64_t i = int64_t(held_copies) * 2 + first; i < int64_t(plan.num_copies) * 2; i += stride) {
    plan.source_of_copy[i] = kNone;
  }
  for (int64_t i = held_rows + first; i < plan.num_rows; i += stride) plan.slot_of_row[i] = kNone;
}

// A tile's tokens, one a thread, which go to `destinations`: their copies.
__device__ void write_copies(const World& world, const Plan& plan, const Chunk& chunk, int first, unsigned destinations,
                             Places& places) {
  const int token = first + int(threadIdx.x);
  const bool own = chunk.source == world.rank;
  const unsigned wanted = own ? (1u << world.num_ranks) - 1 : 1u << world.rank;
  place_copies(places, destinations, wanted, world.num_ranks, [&](int rank, int place) {
    if (place >= plan.copy_limit) place = kNone;
    if (own && token < chunk.end) plan.copy_of_token[int64_t(token) * world.num_ranks + rank] = place;
    if (rank != world.rank) return;
    places.copy_of_token[threadIdx.x] = place;
    if (place != kNone) *reinterpret_cast<int2*>(plan.source_of_copy + int64_t(place) * 2) = {chunk.source, token};
  });
}

__device__ void write_rows(const World& world, const Problem& problem, const Plan& plan, int num_tokens,
                           const int16_t* ids, const Places& places, slots::Shared& sort, int& next_row) {
  const int top_k = problem.top_k, num_slots = num_tokens * top_k, expert = threadIdx.x;
  const int first_expert = int(world.rank) * problem.experts_here;
  slots::Tile tile;
  int16_t held[slots::kSteps];
#pragma unroll
  for (int step = 0; step < slots::kSteps; ++step) {
    const int slot = slots::slot_of_tile(step);
    held[step] = slot < num_slots ? __ldcg(ids + slot) : int16_t{kNone};
  }
#pragma unroll
  for (int step = 0; step < slots::kSteps; ++step) {
    const int slot = slots::slot_of_tile(step), id = held[step] - first_expert;
    const bool here = 0 <= id && id < problem.experts_here && places.copy_of_token[slot / top_k] != kNone;
    tile.experts[step] = here ? id : kNone;
  }
  slots::sort_tile(problem.experts_here, sort, tile);
  sort.shift[expert] = next_row - tile.start;
  next_row += tile.count;
  __syncthreads();
#pragma unroll
  for (int step = 0; step < slots::kSteps; ++step) {
    const int slot = slots::slot_of_tile(step);
    const int copy = slot < num_slots ? places.copy_of_token[slot / top_k] : kNone;
    if (copy == kNone) continue;
    const int row = tile.experts[step] == kNone ? kNone : tile.places[step] + sort.shift[tile.experts[step]];
    const int64_t place = int64_t(copy) * top_k + slot % top_k;
    plan.ids[place] = tile.experts[step];
    plan.row_of_slot[place] = row < plan.num_rows ? row : kNone;
  }
#pragma unroll
  for (int step = 0; step < slots::kSteps; ++step) {
    const int place = step * kThreads + int(threadIdx.x);
    if (place >= tile.num_held) break;
    const unsigned key = sort.sorted[place];
    const int row = place + sort.shift[key / kTile], slot = key % kTile;
    if (row < plan.num_rows) plan.slot_of_row[row] = places.copy_of_token[slot / top_k] * top_k + slot % top_k;
  }
  __syncthreads();
}

// Until all CTAs have written their counts. NOTE: unbounded, for a CTA that does not come has given up waiting for ids,
// which ends this one.
__device__ void wait_for_counts(const Control& here, uint32_t epoch) {
  if (threadIdx.x == 0) {
    while (!reached(load_acquire(&here.plan_ctas_done), epoch * gridDim.x)) {
    }
  }
  __syncthreads();
}

// The plan's parts that follow from this CTA's chunk, and its share of the rest.
template <bool kWaits>
__device__ void place_chunk(const World& world, const Problem& problem, const Plan& plan, const Chunk& chunk,
                            const int16_t* ids, int chunks_per_rank, uint32_t epoch, PlaceShared& shared,
                            slots::Shared& sort) {
  Places& places = shared.places;
  const int ranks = world.num_ranks, experts = problem.experts_here, thread = threadIdx.x;
  const int num_chunks = gridDim.x, num_columns = problem.num_columns();
  const int next_source = (chunk.source + 1) * chunks_per_rank;
  const int tile_tokens = min(kTile / problem.top_k, kThreads);
  const auto mine_of = [&](int first) {
    const int token = first + thread;
    return thread < tile_tokens && token < chunk.end ? destinations_of(ids + int64_t(token) * problem.top_k, problem)
                                                     : 0;
  };
  unsigned next_destinations = mine_of(chunk.begin);  // of the first tile, loaded while others count
  if (kWaits) wait_for_counts(world.control(), epoch);

  slots::Sums sums = slots::add_up(problem.chunk_counts, num_columns, num_chunks, blockIdx.x, next_source, sort);
  const int bad = problem.bad_column(), column = problem.copies_column();
  const int theirs = sums.second - sums.first;  // as seen by the first CTA of a source
  if (thread == bad && blockIdx.x % chunks_per_rank == 0 && theirs != 0) {
    fail(world, kWhat, kBadIds, chunk.source, 0, theirs);
  }
  if (thread < num_columns) sort.totals[thread] = sums.all;
  __syncthreads();
  const int wanted_copies = sort.totals[column + world.rank];
  const bool overflow = wanted_copies > plan.num_copies;
  if (overflow) {
    find_limit(world, problem, num_chunks, plan.num_copies, shared, sort);
    count_kept(world, problem, chunks_per_rank, plan.num_copies, epoch, shared);
    __syncthreads();
  }
  if (column <= thread && thread < column + ranks) places.next[thread - column] = sums.first;
  if (overflow && thread < experts) sums = add_up_kept(problem, blockIdx.x, next_source, shared);

  int wanted_rows;
  int next_row = sums.first + slots::exclusive_scan(thread < experts ? sums.all : 0, sort, wanted_rows);
  const int held_rows = min(wanted_rows, plan.num_rows), held_copies = min(wanted_copies, plan.num_copies);
  if (blockIdx.x == 0) {
    if (thread < experts) plan.offsets[thread] = min(next_row + sums.all, plan.num_rows);
    if (thread == 0) plan.overflow[0] = wanted_copies - held_copies;
    if (thread == 0) plan.overflow[1] = wanted_rows - held_rows;
  }
  if (blockIdx.x % chunks_per_rank == 0 && thread < experts) {
    plan.counts[chunk.source * experts + thread] = sums.second - sums.first;
  }
  clear_tails(plan, problem.top_k, held_copies, held_rows);
  __syncthreads();

  for (int first = chunk.begin; first < chunk.end; first += tile_tokens) {
    const unsigned mine = next_destinations;
    next_destinations = mine_of(first + tile_tokens);
    const int num_tokens = min(tile_tokens, chunk.end - first);
    write_copies(world, plan, chunk, first, mine, places);
    write_rows(world, problem, plan, num_tokens, ids + int64_t(first) * problem.top_k, places, sort, next_row);
  }
}

// Both parts of the work, or, if the host wants the sizes in between, either.
template <bool kCounts, bool kPlaces>
__global__ void __launch_bounds__(kThreads) plan_kernel(World world, Problem problem, Plan plan, int chunks_per_rank) {
  extern __shared__ uint4 shared_words[];
  slots::Shared& sort = *reinterpret_cast<slots::Shared*>(shared_words);
  __shared__ PlaceShared shared;
  __shared__ int count[slots::kMaxExperts];
  __shared__ int num_tokens;
  Control& here = world.control();
  const int num_columns = problem.num_columns(), thread = threadIdx.x;
  const uint32_t epoch = here.plan_epoch + (kCounts ? 1 : 0);
  const int source = blockIdx.x / chunks_per_rank;
  if constexpr (kCounts) {
    count[thread] = 0;
    if (warp() == 0) {
      const int tokens = wait_for_ids(world, problem, source, epoch);
      __syncwarp();
      if (lane() == 0) num_tokens = tokens;
    }
  } else if (thread == 0) {
    num_tokens = num_tokens_of(world, source, epoch);
  }
  __syncthreads();
  const Chunk chunk = chunk_of(world, blockIdx.x, chunks_per_rank, num_tokens);
  const int16_t* const ids = world.ids(world.rank, epoch, source);
  if constexpr (kCounts) {
    count_chunk(world, problem, chunk, ids, count);
    __syncthreads();
    if (thread < num_columns) problem.chunk_counts[blockIdx.x * num_columns + thread] = count[thread];
    __syncthreads();
    // The last CTA counts the plan: all have read the epoch by then.
    if (thread == 0) {
      __threadfence();
      if (atomicAdd(&here.plan_ctas_done, 1) + 1 == epoch * gridDim.x) here.plan_epoch = epoch;
    }
  }
  if constexpr (kPlaces) {
    if (num_tokens > world.max_tokens) fail(world, kWhat, kTooManyTokens, source, world.max_tokens, num_tokens);
    allow_next_kernel();
    place_chunk<kCounts>(world, problem, plan, chunk, ids, chunks_per_rank, epoch, shared, sort);
  }
}

// `num_copies` and `num_rows`: capacities, or 0 where the host reads sizes.
Problem problem_of(const World& world, int64_t num_tokens, int64_t top_k, int64_t num_experts, const Tensor& counts,
                   int64_t num_copies = 0, int64_t num_rows = 0) {
  const int64_t experts_here = num_experts / world.num_ranks;
  STD_TORCH_CHECK(0 < top_k && top_k <= kMaxTopK, "exchange_plan: K must be 1 .. ", kMaxTopK, ", got ", top_k);
  STD_TORCH_CHECK(experts_here * world.num_ranks == num_experts && num_experts < 32768,
                  "exchange_plan: num_experts must be a multiple of the ranks and below 2^15, got ", num_experts);
  Problem problem{static_cast<int>(num_tokens),      static_cast<int>(top_k),
                  static_cast<int>(num_experts),     static_cast<int>(experts_here),
                  static_cast<int>(world.num_ranks), digest_of(Op::kPlan, top_k, num_experts, num_copies, num_rows),
                  counts.mutable_data_ptr<int>()};
  const int columns = problem.num_columns();
  STD_TORCH_CHECK(columns <= kThreads, "exchange_plan: experts of a rank must be at most ",
                  kThreads - 2 * world.num_ranks - 1, ", got ", experts_here);
  STD_TORCH_CHECK(counts.numel() >= world.num_plan_ctas * columns, "exchange_plan: counts must hold ",
                  world.num_plan_ctas * columns, " numbers, got ", counts.numel());
  return problem;
}

int chunks_per_rank(const World& world) { return static_cast<int>(world.num_plan_ctas / world.num_ranks); }

template <bool kCounts, bool kPlaces>
void launch(const World& world, const Problem& problem, const Plan& plan, cudaStream_t stream) {
  const int chunks = chunks_per_rank(world), ctas = chunks * static_cast<int>(world.num_ranks);
  moe_ops::launch(plan_kernel<kCounts, kPlaces>, ctas, kThreads, slots::Shared::bytes(problem.experts_here),
                  kCounts && kPlaces ? Start::kTogether : Start::kPlain, stream, world, problem, plan, chunks);
}

void deliver(const World& world, const Problem& problem, const Tensor& ids, cudaStream_t stream) {
  if (ids.scalar_type() == ScalarType::Long) {
    moe_ops::launch(deliver_kernel<int64_t>, kIdSenders, kSenderThreads, 0, Start::kPlain, stream, world, problem,
                    ids.const_data_ptr<int64_t>());
  } else {
    moe_ops::launch(deliver_kernel<int>, kIdSenders, kSenderThreads, 0, Start::kPlain, stream, world, problem,
                    ids.const_data_ptr<int>());
  }
}

// Sends ids [T, K], contiguous, and counts all ranks'. counts: a workspace that the next two take over.
void exchange_plan_count(Tensor ids, Tensor world_numbers, int64_t num_experts, Tensor counts) {
  const World world = world_of(world_numbers);
  const Problem problem = problem_of(world, ids.size(0), ids.size(1), num_experts, counts);
  const OnDeviceOf device(ids);
  deliver(world, problem, ids, device.stream());
  launch<true, false>(world, problem, Plan{}, device.stream());
}

// totals [6, P] int64: copies sent, copies received, slots sent, slots received, ids that are no experts, tokens.
void exchange_plan_totals(Tensor world_numbers, int64_t top_k, int64_t num_experts, Tensor counts, Tensor totals) {
  const World world = world_of(world_numbers);
  const Problem problem = problem_of(world, 0, top_k, num_experts, counts);
  const OnDeviceOf device(counts);
  moe_ops::launch(totals_kernel, 1, kThreads, 0, Start::kPlain, device.stream(), world, problem, chunks_per_rank(world),
                  totals.mutable_data_ptr<int64_t>());
}

// The plan's device tensors, in the order of layout.Plan: with `own_ids` all of the work, without (after
// exchange_plan_count) the rest of it.
void exchange_plan_place(std::optional<Tensor> own_ids, Tensor world_numbers, int64_t num_experts, Tensor counts,
                         Tensor copy_of_token, Tensor source_of_copy, Tensor ids, Tensor slot_of_row,
                         Tensor row_of_slot, Tensor offsets, Tensor counts_PL, Tensor overflow) {
  const World world = world_of(world_numbers);
  const Problem problem = own_ids ? problem_of(world, copy_of_token.size(0), ids.size(1), num_experts, counts,
                                               ids.size(0), slot_of_row.size(0))
                                  : problem_of(world, copy_of_token.size(0), ids.size(1), num_experts, counts);
  const Plan plan{copy_of_token.mutable_data_ptr<int>(),
                  source_of_copy.mutable_data_ptr<int>(),
                  ids.mutable_data_ptr<int>(),
                  slot_of_row.mutable_data_ptr<int>(),
                  row_of_slot.mutable_data_ptr<int>(),
                  offsets.mutable_data_ptr<int>(),
                  counts_PL.mutable_data_ptr<int>(),
                  overflow.mutable_data_ptr<int>(),
                  static_cast<int>(ids.size(0)),
                  static_cast<int>(slot_of_row.size(0)),
                  own_ids ? static_cast<int>(ids.size(0)) : INT_MAX};
  const OnDeviceOf device(ids);
  if (own_ids) {
    deliver(world, problem, *own_ids, device.stream());
    launch<true, true>(world, problem, plan, device.stream());
  } else {
    launch<false, true>(world, problem, plan, device.stream());
  }
}

// Bytes of a rank's workspace.
int64_t exchange_workspace_bytes(Tensor world_numbers) { return world_of(world_numbers).num_bytes(); }

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops_native, m) {
  m.def("exchange_plan_count(Tensor ids, Tensor world, int num_experts, Tensor(a!) counts) -> ()");
  m.def("exchange_plan_totals(Tensor world, int top_k, int num_experts, Tensor counts, Tensor(a!) totals) -> ()");
  m.def(
      "exchange_plan_place(Tensor? own_ids, Tensor world, int num_experts, Tensor(i!) counts, Tensor(a!) "
      "copy_of_token, Tensor(b!)"
      " source_of_copy, Tensor(c!) ids, Tensor(d!) slot_of_row, Tensor(e!) row_of_slot, Tensor(f!) offsets, Tensor(g!)"
      " counts_PL, Tensor(h!) overflow) -> ()");
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
