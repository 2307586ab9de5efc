// Launches, and what kernels made of warps share.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "device.h"

namespace moe_ops {

constexpr unsigned kAllLanes = 0xFFFFFFFF;
constexpr int kLanes = 32;
constexpr int kNone = -1;                     // no expert, row, slot, copy, rank
constexpr int kPlainSharedBytes = 32 * 1024;  // what a kernel gets without asking, beside what it declares

__device__ inline int lane() { return threadIdx.x % kLanes; }
__device__ inline int warp() { return threadIdx.x / kLanes; }

// Lets the next kernel in the stream start now, rather than when this one ends.
__device__ inline void allow_next_kernel() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Until the kernel before this one has ended and what it wrote can be read.
__device__ inline void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// How a kernel starts: after the one before it; before that one's end, calling wait_for_previous_kernel; or likewise,
// but all CTAs at once, so that they may wait for each other.
enum class Start { kPlain, kEarly, kTogether };

template <typename... Parameters>
void launch(void (*kernel)(Parameters...), int ctas, int threads, int shared_bytes, Start start, cudaStream_t stream,
            std::common_type_t<Parameters>... arguments) {
  if (shared_bytes > kPlainSharedBytes) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
               "cudaFuncSetAttribute");
  }
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = start == Start::kPlain ? 0 : start == Start::kEarly ? 1 : 2;
  check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), "a launch");
}

}  // namespace moe_ops
