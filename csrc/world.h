// Host side of exchange.cuh: the tensor `world` to the kernels' parameter.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include "exchange.cuh"

namespace moe_ops::exchange {

constexpr int kWorldNumbers = 8;  // before the bases

inline World world_of(const torch::stable::Tensor& tensor) {
  const int64_t* numbers = tensor.const_data_ptr<int64_t>();
  World world{numbers[0], numbers[1], numbers[2], numbers[3],
              numbers[4], numbers[5], numbers[6], reinterpret_cast<int64_t*>(numbers[7])};
  STD_TORCH_CHECK(0 < world.num_ranks && world.num_ranks <= kMaxRanks, "moe_ops: ranks must be 1 .. ", kMaxRanks,
                  ", got ", world.num_ranks);
  for (int64_t i = 0; i < world.num_ranks && kWorldNumbers + i < tensor.numel(); ++i) {
    world.bases[i] = reinterpret_cast<uint8_t*>(numbers[kWorldNumbers + i]);
  }
  return world;
}

enum class Op { kPlan, kDispatch, kCombine };

inline const char* name_of(Op op) {
  return op == Op::kPlan ? "exchange_plan" : op == Op::kDispatch ? "dispatch" : "combine";
}

// FNV-1a over what all ranks must have in common.
template <typename... Numbers>
uint32_t digest_of(Op op, Numbers... numbers) {
  uint32_t hash = 2166136261u;
  for (int64_t number : {static_cast<int64_t>(op), static_cast<int64_t>(numbers)...}) {
    for (int i = 0; i < 64; i += 8) hash = (hash ^ ((number >> i) & 0xFF)) * 16777619u;
  }
  return hash;
}

}  // namespace moe_ops::exchange
