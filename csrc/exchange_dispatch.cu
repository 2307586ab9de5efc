// torch.ops.moe_ops_native.exchange_dispatch, called by moe_ops/kernels/exchange_nvlink.py: the operator dispatch.
//
// Rows go into the receiver's output itself, if that lies in memory that peers map, else into the inbox, from where the
// receiver copies them on. As FP8 they go into the inbox, a rank's own ones too, and the receiver decodes them.

#include <torch/csrc/stable/library.h>

#include "exchange_rows.cuh"
#include "wire.cuh"

namespace moe_ops::exchange {
namespace {

constexpr int kRowsAtOnce = 2;  // rows of a warp that copies on what arrived

struct Dispatch {
  const uint8_t* x;
  const float* weights;
  uint8_t* rows;
  float* row_weights;
  int64_t target;  // where peers put this rank's rows, in its workspace
  bool direct;     // whether that is `rows`
  int wire_bytes;  // of a row
  bool pow2;       // whether scales of codes are powers of two
};

// Kernels for rows that travel as they are have Coded = void, the others the dtype of what they encode.
template <typename Coded>
constexpr bool kCoded = !std::is_void_v<Coded>;

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

template <typename Coded>
__device__ void push_tokens(const Exchange& exchange, const Dispatch& dispatch, Shared& shared, uint32_t stages,
                            uint32_t epoch) {
  const World& world = exchange.world;
  const int ranks = world.num_ranks, rows = exchange.batch_rows, row_bytes = exchange.row_bytes;
  const int pusher = blockIdx.x * exchange.num_pushers + warp(), step = gridDim.x * exchange.num_pushers;
  const int row = lane() / ranks, rank = lane() % ranks;
  push<4, kCoded<Coded> ? 1 : 4>(
      exchange, shared, stages, pusher, step, exchange.num_batches(exchange.num_tokens), epoch, false,
      [&](int batch) {
        const int first = batch * rows, held = min(rows, exchange.num_tokens - first);
        return Batch{dispatch.x + int64_t(first) * row_bytes, held * row_bytes};
      },
      [&](int batch) {
        const int token = batch * rows + row;
        return row < rows && token < exchange.num_tokens ? __ldg(exchange.copy_of_token + int64_t(token) * ranks + rank)
                                                         : kNone;
      },
      [&](int batch, int copy, uint32_t stage) -> uint32_t* {
        if constexpr (kCoded<Coded>) {
          auto* const first = static_cast<uint8_t*>(__cvta_shared_to_generic(stage));
          for (int i = 0; i < min(rows, exchange.num_tokens - batch * rows); ++i) {
            encode_row<Coded>(first + i * row_bytes, row_bytes / int(sizeof(Coded)), dispatch.pow2);
          }
          hopper::async_proxy_fence();
          __syncwarp();
        }
        if (copy == kNone) return nullptr;
        const bool own = rank == world.rank;
        const int64_t limit = own ? exchange.num_copies : shared.limit_of_peer[rank];
        if (copy >= limit) fail(world, "dispatch", kOtherSettings, rank, limit, copy);  // it has another plan
        uint8_t* const here = kCoded<Coded> ? world.inbox(world.rank) : dispatch.rows;
        uint8_t* const there = own ? here : shared.rows_of_peer[rank];
        bulk_store(there + int64_t(copy) * dispatch.wire_bytes, stage + row * row_bytes, dispatch.wire_bytes);
        return there == world.inbox(rank) ? world.flags(rank) + copy : nullptr;
      });
  __threadfence_system();
  __syncwarp();
  if (lane() < ranks && lane() != world.rank) say(world, lane(), &Control::rows);
}

// Rows past the `num_held` valid copies become zero.
__device__ void clear_tail(const Exchange& exchange, const Dispatch& dispatch, int num_held) {
  const int taker = warp() - exchange.num_pushers + int(blockIdx.x) * kTakers, step = gridDim.x * kTakers;
  for (int copy = num_held + taker; copy < exchange.num_copies; copy += step) {
    zero_row(dispatch.rows + int64_t(copy) * exchange.row_bytes, exchange.row_bytes);
  }
}

// Copies are sorted by their source, and sources deliver at the same time: warps take from as many parts in turn.
template <typename Coded>
__device__ void take_copies(const Exchange& exchange, const Dispatch& dispatch, int num_held, uint32_t epoch) {
  const World& world = exchange.world;
  const int row_bytes = exchange.row_bytes, parts = world.num_ranks, part_size = (num_held + parts - 1) / parts;
  const int num_groups = (part_size + kRowsAtOnce - 1) / kRowsAtOnce * parts;
  const uint8_t* const inbox = world.inbox(world.rank);
  for (int i = blockIdx.x * kTakers + warp() - exchange.num_pushers; i < num_groups; i += gridDim.x * kTakers) {
    const int begin = i % parts * part_size, first = begin + i / parts * kRowsAtOnce, copy = first + lane();
    const bool inside = lane() < kRowsAtOnce && copy < min(begin + part_size, num_held);
    const int source = inside ? __ldg(exchange.source_of_copy + int64_t(copy) * 2) : kNone;
    const bool sent = source != kNone && (kCoded<Coded> || source != world.rank);
    if (sent) wait_for(world, "dispatch", source, world.flags(world.rank) + copy, epoch);
    __syncwarp();
    for (unsigned left = __ballot_sync(kAllLanes, sent); left; left &= left - 1) {
      const int64_t its = first + __ffs(left) - 1;
      uint8_t* const to = dispatch.rows + its * row_bytes;
      const uint8_t* const from = inbox + its * dispatch.wire_bytes;
      if constexpr (kCoded<Coded>) {
        decode_row<Coded>(to, from, row_bytes / int(sizeof(Coded)));
      } else {
        copy_row(to, from, row_bytes);
      }
    }
  }
}

// A token's weights to every copy of it.
template <int kWidth>
__device__ void send_weights(const Exchange& exchange, const Dispatch& dispatch, Team team) {
  const World& world = exchange.world;
  const int top_k = exchange.top_k, ranks = world.num_ranks;
  for_each_weights<kWidth>(exchange, team, exchange.num_tokens, [&](unsigned token, unsigned slot) {
    const Weights<kWidth> weights = load_weights<kWidth>(dispatch.weights + slot);
    for (int rank = 0; rank < ranks; ++rank) {
      const int copy = rank == world.rank ? kNone : __ldg(exchange.copy_of_token + int64_t(token) * ranks + rank);
      if (copy != kNone) store_weights(world.weights(rank) + int64_t(copy) * top_k + slot % top_k, weights);
    }
  });
  weights_sent(exchange, team);
}

template <int kWidth>
__device__ void take_weights(const Exchange& exchange, const Dispatch& dispatch, Team team) {
  const World& world = exchange.world;
  const int top_k = exchange.top_k;
  const float* const inbox = world.weights(world.rank);
  wait_for_weights(exchange, "dispatch", team);
  for_each_weights<kWidth>(exchange, team, exchange.num_copies, [&](unsigned copy, unsigned slot) {
    const int2 source = __ldg(reinterpret_cast<const int2*>(exchange.source_of_copy) + copy);
    const bool own = source.x == world.rank;
    const float* const from = own ? dispatch.weights + int64_t(source.y) * top_k + slot % top_k : inbox + slot;
    Weights<kWidth> weights{};
    if (source.x != kNone) weights = load_held_weights<kWidth>(from, exchange.ids + slot);
    store_weights(dispatch.row_weights + slot, weights);
  });
}

template <typename Coded>
__global__ void __launch_bounds__((kDispatchPushers + kTakers) * kLanes)
    dispatch_kernel(const __grid_constant__ Exchange exchange, const __grid_constant__ Dispatch dispatch) {
  extern __shared__ uint4 shared_words[];
  Shared& shared = *reinterpret_cast<Shared*>(shared_words);
  init_barriers(shared);
  wait_for_previous_kernel();
  const World& world = exchange.world;
  const uint32_t epoch = world.control().epoch + 1;
  __syncthreads();
  if (warp() < exchange.num_pushers) {
    const uint32_t stages = hopper::shared_address(shared_words) + kSharedHead;
    push_tokens<Coded>(exchange, dispatch, shared, stages + warp() * kStages * exchange.stage_bytes, epoch);
  } else {
    greet(exchange, "dispatch", dispatch.target, exchange.num_copies, epoch, shared);
    if (exchange.weighted) {
      by_width(exchange, [&](auto width) { send_weights<width.value>(exchange, dispatch, takers(exchange)); });
    }
    const int num_held = first_copy_of(exchange, kMaxRanks);
    clear_tail(exchange, dispatch, num_held);
    if (exchange.weighted) {
      by_width(exchange, [&](auto width) { take_weights<width.value>(exchange, dispatch, takers(exchange)); });
    }
    if (!dispatch.direct) {
      take_copies<Coded>(exchange, dispatch, num_held, epoch);
    } else if (blockIdx.x == 0) {
      const int peer = taker_thread(exchange);
      if (peer < world.num_ranks && peer != world.rank) {
        wait_for_all(world, "dispatch", peer, &Control::rows, gridDim.x * exchange.num_pushers);
      }
    }
  }
  finish(exchange, epoch, gridDim.x * exchange.num_pushers);
}

auto dispatch_kernel_of(Wire wire, ScalarType dtype) {
  return wire == Wire::kFull             ? dispatch_kernel<void>
         : dtype == ScalarType::BFloat16 ? dispatch_kernel<__nv_bfloat16>
         : dtype == ScalarType::Half     ? dispatch_kernel<__half>
                                         : dispatch_kernel<float>;
}

// The operator dispatch; all tensors contiguous, weights float32. `weights_out` is not touched without weights.
void exchange_dispatch(Tensor x, std::optional<Tensor> weights, Tensor copy_of_token, Tensor source_of_copy, Tensor ids,
                       Tensor world_numbers, int64_t mapped_bytes, int64_t wire_number, Tensor rows,
                       Tensor weights_out) {
  const OnDeviceOf device(x);
  const Exchange exchange = exchange_of(world_numbers, Op::kDispatch, x, weights.has_value(), copy_of_token,
                                        source_of_copy, ids, wire_number);
  const auto wire = static_cast<Wire>(wire_number);
  const bool full = wire == Wire::kFull;
  const int64_t offset = full ? offset_of(exchange.world, rows, mapped_bytes) : kNowhere;
  const bool direct = offset != kNowhere;
  const Dispatch dispatch{static_cast<const uint8_t*>(x.data_ptr()),
                          pointer_or_null<const float>(weights),
                          static_cast<uint8_t*>(rows.data_ptr()),
                          static_cast<float*>(weights_out.data_ptr()),
                          direct ? offset : exchange.world.inbox_at(),
                          direct,
                          full ? exchange.row_bytes : encoded_bytes(static_cast<int>(x.size(1))),
                          wire == Wire::kFp8Pow2};
  launch(dispatch_kernel_of(wire, x.scalar_type()), exchange, dispatch, 0, device.stream());
}

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops_native, m) {
  m.def(
      "exchange_dispatch(Tensor x, Tensor? weights, Tensor copy_of_token, Tensor source_of_copy, Tensor ids, Tensor"
      " world, int mapped_bytes, int wire, Tensor(a!) rows, Tensor(b!) weights_out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CUDA, m) { m.impl("exchange_dispatch", TORCH_BOX(&exchange_dispatch)); }

}  // namespace
}  // namespace moe_ops::exchange
