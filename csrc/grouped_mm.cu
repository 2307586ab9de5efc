// torch.ops.moe_ops_native.grouped_mm, called by moe_ops/kernels/grouped_mm.py.

#include "grouped_mm_launch.h"

namespace moe_ops {
namespace {

// out [C, N] = a [C, K] @ w[e].T; w [L, N, K] has K or N contiguous.
template <Form kForm>
void launch_gathering(const Tensor& like, const Maps& maps, const Arguments& arguments, const OnDeviceOf& device) {
  if (arguments.gather.slots != nullptr) {
    launch_for<kForm, Epilogue::kStore, Act::kSilu, true>(like, maps, arguments, device);
  } else {
    launch_for<kForm, Epilogue::kStore>(like, maps, arguments, device);
  }
}

void grouped_mm(Tensor a, std::optional<Tensor> slots, int64_t top_k, Tensor w, Tensor offsets,
                std::optional<Tensor> tickets, Tensor out) {
  const OnDeviceOf device(a);
  Arguments arguments = arguments_for(offsets, tickets, out.size(0), w.size(1), w.size(2), kTileN);
  if (slots) {
    arguments.gather = {static_cast<const uint8_t*>(a.data_ptr()), a.stride(0) * kElementBytes,
                        slots->const_data_ptr<int>(), static_cast<int>(top_k)};
  }
  set_tail(arguments, 0, out);
  Maps maps{map_of_rows(a), {}, map_of_output(out, 1)};
  if (w.stride(2) == 1) {
    maps.b = map_of_weights(w, 1);
    launch_gathering<Form::kForward>(a, maps, arguments, device);
  } else {
    maps.b = map_of_transposed_weights(w);
    launch_gathering<Form::kDgrad>(a, maps, arguments, device);
  }
}

STABLE_TORCH_LIBRARY_FRAGMENT(moe_ops_native, m) {
  m.def(
      "grouped_mm(Tensor a, Tensor? slots, int top_k, Tensor w, Tensor offsets, Tensor(b!)? tickets, Tensor(a!) out)"
      " -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(moe_ops_native, CUDA, m) { m.impl("grouped_mm", TORCH_BOX(&grouped_mm)); }

}  // namespace
}  // namespace moe_ops
