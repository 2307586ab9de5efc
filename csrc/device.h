// The device a tensor is on, and its current stream; what every launch needs.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

namespace moe_ops {

inline void check_cuda(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "moe_ops: ", what, " must succeed, got ", cudaGetErrorString(error));
}

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

// Makes the tensor's device current while it lives.
class OnDeviceOf {
 public:
  explicit OnDeviceOf(const torch::stable::Tensor& tensor) : device_(tensor.get_device_index()) {
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

}  // namespace moe_ops
