// Tensor maps: how the copy engine sees a matrix. Made on the host for each launch, passed by value.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <torch/headeronly/util/Exception.h>

#include <array>
#include <cstdint>

#include "tiles.cuh"

namespace moe_ops {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    STD_TORCH_CHECK(error == cudaSuccess && found == cudaDriverEntryPointSuccess,
                    "moe_ops: the CUDA driver must have cuTensorMapEncodeTiled (12.0 or newer), got ",
                    cudaGetErrorString(error));
    return reinterpret_cast<EncodeTiled>(entry);
  }();
  return function;
}

// Dimensions from the contiguous one outwards; strides in bytes, of dimension 1 and up.
template <int kRank>
CUtensorMap tensor_map(CUtensorMapDataType dtype, const void* base, const std::array<uint64_t, kRank>& sizes,
                       const std::array<uint64_t, kRank - 1>& strides, uint32_t box_columns, uint32_t box_rows) {
  std::array<uint32_t, kRank> box, steps;
  box.fill(1);
  steps.fill(1);
  box[0] = box_columns;
  box[1] = box_rows;
  CUtensorMap map;
  const CUresult result =
      encode_tiled()(&map, dtype, kRank, const_cast<void*>(base), sizes.data(), strides.data(), box.data(),
                     steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                     CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "moe_ops: cuTensorMapEncodeTiled must take sizes ", sizes[0], " x ", sizes[1],
                  " and row stride ", strides[0], " bytes, got error ", static_cast<int>(result));
  return map;
}

constexpr uint64_t kManyRows = 0x7FFF0000;  // more than any matrix has

// Strides and sizes of a matrix of which a box sees the rows [start, start + len) only: the copy engine fills what lies
// past them with zeros, and stores nothing there. Coordinates: column, kRagged - len + row, start + len, kRagged. The
// last one's stride takes kRagged rows back, since 2^30 * 2^34 is 0 modulo the 2^64 of an address.
inline std::array<uint64_t, 4> ragged_sizes(uint64_t columns) { return {columns, kRagged, kManyRows, kRagged + 1}; }
inline std::array<uint64_t, 3> ragged_strides(uint64_t row_bytes) {
  return {row_bytes, row_bytes, (uint64_t{1} << 34) - row_bytes};
}

}  // namespace moe_ops
