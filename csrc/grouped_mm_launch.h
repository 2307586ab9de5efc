// Host side of grouped_mm.cuh: tensors to maps and arguments, and the launch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <optional>
#include <string>

#include "device.h"
#include "grouped_mm.cuh"
#include "maps.h"

namespace moe_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline CUtensorMapDataType map_dtype(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

inline CUtensorMap map_of_rows(const Tensor& rows) {
  const uint64_t columns = rows.size(1), row_bytes = rows.stride(0) * kElementBytes;
  return tensor_map<4>(map_dtype(rows), rows.data_ptr(), {columns, uint64_t(rows.size(0)), 1, 1},
                       {row_bytes, row_bytes, row_bytes}, kChunk, kTileM / 2);
}

inline CUtensorMap map_of_ragged_rows(const Tensor& rows) {
  return tensor_map<4>(map_dtype(rows), rows.data_ptr(), ragged_sizes(rows.size(1)),
                       ragged_strides(rows.stride(0) * kElementBytes), kChunk, kTileK);
}

// [C, halves * columns], stored 16 rows x 64 columns at a time.
inline CUtensorMap map_of_output(const Tensor& rows, uint64_t halves) {
  const uint64_t columns = rows.size(1) / halves;
  const auto sizes = ragged_sizes(columns);
  const auto strides = ragged_strides(rows.stride(0) * kElementBytes);
  return tensor_map<5>(map_dtype(rows), rows.data_ptr(), {sizes[0], sizes[1], sizes[2], sizes[3], halves},
                       {strides[0], strides[1], strides[2], columns * kElementBytes}, kChunk, kStagingRows);
}

// [C, 2 * columns], loaded 16 rows x 64 columns of a half at a time.
inline CUtensorMap map_of_halves(const Tensor& rows) {
  const uint64_t columns = rows.size(1) / 2, row_bytes = rows.stride(0) * kElementBytes;
  return tensor_map<4>(map_dtype(rows), rows.data_ptr(), {columns, uint64_t(rows.size(0)), 2, 1},
                       {row_bytes, columns * kElementBytes, row_bytes}, kChunk, kStagingRows);
}

inline CUtensorMap map_of_wgrad(const Tensor& w) {
  const uint64_t columns = w.size(2), rows = w.size(1), experts = w.size(0);
  const uint64_t row_bytes = columns * kElementBytes, expert_bytes = rows * row_bytes;
  return tensor_map<5>(map_dtype(w), w.data_ptr(), {columns, rows, experts, 1, 1},
                       {row_bytes, expert_bytes, expert_bytes, expert_bytes}, kChunk, kStagingRows);
}

// w [L, N, K] with K contiguous, seen as `halves` halves of N.
inline CUtensorMap map_of_weights(const Tensor& w, uint64_t halves) {
  const uint64_t n = w.size(1) / halves, k = w.size(2), experts = w.size(0);
  const uint64_t row_bytes = w.stride(1) * kElementBytes, expert_bytes = w.stride(0) * kElementBytes;
  return tensor_map<4>(map_dtype(w), w.data_ptr(), {k, n, halves, experts}, {row_bytes, n * row_bytes, expert_bytes},
                       kTileK, kTileN / 2);
}

// w [L, N, K] with N contiguous.
inline CUtensorMap map_of_transposed_weights(const Tensor& w) {
  const uint64_t n = w.size(1), k = w.size(2), experts = w.size(0);
  const uint64_t row_bytes = w.stride(2) * kElementBytes, expert_bytes = w.stride(0) * kElementBytes;
  return tensor_map<4>(map_dtype(w), w.data_ptr(), {n, k, experts, 1}, {row_bytes, expert_bytes, expert_bytes}, kChunk,
                       kTileK);
}

template <typename T, Form kForm, Epilogue kEpilogue, Act kAct, bool kGather>
void launch(const Maps& maps, const Arguments& arguments, const OnDeviceOf& device) {
  const auto kernel = grouped_mm_kernel<T, kForm, kEpilogue, kAct, kGather>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "cudaFuncSetAttribute");
  const int ctas = device.num_sms() / 2 * 2;
  kernel<<<ctas, kThreads, kSharedBytes, device.stream()>>>(maps, arguments);
  check_cuda(cudaGetLastError(), "the launch of grouped_mm");
}

template <Form kForm, Epilogue kEpilogue, Act kAct = Act::kSilu, bool kGather = false>
void launch_for(const Tensor& like, const Maps& maps, const Arguments& arguments, const OnDeviceOf& device) {
  if (like.scalar_type() == ScalarType::BFloat16) {
    launch<__nv_bfloat16, kForm, kEpilogue, kAct, kGather>(maps, arguments, device);
  } else {
    launch<__half, kForm, kEpilogue, kAct, kGather>(maps, arguments, device);
  }
}

template <Form kForm, Epilogue kEpilogue>
void launch_activating(const std::string& act, const Tensor& like, const Maps& maps, const Arguments& arguments,
                       const OnDeviceOf& device) {
  const Activation& options = arguments.activation;
  if (act == "gelu") return launch_for<kForm, kEpilogue, Act::kGelu>(like, maps, arguments, device);
  if (!std::isinf(options.limit) || options.alpha != 1.0f || options.up_offset != 0.0f) {
    return launch_for<kForm, kEpilogue, Act::kLimitedSilu>(like, maps, arguments, device);
  }
  launch_for<kForm, kEpilogue, Act::kSilu>(like, maps, arguments, device);
}

inline Arguments arguments_for(const Tensor& offsets, const std::optional<Tensor>& tickets, int64_t num_rows, int64_t n,
                               int64_t k, int tile_n) {
  Arguments arguments{};
  arguments.tickets = tickets ? tickets->mutable_data_ptr<int>() : nullptr;
  arguments.groups = {offsets.const_data_ptr<int>(), static_cast<int>(offsets.numel()), static_cast<int>(num_rows), 0,
                      ceil_div(n, tile_n)};
  arguments.n_size = static_cast<int>(n);
  arguments.k_size = static_cast<int>(k);
  return arguments;
}

inline void set_tail(Arguments& arguments, int output, const Tensor& rows) {
  arguments.tail[output] = rows.data_ptr();
  arguments.tail_bytes[output] = static_cast<int>(rows.size(1) * kElementBytes);
}

inline Activation activation_of(const std::optional<Tensor>& row_weights, double limit, double alpha,
                                double up_offset) {
  Activation activation{};
  activation.row_weights = row_weights ? row_weights->const_data_ptr<float>() : nullptr;
  activation.limit = static_cast<float>(limit);
  activation.alpha = static_cast<float>(alpha);
  activation.up_offset = static_cast<float>(up_offset);
  return activation;
}

}  // namespace moe_ops
