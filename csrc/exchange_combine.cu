// torch.ops.moe_ops_native.exchange_combine, called by moe_ops/kernels/exchange_nvlink.py: the operator combine.
//
// Where all ranks' rows lie in memory that their peers map, sources pull them and add them up, in rank order. Else rows
// go into the source's inbox, [rank, token], and are added up from there.

#include <torch/csrc/stable/library.h>

#include "exchange_rows.cuh"

namespace moe_ops::exchange {
namespace {

constexpr int kVectorsInFlight = 16;  // of a thread that adds from the inbox
constexpr int kVectorsOfPiece = 4;    // of a thread that adds from a ring
constexpr int kPieceBytes = kVectorsOfPiece * kAdders * kLanes * kVectorBytes;
constexpr int kRingsBytes = kSharedBytes - kSharedHead;

struct Combine {
  int64_t offset;  // of the rows in this rank's workspace, or kNowhere
  int piece_bytes, num_slots;
  const uint8_t* rows;
  const float* row_weights;
  const uint8_t* addend;  // or null
  uint8_t* x;
  float* weights;
};

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
  const int others = ranks - 1, num_batches = exchange.num_batches(most) * others;  // none with one rank
  struct Range {
    int source, first, held;
  };
  const auto range_of = [&](int batch) {
    const int source = (int(world.rank) + 1 + batch % others) % ranks;
    const int first = shared.first_copy[source] + batch / others * rows;
    return Range{source, first, max(min(rows, shared.first_copy[source + 1] - first), 0)};
  };
  push<2>(  // the takers wait for flags
      exchange, shared, stages, pusher, step, num_batches, epoch, combine.offset != kNowhere,
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

// The slots of a group's ring, in turn.
struct Ring {
  uint32_t full, empty, rows;  // addresses
  int num_slots, slot_bytes;
  int slot = 0;
  uint32_t parity = 0;

  __device__ Ring(const Combine& combine, Shared& shared, uint32_t rings, int group)
      : full(hopper::shared_address(shared.slot_full[group])),
        empty(hopper::shared_address(shared.slot_empty[group])),
        rows(rings + group * combine.num_slots * combine.piece_bytes),
        num_slots(combine.num_slots),
        slot_bytes(combine.piece_bytes) {}
  __device__ uint32_t full_barrier() const { return full + slot * sizeof(uint64_t); }
  __device__ uint32_t empty_barrier() const { return empty + slot * sizeof(uint64_t); }
  __device__ uint32_t address() const { return rows + slot * slot_bytes; }
  __device__ void advance() {
    if (++slot == num_slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Whether all ranks' rows lie in workspaces; all have greeted.
__device__ bool all_can_be_pulled(const Exchange& exchange, const Combine& combine, const Shared& shared) {
  bool can = combine.offset != kNowhere;
  for (int rank = 0; rank < exchange.world.num_ranks; ++rank) {
    if (rank != exchange.world.rank) can = can && shared.rows_of_peer[rank];
  }
  return can;
}

// Loads the pieces of the rows of a group's tokens, by one warp, of which a few lanes a token look after one rank each.
__device__ void load_pieces(const Exchange& exchange, const Combine& combine, Shared& shared, uint32_t rings,
                            int group) {
  const int ranks = exchange.world.num_ranks, at_once = kLanes / ranks, step = gridDim.x * kGroups;
  const int rank = lane() % ranks, ahead = lane() / ranks, begin = group * gridDim.x + blockIdx.x;
  const uint8_t* const rows = rank == exchange.world.rank ? combine.rows : shared.rows_of_peer[rank];
  Ring ring(combine, shared, rings, group);
  const auto copy_of = [&](int first) {
    const int token = first + ahead * step;
    return ahead < at_once && token < exchange.num_tokens
               ? __ldg(exchange.copy_of_token + int64_t(token) * ranks + rank)
               : kNone;
  };
  asm volatile("fence.proxy.async.global;" ::: "memory");  // bulk copies read what ordinary stores wrote
  int next = copy_of(begin);
  for (int first = begin; first < exchange.num_tokens; first += at_once * step) {
    const int copy = next;
    next = copy_of(first + at_once * step);
    if (rank != exchange.world.rank && ahead < at_once && copy >= shared.limit_of_peer[rank]) {
      fail(exchange.world, "combine", kOtherSettings, rank, shared.limit_of_peer[rank], copy);  // it has another plan
    }
    const auto row = reinterpret_cast<uint64_t>(rows + int64_t(copy) * exchange.row_bytes);
    const unsigned held = __ballot_sync(kAllLanes, copy != kNone);
    for (int i = 0; i < at_once && first + i * step < exchange.num_tokens; ++i) {
      for (int at = 0; at < exchange.row_bytes; at += combine.piece_bytes) {
        const int bytes = min(combine.piece_bytes, exchange.row_bytes - at);
        for (unsigned left = held >> (i * ranks) & ((1u << ranks) - 1); left; left &= left - 1) {
          const uint64_t from = __shfl_sync(kAllLanes, row, i * ranks + __ffs(left) - 1) + at;
          if (lane() == 0) {
            hopper::barrier_wait(ring.empty_barrier(), ring.parity ^ 1);
            hopper::barrier_expect(ring.full_barrier(), bytes);
            bulk_load(ring.address(), reinterpret_cast<const void*>(from), bytes, ring.full_barrier());
          }
          ring.advance();
        }
      }
    }
  }
}

// Adds up what load_pieces brings, in rank order. A thread has vectors of its own of every piece.
template <typename T>
__device__ void add_pieces(const Exchange& exchange, const Combine& combine, Shared& shared, uint32_t rings) {
  const int ranks = exchange.world.num_ranks, row_bytes = exchange.row_bytes, step = gridDim.x * kGroups;
  const int group = taker_thread(exchange) / (kAdders * kLanes), thread = taker_thread(exchange) % (kAdders * kLanes);
  Ring ring(combine, shared, rings, group);
  const auto at_of = [&](int i) { return (thread + i * kAdders * kLanes) * kVectorBytes; };
  const auto held_of = [&](int token) {
    return lane() < ranks && token < exchange.num_tokens
               ? __ldg(exchange.copy_of_token + int64_t(token) * ranks + lane())
               : kNone;
  };
  const int begin = group * gridDim.x + blockIdx.x;
  int next = held_of(begin);
  for (int token = begin; token < exchange.num_tokens; token += step) {
    const int num_rows = __popc(__ballot_sync(kAllLanes, next != kNone));
    next = held_of(token + step);
    for (int at = 0; at < row_bytes; at += combine.piece_bytes) {
      const int bytes = min(combine.piece_bytes, row_bytes - at);
      Vector<T> sums[kVectorsOfPiece]{};
      for (int row = 0; row < num_rows; ++row) {
        hopper::barrier_wait(ring.full_barrier(), ring.parity);
        uint4 values[kVectorsOfPiece];
        // Past the end of a piece lies the next slot, or other memory of the CTA: its sums are not stored.
#pragma unroll
        for (int i = 0; i < kVectorsOfPiece; ++i) values[i] = load_shared(ring.address() + at_of(i));
        __syncwarp();
        if (lane() == 0) hopper::barrier_arrive(ring.empty_barrier());
        ring.advance();
#pragma unroll
        for (int i = 0; i < kVectorsOfPiece; ++i) sums[i].add(values[i]);
      }
#pragma unroll
      for (int i = 0; i < kVectorsOfPiece; ++i) {
        if (at_of(i) >= bytes) continue;
        const int64_t place = int64_t(token) * row_bytes + at + at_of(i);
        if (combine.addend) sums[i].add(__ldg(reinterpret_cast<const uint4*>(combine.addend + place)));
        *reinterpret_cast<uint4*>(combine.x + place) = sums[i].bits();
      }
    }
  }
}

// Tells the peers that this CTA is through with their rows; the first CTA waits for all of the peers', whereupon this
// rank's rows may change.
__device__ void part(const Exchange& exchange) {
  __syncthreads();
  const World& world = exchange.world;
  const int peer = threadIdx.x;
  if (peer >= world.num_ranks || peer == world.rank) return;
  add_release(&world.control(peer).pulled[world.rank], 1);
  const Control& here = world.control();
  if (blockIdx.x == 0) wait_for_count(world, "combine", peer, &here.pulled[peer], here.pulled_expected + gridDim.x);
}

template <typename T, int kRanks>
__global__ void __launch_bounds__((kDispatchPushers + kTakers) * kLanes)
    combine_kernel(const __grid_constant__ Exchange exchange, const __grid_constant__ Combine combine) {
  extern __shared__ uint4 shared_words[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_words);
  init_barriers(shared);
  wait_for_previous_kernel();
  const uint32_t epoch = exchange.world.control().epoch + 1;
  const int ranks = exchange.world.num_ranks;
  if (warp() <= ranks) {
    const int first = first_copy_of(exchange, warp() < ranks ? warp() : kMaxRanks);
    if (lane() == 0) shared.first_copy[warp()] = first;
  }
  __syncthreads();
  const uint32_t stages = hopper::shared_address(shared_words) + kSharedHead;
  bool pulls;
  if (warp() < exchange.num_pushers) {
    const bool greeted = combine.offset != kNowhere;
    if (greeted) sync_greeted();
    pulls = greeted && all_can_be_pulled(exchange, combine, shared);
    if (pulls) {
      load_pieces(exchange, combine, shared, stages, warp());
    } else {
      push_copies(exchange, combine, shared, stages + warp() * kStages * exchange.stage_bytes, epoch);
    }
  } else {
    greet(exchange, "combine", combine.offset, exchange.num_copies, exchange.tag_digest | epoch, shared);
    pulls = all_can_be_pulled(exchange, combine, shared);
    if (exchange.weighted) {
      by_width(exchange, [&](auto width) { send_weights<width.value>(exchange, combine); });
    }
    if (pulls) {
      add_pieces<T>(exchange, combine, shared, stages);
    } else {
      take_sums<T, kRanks>(exchange, combine, epoch);
    }
    if (exchange.weighted) {
      by_width(exchange, [&](auto width) { take_weights<width.value>(exchange, combine); });
    }
  }
  if (pulls) part(exchange);
  finish(exchange, epoch, pulls);
}

template <typename T>
auto combine_kernel_of(const Exchange& exchange) {
  const int64_t ranks = exchange.world.num_ranks;
  return ranks <= 2 ? combine_kernel<T, 2> : ranks <= 4 ? combine_kernel<T, 4> : combine_kernel<T, 8>;
}

// The operator combine; all tensors contiguous, weights float32. `weights_out` is not touched without weights.
void exchange_combine(Tensor rows, std::optional<Tensor> weights, std::optional<Tensor> addend, Tensor copy_of_token,
                      Tensor source_of_copy, Tensor ids, Tensor world_numbers, int64_t mapped_bytes, Tensor x,
                      Tensor weights_out) {
  const OnDeviceOf device(rows);
  Exchange exchange =
      exchange_of(world_numbers, Op::kCombine, rows, weights.has_value(), copy_of_token, source_of_copy, ids);
  const int num_pieces = ceil_div(exchange.row_bytes, kPieceBytes);
  const int piece_bytes = ceil_div(exchange.row_bytes, num_pieces * kVectorBytes) * kVectorBytes;
  // Threads that add read as if every piece were as long as can be, up to `overrun` past the last slot.
  const int overrun = kPieceBytes - piece_bytes;
  const int num_slots = std::min((kRingsBytes - overrun) / (kGroups * piece_bytes), kMaxSlots);
  const int64_t offset = exchange.num_pushers == kGroups ? offset_of(exchange.world, rows, mapped_bytes) : kNowhere;
  const Combine combine{offset,
                        piece_bytes,
                        num_slots,
                        static_cast<const uint8_t*>(rows.data_ptr()),
                        pointer_or_null<const float>(weights),
                        pointer_or_null<const uint8_t>(addend),
                        static_cast<uint8_t*>(x.data_ptr()),
                        static_cast<float*>(weights_out.data_ptr())};
  if (offset == kNowhere) exchange.num_pushers = std::min(exchange.num_pushers, kCombinePushers);
  const int rings_bytes = offset == kNowhere ? 0 : kGroups * num_slots * piece_bytes + overrun;
  const ScalarType dtype = rows.scalar_type();
  const auto kernel = dtype == ScalarType::BFloat16 ? combine_kernel_of<__nv_bfloat16>(exchange)
                      : dtype == ScalarType::Half   ? combine_kernel_of<__half>(exchange)
                                                    : combine_kernel_of<float>(exchange);
  launch(kernel, exchange, combine, rings_bytes, device.stream());
}

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops_native, m) {
  m.def(
      "exchange_combine(Tensor rows, Tensor? weights, Tensor? addend, Tensor copy_of_token, Tensor source_of_copy,"
      " Tensor ids, Tensor world, int mapped_bytes, Tensor(a!) x, Tensor(b!) weights_out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CUDA, m) { m.impl("exchange_combine", TORCH_BOX(&exchange_combine)); }

}  // namespace
}  // namespace moe_ops::exchange
