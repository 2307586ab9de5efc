// Grouped matmul on sm_90a: for every expert a [rows, K] @ b [K, N], with a producer warp that copies tiles into a ring
// of stages, of which a tile's first also says which tile it is, and two warpgroups that multiply 64 x 256 each. kWgrad
// sums over the expert's rows instead.
//
//            a (M x K)                    b (K x N)                        out
//   forward  rows, or gathered tokens     w[e], K contiguous               rows
//   dgrad    rows, or gathered tokens     w[e], N contiguous               rows
//   wgrad    grad rows, M contiguous      rows, N contiguous               w[e]
#pragma once

#include "tiles.cuh"
#include "wgmma.cuh"

namespace moe_ops {

enum class Epilogue { kStore, kFloat32, kActivate, kDifferentiate };
enum class Act { kSilu, kLimitedSilu, kGelu };

// moe_ops/ops/swiglu.py has the formula.
struct Activation {
  const float* row_weights;       // [C] or null
  float* grad_row_weights;        // kDifferentiate: [C, n_tiles], each tile's part of the sum; or null
  bool store_h;                   // kActivate
  float limit, alpha, up_offset;  // limit: infinity for none
};

// Rows of the a operand are tokens, picked by slot (-1: zeros), if `slots` is given.
struct Gather {
  const uint8_t* tokens;
  int64_t token_bytes;
  const int* slots;  // [C]
  int top_k;
};

struct Arguments {
  Groups groups;
  int* tickets;        // [1] 0: clusters draw their pairs of tiles, since some start late; null: each takes its share
  int n_size, k_size;  // n_size: columns of one half of h where the epilogue is gated
  Gather gather;
  Activation activation;
  float* out_float32;  // kFloat32: [L, O, I]
  bool accumulate;     // kFloat32: add to what is there
  void* tail[2];       // outputs whose rows past the last expert's are zeroed, and their widths in bytes
  int tail_bytes[2];
};

constexpr int kElementBytes = 2;
constexpr int kConsumerWarps = 8;
constexpr int kConsumers = kConsumerWarps * 32;
constexpr int kProducerThreads = 128;
constexpr int kThreads = kConsumers + kProducerThreads;
constexpr int kChunk = 64;                                // columns: 128 bytes, the width of the swizzle
constexpr int kBytesA = kTileM * kTileK * kElementBytes;  // two boxes of 64 rows (or columns)
constexpr int kBytesB = kTileN * kTileK * kElementBytes;  // two halves
constexpr int kStageBytes = kBytesA + kBytesB;
constexpr int kStagingRows = 16;  // of a warp
constexpr int kStagingBytes = kStagingRows * kChunk * kElementBytes;
constexpr int kAtomBytes = 1024;

constexpr int kStages = 4;
constexpr int kStagingBuffers = 2;  // of each warp
constexpr int kDrawn = 8;           // positions on their way between the producers of a cluster
constexpr int kAnnouncedInts = 5;   // of a tile, in its first stage
constexpr int kBarriers = 2 * kStages + kConsumerWarps + kDrawn;
constexpr int kSharedBytes = kAtomBytes + kStages * kStageBytes + kConsumerWarps * kStagingBuffers * kStagingBytes +
                             kBarriers * 8 + kDrawn * sizeof(int) + kStages * kAnnouncedInts * sizeof(int);

struct Maps {
  CUtensorMap a, b, out, act, h;
};

template <typename T, Form kForm, Epilogue kEpilogue, Act kAct, bool kGather>
class GroupedMatmul {
 public:
  __device__ GroupedMatmul(const Maps& maps, const Arguments& arguments, uint8_t* shared)
      : maps_(maps), arguments_(arguments), rank_(hopper::cluster_rank()) {
    stages_ = (hopper::shared_address(shared) + kAtomBytes - 1) / kAtomBytes * kAtomBytes;
    staging_ = stages_ + kStages * kStageBytes;
    full_ = staging_ + kConsumerWarps * kStagingBuffers * kStagingBytes;
    empty_ = full_ + kStages * 8;
    h_loaded_ = empty_ + kStages * 8;
    drawn_ = h_loaded_ + kConsumerWarps * 8;
    tiles_ = drawn(kDrawn);
  }

  __device__ void init() const {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        hopper::barrier_init(full(stage), kGather ? 1 + kProducerThreads : 1);
        hopper::barrier_init(empty(stage), 2 * kConsumerWarps);
      }
      for (int warp = 0; warp < kConsumerWarps; ++warp) hopper::barrier_init(h_loaded_ + 8 * warp, 1);
      for (int number = 0; number < kDrawn; ++number) hopper::barrier_init(is_drawn(number), 1);
      hopper::barrier_init_fence();
    }
    hopper::cluster_sync();
  }

  // Fill the stages of every tile. One warp.
  __device__ void produce() {
    TileWalk<kForm> walk(arguments_.groups);
    Tile tile;
    int position = first_position();
    for (int number = 0; walk.find(position, tile); ++number) {
      position += num_clusters();
      if (lane() == 0) {
        if (draws() && rank_ == 0) position = num_clusters() + atomicAdd(arguments_.tickets, 1);
        const int blocks = k_blocks(tile);
        for (int block = 0; block < blocks; ++block) {
          hopper::barrier_wait(empty(stage_), phase_ ^ 1);
          if (block == 0) announce(tile);
          hopper::barrier_expect(full(stage_), kStageBytes);
          load_a(tile, block * kTileK);
          load_b(tile, block * kTileK);
          advance();
          if (block == blocks / 2 && draws() && rank_ == 0) tell(number, position);  // by now the ticket is here
        }
        if (draws() && rank_ == 1) position = told(number);
      }
      position = __shfl_sync(hopper::kAllLanes, position, 0);
    }
    if (lane() == 0) announce_end();
    __syncwarp();  // the cluster's barrier is for whole warps
  }

  // The same with gathered rows, by 16-byte copies, eight a thread and stage: thread t brings piece t % 8 of rows t /
  // 8, t / 8 + 16, ... Four warps.
  __device__ void produce_gathered() {
    TileWalk<kForm> walk(arguments_.groups);
    Tile tile, next;
    int position = first_position();
    bool has_next = walk.find(position, next);
    int tokens[kRowsOfThread], next_slots[kRowsOfThread];
    load_slots(next, has_next, next_slots);
    const int thread = threadIdx.x % kProducerThreads;
    const int piece = thread % 8, first = thread / 8;
    const uint32_t swizzled = first * 128 + ((piece ^ (first % 8)) * 16);
    int previous = -1;
    while (has_next) {
      tile = next;
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        tokens[i] = next_slots[i] < 0 ? -1 : next_slots[i] / arguments_.gather.top_k;
      }
      position += num_clusters();
      has_next = walk.find(position, next);
      load_slots(next, has_next, next_slots);  // long before they are needed
      for (int block = 0; block < k_blocks(tile); ++block) {
        hopper::barrier_wait(empty(stage_), phase_ ^ 1);
        if (thread == 0) {
          if (block == 0) announce(tile);
          hopper::barrier_expect(full(stage_), kBytesB);
          load_b(tile, block * kTileK);
        }
        const int k = block * kTileK + piece * 8;
        const uint32_t to = stages_ + stage_ * kStageBytes + swizzled;
#pragma unroll
        for (int i = 0; i < kRowsOfThread; ++i) {
          const bool valid = k < arguments_.k_size && tokens[i] >= 0;
          const int64_t at = valid ? tokens[i] * arguments_.gather.token_bytes + k * kElementBytes : 0;
          hopper::copy_16_async(to + i * 16 * 128, arguments_.gather.tokens + at, valid);
        }
        // A stage is handed over once the next one's copies are under way.
        hopper::copies_commit();
        if (previous >= 0) hand_over<1>(previous);
        previous = stage_;
        advance();
      }
    }
    if (previous >= 0) hand_over<0>(previous);
    if (thread == 0) announce_end();
    __syncwarp();
    hopper::barrier_wait(empty(stage_), phase_ ^ 1);
    hopper::barrier_arrive(full(stage_));
  }

  // Two warpgroups: multiply what the stages hold, 64 rows each. A tile's results wait in registers, rounded, and are
  // stored in parts between the multiplications of the next one. A call would end the pipeline of these.
  __device__ __forceinline__ void consume(int warpgroup) {
    while (true) {
      hopper::barrier_wait(full(stage_), phase_);
      const Tile tile = announced();
      const bool has_tile = tile.expert != kNoExpert;
      const int m = tile.m * kTileM + warpgroup * 64;
      if (has_tile && m >= (kForm == Form::kWgrad ? arguments_.groups.m_size : tile.num_rows)) {
        skip(tile);
        continue;
      }
      float acc[128];
      if (has_tile) {
        const int blocks = k_blocks(tile);
        multiply_stage(warpgroup, false, acc);
        int previous = stage_;
        advance();
        for (int block = 1; block < blocks; ++block) {
          hopper::barrier_wait(full(stage_), phase_);
          multiply_stage(warpgroup, true, acc);
          hopper::wgmma_wait<1>();
          release(previous);
          if (parts_left_ > 0) store_part();
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
  static constexpr bool kGated = kEpilogue == Epilogue::kActivate;
  static constexpr bool kBackward = kEpilogue == Epilogue::kDifferentiate;
  static constexpr bool kTransposeA = kForm == Form::kWgrad;
  static constexpr bool kTransposeB = kForm != Form::kForward;

  __device__ uint32_t full(int stage) const { return full_ + 8 * stage; }
  __device__ uint32_t empty(int stage) const { return empty_ + 8 * stage; }
  __device__ static uint32_t lane() { return threadIdx.x % 32; }
  // First row of a warp among its warpgroup's.
  __device__ static int warp_row() { return threadIdx.x / 32 % 4 * kStagingRows; }

  __device__ static int first_position() { return blockIdx.x / 2; }
  __device__ static int num_clusters() { return gridDim.x / 2; }

  // The first producer of a cluster draws and tells the second. NOTE: a place is taken again after kDrawn tiles; the
  // second producer has read it by then, since the first is at most kStages tiles ahead of what both CTAs multiply.
  __device__ bool draws() const { return arguments_.tickets != nullptr; }
  __device__ uint32_t is_drawn(int number) const { return drawn_ + 8 * (number % kDrawn); }
  __device__ uint32_t drawn(int number) const { return drawn_ + 8 * kDrawn + sizeof(int) * number; }

  __device__ void tell(int number, int position) const {
    hopper::store_at(drawn(number % kDrawn), position, is_drawn(number), 1);
  }

  __device__ int told(int number) const {
    hopper::barrier_expect(is_drawn(number), sizeof(int));
    hopper::barrier_wait(is_drawn(number), number / kDrawn % 2);
    return hopper::load_shared(drawn(number % kDrawn));
  }

  __device__ uint32_t announced(int number) const { return tiles_ + sizeof(int) * (kAnnouncedInts * stage_ + number); }

  __device__ void announce(const Tile& tile) const {
    hopper::store_shared(announced(0), tile.expert);
    hopper::store_shared(announced(1), tile.first_row);
    hopper::store_shared(announced(2), tile.num_rows);
    hopper::store_shared(announced(3), tile.m);
    hopper::store_shared(announced(4), tile.n);
  }

  __device__ Tile announced() const {
    return {hopper::load_shared(announced(0)), hopper::load_shared(announced(1)), hopper::load_shared(announced(2)),
            hopper::load_shared(announced(3)), hopper::load_shared(announced(4))};
  }

  __device__ void announce_end() const {
    hopper::barrier_wait(empty(stage_), phase_ ^ 1);
    announce({kNoExpert});
    hopper::barrier_arrive(full(stage_));
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

  static constexpr int kRowsOfThread = kTileM / (kProducerThreads / 8);

  template <int kPending>
  __device__ void hand_over(int stage) const {
    hopper::copies_wait<kPending>();
    hopper::async_proxy_fence();
    hopper::barrier_arrive(full(stage));
  }

  __device__ void load_slots(const Tile& tile, bool exists, int (&slots)[kRowsOfThread]) const {
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int row = tile.m * kTileM + threadIdx.x % kProducerThreads / 8 + 16 * i;
      slots[i] = exists && row < tile.num_rows ? arguments_.gather.slots[tile.first_row + row] : -1;
    }
  }

  __device__ void load_a(const Tile& tile, int k) const {
    for (int half = 0; half < 2; ++half) {
      if (!tile.shares_b && half != rank_) continue;  // the other CTA brings it
      const uint32_t to = stages_ + stage_ * kStageBytes + half * (kBytesA / 2);
      const int m = tile.m * kTileM + half * 64;
      if constexpr (kForm == Form::kWgrad) {
        load(!tile.shares_b, to, &maps_.a, m, kRagged - tile.num_rows + k, tile.first_row + tile.num_rows, kRagged);
      } else {
        load(!tile.shares_b, to, &maps_.a, k, tile.first_row + m, 0, 0);
      }
    }
  }

  __device__ void load_b(const Tile& tile, int k) const {
    for (int half = 0; half < 2; ++half) {
      if (tile.shares_b && half != rank_) continue;
      const uint32_t to = stages_ + stage_ * kStageBytes + kBytesA + half * (kBytesB / 2);
      if constexpr (kForm == Form::kForward) {
        if constexpr (kGated) {  // gate columns, then up columns
          load(tile.shares_b, to, &maps_.b, k, tile.n * (kTileN / 2), half, tile.expert);
        } else {
          load(tile.shares_b, to, &maps_.b, k, tile.n * kTileN + half * (kTileN / 2), 0, tile.expert);
        }
      } else {
        for (int chunk = 0; chunk < 2; ++chunk) {
          const int n = tile.n * kTileN + (2 * half + chunk) * kChunk;
          const uint32_t chunk_to = to + chunk * (kBytesB / 4);
          if constexpr (kForm == Form::kDgrad) {
            load(tile.shares_b, chunk_to, &maps_.b, n, k, tile.expert, 0);
          } else {
            load(tile.shares_b, chunk_to, &maps_.b, n, kRagged - tile.num_rows + k, tile.first_row + tile.num_rows,
                 kRagged);
          }
        }
      }
    }
  }

  __device__ void load(bool both, uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, int c3) const {
    if (both) {
      hopper::tma_load_both(to, map, full(stage_), c0, c1, c2, c3);
    } else {
      hopper::tma_load(to, map, full(stage_), c0, c1, c2, c3);
    }
  }

  // A tile of which no row of this warpgroup exists.
  __device__ void skip(const Tile& tile) {
    for (int block = k_blocks(tile); block > 0; --block) {
      hopper::barrier_wait(full(stage_), phase_);
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
      hopper::wgmma<T, kTransposeA, kTransposeB>(acc, hopper::operand(a + step * kStepA, kChunkBytes, kAtomBytes),
                                                 hopper::operand(b + step * kStepB, kChunkBytes, kAtomBytes),
                                                 accumulate || step > 0);
    }
    hopper::wgmma_commit();
  }

  // Both CTAs' producers may write to a stage once all consumers of both have read it.
  __device__ void release(int stage) const {
    const uint32_t lane = GroupedMatmul::lane();
    if (lane < 2) hopper::barrier_arrive_at(empty(stage), lane);
  }

  // In acc, [4j .. 4j+3] are row lane / 4 and row lane / 4 + 8, columns 8j + 2 (lane % 4) and the next.

  static constexpr int kChunkRegisters = 16;  // of a thread, for 64 columns

  // Round a tile, to be stored part by part: chunk after chunk of 64 columns; for kActivate gate and up chunks in turn.
  __device__ void keep(const Tile& tile, int m, const float (&acc)[128]) {
    keep_place(tile, m + warp_row());
    parts_left_ = kParts;
#pragma unroll
    for (int i = 0; i < kChunks * kChunkRegisters; ++i) {
      const int chunk = i / kChunkRegisters;
      const int from = (kGated ? chunk % 2 * 2 + chunk / 2 : chunk) * 2 * kChunkRegisters + i % kChunkRegisters * 2;
      packed_[i] = hopper::pack<T>(acc[from], acc[from + 1]);
    }
    if constexpr (kGated || kBackward) row_weights_ = row_weights(tile, m);
    if constexpr (kBackward) {
      grad_weights_ = {0.0f, 0.0f};
      kept_first_ = tile.first_row + m + warp_row();
    }
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
    run_part<0, kParts>(kParts - parts_left_);
    --parts_left_;
  }

  // Registers have no index at run time.
  template <int kFrom, int kTo>
  __device__ void run_part(int part) {
    constexpr int kMiddle = (kFrom + kTo) / 2;
    if constexpr (kFrom == kMiddle) {
      run_part<kFrom>();
    } else if (part < kMiddle) {
      run_part<kFrom, kMiddle>(part);
    } else {
      run_part<kMiddle, kTo>(part);
    }
  }

  template <int kPart>
  __device__ void run_part() {
    if constexpr (kEpilogue == Epilogue::kStore) {
      const int n = kept_n_ + kPart * kChunk;
      if (n < arguments_.n_size) store_chunk<kPart>(&maps_.out, n, 0);
    } else if constexpr (kGated) {
      constexpr int kGate = kPart / kSteps * 2, kStep = kPart % kSteps;
      const int n = kept_n_ + kPart / kSteps * kChunk;
      if (n >= arguments_.n_size) return;
      if constexpr (kStep < 2) {
        if (arguments_.activation.store_h) store_chunk<kGate + kStep>(&maps_.out, n, kStep);
      } else {
        activate_columns<kGate, kStep - 2>();
        if constexpr (kStep == 5) store_chunk<kGate>(&maps_.act, n, 0);
      }
    } else if constexpr (kBackward) {
      constexpr int kStep = kPart % kSteps;  // the second and third do nothing, while h is on its way
      if constexpr (kStep == 0 || kStep > 2) differentiate_chunk<kPart / kSteps, kStep == 0 ? 0 : kStep - 2>();
    }
  }

  // 16 columns, in the place of the gate.
  template <int kGate, int kPair>
  __device__ void activate_columns() {
    uint32_t* const gates = packed_ + kGate * kChunkRegisters + 4 * kPair;
    float2 sigmoids[4];
    load_sigmoids(gates, sigmoids);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 gate = hopper::unpack<T>(gates[i]), up = hopper::unpack<T>(gates[kChunkRegisters + i]);
      const float weight = i % 2 == 0 ? row_weights_.x : row_weights_.y;
      gates[i] = hopper::pack<T>(activated(limited_gate(gate.x), sigmoids[i].x).value * limited_up(up.x) * weight,
                                 activated(limited_gate(gate.y), sigmoids[i].y).value * limited_up(up.y) * weight);
    }
  }

  __device__ float2 row_weights(const Tile& tile, int m) const {
    const float* weights = arguments_.activation.row_weights;
    if (weights == nullptr) return {1.0f, 1.0f};
    const int row = m + warp_row() + lane() / 4;
    weights += tile.first_row;
    return {row < tile.num_rows ? weights[row] : 0.0f, row + 8 < tile.num_rows ? weights[row + 8] : 0.0f};
  }

  static constexpr float kLog2E = 1.4426950408889634f;

  struct Activated {
    float value, slope;  // of the gate
  };

  __device__ float scaled(float gate) const { return kAct == Act::kSilu ? gate : arguments_.activation.alpha * gate; }

  // Of eight gates at a time, all exponentials before all reciprocals, so that none is waited for. Not for kGelu.
  __device__ void load_sigmoids(const uint32_t* gates, float2 (&sigmoids)[4]) const {
    if constexpr (kAct != Act::kGelu) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 gate = hopper::unpack<T>(gates[i]);
        sigmoids[i] = {hopper::exp2(-kLog2E * scaled(limited_gate(gate.x))),
                       hopper::exp2(-kLog2E * scaled(limited_gate(gate.y)))};
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sigmoids[i] = {hopper::reciprocal(1.0f + sigmoids[i].x), hopper::reciprocal(1.0f + sigmoids[i].y)};
      }
    }
  }

  __device__ Activated activated(float gate, float sigmoid) const {
    if constexpr (kAct == Act::kGelu) {
      // Phi by formula 7.1.26 of Abramowitz and Stegun (error 1e-7): erff would be a call, and calls end a wgmma
      // pipeline.
      const float x = fabsf(gate) * 0.70710678118654752f;
      const float bell = hopper::exp2(-kLog2E * x * x);
      const float t = hopper::reciprocal(1.0f + 0.3275911f * x);
      const float tail =
          0.5f * bell * t *
          (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
      const float phi = gate < 0.0f ? tail : 1.0f - tail;
      return {gate * phi, phi + gate * 0.39894228040143268f * bell};
    }
    return {gate * sigmoid, sigmoid + sigmoid * scaled(gate) * (1.0f - sigmoid)};
  }

  __device__ float limited_gate(float gate) const {
    if constexpr (kAct == Act::kSilu) return gate;
    return hopper::min_or_nan(gate, arguments_.activation.limit);
  }

  __device__ float limited_up(float up) const {
    if constexpr (kAct == Act::kSilu) return up;
    const Activation& act = arguments_.activation;
    return hopper::max_or_nan(hopper::min_or_nan(up, act.limit), -act.limit) + act.up_offset;
  }

  __device__ uint32_t warp_staging(int buffer) const {
    return staging_ + (threadIdx.x / 32 % kConsumerWarps * kStagingBuffers + buffer) * kStagingBytes;
  }

  // Here packed_ holds the activation's gradient. Steps of a chunk: load gate and up; 16 columns at a time put their
  // gradients in their place, and the activation in that of its own; store them; store the activation by way of the
  // gate's buffer.
  template <int kFrom, int kStep>
  __device__ void differentiate_chunk() {
    const int n = kept_n_ + kFrom * kChunk;
    const uint32_t lane = GroupedMatmul::lane();
    const uint32_t loaded = h_loaded_ + 8 * (threadIdx.x / 32 % kConsumerWarps);
    if (n < arguments_.n_size) {
      if constexpr (kStep == 0) {
        if (lane == 0) {
          hopper::tma_store_wait_read<0>();
          hopper::barrier_expect(loaded, 2 * kStagingBytes);
          for (int half = 0; half < 2; ++half) {
            hopper::tma_load(warp_staging(half), &maps_.h, loaded, n, kept_first_, half, 0);
          }
        }
      } else if constexpr (kStep < 5) {
        if constexpr (kStep == 1) {
          hopper::barrier_wait(loaded, h_phase_);
          h_phase_ ^= 1;
        }
        differentiate_columns<kFrom, kStep - 1>();
        if constexpr (kStep == 4) {
          hopper::async_proxy_fence();
          __syncwarp();
          if (lane == 0) {
            for (int half = 0; half < 2; ++half) {
              hopper::tma_store(&maps_.out, warp_staging(half), n, kept_row_, kept_group_, kRagged, half);
            }
            hopper::tma_store_commit();
          }
        }
      } else {
        if (lane == 0) hopper::tma_store_wait_read<0>();
        buffer_ = 0;
        store_chunk<kFrom>(&maps_.act, n, 0);
      }
    }
    if constexpr (kFrom == kChunks - 1 && kStep == 5) store_grad_weights();
  }

  template <int kFrom, int kPair>
  __device__ void differentiate_columns() {
    const uint32_t lane = GroupedMatmul::lane(), row = lane % 16;
    const uint32_t at = row * 128 + ((2 * kPair + lane / 16) ^ (row % 8)) * 16;
    uint32_t gate[4], up[4];
    hopper::load_matrices(warp_staging(0) + at, gate[0], gate[1], gate[2], gate[3]);
    hopper::load_matrices(warp_staging(1) + at, up[0], up[1], up[2], up[3]);
    float2 sigmoids[4];
    load_sigmoids(gate, sigmoids);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      differentiate(i % 2 == 0, sigmoids[i], gate[i], up[i], packed_[kFrom * kChunkRegisters + 4 * kPair + i]);
    }
    hopper::store_matrices(warp_staging(0) + at, gate[0], gate[1], gate[2], gate[3]);
    hopper::store_matrices(warp_staging(1) + at, up[0], up[1], up[2], up[3]);
  }

  // Two neighbouring columns of a row, the upper or the lower one of the thread's.
  __device__ void differentiate(bool upper, float2 sigmoids, uint32_t& gates, uint32_t& ups, uint32_t& grads) {
    const float2 gate = hopper::unpack<T>(gates), up = hopper::unpack<T>(ups), grad = hopper::unpack<T>(grads);
    const float weight = upper ? row_weights_.x : row_weights_.y;
    const float3 first = differentiate(weight, sigmoids.x, gate.x, up.x, grad.x, upper);
    const float3 second = differentiate(weight, sigmoids.y, gate.y, up.y, grad.y, upper);
    gates = hopper::pack<T>(first.x, second.x);
    ups = hopper::pack<T>(first.y, second.y);
    grads = hopper::pack<T>(first.z, second.z);
  }

  // Gradients of gate and up, and the activation.
  __device__ float3 differentiate(float weight, float sigmoid, float gate, float up, float grad, bool upper) {
    const Activated act = activated(limited_gate(gate), sigmoid);
    const float factor = limited_up(up), product = act.value * factor;
    (upper ? grad_weights_.x : grad_weights_.y) += grad * product;
    grad *= weight;
    float3 result{grad * act.slope * factor, grad * act.value, product * weight};
    if constexpr (kAct != Act::kSilu) {
      const float limit = arguments_.activation.limit;
      const bool limited = limit < INFINITY;  // then NaN gets no gradient either, as in torch.clamp
      if (limited && !(gate <= limit)) result.x = 0.0f;
      if (limited && !(fabsf(up) <= limit)) result.y = 0.0f;
    }
    return result;
  }

  __device__ void store_grad_weights() const {
    float* const out = arguments_.activation.grad_row_weights;
    const int n_tiles = arguments_.groups.n_tiles;
    if (out == nullptr || kept_n_ >= arguments_.n_size) return;
    for (int below = 0; below < 2; ++below) {
      float sum = below == 0 ? grad_weights_.x : grad_weights_.y;
      sum += __shfl_xor_sync(hopper::kAllLanes, sum, 1);
      sum += __shfl_xor_sync(hopper::kAllLanes, sum, 2);
      const int row = lane() / 4 + 8 * below;
      if (threadIdx.x % 4 == 0 && kept_row_ + row < kRagged) {
        out[int64_t{kept_first_ + row} * n_tiles + kept_n_ / kTileN] = sum;
      }
    }
  }

  // 16 rows x 64 columns of this warp.
  template <int kFrom>
  __device__ void store_chunk(const CUtensorMap* map, int n, int half) {
    const uint32_t lane = GroupedMatmul::lane();
    const uint32_t buffer = warp_staging(buffer_);
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
    const int row0 = m + warp_row() + lane() / 4;
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
    const int64_t thread = int64_t{blockIdx.x} * kConsumers + threadIdx.x, threads = int64_t{gridDim.x} * kConsumers;
    for (int output = 0; output < 2; ++output) {
      if (arguments_.tail[output] == nullptr) continue;
      const int64_t pieces = arguments_.tail_bytes[output] / 16;
      uint4* out = static_cast<uint4*>(arguments_.tail[output]);
      for (int64_t i = rows * pieces + thread; i < groups.num_rows * pieces; i += threads) {
        out[i] = make_uint4(0, 0, 0, 0);
      }
    }
    if (float* const grad_weights = arguments_.activation.grad_row_weights; kBackward && grad_weights != nullptr) {
      const int64_t end = int64_t{groups.num_rows} * groups.n_tiles;
      for (int64_t i = int64_t{rows} * groups.n_tiles + thread; i < end; i += threads) grad_weights[i] = 0;
    }
  }

  const Maps& maps_;
  const Arguments& arguments_;
  const int rank_;
  uint32_t stages_, staging_, full_, empty_, h_loaded_, drawn_, tiles_;
  int stage_ = 0, buffer_ = 0;
  uint32_t phase_ = 0;

  static constexpr int kChunks = kTileN / kChunk;
  static constexpr int kSteps = kGated ? 6 : kBackward ? 8 : 1;  // of a chunk, or of one of gate and one of up
  static constexpr int kParts = kSteps * (kGated ? kChunks / 2 : kChunks);
  int kept_n_, kept_row_, kept_group_, kept_first_, parts_left_ = 0;
  uint32_t h_phase_ = 0;
  float2 row_weights_, grad_weights_;
  uint32_t packed_[kChunks * kChunkRegisters];
};

template <typename T, Form kForm, Epilogue kEpilogue, Act kAct, bool kGather>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    grouped_mm_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments arguments) {
  extern __shared__ uint8_t shared[];
  GroupedMatmul<T, kForm, kEpilogue, kAct, kGather> matmul(maps, arguments, shared);
  matmul.init();
  const int warpgroup = __shfl_sync(hopper::kAllLanes, threadIdx.x / 128, 0);  // uniform, as the compiler can see
  if (warpgroup == 2) {
    hopper::registers_shrink<56>();
    if constexpr (kGather) {
      matmul.produce_gathered();
    } else if (threadIdx.x / 32 == kConsumerWarps) {
      matmul.produce();
    }
  } else {
    hopper::registers_grow<224>();
    matmul.consume(warpgroup);
  }
  hopper::cluster_sync();  // the other CTA may still write to this one's shared memory
}

}  // namespace moe_ops
