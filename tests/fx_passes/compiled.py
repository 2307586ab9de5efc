"""Compile with the passes but without Inductor's code generation: the graphs are run as they are.

Letters: T tokens, K top-k, F ffn.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx import Graph, GraphModule

import fx_passes
from fx_passes.compat import unpin
from fx_passes.graph import name_of
from moe_ops.nn import MoE, MoEConfig

PRE_GRAD = "pre_grad_custom_pass"
JOINT, POST_GRAD = "joint_custom_post_pass", "post_grad_custom_post_pass"
PASSES = (
    "fuse_permute_all_to_all",
    "fold_permute_grouped_mm",
    "fuse_swiglu",
    "protect_exchange",
    "split_exchange",
    "interleave_exchanges",
    "overlap_shared_experts",
    "defer_wgrad",
    "lower",
)
OFF = dict.fromkeys(PASSES, False)
SIZES = {"hidden_size": 8, "ffn_hidden_size": 6, "num_experts": 4, "top_k": 2}
# What the passes leave of a local layer's matmuls and of what stands between them.
FORWARD = ["grouped_mm_swiglu", "grouped_mm", "unpermute"]
BACKWARD = ["grouped_mm_swiglu_backward", "gather_grouped_mm_wgrad", "grouped_mm"]
BACKWARD += ["gather_grouped_mm_wgrad", "unpermute", "unpermute"]


def ops_of(graph: Graph) -> list[str]:
    """Names of this library's operators in a graph, in order."""
    calls = [node for node in graph.nodes if str(node.target).startswith("moe_ops.")]
    return [name_of(node) for node in calls]


def passes_of(hook: str, **overrides: Any) -> Callable[[Graph], None]:
    return fx_passes.options(**overrides).get(hook, lambda graph: None)


@contextlib.contextmanager
def graph_caches(enabled: bool) -> Iterator[None]:
    """Whether Inductor may take a graph's code from its caches; C++ kernels it always may."""
    with (
        torch._inductor.config.patch(fx_graph_cache=enabled),
        torch._functorch.config.patch(enable_autograd_cache=enabled),
    ):
        yield


class Backend:
    """Runs the passes where Inductor does, and keeps the graphs that they leave."""

    def __init__(self, **overrides: Any) -> None:
        self.overrides = overrides
        self.forward: list[Graph] = []
        self.backward: list[Graph] = []
        self.after_pre_grad = aot_autograd(
            fw_compiler=self._keep(self.forward),
            bw_compiler=self._keep(self.backward),
            partition_fn=self._partition,
            decompositions=select_decomp_table(),
        )

    def backend(self, module: GraphModule, inputs: Any) -> Any:
        """A backend of torch.compile."""
        passes_of(PRE_GRAD, **self.overrides)(module.graph)
        module.recompile()
        return self.after_pre_grad(module, inputs)

    def _partition(self, module: GraphModule, inputs: Any, **options: Any) -> Any:
        passes_of(JOINT, **self.overrides)(module.graph)
        return min_cut_rematerialization_partition(module, inputs, **options)

    def _keep(self, graphs: list[Graph]) -> Any:
        def compiler(module: GraphModule, inputs: Any) -> Any:
            passes_of(POST_GRAD, **self.overrides)(module.graph)
            unpin(module.graph)
            module.recompile()
            graphs.append(module.graph)
            return make_boxed_func(module.forward)

        return compiler

    def compile(self, function: Any, **options: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, backend=self.backend, **options)


def make_layer(
    dtype: torch.dtype = torch.float64, device: str = "cpu", group: Any = None, **fields: Any
) -> MoE:
    torch.manual_seed(0)
    return MoE(MoEConfig(**{**SIZES, **fields}), group=group, dtype=dtype, device=device)


class SavedBytes:
    """Counts what autograd keeps between forward and backward, each storage once.

    `ignored`: tensors that are alive anyway.
    """

    def __init__(self, *ignored: torch.Tensor) -> None:
        self.ignored = {tensor.untyped_storage().data_ptr() for tensor in ignored}
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.ignored:
            self.storages[storage.data_ptr()] = storage
        return tensor

    def __enter__(self) -> SavedBytes:
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.hooks.__exit__(*error)

    @property
    def total(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def step(
    layer: MoE, function: Any, num_tokens: int = 11, autocast: bool = False, **inputs: Any
) -> dict[str, torch.Tensor]:
    """Output and all gradients of one step of `function`, the layer or a compiled form of it."""
    parameter = layer.experts.w13
    dtype, device = parameter.dtype, parameter.device
    stream = torch.Generator().manual_seed(1)
    shape = (num_tokens, layer.config.hidden_size)
    x = torch.randn(shape, generator=stream).to(device, dtype).requires_grad_()
    grad = torch.randn(shape, generator=stream).to(device, dtype)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        y = function(x, **inputs)
    y.backward(grad.to(y.dtype))
    found = {"y": y.detach(), "x.grad": x.grad}
    for name, value in layer.named_parameters():
        found[f"{name}.grad"] = value.grad
        value.grad = None
    return found
