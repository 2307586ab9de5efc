// Rows on the wires "fp8" and "fp8_pow2", to the bit as moe_ops/comm/wire.py says: a float32 scale for each run of
// values, filled up to 8 bytes, then an e4m3 code for each value, filled up to 16.
#pragma once

#include <cuda_fp8.h>

#include <cfloat>
#include <cmath>

#include "exchange_rows.cuh"

namespace moe_ops::exchange {

enum class Wire : int64_t { kFull, kFp8, kFp8Pow2 };  // FORMATS of moe_ops/comm/wire.py

constexpr int kRun = 128;       // values that share a scale
constexpr int kLanesOfRun = 4;  // that encode it
constexpr float kMaxCode = 448;

__host__ __device__ inline int num_runs_of(int width) { return (width + kRun - 1) / kRun; }
__host__ __device__ inline int codes_at(int width) { return (num_runs_of(width) * int(sizeof(float)) + 7) / 8 * 8; }
// Never more than the row's own bytes, if those are a multiple of 16.
__host__ __device__ inline int encoded_bytes(int width) { return (codes_at(width) + width + 15) / 16 * 16; }

// The largest magnitude of a lane's values of a run; NaN does not count.
template <typename T, int kVectors>
__device__ float largest_of(const uint4 (&vectors)[kVectors]) {
  if constexpr (sizeof(T) == 4) {
    float largest = 0;
#pragma unroll
    for (const uint4& bits : vectors) {
#pragma unroll
      for (float value : Vector<T>::of(bits).values) largest = fmaxf(largest, fabsf(value));
    }
    return largest;
  } else {
    using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
    Pair largest{};
#pragma unroll
    for (const uint4& bits : vectors) {
#pragma unroll
      for (uint32_t word : {bits.x, bits.y, bits.z, bits.w}) {
        largest = __hmax2(largest, __habs2(reinterpret_cast<const Pair&>(word)));
      }
    }
    return fmaxf(__low2float(largest), __high2float(largest));
  }
}

template <typename T, int kVectors>
__device__ float largest_of_run(const uint4 (&vectors)[kVectors]) {
  float largest = largest_of<T>(vectors);
#pragma unroll
  for (int other = 1; other < kLanesOfRun; other *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, other));
  }
  return largest;
}

template <typename T>
__device__ uint4 nan_for_infinities(uint4 bits) {
  Vector<T> vector = Vector<T>::of(bits);
#pragma unroll
  for (float& value : vector.values) value = isinf(value) ? NAN : value;
  return vector.bits();
}

__device__ inline float scale_of(float largest, bool pow2) {
  constexpr uint32_t kMantissa = (1 << 23) - 1;
  const float scale = fmaxf(largest * (1 / kMaxCode), FLT_MIN);
  return pow2 ? __uint_as_float((__float_as_uint(scale) + kMantissa) & ~kMantissa) : scale;
}

// 4 values to their codes.
__device__ inline uint32_t encode(const float* values, float inverse_scale) {
  const auto pair = [&](int i) -> uint32_t {
    const float2 scaled{values[i] * inverse_scale, values[i + 1] * inverse_scale};
    return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
  };
  return pair(0) | pair(2) << 16;
}

// 4 codes to their values.
__device__ inline void decode(uint32_t codes, float scale, float* values) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const __half2 pair = __nv_cvt_fp8x2_to_halfraw2(codes >> (8 * i), __NV_E4M3);
    const float2 scaled = __half22float2(pair);
    values[i] = scaled.x * scale;
    values[i + 1] = scaled.y * scale;
  }
}

// Puts a row in shared memory, of `width` values, into its form on the wire, in place. By one warp.
template <typename T>
__device__ void encode_row(uint8_t* row, int width, bool pow2) {
  constexpr int kValues = Vector<T>::kSize, kVectors = kRun / kLanesOfRun / kValues, kStride = kLanesOfRun * kValues;
  constexpr int kTurns = 4 / sizeof(T), kRuns = kLanes / kLanesOfRun;
  const int group = lane() / kLanesOfRun, member = lane() % kLanesOfRun, num_runs = num_runs_of(width);
  // Groups take a run's vectors in different orders, so that no two meet in a bank.
  const int start = group % kVectors * kStride + member * kValues;
  const auto place = [&](int run, int i) { return run * kRun + (start ^ (i * kStride)); };
  uint8_t* const codes = row + codes_at(width);
  // What is written lies within what has been read: kTurns * kRuns runs are longer than all scales and their own codes.
  for (int first = group; first - group < num_runs; first += kTurns * kRuns) {
    uint4 vectors[kTurns][kVectors];
    float largest[kTurns];
    bool infinite = false;
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int at = place(first + turn * kRuns, i);
        vectors[turn][i] = at < width ? *reinterpret_cast<const uint4*>(row + at * sizeof(T)) : uint4{};
      }
    }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      largest[turn] = largest_of_run<T>(vectors[turn]);
      infinite = infinite || isinf(largest[turn]);
    }
    if (__any_sync(kAllLanes, infinite)) {
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
        for (uint4& bits : vectors[turn]) bits = nan_for_infinities<T>(bits);
        largest[turn] = largest_of_run<T>(vectors[turn]);
      }
    }
    __syncwarp();
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      const int run = first + turn * kRuns;
      const float scale = scale_of(largest[turn], pow2), inverse = __frcp_rn(scale);
      if (member == 0 && run < num_runs) reinterpret_cast<float*>(row)[run] = scale;
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int at = place(run, i);
        if (at >= width) continue;
        const Vector<T> vector = Vector<T>::of(vectors[turn][i]);
        if constexpr (kValues == 8) {
          *reinterpret_cast<uint2*>(codes + at) = {encode(vector.values, inverse), encode(vector.values + 4, inverse)};
        } else {
          *reinterpret_cast<uint32_t*>(codes + at) = encode(vector.values, inverse);
        }
      }
    }
  }
}

// A row of `width` values from its form on the wire, both in global memory. By one warp.
template <typename T>
__device__ void decode_row(uint8_t* to, const uint8_t* from, int width) {
  using Codes = std::conditional_t<Vector<T>::kSize == 8, uint2, uint32_t>;
  constexpr int kAtOnce = 8, kStride = kLanes * Vector<T>::kSize;
  const uint8_t* const codes_from = from + codes_at(width);
  for (int first = lane() * Vector<T>::kSize; first < width; first += kAtOnce * kStride) {
    Codes codes[kAtOnce];
    float scales[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kStride;
      if (at >= width) continue;
      codes[i] = __ldcg(reinterpret_cast<const Codes*>(codes_from + at));
      scales[i] = __ldcg(reinterpret_cast<const float*>(from) + at / kRun);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * kStride;
      if (at >= width) continue;
      Vector<T> vector;
      if constexpr (Vector<T>::kSize == 8) {
        decode(codes[i].x, scales[i], vector.values);
        decode(codes[i].y, scales[i], vector.values + 4);
      } else {
        decode(codes[i], scales[i], vector.values);
      }
      *reinterpret_cast<uint4*>(to + at * sizeof(T)) = vector.bits();
    }
  }
}

}  // namespace moe_ops::exchange
