// What dispatch and combine share: a kernel on a few multiprocessors. Some of its warps push rows to the ranks that
// want them, by bulk copies through shared memory, with a flag for each row that goes into an inbox; the others take
// what has arrived, or (combine) pull it. First ranks tell their peers where rows go or lie, which also says that what
// lay in memory that they may write is no longer read.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "device.h"
#include "exchange.cuh"
#include "hopper.cuh"
#include "world.h"

namespace moe_ops::exchange {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Warps of a CTA.
constexpr int kDispatchPushers = 4;
constexpr int kCombinePushers = 3;  // one fewer leaves L1, which shares that memory, to what takers load
constexpr int kTakers = 13;         // with combine's pushers 16 warps: one more, and registers for sums spill
constexpr int kStages = 3;
constexpr int kStageBytes = 16 * 1024;  // a batch of short rows; a longer row is a batch of its own
constexpr int kSharedBytes = 227 * 1024;
constexpr int kVectorBytes = 16;

// Combine, where rows are pulled: each taker brings them, piece by piece, into stages of its own.
constexpr int kVectorsOfPiece = 4;  // of a lane
constexpr int kPieceBytes = kVectorsOfPiece * kLanes * kVectorBytes;
constexpr int kPullStages = 8;

struct Shared {
  uint64_t full[kDispatchPushers][kStages];
  uint64_t pull_full[kTakers][kPullStages];
  uint8_t* rows_of_peer[kMaxRanks];  // where rows for a peer go, or (combine) its rows are; or null
  int64_t limit_of_peer[kMaxRanks];  // and how many of them there are
  int first_copy[kMaxRanks + 1];     // of each source rank (combine)
};

constexpr int kSharedHead = (sizeof(Shared) + 127) / 128 * 128;
static_assert(kSharedHead + kTakers * kPullStages * kPieceBytes <= kSharedBytes);

struct Exchange {
  World world;
  Tag tag_digest;  // the digest alone, shifted
  const int *copy_of_token, *source_of_copy, *ids;
  int num_tokens, num_copies, top_k, row_bytes;
  int batch_rows, stage_bytes, num_pushers;
  bool weighted;  // whether weights travel (an empty tensor of them has no address either)

  __device__ int num_batches(int num_rows) const { return (num_rows + batch_rows - 1) / batch_rows; }
};

__device__ inline void bulk_load(uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ inline void bulk_store(void* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// All but the latest `kPending` groups of this thread's stores have arrived.
template <int kPending>
__device__ void stores_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ inline int taker_thread(const Exchange& exchange) {
  return int(threadIdx.x) - exchange.num_pushers * kLanes;
}

// Threads that move weights together.
struct Team {
  int thread, size;
  __device__ void sync() const { asm volatile("bar.sync 1, %0;" ::"r"(size) : "memory"); }
};

__device__ inline Team takers(const Exchange& exchange) { return {taker_thread(exchange), kTakers * kLanes}; }
__device__ inline Team pushers(const Exchange& exchange) { return {int(threadIdx.x), exchange.num_pushers * kLanes}; }

// Of all: the peers' mail is here.
__device__ inline void sync_greeted() { asm volatile("bar.sync 2, %0;" ::"r"(blockDim.x) : "memory"); }

// The values of 16 bytes of a row, as float32.
template <typename T>
struct Vector {
  static constexpr int kSize = kVectorBytes / sizeof(T);
  float values[kSize];

  __device__ static Vector of(uint4 bits) {
    Vector vector;
    for_each(bits, [&](int i, float value) { vector.values[i] = value; });
    return vector;
  }
  __device__ void add(uint4 bits) {
    for_each(bits, [&](int i, float value) { values[i] += value; });
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

 private:
  template <typename Use>
  __device__ static void for_each(uint4 bits, Use use) {
    const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        use(i, __uint_as_float(words[i]));
      } else {
        const float2 pair = hopper::unpack<T>(words[i]);
        use(2 * i, pair.x);
        use(2 * i + 1, pair.y);
      }
    }
  }
};

// Rows that lie together, loaded at once.
struct Batch {
  const uint8_t* from;
  int bytes;
};

// Flags of a lane's rows, null for none: raised once the stores of the rows have arrived.
template <int kFlagged>
struct Flags {
  uint32_t* words[kFlagged]{};

  __device__ bool any() const {  // in the warp
    bool some = false;
#pragma unroll
    for (int i = 0; i < kFlagged; ++i) some |= words[i] != nullptr;
    return __any_sync(kAllLanes, some);
  }
  __device__ void raise(uint32_t epoch) const {
    __threadfence_system();
#pragma unroll
    for (int i = 0; i < kFlagged; ++i) {
      if (words[i]) store_relaxed(words[i], epoch);
    }
  }
};

// One warp's batches first, first + step, .. below `end`, through its stages.
//   batch_of(i): what to load; no bytes for nothing
//   place_of(i): a number for this lane, loaded two batches ahead
//   deliver(i, place, stage): starts this lane's stores, returns the flag to raise when they have arrived, or null
//
// Unless `greeted`, the first loads are started before the peers' mail is here. A stage is free once its stores have
// read it. Flags wait until the stores have arrived, and are raised kFlagged batches at a time, kFlagged batches later:
// ordering them after the rows takes a microsecond (H200). kUnrolled: how many of them the loop's body holds. At the
// end all stores have arrived.
template <int kFlagged, int kUnrolled = kFlagged, typename BatchOf, typename PlaceOf, typename Deliver>
__device__ void push(const Exchange& exchange, Shared& shared, uint32_t stages, int first, int step, int end,
                     uint32_t epoch, bool greeted, BatchOf batch_of, PlaceOf place_of, Deliver deliver) {
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
  static_assert(kStages == 3, "places are held for the current batch and two more");
  for (int number = 0; number < kStages; ++number) load(number);
  int current = place(0), next = place(1);
  if (!greeted) sync_greeted();
  Flags<kFlagged> previous;
  for (int base = 0; first + base * step < end; base += kFlagged) {
    Flags<kFlagged> flags;
#pragma unroll kUnrolled
    for (int i = 0; i < kFlagged; ++i) {
      const int number = base + i, index = first + number * step;
      if (index < end) {
        const int after_next = place(number + 2);
        const uint32_t stage = number % kStages;
        hopper::barrier_wait(full + stage * sizeof(uint64_t), number / kStages & 1);
        flags.words[i] = deliver(index, current, stages + stage * exchange.stage_bytes);
        current = next;
        next = after_next;
      }
      hopper::tma_store_commit();
      hopper::tma_store_wait_read<1>();
      __syncwarp();
      if (number > 0) load(number - 1 + kStages);
    }
    if (previous.any()) {
      stores_wait<kFlagged>();
      previous.raise(epoch);
    }
    previous = flags;
  }
  stores_wait<0>();
  if (previous.any()) previous.raise(epoch);
}

// Tells the peers where they write or read this rank's rows, and learns it of theirs. By the takers.
__device__ inline void greet(const Exchange& exchange, const char* what, int64_t offset, int64_t limit, uint32_t epoch,
                             Shared& shared) {
  const World& world = exchange.world;
  const int peer = taker_thread(exchange);
  if (peer < world.num_ranks && peer != world.rank) {
    const Tag tag = exchange.tag_digest | epoch;
    if (blockIdx.x == 0) {
      Mail& mail = world.control(peer).mail[epoch & 1][world.rank];
      mail.offset = offset;
      mail.limit = limit;
      store_release(&mail.tag, tag);
    }
    const Mail& mail = world.control().mail[epoch & 1][peer];
    wait_for_tag(world, what, peer, &mail.tag, tag);
    const int64_t theirs = *static_cast<const volatile int64_t*>(&mail.offset);
    shared.rows_of_peer[peer] = theirs == kNowhere ? nullptr : world.bases[peer] + theirs;
    shared.limit_of_peer[peer] = *static_cast<const volatile int64_t*>(&mail.limit);
  }
  sync_greeted();
}

__device__ inline void init_barriers(Shared& shared) {
  const auto init = [](uint64_t* barriers, int number) {
    if (int(threadIdx.x) < number) hopper::barrier_init(hopper::shared_address(barriers + threadIdx.x), 1);
  };
  init(shared.full[0], kDispatchPushers * kStages);
  init(shared.pull_full[0], kTakers * kPullStages);
  hopper::barrier_init_fence();
}

// The last CTA counts the exchange. All have read the epoch by then.
__device__ inline void finish(const Exchange& exchange, uint32_t epoch, int parts_of_rows) {
  __syncthreads();
  Control& here = exchange.world.control();
  if (threadIdx.x == 0 && atomicAdd(&here.ctas_done, 1) == gridDim.x - 1) {
    here.ctas_done = 0;
    here.epoch = epoch;
    if (exchange.weighted) here.weights.expected += gridDim.x;
    here.rows.expected += parts_of_rows;
  }
}

// Where the copies of `source` and of later ranks begin, by one warp. Copies are sorted by source, none (-1) last.
__device__ inline int first_copy_of(const Exchange& exchange, int source) {
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

// `use(owner, slot)` for the first slot of every kWidth of a token or copy below `num_owners`.
template <int kWidth, typename Use>
__device__ void for_each_weights(const Exchange& exchange, Team team, int num_owners, Use use) {
  const unsigned per_owner = exchange.top_k / kWidth, end = num_owners * per_owner, step = gridDim.x * team.size;
#pragma unroll 2
  for (unsigned i = blockIdx.x * team.size + team.thread; i < end; i += step) use(i / per_owner, i * kWidth);
}

// Tells the peers that this CTA's part of the weights is theirs to read.
__device__ inline void weights_sent(const Exchange& exchange, Team team) {
  team.sync();
  const World& world = exchange.world;
  const int peer = team.thread;
  if (peer < world.num_ranks && peer != world.rank) say(world, peer, &Control::weights);
}

__device__ inline void wait_for_weights(const Exchange& exchange, const char* what, Team team) {
  const World& world = exchange.world;
  const int peer = team.thread;
  if (peer < world.num_ranks && peer != world.rank) {
    wait_for_all(world, what, peer, &Control::weights, gridDim.x);
  }
  team.sync();
}

// `use` of how many weights are moved at a time, as a constant.
template <typename Use>
__device__ void by_width(const Exchange& exchange, Use use) {
  if (exchange.top_k % 4 == 0) {
    use(std::integral_constant<int, 4>{});
  } else {
    use(std::integral_constant<int, 1>{});
  }
}

inline Exchange exchange_of(const Tensor& world_numbers, Op op, const Tensor& rows, bool weighted,
                            const Tensor& copy_of_token, const Tensor& source_of_copy, const Tensor& ids,
                            int64_t wire = 0) {
  const int64_t row_bytes = rows.size(1) * rows.element_size(), top_k = ids.size(1);
  Exchange exchange{world_of(world_numbers),
                    uint64_t{digest_of(op, row_bytes, int64_t(rows.scalar_type()), weighted ? top_k : 0, wire)} << 32,
                    copy_of_token.const_data_ptr<int>(),
                    source_of_copy.const_data_ptr<int>(),
                    ids.const_data_ptr<int>(),
                    static_cast<int>(copy_of_token.size(0)),
                    static_cast<int>(ids.size(0)),
                    static_cast<int>(top_k),
                    static_cast<int>(row_bytes)};
  const World& world = exchange.world;
  STD_TORCH_CHECK(row_bytes % kVectorBytes == 0 && 0 < row_bytes && row_bytes <= world.max_row_bytes, name_of(op),
                  ": bytes of a row must be a multiple of 16 and at most ", world.max_row_bytes, ", got ", row_bytes);
  STD_TORCH_CHECK(exchange.num_tokens <= world.max_tokens, name_of(op), ": tokens of a rank must be at most ",
                  world.max_tokens, ", got ", exchange.num_tokens);
  STD_TORCH_CHECK(top_k <= kMaxTopK, name_of(op), ": K must be at most ", kMaxTopK, ", got ", top_k);
  const int most = kLanes / static_cast<int>(world.num_ranks);  // a lane a (row, rank)
  exchange.weighted = weighted;
  exchange.batch_rows = std::max(std::min(kStageBytes / exchange.row_bytes, most), 1);
  exchange.stage_bytes = (exchange.batch_rows * exchange.row_bytes + 127) / 128 * 128;
  const int stages = (kSharedBytes - kSharedHead) / exchange.stage_bytes;
  exchange.num_pushers = std::min(stages / kStages, kDispatchPushers);
  STD_TORCH_CHECK(exchange.num_pushers > 0, name_of(op), ": rows must fit into shared memory, got bytes ", row_bytes);
  return exchange;
}

template <typename Arguments>
void launch(void (*kernel)(Exchange, Arguments), const Exchange& exchange, const Arguments& arguments, int pull_bytes,
            cudaStream_t stream) {
  const int stages_bytes = exchange.num_pushers * kStages * exchange.stage_bytes;
  const int shared_bytes = kSharedHead + std::max(stages_bytes, pull_bytes);
  launch(kernel, static_cast<int>(exchange.world.num_sms), (exchange.num_pushers + kTakers) * kLanes, shared_bytes,
         Start::kEarly, stream, exchange, arguments);
}

// Where `tensor` begins in this rank's workspace of `mapped_bytes`, or kNowhere.
inline int64_t offset_of(const World& world, const Tensor& tensor, int64_t mapped_bytes) {
  const int64_t num_bytes = tensor.numel() * tensor.element_size();
  if (num_bytes == 0) return 0;  // it has no address
  const int64_t offset = static_cast<uint8_t*>(tensor.data_ptr()) - world.bases[world.rank];
  return 0 <= offset && offset + num_bytes <= mapped_bytes ? offset : kNowhere;
}

template <typename T>
T* pointer_or_null(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<T*>(tensor->data_ptr()) : nullptr;
}

}  // namespace moe_ops::exchange
