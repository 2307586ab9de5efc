// torch.ops.moe_ops_native.grouped_mm, called by moe_ops/kernels/grouped_mm.py.

#include "grouped_mm_launch.h"

namespace moe_ops {
namespace {

// out [C, N] = a [C, K] @ w[e].T; w [L, N, K] has K or N contiguous.
void grouped_mm(Tensor a, std::optional<Tensor> slots, int64_t top_k, Tensor w, Tensor offsets, Tensor out) {
  const OnDeviceOf device(a);
  Arguments arguments = arguments_for(offsets, out.size(0), w.size(1), w.size(2), kTileN);
  set_gather(arguments, a, slots, top_k);
  set_tail(arguments, 0, out);
  Maps maps{map_of_rows(a, 64), {}, map_of_output(out, 1)};
  if (w.stride(2) == 1) {
    maps.b = map_of_weights(w, 1);
    launch_gathering<Form::kForward, Epilogue::kStore>(a, maps, arguments, device);
  } else {
    maps.b = map_of_transposed_weights(w);
    launch_gathering<Form::kDgrad, Epilogue::kStore>(a, maps, arguments, device);
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops_native, m) {
  m.def("grouped_mm(Tensor a, Tensor? slots, int top_k, Tensor w, Tensor offsets, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CUDA, m) { m.impl("grouped_mm", TORCH_BOX(&grouped_mm)); }

}  // namespace
}  // namespace moe_ops
