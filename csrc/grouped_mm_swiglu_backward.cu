// torch.ops.moe_ops_native.grouped_mm_swiglu_backward, called by moe_ops/kernels/grouped_mm_swiglu.py.

#include "grouped_mm_launch.h"

namespace moe_ops {
namespace {

// From g [C, H] and w2 [L, H, F] (passed as its transposed view [L, F, H]): grad_h [C, 2F], the activation out [C, F]
// and grad_row_weights [C, ceil(F / 256)], to be summed over its columns.
void grouped_mm_swiglu_backward(Tensor g, Tensor w, Tensor h, std::optional<Tensor> row_weights, Tensor offsets,
                                std::optional<Tensor> tickets, std::string act, double limit, double alpha,
                                double up_offset, Tensor grad_h, Tensor out, std::optional<Tensor> grad_row_weights) {
  const OnDeviceOf device(g);
  Arguments arguments = arguments_for(offsets, tickets, out.size(0), w.size(1), w.size(2), kTileN);
  arguments.activation = activation_of(row_weights, limit, alpha, up_offset);
  if (grad_row_weights) arguments.activation.grad_row_weights = grad_row_weights->mutable_data_ptr<float>();
  set_tail(arguments, 0, out);
  set_tail(arguments, 1, grad_h);
  const Maps maps{map_of_rows(g), map_of_transposed_weights(w), map_of_output(grad_h, 2), map_of_output(out, 1),
                  map_of_halves(h)};
  launch_activating<Form::kDgrad, Epilogue::kDifferentiate>(act, g, maps, arguments, device);
}

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops_native, m) {
  m.def(
      "grouped_mm_swiglu_backward(Tensor g, Tensor w, Tensor h, Tensor? row_weights, Tensor offsets,"
      " Tensor(d!)? tickets, str act, float limit, float alpha, float up_offset, Tensor(a!) grad_h, Tensor(b!) out,"
      " Tensor(c!)? grad_row_weights) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CUDA, m) {
  m.impl("grouped_mm_swiglu_backward", TORCH_BOX(&grouped_mm_swiglu_backward));
}

}  // namespace
}  // namespace moe_ops
