// Host side of grouped_mm.cuh: torch.ops.moe_ops_native.grouped_mm and its kin, called by moe_ops/kernels/native.py.

#include "grouped_mm.cuh"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <optional>
#include <string>

#include "maps.h"

namespace moe_ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check_cuda(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "moe_ops: ", what, " must succeed, got ", cudaGetErrorString(error));
}

// Makes the tensor's device current while it lives.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const Tensor& tensor) : device_(tensor.get_device_index()) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device_) check_cuda(cudaSetDevice(device_), "cudaSetDevice");
  }
  ~OnDeviceOf() {
    if (before_ != device_) cudaSetDevice(before_);
  }
  cudaStream_t stream() const {
    void* stream = nullptr;
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream) == AOTI_TORCH_SUCCESS,
                    "moe_ops: the current CUDA stream must be known");
    return static_cast<cudaStream_t>(stream);
  }
  int num_sms() const {
    int count = 0;
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device_), "cudaDeviceGetAttribute");
    return count;
  }

 private:
  int device_, before_ = 0;
};

CUtensorMapDataType map_dtype(const Tensor& tensor) {
  return tensor.scalar_type() == ScalarType::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

CUtensorMap map_of_rows(const Tensor& rows, uint32_t box_rows) {
  const uint64_t columns = rows.size(1), row_bytes = rows.stride(0) * kElementBytes;
  return tensor_map<4>(map_dtype(rows), rows.data_ptr(), {columns, uint64_t(rows.size(0)), 1, 1},
                       {row_bytes, row_bytes, row_bytes}, kChunk, box_rows);
}

CUtensorMap map_of_ragged_rows(const Tensor& rows, uint32_t box_rows) {
  return tensor_map<4>(map_dtype(rows), rows.data_ptr(), ragged_sizes(rows.size(1)),
                       ragged_strides(rows.stride(0) * kElementBytes), kChunk, box_rows);
}

// [C, halves * columns], stored 16 rows x 64 columns at a time.
CUtensorMap map_of_output(const Tensor& rows, uint64_t halves) {
  const uint64_t columns = rows.size(1) / halves;
  const auto sizes = ragged_sizes(columns);
  const auto strides = ragged_strides(rows.stride(0) * kElementBytes);
  return tensor_map<5>(map_dtype(rows), rows.data_ptr(), {sizes[0], sizes[1], sizes[2], sizes[3], halves},
                       {strides[0], strides[1], strides[2], columns * kElementBytes}, kChunk, kStagingRows);
}

// [C, 2 * columns], loaded 16 rows x 64 columns of a half at a time.
CUtensorMap map_of_halves(const Tensor& rows) {
  const uint64_t columns = rows.size(1) / 2, row_bytes = rows.stride(0) * kElementBytes;
  return tensor_map<4>(map_dtype(rows), rows.data_ptr(), {columns, uint64_t(rows.size(0)), 2, 1},
                       {row_bytes, columns * kElementBytes, row_bytes}, kChunk, kStagingRows);
}

CUtensorMap map_of_wgrad(const Tensor& w) {
  const uint64_t columns = w.size(2), rows = w.size(1), experts = w.size(0);
  const uint64_t row_bytes = columns * kElementBytes, expert_bytes = rows * row_bytes;
  return tensor_map<5>(map_dtype(w), w.data_ptr(), {columns, rows, experts, 1, 1},
                       {row_bytes, expert_bytes, expert_bytes, expert_bytes}, kChunk, kStagingRows);
}

// w [L, N, K] with K contiguous, seen as `halves` halves of N.
CUtensorMap map_of_weights(const Tensor& w, uint64_t halves) {
  const uint64_t n = w.size(1) / halves, k = w.size(2), experts = w.size(0);
  const uint64_t row_bytes = w.stride(1) * kElementBytes, expert_bytes = w.stride(0) * kElementBytes;
  return tensor_map<4>(map_dtype(w), w.data_ptr(), {k, n, halves, experts}, {row_bytes, n * row_bytes, expert_bytes},
                       kTileK, kTileN / 2);
}

// w [L, N, K] with N contiguous.
CUtensorMap map_of_transposed_weights(const Tensor& w) {
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
#ifndef BF16_ONLY
  } else {
    launch<__half, kForm, kEpilogue, kAct, kGather>(maps, arguments, device);
#endif
  }
}

template <Form kForm, Epilogue kEpilogue, Act kAct = Act::kSilu>
void launch_gathering(const Tensor& like, const Maps& maps, const Arguments& arguments, const OnDeviceOf& device) {
  if (arguments.gather.slots != nullptr) {
    launch_for<kForm, kEpilogue, kAct, true>(like, maps, arguments, device);
  } else {
    launch_for<kForm, kEpilogue, kAct>(like, maps, arguments, device);
  }
}

template <Form kForm, Epilogue kEpilogue>
void launch_activating(
    const std::string& act, const Tensor& like, const Maps& maps, const Arguments& arguments,
    const OnDeviceOf& device) {
  const Activation& options = arguments.activation;
#ifndef BF16_ONLY
  if (act == "gelu") return launch_gathering<kForm, kEpilogue, Act::kGelu>(like, maps, arguments, device);
  if (!std::isinf(options.limit) || options.alpha != 1.0f || options.up_offset != 0.0f) {
    return launch_gathering<kForm, kEpilogue, Act::kLimitedSilu>(like, maps, arguments, device);
  }
#endif
  launch_gathering<kForm, kEpilogue, Act::kSilu>(like, maps, arguments, device);
}

int tiles_of(int64_t size, int tile) {
  return static_cast<int>((size + tile - 1) / tile);
}

Arguments arguments_for(const Tensor& offsets, int64_t num_rows, int64_t n, int64_t k, int tile_n) {
  Arguments arguments{};
  arguments.groups = {offsets.const_data_ptr<int>(), static_cast<int>(offsets.numel()), static_cast<int>(num_rows), 0,
                      tiles_of(n, tile_n)};
  arguments.n_size = static_cast<int>(n);
  arguments.k_size = static_cast<int>(k);
  return arguments;
}

void set_tail(Arguments& arguments, int output, const Tensor& rows) {
  arguments.tail[output] = rows.data_ptr();
  arguments.tail_bytes[output] = static_cast<int>(rows.size(1) * kElementBytes);
}

void set_gather(Arguments& arguments, const Tensor& tokens, const std::optional<Tensor>& slots, int64_t top_k) {
  if (!slots) return;
  arguments.gather = {static_cast<const uint8_t*>(tokens.data_ptr()), tokens.stride(0) * kElementBytes,
                      slots->const_data_ptr<int>(), static_cast<int>(top_k)};
}

Activation activation_of(const std::optional<Tensor>& row_weights, double limit, double alpha, double up_offset) {
  Activation activation{};
  activation.row_weights = row_weights ? row_weights->const_data_ptr<float>() : nullptr;
  activation.limit = static_cast<float>(limit);
  activation.alpha = static_cast<float>(alpha);
  activation.up_offset = static_cast<float>(up_offset);
  return activation;
}

// out [C, N] = a [C, K] @ w[e].T; w [L, N, K] has K or N contiguous.
void grouped_mm(Tensor a, std::optional<Tensor> slots, int64_t top_k, Tensor w, Tensor offsets, Tensor out) {
  const OnDeviceOf device(a);
  Arguments arguments = arguments_for(offsets, out.size(0), w.size(1), w.size(2), kTileN);
  set_gather(arguments, a, slots, top_k);
  set_tail(arguments, 0, out);
  Maps maps{map_of_rows(a, 64), {}, map_of_output(out, 1), {}, map_of_rows(a, 1)};
  if (w.stride(2) == 1) {
    maps.b = map_of_weights(w, 1);
    launch_gathering<Form::kForward, Epilogue::kStore>(a, maps, arguments, device);
  } else {
    maps.b = map_of_transposed_weights(w);
    launch_gathering<Form::kDgrad, Epilogue::kStore>(a, maps, arguments, device);
  }
}

// h [C, 2F] = a @ w13[e].T (unless null) and act [C, F] = activation of h.
void grouped_mm_swiglu(
    Tensor a, std::optional<Tensor> slots, int64_t top_k, Tensor w13, std::optional<Tensor> row_weights,
    Tensor offsets, std::string act, double limit, double alpha, double up_offset, std::optional<Tensor> h,
    Tensor out) {
  const OnDeviceOf device(a);
  Arguments arguments = arguments_for(offsets, out.size(0), w13.size(1) / 2, w13.size(2), kTileN / 2);
  arguments.activation = activation_of(row_weights, limit, alpha, up_offset);
  arguments.activation.store_h = h.has_value();
  set_gather(arguments, a, slots, top_k);
  Maps maps{map_of_rows(a, 64), map_of_weights(w13, 2), {}, map_of_output(out, 1)};
  set_tail(arguments, 0, out);
  if (h) {
    set_tail(arguments, 1, *h);
    maps.out = map_of_output(*h, 2);
  }
  launch_activating<Form::kForward, Epilogue::kActivate>(act, a, maps, arguments, device);
}

// From g [C, H] and w2 [L, H, F] (passed as its transposed view [L, F, H]): grad_h [C, 2F], the activation out [C, F]
// and grad_row_weights [C, ceil(F / 256)], to be summed over its columns.
void grouped_mm_swiglu_backward(
    Tensor g, std::optional<Tensor> slots, int64_t top_k, Tensor w, Tensor h, std::optional<Tensor> row_weights,
    Tensor offsets, std::string act, double limit, double alpha, double up_offset, Tensor grad_h, Tensor out,
    std::optional<Tensor> grad_row_weights) {
  const OnDeviceOf device(g);
  Arguments arguments = arguments_for(offsets, out.size(0), w.size(1), w.size(2), kTileN);
  arguments.activation = activation_of(row_weights, limit, alpha, up_offset);
  if (grad_row_weights) arguments.activation.grad_row_weights = grad_row_weights->mutable_data_ptr<float>();
  set_gather(arguments, g, slots, top_k);
  set_tail(arguments, 0, out);
  set_tail(arguments, 1, grad_h);
  const Maps maps{map_of_rows(g, 64), map_of_transposed_weights(w), map_of_output(grad_h, 2), map_of_output(out, 1),
                  map_of_halves(h)};
  launch_activating<Form::kDgrad, Epilogue::kDifferentiate>(act, g, maps, arguments, device);
}

// w [L, O, I] = g[rows].T @ a[rows] for each expert; float32 w may be added to.
void grouped_mm_wgrad(Tensor g, Tensor a, Tensor offsets, Tensor w, bool accumulate) {
  const OnDeviceOf device(a);
  Arguments arguments = arguments_for(offsets, a.size(0), a.size(1), 0, kTileN);
  arguments.groups.m_size = static_cast<int>(g.size(1));
  Maps maps{map_of_ragged_rows(g, kTileK), map_of_ragged_rows(a, kTileK)};
  if (w.scalar_type() == ScalarType::Float) {
    arguments.out_float32 = w.mutable_data_ptr<float>();
    arguments.accumulate = accumulate;
    launch_for<Form::kWgrad, Epilogue::kFloat32>(a, maps, arguments, device);
  } else {
    maps.out = map_of_wgrad(w);
    launch_for<Form::kWgrad, Epilogue::kStore>(a, maps, arguments, device);
  }
}

STABLE_TORCH_LIBRARY(moe_ops_native, m) {
  m.def("grouped_mm(Tensor a, Tensor? slots, int top_k, Tensor w, Tensor offsets, Tensor(a!) out) -> ()");
  m.def(
      "grouped_mm_swiglu(Tensor a, Tensor? slots, int top_k, Tensor w13, Tensor? row_weights, Tensor offsets, str act,"
      " float limit, float alpha, float up_offset, Tensor(a!)? h, Tensor(b!) out) -> ()");
  m.def(
      "grouped_mm_swiglu_backward(Tensor g, Tensor? slots, int top_k, Tensor w, Tensor h, Tensor? row_weights,"
      " Tensor offsets, str act, float limit, float alpha, float up_offset, Tensor(a!) grad_h, Tensor(b!) out,"
      " Tensor(c!)? grad_row_weights) -> ()");
  m.def("grouped_mm_wgrad(Tensor g, Tensor a, Tensor offsets, Tensor(a!) w, bool accumulate) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CUDA, m) {
  m.impl("grouped_mm", TORCH_BOX(&grouped_mm));
  m.impl("grouped_mm_swiglu", TORCH_BOX(&grouped_mm_swiglu));
  m.impl("grouped_mm_swiglu_backward", TORCH_BOX(&grouped_mm_swiglu_backward));
  m.impl("grouped_mm_wgrad", TORCH_BOX(&grouped_mm_wgrad));
}

}  // namespace
}  // namespace moe_ops
