// Grouped matmul on sm_90a: for every expert a [rows, K] @ b [K, N], with a producer warp that copies tiles into a ring
// of stages and two warpgroups that multiply 64 x 256 each. kWgrad sums over the expert's rows instead.
//
//            a (M x K)                    b (K x N)                        out
//   forward  rows, or gathered tokens     w[e], K contiguous               rows
//   dgrad    rows, or gathered tokens     w[e], N contiguous               rows
//   wgrad    grad rows, M contiguous      rows, N contiguous               w[e]
#pragma once

#include "tiles.cuh"
#include "wgmma.cuh"

namespace moe_ops {

enum class Epilogue { kStore, kSwiglu, kGeglu, kFloat32 };

// What of the gate the activation makes; moe_ops/ops/swiglu.py has the formula.
struct Activation {
  const float* row_weights;  // [C] or null
  bool store_h;
  float limit, minus_alpha_log2e, up_offset;  // limit: infinity for none
};

struct Arguments {
  Groups groups;
  int n_size, k_size;  // n_size: columns of one half of the output for kSwiglu
  Activation activation;
  float* out_float32;  // kFloat32: [L, O, I]
  bool accumulate;     // kFloat32: add to what is there
  void* tail[2];       // outputs whose rows past the last expert's are zeroed, and their widths in bytes
  int tail_bytes[2];
};

constexpr int kStages = 4;
constexpr int kElementBytes = 2;
constexpr int kConsumerWarps = 8;
constexpr int kThreads = 384;
constexpr int kChunk = 64;                                      // columns: 128 bytes, the width of the swizzle
constexpr int kBytesA = kTileM * kTileK * kElementBytes;        // two boxes of 64 rows (or columns)
constexpr int kBytesB = kTileN * kTileK * kElementBytes;        // two halves
constexpr int kStageBytes = kBytesA + kBytesB;
constexpr int kStagingRows = 16;                                // rows of a warp
constexpr int kStagingBytes = kStagingRows * kChunk * kElementBytes;
constexpr int kStagingBuffers = 2;                              // of each warp
constexpr int kAtomBytes = 1024;
constexpr int kSharedBytes =
    kAtomBytes + kStages * kStageBytes + kConsumerWarps * kStagingBuffers * kStagingBytes + 2 * kStages * 8;

// Row dimension of a ragged map: see ragged_map in maps.h.
constexpr int kRagged = 1 << 30;

template <typename T, Form kForm, Epilogue kEpilogue>
class GroupedMatmul {
 public:
  __device__ GroupedMatmul(
      const CUtensorMap* map_a, const CUtensorMap* map_b, const CUtensorMap* map_out, const CUtensorMap* map_act,
      const Arguments& arguments, uint8_t* shared)
      : map_a_(map_a), map_b_(map_b), map_out_(map_out), map_act_(map_act), arguments_(arguments) {
    stages_ = (hopper::shared_address(shared) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
    staging_ = stages_ + kStages * kStageBytes;
    full_ = staging_ + kConsumerWarps * kStagingBuffers * kStagingBytes;
    empty_ = full_ + kStages * 8;
    rank_ = hopper::cluster_rank();
  }

  __device__ void init() const {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        hopper::barrier_init(full_ + 8 * stage, 1);
        hopper::barrier_init(empty_ + 8 * stage, 2 * kConsumerWarps);
      }
      hopper::barrier_init_fence();
    }
    hopper::cluster_sync();
  }

  // One warp: fill the stages of every tile.
  __device__ void produce() {
    TileWalk<kForm> walk = tiles();
    Tile tile;
    while (walk.next(tile)) {
      if (threadIdx.x % 32 == 0) {
        const int blocks = k_blocks(tile);
        for (int block = 0; block < blocks; ++block) {
          hopper::barrier_wait(empty_ + 8 * stage_, phase_ ^ 1);
          hopper::barrier_expect(full_ + 8 * stage_, kStageBytes);
          load_a(tile, block * kTileK);
          load_b(tile, block * kTileK);
          advance();
        }
      }
      __syncwarp();
    }
  }

  // Two warpgroups: multiply what the stages hold, 64 rows each. A tile's results wait in registers, rounded, and are
  // stored in parts between the multiplications of the next one.
  __device__ void consume(int warpgroup) {
    TileWalk<kForm> walk = tiles();
    Tile next;
    bool has_next = walk.next(next);
#ifdef STAGGER
    if (warpgroup == 1) { const long long t = clock64(); while (clock64() - t < STAGGER) {} }
#endif
    while (true) {
      const Tile tile = next;
      const int m = tile.m * kTileM + warpgroup * 64;
      if (has_next && m >= (kForm == Form::kWgrad ? arguments_.groups.m_size : tile.num_rows)) {
        skip(tile);
        has_next = walk.next(next);
        continue;
      }
      const bool has_tile = has_next;
      float acc[128];
      if (has_tile) {
        const int blocks = k_blocks(tile);
        hopper::barrier_wait(full_ + 8 * stage_, phase_);
        multiply_stage(warpgroup, false, acc);
        has_next = walk.next(next);
        int previous = stage_;
        advance();
        for (int block = 1; block < blocks; ++block) {
          hopper::barrier_wait(full_ + 8 * stage_, phase_);
          multiply_stage(warpgroup, true, acc);
          if (parts_left_ > 0) store_part();
          hopper::wgmma_wait<1>();
          release(previous);
          previous = stage_;
          advance();
        }
        hopper::wgmma_wait<0>();
        release(previous);
      }
      while (parts_left_ > 0) store_part();
      if (!has_tile) break;
      if constexpr (kEpilogue == Epilogue::kFloat32) {
        store_float32(tile, m, acc);
      } else {
        keep(tile, m, acc);
      }
    }
    hopper::tma_store_wait_read<0>();  // shared memory must outlive its reads
    zero_tail();
  }

 private:
  static constexpr bool kGated = kEpilogue == Epilogue::kSwiglu || kEpilogue == Epilogue::kGeglu;
  static constexpr bool kTransposeA = kForm == Form::kWgrad;
  static constexpr bool kTransposeB = kForm != Form::kForward;

  __device__ TileWalk<kForm> tiles() const {
    return TileWalk<kForm>(arguments_.groups, blockIdx.x / 2, gridDim.x / 2);
  }

  __device__ int k_blocks(const Tile& tile) const {
    const int k_size = kForm == Form::kWgrad ? tile.num_rows : arguments_.k_size;
    return max((k_size + kTileK - 1) / kTileK, 1);  // without rows one block of zeros
  }

  __device__ void advance() {
    if (++stage_ == kStages) {
      stage_ = 0;
      phase_ ^= 1;
    }
  }

  // ---- producer ----

  __device__ void load_a(const Tile& tile, int k) const {
    for (int half = 0; half < 2; ++half) {
      if (!tile.shares_b && half != rank_) continue;  // the other CTA brings it
      const uint32_t to = stages_ + stage_ * kStageBytes + half * (kBytesA / 2);
      const int m = tile.m * kTileM + half * 64;
      if constexpr (kForm == Form::kWgrad) {
        load(!tile.shares_b, to, map_a_, m, kRagged - tile.num_rows + k, tile.first_row + tile.num_rows, kRagged);
      } else {
        load(!tile.shares_b, to, map_a_, k, tile.first_row + m, 0, 0);
      }
    }
  }

  __device__ void load_b(const Tile& tile, int k) const {
    for (int half = 0; half < 2; ++half) {
      if (tile.shares_b && half != rank_) continue;
      const uint32_t to = stages_ + stage_ * kStageBytes + kBytesA + half * (kBytesB / 2);
      if constexpr (kForm == Form::kForward) {
        if constexpr (kGated) {  // gate columns, then up columns
          load(tile.shares_b, to, map_b_, k, tile.n * (kTileN / 2), half, tile.expert);
        } else {
          load(tile.shares_b, to, map_b_, k, tile.n * kTileN + half * (kTileN / 2), 0, tile.expert);
        }
      } else {
        for (int chunk = 0; chunk < 2; ++chunk) {
          const int n = tile.n * kTileN + (2 * half + chunk) * kChunk;
          const uint32_t chunk_to = to + chunk * (kBytesB / 4);
          if constexpr (kForm == Form::kDgrad) {
            load(tile.shares_b, chunk_to, map_b_, n, k, tile.expert, 0);
          } else {
            load(tile.shares_b, chunk_to, map_b_, n, kRagged - tile.num_rows + k, tile.first_row + tile.num_rows,
                 kRagged);
          }
        }
      }
    }
  }

  __device__ void load(bool both, uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, int c3) const {
    if (both) {
      hopper::tma_load_both(to, map, full_ + 8 * stage_, c0, c1, c2, c3);
    } else {
      hopper::tma_load(to, map, full_ + 8 * stage_, c0, c1, c2, c3);
    }
  }

  // ---- consumers ----

  // A tile of which no row of this warpgroup exists.
  __device__ void skip(const Tile& tile) {
    for (int block = k_blocks(tile); block > 0; --block) {
      hopper::barrier_wait(full_ + 8 * stage_, phase_);
      release(stage_);
      advance();
    }
  }

  __device__ void multiply_stage(int warpgroup, bool accumulate, float (&acc)[128]) const {
    // Distance between atoms, and between steps of 16 along K.
    constexpr uint32_t kChunkBytes = kAtomBytes * (kTileK / 8);
    constexpr uint32_t kStepA = kTransposeA ? 2 * kAtomBytes : 16 * kElementBytes;
    constexpr uint32_t kStepB = kTransposeB ? 2 * kAtomBytes : 16 * kElementBytes;
    const uint32_t a = stages_ + stage_ * kStageBytes + warpgroup * (kBytesA / 2);
    const uint32_t b = stages_ + stage_ * kStageBytes + kBytesA;
    hopper::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      hopper::wgmma<T, kTransposeA, kTransposeB>(
          acc, hopper::operand(a + step * kStepA, kChunkBytes, kAtomBytes),
          hopper::operand(b + step * kStepB, kChunkBytes, kAtomBytes), accumulate || step > 0);
    }
    hopper::wgmma_commit();
  }

  // Both CTAs' producers may write to a stage once all consumers of both have read it.
  __device__ void release(int stage) const {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < 2) hopper::barrier_arrive_at(empty_ + 8 * stage, lane);
  }

  // ---- epilogues: acc[4j .. 4j+3] is row lane / 4 and row lane / 4 + 8, columns 8j + 2 (lane % 4) and the next ----

  static constexpr int kChunkRegisters = 16;  // of a thread, for 64 columns

  // Round a tile, to be stored part by part: chunk after chunk of 64 columns; for kSwiglu gate and up chunks in turn.
  __device__ void keep(const Tile& tile, int m, const float (&acc)[128]) {
    keep_place(tile, m + threadIdx.x / 32 % 4 * kStagingRows);
    parts_left_ = kParts;
    constexpr int kHalf = kGated ? 2 : 1;
#pragma unroll
    for (int i = 0; i < kChunks * kChunkRegisters; ++i) {
      const int chunk = i / kChunkRegisters;
      const int from = (kHalf == 1 ? chunk : chunk % 2 * 2 + chunk / 2) * 2 * kChunkRegisters + i % kChunkRegisters * 2;
      packed_[i] = hopper::pack<T>(acc[from], acc[from + 1]);
    }
    if constexpr (kGated) row_weights_ = row_weights(tile, m);
  }

  // Coordinates of the tile's output for this warp's rows, see map_of_output and map_of_wgrad.
  __device__ void keep_place(const Tile& tile, int row) {
    kept_n_ = tile.n * (kGated ? kTileN / 2 : kTileN);
    if constexpr (kForm == Form::kWgrad) {
      kept_row_ = row;
      kept_group_ = tile.expert;
    } else {
      kept_row_ = kRagged - tile.num_rows + row;
      kept_group_ = tile.first_row + tile.num_rows;
    }
  }

  __device__ void store_part() {
    switch (kParts - parts_left_--) {  // registers have no index at run time
      case 0:
        return store_part<0>();
      case 1:
        return store_part<1>();
      case 2:
        return store_part<2>();
      case 3:
        return store_part<3>();
    }
    if constexpr (kParts > 4) {
      switch (kParts - 1 - parts_left_) {
        case 4:
          return store_part<4>();
        case 5:
          return store_part<5>();
        case 6:
          return store_part<6>();
        case 7:
          return store_part<7>();
      }
    }
  }

  template <int kPart>
  __device__ void store_part() {
    if constexpr (kEpilogue == Epilogue::kStore) {
      const int n = kept_n_ + kPart * kChunk;
      if (n < arguments_.n_size) store_chunk<kPart>(map_out_, n, 0);
    } else if constexpr (kGated) {
      constexpr int kGate = kPart / 4 * 2, kUp = kGate + 1, kHalf = kPart % 2;
      const int n = kept_n_ + kPart / 4 * kChunk;
      if (n >= arguments_.n_size) return;
      if constexpr (kPart % 4 < 2) {
        if (arguments_.activation.store_h) store_chunk<kHalf == 0 ? kGate : kUp>(map_out_, n, kHalf);
      } else {
        activate_half<kGate, kHalf>();
        if constexpr (kHalf == 1) store_chunk<kGate>(map_act_, n, 0);
      }
    }
  }

  // In the place of the gate.
  template <int kGate, int kHalf>
  __device__ void activate_half() {
    constexpr int kFirst = kGate * kChunkRegisters + kHalf * kChunkRegisters / 2;
#pragma unroll
    for (int i = kFirst; i < kFirst + kChunkRegisters / 2; ++i) {
      const float2 gate = hopper::unpack<T>(packed_[i]), up = hopper::unpack<T>(packed_[kChunkRegisters + i]);
      const float weight = i % 2 == 0 ? row_weights_.x : row_weights_.y;
      packed_[i] = hopper::pack<T>(activate(gate.x, up.x) * weight, activate(gate.y, up.y) * weight);
    }
  }

  __device__ float2 row_weights(const Tile& tile, int m) const {
    const float* weights = arguments_.activation.row_weights;
    if (weights == nullptr) return {1.0f, 1.0f};
    const int row = m + threadIdx.x / 32 % 4 * kStagingRows + threadIdx.x % 32 / 4;
    weights += tile.first_row;
    return {row < tile.num_rows ? weights[row] : 0.0f, row + 8 < tile.num_rows ? weights[row + 8] : 0.0f};
  }

  __device__ float activate(float gate, float up) const {
    const Activation& act = arguments_.activation;
    gate = hopper::min_or_nan(gate, act.limit);
    up = hopper::max_or_nan(hopper::min_or_nan(up, act.limit), -act.limit) + act.up_offset;
    if constexpr (kEpilogue == Epilogue::kGeglu) {
      return gate * 0.5f * (1.0f + erff(gate * 0.70710678118654752f)) * up;
    }
    return gate * hopper::reciprocal(1.0f + hopper::exp2(act.minus_alpha_log2e * gate)) * up;
  }

  // 16 rows x 64 columns of this warp.
  template <int kFrom>
  __device__ void store_chunk(const CUtensorMap* map, int n, int half) {
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % kConsumerWarps;
    const uint32_t buffer = staging_ + (warp * kStagingBuffers + buffer_) * kStagingBytes;
    if (lane == 0) hopper::tma_store_wait_read<kStagingBuffers - 1>();
    __syncwarp();
    const uint32_t row = lane % 16;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // 16 columns: two of the row's eight 16-byte pieces
      const uint32_t piece = (2 * pair + lane / 16) ^ (row % 8);
      const uint32_t* packed = packed_ + kFrom * kChunkRegisters + 4 * pair;
      hopper::store_matrices(buffer + row * 128 + piece * 16, packed[0], packed[1], packed[2], packed[3]);
    }
    hopper::async_proxy_fence();
    __syncwarp();
    if (lane == 0) {
      hopper::tma_store(map, buffer, n, kept_row_, kept_group_, kForm == Form::kWgrad ? 0 : kRagged, half);
      hopper::tma_store_commit();
    }
    buffer_ = (buffer_ + 1) % kStagingBuffers;
  }

  __device__ void store_float32(const Tile& tile, int m, const float (&acc)[128]) const {
    const int row0 = m + threadIdx.x / 32 % 4 * kStagingRows + threadIdx.x % 32 / 4;
    const int64_t width = arguments_.n_size;
    float* out = arguments_.out_float32 + tile.expert * (arguments_.groups.m_size * width);
#pragma unroll
    for (int piece = 0; piece < kTileN / 8; ++piece) {
      const int n = tile.n * kTileN + piece * 8 + threadIdx.x % 4 * 2;
      for (int below = 0; below < 2; ++below) {
        const int row = row0 + 8 * below;
        if (n >= arguments_.n_size || row >= arguments_.groups.m_size) continue;
        float2* at = reinterpret_cast<float2*>(out + row * width + n);
        float2 value{acc[4 * piece + 2 * below], acc[4 * piece + 2 * below + 1]};
        if (arguments_.accumulate) {
          const float2 old = *at;
          value = {value.x + old.x, value.y + old.y};
        }
        *at = value;
      }
    }
  }

  __device__ void zero_tail() const {
    if constexpr (kForm == Form::kWgrad) return;
    const Groups& groups = arguments_.groups;
    const int rows = min(max(groups.offsets[groups.num_experts - 1], 0), groups.num_rows);
    for (int output = 0; output < 2; ++output) {
      if (arguments_.tail[output] == nullptr) continue;
      const int64_t pieces = arguments_.tail_bytes[output] / 16;
      uint4* out = static_cast<uint4*>(arguments_.tail[output]);
      const int64_t thread = int64_t{blockIdx.x} * 256 + threadIdx.x % 256;
      for (int64_t i = rows * pieces + thread; i < groups.num_rows * pieces; i += int64_t{gridDim.x} * 256) {
        out[i] = make_uint4(0, 0, 0, 0);
      }
    }
  }

  const CUtensorMap *map_a_, *map_b_, *map_out_, *map_act_;
  const Arguments& arguments_;
  uint32_t stages_, staging_, full_, empty_;
  int rank_;
  int stage_ = 0, buffer_ = 0;
  uint32_t phase_ = 0;

  static constexpr int kChunks = kTileN / kChunk;
  static constexpr int kParts = kGated ? 8 : 4;
  int kept_n_, kept_row_, kept_group_, parts_left_ = 0;
  float2 row_weights_;
  uint32_t packed_[kChunks * kChunkRegisters];
};

template <typename T, Form kForm, Epilogue kEpilogue>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1) grouped_mm_kernel(
    const __grid_constant__ CUtensorMap map_a, const __grid_constant__ CUtensorMap map_b,
    const __grid_constant__ CUtensorMap map_out, const __grid_constant__ CUtensorMap map_act,
    const __grid_constant__ Arguments arguments) {
  extern __shared__ uint8_t shared[];
  GroupedMatmul<T, kForm, kEpilogue> matmul(&map_a, &map_b, &map_out, &map_act, arguments, shared);
  matmul.init();
  const int warpgroup = __shfl_sync(0xFFFFFFFF, threadIdx.x / 128, 0);  // uniform, as the compiler can see
  if (warpgroup == 2) {
    hopper::registers_shrink<40>();
    if (threadIdx.x / 32 == 8) matmul.produce();
  } else {
    hopper::registers_grow<232>();
    matmul.consume(warpgroup);
  }
  hopper::cluster_sync();  // the other CTA may still write to this one's shared memory
}

}  // namespace moe_ops
