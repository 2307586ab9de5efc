// torch.ops.moe_ops_native.exchange_combine, called by moe_ops/kernels/exchange_nvlink.py: the operator combine.
//
// Where all ranks' rows lie in memory that their peers map, sources pull them and add them up, in rank order. Else rows
// go into the source's inbox, [rank, token], and are added up from there.

#include <torch/csrc/stable/library.h>

#include "exchange_rows.cuh"

namespace moe_ops::exchange {
namespace {

constexpr int kVectorsInFlight = 16;  // of a thread that adds from the inbox

struct Combine {
  int64_t offset;  // of the rows in this rank's workspace, or kNowhere
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

__device__ inline uint4 load_shared(uint32_t from) {
  uint4 bits;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "r"(from)
               : "memory");
  return bits;
}

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
__device__ void send_weights(const Exchange& exchange, const Combine& combine, Team team) {
  const World& world = exchange.world;
  const int top_k = exchange.top_k;
  for_each_weights<kWidth>(exchange, team, exchange.num_copies, [&](unsigned copy, unsigned slot) {
    const int2 source = __ldg(reinterpret_cast<const int2*>(exchange.source_of_copy) + copy);
    if (source.x == world.rank || source.x == kNone) return;
    float* const to = world.weights(source.x) + (world.rank * world.max_tokens + source.y) * top_k + slot % top_k;
    store_weights(to, load_held_weights<kWidth>(combine.row_weights + slot, exchange.ids + slot));
  });
  weights_sent(exchange, team);
}

template <int kWidth>
__device__ void take_weights(const Exchange& exchange, const Combine& combine, Team team) {
  const World& world = exchange.world;
  const int top_k = exchange.top_k, ranks = world.num_ranks;
  const float* const inbox = world.weights(world.rank);
  wait_for_weights(exchange, "combine", team);
  for_each_weights<kWidth>(exchange, team, exchange.num_tokens, [&](unsigned token, unsigned slot) {
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

// Whether all ranks' rows lie in workspaces; all have greeted.
__device__ bool all_can_be_pulled(const Exchange& exchange, const Combine& combine, const Shared& shared) {
  bool can = combine.offset != kNowhere;
  for (int rank = 0; rank < exchange.world.num_ranks; ++rank) {
    if (rank != exchange.world.rank) can = can && shared.rows_of_peer[rank];
  }
  return can;
}

// A warp's tokens one after another, with their copies, which are loaded far ahead.
class Tokens {
 public:
  int token;
  unsigned held;  // bit by bit, the ranks that have a copy; bit num_ranks: there is an addend
  int lane_of_rank_0;
  int copy;  // of lane lane_of_rank_0 + r: that of rank r

  __device__ Tokens(const Exchange& exchange, const Combine& combine, int begin, int step)
      : exchange_(exchange),
        ranks_(exchange.world.num_ranks),
        addend_bit_(combine.addend ? 1u << ranks_ : 0),
        at_once_(kLanes / ranks_),
        step_(step),
        first_(begin - at_once_ * step),
        index_(at_once_ - 1),
        next_copy_(load(begin)) {}

  // Goes on to the next token, if there is one.
  __device__ bool next() {
    if (++index_ == at_once_) {
      index_ = 0;
      first_ += at_once_ * step_;
      copy = next_copy_;
      next_copy_ = load(first_ + at_once_ * step_);
      all_held_ = __ballot_sync(kAllLanes, copy != kNone);
    }
    token = first_ + index_ * step_;
    lane_of_rank_0 = index_ * ranks_;
    held = (all_held_ >> lane_of_rank_0 & ((1u << ranks_) - 1)) | addend_bit_;
    return token < exchange_.num_tokens;
  }

 private:
  const Exchange& exchange_;
  const int ranks_;
  const unsigned addend_bit_;
  const int at_once_, step_;
  int first_, index_;  // of the tokens whose copies the lanes hold
  int next_copy_;
  unsigned all_held_;

  __device__ int load(int first) const {
    const int ahead = lane() / ranks_, token = first + ahead * step_;
    return ahead < at_once_ && token < exchange_.num_tokens
               ? __ldg(exchange_.copy_of_token + int64_t(token) * ranks_ + lane() % ranks_)
               : kNone;
  }
};

// Starts the loads of what a warp adds up, in that order: token by token, piece by piece, rank by rank, the addend
// last.
class Loader {
 public:
  __device__ Loader(const Exchange& exchange, const Combine& combine, const Shared& shared, int begin, int step)
      : exchange_(exchange), addend_(combine.addend), tokens_(exchange, combine, begin, step), at_(exchange.row_bytes) {
    const int rank = lane() % exchange.world.num_ranks;
    const bool own = rank == exchange.world.rank;
    rows_ = own ? combine.rows : shared.rows_of_peer[rank];
    limit_ = own ? exchange.num_copies : shared.limit_of_peer[rank];
  }

  // The next piece, if there is one.
  __device__ void load(uint32_t to, uint32_t full) {
    const int row_bytes = exchange_.row_bytes, ranks = exchange_.world.num_ranks;
    while (left_ == 0) {
      at_ += kPieceBytes;
      if (at_ >= row_bytes) {
        if (!tokens_.next()) return;
        if (tokens_.copy >= limit_) {  // the peer has another plan
          fail(exchange_.world, "combine", kOtherSettings, lane() % ranks, limit_, tokens_.copy);
        }
        at_ = 0;
      }
      left_ = tokens_.held;
    }
    const int bit = __ffs(left_) - 1;
    left_ &= left_ - 1;
    const auto row = reinterpret_cast<uint64_t>(rows_ + int64_t(tokens_.copy) * row_bytes);
    uint64_t from = __shfl_sync(kAllLanes, row, tokens_.lane_of_rank_0 + bit);
    if (bit == ranks) from = reinterpret_cast<uint64_t>(addend_ + int64_t(tokens_.token) * row_bytes);
    if (lane() != 0) return;
    const int bytes = min(kPieceBytes, row_bytes - at_);
    hopper::barrier_expect(full, bytes);
    bulk_load(to, reinterpret_cast<const void*>(from + at_), bytes, full);
  }

 private:
  const Exchange& exchange_;
  const uint8_t *rows_, *addend_;  // rows: of this lane's rank
  int64_t limit_;
  Tokens tokens_;
  int at_;             // where the piece begins
  unsigned left_ = 0;  // bits of `held` whose piece is still to be loaded
};

// Rows summed in rank order, then the addend, as pulled piece by piece into this warp's stages.
template <typename T>
__device__ void pull_sums(const Exchange& exchange, const Combine& combine, Shared& shared, uint32_t stages) {
  const int taker = warp() - exchange.num_pushers, begin = taker * gridDim.x + blockIdx.x, step = gridDim.x * kTakers;
  const int row_bytes = exchange.row_bytes;
  const uint32_t full = hopper::shared_address(shared.pull_full[taker]);
  stages += taker * kPullStages * kPieceBytes;
  Loader loader(exchange, combine, shared, begin, step);
  const auto refill = [&](int stage) { loader.load(stages + stage * kPieceBytes, full + stage * sizeof(uint64_t)); };
  asm volatile("fence.proxy.async.global;" ::: "memory");  // bulk copies read what ordinary stores wrote
  for (int stage = 0; stage < kPullStages; ++stage) refill(stage);
  int stage = 0;
  uint32_t parity = 0;
  Tokens tokens(exchange, combine, begin, step);
  while (tokens.next()) {
    for (int first = 0; first < row_bytes; first += kPieceBytes) {
      Vector<T> sums[kVectorsOfPiece]{};
      for (unsigned left = tokens.held; left; left &= left - 1) {
        hopper::barrier_wait(full + stage * sizeof(uint64_t), parity);
        uint4 values[kVectorsOfPiece];  // past a row's end: what the stage held before, not stored
#pragma unroll
        for (int i = 0; i < kVectorsOfPiece; ++i) {
          values[i] = load_shared(stages + stage * kPieceBytes + (i * kLanes + lane()) * kVectorBytes);
        }
        hopper::async_proxy_fence();  // before they are overwritten
        __syncwarp();
        refill(stage);
        if (++stage == kPullStages) {
          stage = 0;
          parity ^= 1;
        }
#pragma unroll
        for (int i = 0; i < kVectorsOfPiece; ++i) sums[i].add(values[i]);
      }
#pragma unroll
      for (int i = 0; i < kVectorsOfPiece; ++i) {
        const int at = first + (i * kLanes + lane()) * kVectorBytes;
        if (at >= row_bytes) continue;
        *reinterpret_cast<uint4*>(combine.x + int64_t(tokens.token) * row_bytes + at) = sums[i].bits();
      }
    }
  }
}

// Tells the peers that this CTA has pulled their rows. The first CTA waits for all of theirs: then this rank's rows may
// change.
__device__ void finish_pulls(const Exchange& exchange) {
  __syncthreads();
  const World& world = exchange.world;
  const int peer = threadIdx.x;
  if (peer >= world.num_ranks || peer == world.rank) return;
  say(world, peer, &Control::rows);
  if (blockIdx.x == 0) wait_for_all(world, "combine", peer, &Control::rows, gridDim.x);
}

template <typename T, int kRanks>
__global__ void __launch_bounds__((kCombinePushers + kTakers) * kLanes)
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
  const uint32_t buffers = hopper::shared_address(shared_words) + kSharedHead;
  const auto send = [&](Team team) {
    if (exchange.weighted) by_width(exchange, [&](auto width) { send_weights<width.value>(exchange, combine, team); });
  };
  const auto take = [&](Team team) {
    if (exchange.weighted) by_width(exchange, [&](auto width) { take_weights<width.value>(exchange, combine, team); });
  };
  bool pulls = false;
  if (warp() < exchange.num_pushers) {
    if (combine.offset != kNowhere) {
      sync_greeted();
      pulls = all_can_be_pulled(exchange, combine, shared);
    }
    if (pulls) {
      send(pushers(exchange));
      take(pushers(exchange));
    } else {
      push_copies(exchange, combine, shared, buffers + warp() * kStages * exchange.stage_bytes, epoch);
    }
  } else {
    greet(exchange, "combine", combine.offset, exchange.num_copies, epoch, shared);
    pulls = all_can_be_pulled(exchange, combine, shared);
    if (pulls) {
      pull_sums<T>(exchange, combine, shared, buffers);
    } else {
      send(takers(exchange));
      take_sums<T, kRanks>(exchange, combine, epoch);
      take(takers(exchange));
    }
  }
  if (pulls) finish_pulls(exchange);
  finish(exchange, epoch, pulls ? gridDim.x : 0);
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
  exchange.num_pushers = std::min(exchange.num_pushers, kCombinePushers);
  const Combine combine{offset_of(exchange.world, rows, mapped_bytes), static_cast<const uint8_t*>(rows.data_ptr()),
                        pointer_or_null<const float>(weights),         pointer_or_null<const uint8_t>(addend),
                        static_cast<uint8_t*>(x.data_ptr()),           static_cast<float*>(weights_out.data_ptr())};
  const int pull_bytes = combine.offset == kNowhere ? 0 : kTakers * kPullStages * kPieceBytes;
  const ScalarType dtype = rows.scalar_type();
  const auto kernel = dtype == ScalarType::BFloat16 ? combine_kernel_of<__nv_bfloat16>(exchange)
                      : dtype == ScalarType::Half   ? combine_kernel_of<__half>(exchange)
                                                    : combine_kernel_of<float>(exchange);
  launch(kernel, exchange, combine, pull_bytes, device.stream());
}

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops_native, m) {
  m.def(
      "exchange_combine(Tensor rows, Tensor? weights, Tensor? addend, Tensor copy_of_token, Tensor source_of_copy,"
      " Tensor ids, Tensor world, int mapped_bytes, Tensor(a!) x, Tensor(b!) weights_out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CUDA, m) { m.impl("exchange_combine", TORCH_BOX(&exchange_combine)); }

}  // namespace
}  // namespace moe_ops::exchange
