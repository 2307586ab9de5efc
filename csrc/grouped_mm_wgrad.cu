// torch.ops.moe_ops_native.grouped_mm_wgrad, called by moe_ops/kernels/grouped_mm.py.

#include "grouped_mm_launch.h"

namespace moe_ops {
namespace {

// w [L, O, I] = g[rows].T @ a[rows] for each expert; float32 w may be added to.
void grouped_mm_wgrad(Tensor g, Tensor a, Tensor offsets, std::optional<Tensor> tickets, Tensor w, bool accumulate) {
  const OnDeviceOf device(a);
  Arguments arguments = arguments_for(offsets, tickets, a.size(0), a.size(1), 0, kTileN);
  arguments.groups.m_size = static_cast<int>(g.size(1));
  Maps maps{map_of_ragged_rows(g), map_of_ragged_rows(a)};
  if (w.scalar_type() == ScalarType::Float) {
    arguments.out_float32 = w.mutable_data_ptr<float>();
    arguments.accumulate = accumulate;
    launch_for<Form::kWgrad, Epilogue::kFloat32>(a, maps, arguments, device);
  } else {
    maps.out = map_of_wgrad(w);
    launch_for<Form::kWgrad, Epilogue::kStore>(a, maps, arguments, device);
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops_native, m) {
  m.def(
      "grouped_mm_wgrad(Tensor g, Tensor a, Tensor offsets, Tensor(b!)? tickets, Tensor(a!) w, bool accumulate)"
      " -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CUDA, m) { m.impl("grouped_mm_wgrad", TORCH_BOX(&grouped_mm_wgrad)); }

}  // namespace
}  // namespace moe_ops
