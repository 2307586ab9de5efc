// torch.ops.moe_ops_native.grouped_mm_swiglu, called by moe_ops/kernels/grouped_mm_swiglu.py.

#include "grouped_mm_launch.h"

namespace moe_ops {
namespace {

// h [C, 2F] = a @ w13[e].T (unless null) and act [C, F] = activation of h.
void grouped_mm_swiglu(Tensor a, Tensor w13, std::optional<Tensor> row_weights, Tensor offsets,
                       std::optional<Tensor> tickets, std::string act, double limit, double alpha, double up_offset,
                       std::optional<Tensor> h, Tensor out) {
  const OnDeviceOf device(a);
  Arguments arguments = arguments_for(offsets, tickets, out.size(0), w13.size(1) / 2, w13.size(2), kTileN / 2);
  arguments.activation = activation_of(row_weights, limit, alpha, up_offset);
  arguments.activation.store_h = h.has_value();
  Maps maps{map_of_rows(a), map_of_weights(w13, 2), {}, map_of_output(out, 1)};
  set_tail(arguments, 0, out);
  if (h) {
    set_tail(arguments, 1, *h);
    maps.out = map_of_output(*h, 2);
  }
  launch_activating<Form::kForward, Epilogue::kActivate>(act, a, maps, arguments, device);
}

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops_native, m) {
  m.def(
      "grouped_mm_swiglu(Tensor a, Tensor w13, Tensor? row_weights, Tensor offsets, Tensor(c!)? tickets, str act,"
      " float limit, float alpha, float up_offset, Tensor(a!)? h, Tensor(b!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CUDA, m) { m.impl("grouped_mm_swiglu", TORCH_BOX(&grouped_mm_swiglu)); }

}  // namespace
}  // namespace moe_ops
