// torch.ops.moe_ops_native.exchange_dispatch and exchange_combine, called by moe_ops/kernels/exchange_nvlink.py: the
// operators dispatch and combine.
//
// Both are one kernel on a few multiprocessors. Some warps push rows to the ranks that want them, by bulk copies
// through shared memory, and raise a flag for every row that has arrived; the others take what the peers push. A rank
// first tells its peers where their rows may go, which also says that nobody here still reads what lies there:
//
//   dispatch: into the receiver's output itself, if that lies in memory that peers map, else into the inbox, from where
//             the receiver copies them on
//   combine:  into the inbox, [source rank, token]; the receiver adds them up in rank order

#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "device.h"
#include "exchange.cuh"
#include "hopper.cuh"
#include "slots.cuh"
#include "world.h"

namespace moe_ops::exchange {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Warps of a CTA.
constexpr int kMaxPushers = 4;      // of dispatch
constexpr int kCombinePushers = 3;  // of combine: shared memory that they do without caches what its takers load
constexpr int kTakers = 16;
constexpr int kStages = 3;
constexpr int kStageBytes = 16 * 1024;  // a batch of short rows; a longer row is a batch of its own
constexpr int kSharedBytes = 227 * 1024;
constexpr int kVectorBytes = 16;
constexpr int kRowsInboxAtOnce = 2;   // rows of a warp that copies on what arrived
constexpr int kVectorsInFlight = 16;  // of a thread that adds

struct Shared {
  uint64_t full[kMaxPushers][kStages];
  uint8_t* rows_of_peer[kMaxRanks];  // where rows for a peer go
  int first_copy[kMaxRanks + 1];     // of each source rank (combine)
};

constexpr int kSharedHead = (sizeof(Shared) + 127) / 128 * 128;

struct Exchange {
  World world;
  Tag tag_digest;  // the digest alone, shifted
  const int *copy_of_token, *source_of_copy, *ids;
  int num_tokens, num_copies, top_k, row_bytes;
  int batch_rows, stage_bytes, num_pushers;
  bool weighted;  // an empty tensor of weights has no address to tell

  __device__ int num_batches(int num_rows) const { return (num_rows + batch_rows - 1) / batch_rows; }
};

struct Dispatch {
  const uint8_t* x;
  const float* weights;
  uint8_t* rows;
  float* row_weights;
  int64_t target;  // where peers put this rank's rows, in its workspace
  bool direct;     // whether that is `rows`
};

struct Combine {
  const uint8_t* rows;
  const float* row_weights;
  const uint8_t* addend;  // or null
  uint8_t* x;
  float* weights;
};

__device__ int lane() { return threadIdx.x % kLanes; }
__device__ int warp() { return threadIdx.x / kLanes; }

__device__ void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ void bulk_store(void* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// All but the latest `kPending` groups of this thread's stores have arrived.
template <int kPending>
__device__ void stores_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ int taker_thread(const Exchange& exchange) { return int(threadIdx.x) - exchange.num_pushers * kLanes; }

// Of the warps that take.
__device__ void sync_takers() { asm volatile("bar.sync 1, %0;" ::"n"(kTakers * kLanes) : "memory"); }

// Of all: the peers' mail is here.
__device__ void sync_greeted() { asm volatile("bar.sync 2, %0;" ::"r"(blockDim.x) : "memory"); }

// Rows that lie together, loaded at once.
struct Batch {
  const uint8_t* from;
  int bytes;
};

// One warp's batches first, first + step, .. below `end`, through its stages. For each, `batch_of(i)` says what to load
// (no bytes: nothing), `place_of(i)` loads, early, the number by which the lane's part of `deliver(i, place, stage)`
// goes; that one starts stores of the lane and returns the flag to raise when they have arrived, or null.
//
// A stage is free once its stores have read it. Flags wait until the stores have arrived, and are raised kFlagged
// batches at a time, kFlagged batches later: ordering them after the rows takes a microsecond.
template <int kFlagged, typename BatchOf, typename PlaceOf, typename Deliver>
__device__ void push(const Exchange& exchange, Shared& shared, uint32_t stages, int first, int step, int end,
                     uint32_t epoch, BatchOf batch_of, PlaceOf place_of, Deliver deliver) {
  const uint32_t full = hopper::shared_address(shared.full[warp()]);
  const auto load = [&](int number) {
    const int index = first + number * step;
    if (index >= end || lane() != 0) return;
    const Batch batch = batch_of(index);
    const uint32_t stage = number % kStages, barrier = full + stage * sizeof(uint64_t);
    hopper::barrier_expect(barrier, batch.bytes);
    if (batch.bytes != 0) bulk_load(stages + stage * exchange.stage_bytes, batch.from, batch.bytes, barrier);
  };
  const auto place = [&](int number) {
    const int index = first + number * step;
    return index < end ? place_of(index) : kNone;
  };
  const auto raise = [&](uint32_t* const(&flags)[kFlagged]) {
    __threadfence_system();
#pragma unroll
    for (int i = 0; i < kFlagged; ++i) {
      if (flags[i]) store_relaxed(flags[i], epoch);
    }
  };
  static_assert(kStages == 3, "places are held for the current batch and two more");
  for (int number = 0; number < kStages; ++number) load(number);
  int current = place(0), next = place(1);
  sync_greeted();
  uint32_t* before[kFlagged]{};
  for (int base = 0; first + base * step < end; base += kFlagged) {
    uint32_t* flags[kFlagged]{};
#pragma unroll
    for (int i = 0; i < kFlagged; ++i) {
      const int number = base + i, index = first + number * step;
      if (index < end) {
        const int after_next = place(number + 2);
        const uint32_t stage = number % kStages;
        hopper::barrier_wait(full + stage * sizeof(uint64_t), number / kStages & 1);
        flags[i] = deliver(index, current, stages + stage * exchange.stage_bytes);
        current = next;
        next = after_next;
      }
      hopper::tma_store_commit();
      hopper::tma_store_wait_read<1>();
      __syncwarp();
      if (number > 0) load(number - 1 + kStages);
    }
    stores_wait<kFlagged>();
    raise(before);
#pragma unroll
    for (int i = 0; i < kFlagged; ++i) before[i] = flags[i];
  }
  stores_wait<0>();
  raise(before);
}

// Tells the peers where rows for this rank go, and learns where theirs do. By the warps that take.
__device__ void greet(const Exchange& exchange, const char* what, int64_t target, Tag tag, Shared& shared) {
  const World& world = exchange.world;
  const int peer = taker_thread(exchange);
  if (peer < world.num_ranks && peer != world.rank) {
    if (blockIdx.x == 0) {
      Mail& mail = world.control(peer).mail[world.rank];
      mail.target = target;
      store_release(&mail.tag, tag);
    }
    const Mail& mail = world.control().mail[peer];
    wait_for_tag(world, what, peer, &mail.tag, tag);
    shared.rows_of_peer[peer] = world.bases[peer] + *static_cast<const volatile uint64_t*>(&mail.target);
  }
  sync_greeted();
}

__device__ void init_barriers(Shared& shared) {
  if (threadIdx.x == 0) {
    for (auto& warp : shared.full) {
      for (auto& barrier : warp) hopper::barrier_init(hopper::shared_address(&barrier), 1);
    }
    hopper::barrier_init_fence();
  }
}

// The last CTA counts the exchange. All have read the epoch by then.
__device__ void finish(const Exchange& exchange, uint32_t epoch) {
  __syncthreads();
  Control& here = exchange.world.control();
  if (threadIdx.x == 0 && atomicAdd(&here.ctas_done, 1) == gridDim.x - 1) {
    here.ctas_done = 0;
    here.epoch = epoch;
    if (exchange.weighted) here.weights_expected += gridDim.x;
  }
}

__device__ void zero_row(uint8_t* row, int row_bytes) {
  for (int at = lane() * kVectorBytes; at < row_bytes; at += kLanes * kVectorBytes) {
    *reinterpret_cast<uint4*>(row + at) = uint4{};
  }
}

__device__ void copy_row(uint8_t* to, const uint8_t* from, int row_bytes) {
  constexpr int kAtOnce = 4, kStride = kLanes * kVectorBytes;
  for (int first = lane() * kVectorBytes; first < row_bytes; first += kAtOnce * kStride) {
    uint4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kStride < row_bytes)
        values[i] = __ldcg(reinterpret_cast<const uint4*>(from + first + i * kStride));
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * kStride < row_bytes) *reinterpret_cast<uint4*>(to + first + i * kStride) = values[i];
    }
  }
}

__device__ void push_tokens(const Exchange& exchange, const Dispatch& dispatch, Shared& shared, uint32_t stages,
                            uint32_t epoch) {
  const World& world = exchange.world;
  const int ranks = world.num_ranks, rows = exchange.batch_rows, row_bytes = exchange.row_bytes;
  const int pusher = blockIdx.x * exchange.num_pushers + warp(), step = gridDim.x * exchange.num_pushers;
  const int row = lane() / ranks, rank = lane() % ranks;
  push<4>(
      exchange, shared, stages, pusher, step, exchange.num_batches(exchange.num_tokens), epoch,
      [&](int batch) {
        const int first = batch * rows, held = min(rows, exchange.num_tokens - first);
        return Batch{dispatch.x + int64_t(first) * row_bytes, held * row_bytes};
      },
      [&](int batch) {
        const int token = batch * rows + row;
        return row < rows && token < exchange.num_tokens ? __ldg(exchange.copy_of_token + int64_t(token) * ranks + rank)
                                                         : kNone;
      },
      [&](int, int copy, uint32_t stage) -> uint32_t* {
        if (copy == kNone) return nullptr;
        const bool own = rank == world.rank;
        uint8_t* const there = own ? dispatch.rows : shared.rows_of_peer[rank];
        bulk_store(there + int64_t(copy) * row_bytes, stage + row * row_bytes, row_bytes);
        return own ? nullptr : world.flags(rank) + copy;
      });
}

// Where the copies of `source` and of later ranks begin, by one warp. Copies are sorted by source, none (-1) last.
__device__ int first_copy_of(const Exchange& exchange, int source) {
  int low = 0, high = exchange.num_copies;  // the answer lies in low .. high
  while (low < high) {
    const int step = (high - low + kLanes - 1) / kLanes, at = low + lane() * step;
    bool before = false;
    if (at < high) {
      const int its = __ldg(exchange.source_of_copy + int64_t(at) * 2);
      before = 0 <= its && its < source;
    }
    const int count = __popc(__ballot_sync(kAllLanes, before));  // the first `count` probes lie before it
    if (count == 0) return low;
    high = min(low + count * step, high);
    low += (count - 1) * step + 1;
  }
  return low;
}

// Rows past the valid copies become zero.
__device__ void clear_tail(const Exchange& exchange, const Dispatch& dispatch) {
  const int taker = warp() - exchange.num_pushers + int(blockIdx.x) * kTakers, step = gridDim.x * kTakers;
  for (int copy = first_copy_of(exchange, kMaxRanks) + taker; copy < exchange.num_copies; copy += step) {
    zero_row(dispatch.rows + int64_t(copy) * exchange.row_bytes, exchange.row_bytes);
  }
}

__device__ void take_copies(const Exchange& exchange, const Dispatch& dispatch, uint32_t epoch) {
  const World& world = exchange.world;
  const int row_bytes = exchange.row_bytes;
  const int group = dispatch.direct ? kLanes : kRowsInboxAtOnce;
  const int taker = blockIdx.x * kTakers + warp() - exchange.num_pushers, step = gridDim.x * kTakers * group;
  const uint8_t* const inbox = world.inbox(world.rank);
  for (int first = taker * group; first < exchange.num_copies; first += step) {
    const int copy = first + lane();
    const bool inside = lane() < group && copy < exchange.num_copies;
    int2 source{kNone, kNone};
    if (inside) source = __ldg(reinterpret_cast<const int2*>(exchange.source_of_copy) + copy);
    const bool own = source.x == world.rank, sent = source.x != kNone && !own;
    if (sent) wait_for(world, "dispatch", source.x, world.flags(world.rank) + copy, epoch);
    __syncwarp();
    if (dispatch.direct) continue;
    for (unsigned left = __ballot_sync(kAllLanes, sent); left; left &= left - 1) {
      const int64_t at = int64_t(first + __ffs(left) - 1) * row_bytes;
      copy_row(dispatch.rows + at, inbox + at, row_bytes);
    }
  }
}

// Weights of a token or a copy that are moved together.
template <int kWidth>
struct Weights {
  float values[kWidth];
};

template <int kWidth>
__device__ Weights<kWidth> load_weights(const float* from) {
  Weights<kWidth> weights;
  if constexpr (kWidth == 4) {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
    weights = {four.x, four.y, four.z, four.w};
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) weights.values[i] = __ldcg(from + i);
  }
  return weights;
}

template <int kWidth>
__device__ void store_weights(float* to, const Weights<kWidth>& weights) {
  if constexpr (kWidth == 4) {
    const auto& values = weights.values;
    *reinterpret_cast<float4*>(to) = {values[0], values[1], values[2], values[3]};
  } else {
#pragma unroll
    for (int i = 0; i < kWidth; ++i) to[i] = weights.values[i];
  }
}

// Those of experts alone: zero where there is none.
template <int kWidth>
__device__ Weights<kWidth> load_held_weights(const float* from, const int* ids) {
  Weights<kWidth> weights = load_weights<kWidth>(from);
  int held[kWidth];
#pragma unroll
  for (int i = 0; i < kWidth; ++i) held[i] = __ldg(ids + i);
#pragma unroll
  for (int i = 0; i < kWidth; ++i) weights.values[i] = held[i] >= 0 ? weights.values[i] : 0.f;
  return weights;
}

// `use(owner, slot)` for the first slot of every kWidth of a token or copy below `num_owners`, by the threads that
// take.
template <int kWidth, typename Use>
__device__ void for_each_weights(const Exchange& exchange, int num_owners, Use use) {
  const unsigned per_owner = exchange.top_k / kWidth, end = num_owners * per_owner;
  constexpr int kThreads = kTakers * kLanes;
  const unsigned step = gridDim.x * kThreads;
#pragma unroll 2
  for (unsigned i = blockIdx.x * kThreads + taker_thread(exchange); i < end; i += step) {
    use(i / per_owner, i * kWidth);
  }
}

// Tells the peers that this CTA's part of the weights is theirs to read.
__device__ void weights_sent(const Exchange& exchange) {
  sync_takers();
  const World& world = exchange.world;
  const int peer = taker_thread(exchange);
  if (peer < world.num_ranks && peer != world.rank) add_release(&world.control(peer).weights_arrived[world.rank], 1);
}

__device__ void wait_for_weights(const Exchange& exchange, const char* what) {
  const World& world = exchange.world;
  const int peer = taker_thread(exchange);
  if (peer < world.num_ranks && peer != world.rank) {
    const Control& here = world.control();
    const uint32_t* const arrived = &here.weights_arrived[peer];
    const uint32_t expected = here.weights_expected + gridDim.x;
    wait_for_count(world, what, peer, arrived, expected);
  }
  sync_takers();
}

// A token's weights to every copy of it.
template <int kWidth>
__device__ void send_weights(const Exchange& exchange, const Dispatch& dispatch) {
  const World& world = exchange.world;
  const int top_k = exchange.top_k, ranks = world.num_ranks;
  for_each_weights<kWidth>(exchange, exchange.num_tokens, [&](unsigned token, unsigned slot) {
    const Weights<kWidth> weights = load_weights<kWidth>(dispatch.weights + slot);
    for (int rank = 0; rank < ranks; ++rank) {
      const int copy = rank == world.rank ? kNone : __ldg(exchange.copy_of_token + int64_t(token) * ranks + rank);
      if (copy != kNone) store_weights(world.weights(rank) + int64_t(copy) * top_k + slot % top_k, weights);
    }
  });
  weights_sent(exchange);
}

template <int kWidth>
__device__ void take_weights(const Exchange& exchange, const Dispatch& dispatch) {
  const World& world = exchange.world;
  const int top_k = exchange.top_k;
  const float* const inbox = world.weights(world.rank);
  wait_for_weights(exchange, "dispatch");
  for_each_weights<kWidth>(exchange, exchange.num_copies, [&](unsigned copy, unsigned slot) {
    const int2 source = __ldg(reinterpret_cast<const int2*>(exchange.source_of_copy) + copy);
    const bool own = source.x == world.rank;
    const float* const from = own ? dispatch.weights + int64_t(source.y) * top_k + slot % top_k : inbox + slot;
    store_weights(dispatch.row_weights + slot, load_held_weights<kWidth>(from, exchange.ids + slot));
  });
}

// A copy's weights back to its token.
template <int kWidth>
__device__ void send_weights(const Exchange& exchange, const Combine& combine) {
  const World& world = exchange.world;
  const int top_k = exchange.top_k;
  for_each_weights<kWidth>(exchange, exchange.num_copies, [&](unsigned copy, unsigned slot) {
    const int2 source = __ldg(reinterpret_cast<const int2*>(exchange.source_of_copy) + copy);
    if (source.x == world.rank || source.x == kNone) return;
    float* const to = world.weights(source.x) + (world.rank * world.max_tokens + source.y) * top_k + slot % top_k;
    store_weights(to, load_held_weights<kWidth>(combine.row_weights + slot, exchange.ids + slot));
  });
  weights_sent(exchange);
}

template <int kWidth>
__device__ void take_weights(const Exchange& exchange, const Combine& combine) {
  const World& world = exchange.world;
  const int top_k = exchange.top_k, ranks = world.num_ranks;
  const float* const inbox = world.weights(world.rank);
  wait_for_weights(exchange, "combine");
  for_each_weights<kWidth>(exchange, exchange.num_tokens, [&](unsigned token, unsigned slot) {
    Weights<kWidth> sum{};
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t copy = __ldg(exchange.copy_of_token + int64_t(token) * ranks + rank);
      if (copy == kNone) continue;
      const int64_t its = copy * top_k + slot % top_k;
      const Weights<kWidth> term = rank == world.rank
                                       ? load_held_weights<kWidth>(combine.row_weights + its, exchange.ids + its)
                                       : load_weights<kWidth>(inbox + rank * world.max_tokens * top_k + slot);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) sum.values[i] += term.values[i];
    }
    store_weights(combine.weights + slot, sum);
  });
}

template <typename Arguments>
__device__ void send_weights(const Exchange& exchange, const Arguments& arguments) {
  if (exchange.top_k % 4 == 0) {
    send_weights<4>(exchange, arguments);
  } else {
    send_weights<1>(exchange, arguments);
  }
}

template <typename Arguments>
__device__ void take_weights(const Exchange& exchange, const Arguments& arguments) {
  if (exchange.top_k % 4 == 0) {
    take_weights<4>(exchange, arguments);
  } else {
    take_weights<1>(exchange, arguments);
  }
}

__global__ void __launch_bounds__((kMaxPushers + kTakers) * kLanes)
    dispatch_kernel(const __grid_constant__ Exchange exchange, const __grid_constant__ Dispatch dispatch) {
  extern __shared__ uint4 shared_words[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_words);
  init_barriers(shared);
  slots::wait_for_previous_kernel();
  const uint32_t epoch = exchange.world.control().epoch + 1;
  __syncthreads();
  if (warp() < exchange.num_pushers) {
    const uint32_t stages = hopper::shared_address(shared_words) + kSharedHead;
    push_tokens(exchange, dispatch, shared, stages + warp() * kStages * exchange.stage_bytes, epoch);
  } else {
    greet(exchange, "dispatch", dispatch.target, exchange.tag_digest | epoch, shared);
    if (exchange.weighted) send_weights(exchange, dispatch);
    clear_tail(exchange, dispatch);
    if (exchange.weighted) take_weights(exchange, dispatch);
    take_copies(exchange, dispatch, epoch);
  }
  finish(exchange, epoch);
}

__device__ void push_copies(const Exchange& exchange, const Combine& combine, Shared& shared, uint32_t stages,
                            uint32_t epoch) {
  const World& world = exchange.world;
  const int ranks = world.num_ranks, rows = exchange.batch_rows, row_bytes = exchange.row_bytes;
  const int pusher = blockIdx.x * exchange.num_pushers + warp(), step = gridDim.x * exchange.num_pushers;
  // Batches take turns among the other ranks, another first on each rank: all links are busy, and each rank's tokens
  // are completed one after another.
  int most = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank != world.rank) most = max(most, shared.first_copy[rank + 1] - shared.first_copy[rank]);
  }
  const int num_batches = exchange.num_batches(most) * (ranks - 1);  // none with one rank
  struct Range {
    int source, first, held;
  };
  const auto range_of = [&](int batch) {
    const int others = ranks - 1, source = (int(world.rank) + 1 + batch % others) % ranks;
    const int first = shared.first_copy[source] + batch / (ranks - 1) * rows;
    return Range{source, first, max(min(rows, shared.first_copy[source + 1] - first), 0)};
  };
  push<2>(  // the takers wait for flags
      exchange, shared, stages, pusher, step, num_batches, epoch,
      [&](int batch) {
        const Range range = range_of(batch);
        return Batch{combine.rows + int64_t(range.first) * row_bytes, range.held * row_bytes};
      },
      [&](int batch) {
        const Range range = range_of(batch);
        return lane() < range.held ? __ldg(exchange.source_of_copy + int64_t(range.first + lane()) * 2 + 1) : kNone;
      },
      [&](int batch, int token, uint32_t stage) -> uint32_t* {
        if (token == kNone) return nullptr;
        const Range range = range_of(batch);
        const int64_t place = world.rank * world.max_tokens + token;
        bulk_store(world.inbox(range.source) + place * row_bytes, stage + lane() * row_bytes, row_bytes);
        return world.flags(range.source) + place;
      });
}

// The values of 16 bytes of a row, as float32.
template <typename T>
struct Vector {
  static constexpr int kSize = kVectorBytes / sizeof(T);
  float values[kSize];

  __device__ void add(uint4 bits) {
    const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        values[i] += __uint_as_float(words[i]);
      } else {
        const float2 pair = hopper::unpack<T>(words[i]);
        values[2 * i] += pair.x;
        values[2 * i + 1] += pair.y;
      }
    }
  }
  __device__ uint4 bits() const {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        words[i] = __float_as_uint(values[i]);
      } else {
        words[i] = hopper::pack<T>(values[2 * i], values[2 * i + 1]);
      }
    }
    return {words[0], words[1], words[2], words[3]};
  }
};

// A token's rows, which lane r of the warp knows of rank r (null: none), summed in rank order; up to kRanks of them.
template <typename T, int kRanks>
__device__ void sum_rows(const uint8_t* row_of_rank, const uint8_t* addend, uint8_t* to, int row_bytes) {
  constexpr int kAtOnce = kVectorsInFlight / kRanks, kStride = kLanes * kVectorBytes;
  const uint8_t* rows[kRanks];
#pragma unroll
  for (int rank = 0; rank < kRanks; ++rank) {
    rows[rank] =
        reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(row_of_rank), rank));
  }
  for (int first = lane() * kVectorBytes; first < row_bytes; first += kAtOnce * kStride) {
    uint4 values[kRanks][kAtOnce];
    const auto load = [&](const uint8_t* row, int at) {
      return row && at < row_bytes ? __ldcg(reinterpret_cast<const uint4*>(row + at)) : uint4{};
    };
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) values[rank][i] = load(rows[rank], first + i * kStride);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kStride;
      Vector<T> sum{};
#pragma unroll
      for (int rank = 0; rank < kRanks; ++rank) sum.add(values[rank][i]);
      if (addend) sum.add(load(addend, at));
      if (at < row_bytes) *reinterpret_cast<uint4*>(to + at) = sum.bits();
    }
  }
}

template <typename T, int kRanks>
__device__ void take_sums(const Exchange& exchange, const Combine& combine, uint32_t epoch) {
  const World& world = exchange.world;
  const int ranks = world.num_ranks, row_bytes = exchange.row_bytes, rank = lane();
  const int taker = blockIdx.x * kTakers + warp() - exchange.num_pushers, step = gridDim.x * kTakers;
  const auto copy_of = [&](int token) {
    return rank < ranks && token < exchange.num_tokens ? __ldg(exchange.copy_of_token + int64_t(token) * ranks + rank)
                                                       : kNone;
  };
  int next = copy_of(taker);
  for (int token = taker; token < exchange.num_tokens; token += step) {
    const int copy = next;
    next = copy_of(token + step);
    const int64_t place = int64_t(rank) * world.max_tokens + token;
    const uint8_t* row = nullptr;
    if (copy != kNone && rank == world.rank) row = combine.rows + int64_t(copy) * row_bytes;
    if (copy != kNone && rank != world.rank) {
      row = world.inbox(world.rank) + place * row_bytes;
      wait_for(world, "combine", rank, world.flags(world.rank) + place, epoch);
    }
    __syncwarp();
    const int64_t at = int64_t(token) * row_bytes;
    sum_rows<T, kRanks>(row, combine.addend ? combine.addend + at : nullptr, combine.x + at, row_bytes);
  }
}

template <typename T, int kRanks>
__global__ void __launch_bounds__((kMaxPushers + kTakers) * kLanes)
    combine_kernel(const __grid_constant__ Exchange exchange, const __grid_constant__ Combine combine) {
  extern __shared__ uint4 shared_words[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_words);
  init_barriers(shared);
  slots::wait_for_previous_kernel();
  const uint32_t epoch = exchange.world.control().epoch + 1;
  const int ranks = exchange.world.num_ranks;
  if (warp() <= ranks) {
    const int first = first_copy_of(exchange, warp() < ranks ? warp() : kMaxRanks);
    if (lane() == 0) shared.first_copy[warp()] = first;
  }
  __syncthreads();
  const uint32_t stages = hopper::shared_address(shared_words) + kSharedHead;
  if (warp() < exchange.num_pushers) {
    push_copies(exchange, combine, shared, stages + warp() * kStages * exchange.stage_bytes, epoch);
  } else {
    greet(exchange, "combine", exchange.world.inbox_at(), exchange.tag_digest | epoch, shared);
    if (exchange.weighted) send_weights(exchange, combine);
    take_sums<T, kRanks>(exchange, combine, epoch);
    if (exchange.weighted) take_weights(exchange, combine);
  }
  finish(exchange, epoch);
}

Exchange exchange_of(const Tensor& world_numbers, bool back, const Tensor& rows, bool weighted,
                     const Tensor& copy_of_token, const Tensor& source_of_copy, const Tensor& ids) {
  const int64_t row_bytes = rows.size(1) * rows.element_size(), top_k = ids.size(1);
  Exchange exchange{world_of(world_numbers),
                    uint64_t{digest_of(1, back, row_bytes, int64_t(rows.scalar_type()), weighted ? top_k : 0)} << 32,
                    copy_of_token.const_data_ptr<int>(),
                    source_of_copy.const_data_ptr<int>(),
                    ids.const_data_ptr<int>(),
                    static_cast<int>(copy_of_token.size(0)),
                    static_cast<int>(ids.size(0)),
                    static_cast<int>(top_k),
                    static_cast<int>(row_bytes)};
  const World& world = exchange.world;
  STD_TORCH_CHECK(row_bytes % kVectorBytes == 0 && 0 < row_bytes && row_bytes <= world.max_row_bytes,
                  "moe_ops: rows must have a multiple of 16 bytes and at most ", world.max_row_bytes, ", got ",
                  row_bytes);
  STD_TORCH_CHECK(exchange.num_tokens <= world.max_tokens, "moe_ops: tokens must be at most ", world.max_tokens,
                  ", got ", exchange.num_tokens);
  STD_TORCH_CHECK(top_k <= kMaxTopK, "moe_ops: K must be at most ", kMaxTopK, ", got ", top_k);
  const int most = kLanes / static_cast<int>(world.num_ranks);  // a lane a (row, rank)
  exchange.weighted = weighted;
  exchange.batch_rows = std::max(std::min(kStageBytes / exchange.row_bytes, most), 1);
  exchange.stage_bytes = (exchange.batch_rows * exchange.row_bytes + 127) / 128 * 128;
  const int stages = (kSharedBytes - kSharedHead) / exchange.stage_bytes;
  exchange.num_pushers = std::min(stages / kStages, back ? kCombinePushers : kMaxPushers);
  STD_TORCH_CHECK(exchange.num_pushers > 0, "moe_ops: rows are too long for shared memory, got bytes ", row_bytes);
  return exchange;
}

template <typename Arguments>
void launch(void (*kernel)(Exchange, Arguments), const Exchange& exchange, const Arguments& arguments,
            cudaStream_t stream) {
  const int shared_bytes = kSharedHead + exchange.num_pushers * kStages * exchange.stage_bytes;
  slots::launch(kernel, static_cast<int>(exchange.world.num_sms), (exchange.num_pushers + kTakers) * kLanes,
                shared_bytes, slots::Start::kEarly, stream, exchange, arguments);
}

template <typename T>
auto combine_kernel_of(const Exchange& exchange) {
  const int64_t ranks = exchange.world.num_ranks;
  return ranks <= 2 ? combine_kernel<T, 2> : ranks <= 4 ? combine_kernel<T, 4> : combine_kernel<T, 8>;
}

template <typename T>
T* pointer_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

// The operator dispatch; all tensors contiguous, weights float32. `weights_out` is not touched without weights.
void exchange_dispatch(Tensor x, std::optional<Tensor> weights, Tensor copy_of_token, Tensor source_of_copy, Tensor ids,
                       Tensor world_numbers, int64_t window_bytes, Tensor rows, Tensor weights_out) {
  const OnDeviceOf device(x);
  const Exchange exchange =
      exchange_of(world_numbers, false, x, weights.has_value(), copy_of_token, source_of_copy, ids);
  const World& world = exchange.world;
  uint8_t* const out = static_cast<uint8_t*>(rows.data_ptr());
  const int64_t offset = out - world.bases[world.rank];
  const int64_t out_bytes = rows.numel() * rows.element_size();
  const bool direct = 0 <= offset && offset + out_bytes <= window_bytes;
  launch(dispatch_kernel, exchange,
         Dispatch{static_cast<const uint8_t*>(x.data_ptr()), pointer_or_null<const float>(weights), out,
                  static_cast<float*>(weights_out.data_ptr()), direct ? offset : world.inbox_at(), direct},
         device.stream());
}

// The operator combine; all tensors contiguous, weights float32. `weights_out` is not touched without weights.
void exchange_combine(Tensor rows, std::optional<Tensor> weights, std::optional<Tensor> addend, Tensor copy_of_token,
                      Tensor source_of_copy, Tensor ids, Tensor world_numbers, Tensor x, Tensor weights_out) {
  const OnDeviceOf device(rows);
  const Exchange exchange =
      exchange_of(world_numbers, true, rows, weights.has_value(), copy_of_token, source_of_copy, ids);
  const Combine combine{static_cast<const uint8_t*>(rows.data_ptr()), pointer_or_null<const float>(weights),
                        pointer_or_null<const uint8_t>(addend), static_cast<uint8_t*>(x.data_ptr()),
                        static_cast<float*>(weights_out.data_ptr())};
  const ScalarType dtype = rows.scalar_type();
  const auto kernel = dtype == ScalarType::BFloat16 ? combine_kernel_of<__nv_bfloat16>(exchange)
                      : dtype == ScalarType::Half   ? combine_kernel_of<__half>(exchange)
                                                    : combine_kernel_of<float>(exchange);
  launch(kernel, exchange, combine, device.stream());
}

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops_native, m) {
  m.def(
      "exchange_dispatch(Tensor x, Tensor? weights, Tensor copy_of_token, Tensor source_of_copy, Tensor ids, Tensor"
      " world, int window_bytes, Tensor(a!) rows, Tensor(b!) weights_out) -> ()");
  m.def(
      "exchange_combine(Tensor rows, Tensor? weights, Tensor? addend, Tensor copy_of_token, Tensor source_of_copy,"
      " Tensor ids, Tensor world, Tensor(a!) x, Tensor(b!) weights_out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CUDA, m) {
  m.impl("exchange_dispatch", TORCH_BOX(&exchange_dispatch));
  m.impl("exchange_combine", TORCH_BOX(&exchange_combine));
}

}  // namespace
}  // namespace moe_ops::exchange
