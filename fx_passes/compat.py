"""PyTorch's private functions, in the forms of torch 2.11 to 2.14."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx
from torch._inductor.fx_passes.control_dependencies import control_deps, preserve_node_ordering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._ordered_set import OrderedSet


def graph_backend(
    inductor: Mapping[str, Any], keep: Callable[[str, Graph], None]
) -> Callable[[GraphModule, Sequence[Any]], Any]:
    """A backend for torch.compile that goes Inductor's way with the options `inductor`, but stops
    before it makes code: `keep` gets the "forward" and the "backward" graph, unpinned, and what
    runs is the plain graph.
    """

    def compile_graph(
        module: GraphModule,
        inputs: Sequence[Any],
        is_backward: bool = False,
        is_inference: bool = False,
        **unused: Any,
    ) -> Any:
        kept = copy.deepcopy(module)
        values = [node.meta.get("val") for node in kept.graph.nodes if node.op == "placeholder"]
        with V.set_fake_mode(detect_fake_mode(values)):
            compile_fx._recursive_post_grad_passes(kept, is_inference)
        unpin(kept.graph)
        keep("backward" if is_backward else "forward", kept.graph)

        def run(args: list[Any]) -> Any:
            return module.forward(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        with functorch_config.patch(enable_autograd_cache=False):  # it would keep the plain graph
            return compile_fx.compile_fx(
                module, inputs, compile_graph, config_patches=dict(inductor)
            )

    return backend


def inductor_backend(
    inductor: Mapping[str, Any],
) -> Callable[[GraphModule, Sequence[Any]], Any]:
    """A backend for torch.compile: Inductor with these options. It compiles backward at once, and
    runs the passes before autograd whatever the caches hold.
    """

    def backend(module: GraphModule, inputs: Sequence[Any]) -> Any:
        with functorch_config.patch(
            enable_autograd_cache=False, force_non_lazy_backward_lowering=True
        ):
            return compile_fx.compile_fx(module, inputs, config_patches=dict(inductor))

    return backend


def is_sum_by_inductor(addmm: Node) -> bool:
    """Whether a call of `addmm` was a sum and a matmul when the graph was traced."""
    is_addmm = str(addmm.meta.get("original_aten")) == "aten.addmm.default"  # maybe a copy of it
    return not is_addmm or not addmm.meta.get("from_node")  # torch 2.11 loses the sum's


def pin(graph: Graph, after: Mapping[Node, Sequence[Node]]) -> None:
    """Have Inductor run each node of `after` when the nodes listed for it have run, which come
    before it in the graph. It becomes a call of `control_deps`: nothing that looks for its operator
    finds it any more.
    """
    ordered = {
        node: OrderedSet(_tensors(after[node], node)) for node in graph.nodes if node in after
    }
    preserve_node_ordering(graph, {node: calls for node, calls in ordered.items() if calls})


def _tensors(calls: Sequence[Node], before: Node) -> Iterator[Node]:
    """One tensor of each call, since torch 2.11 waits for no call that returns several."""
    for call in calls:
        if not isinstance(call.meta["val"], list | tuple):
            yield call
        elif outputs := [u for u in call.users if u.target is operator.getitem and u < before]:
            yield outputs[0]


def unpin(graph: Graph) -> None:
    """Undo `pin`: such a graph can be run and read as any other."""
    for pinned in list(graph.find_nodes(op="call_function", target=control_deps)):
        _, body, *inputs = pinned.args
        *parameters, call, _ = getattr(graph.owning_module, body.target).graph.nodes
        input_of = dict(zip(parameters, inputs))
        with graph.inserting_before(pinned):
            plain = graph.node_copy(call, input_of.__getitem__)
        plain.meta, name = pinned.meta, pinned.name
        pinned.replace_all_uses_with(plain)
        graph.erase_node(pinned)
        graph.erase_node(body)
        plain.name = name


def open_fakes() -> FakeTensorMode:
    """Tensors without data, of whose numbers any may be read: they are symbols of their own."""
    sizes = ShapeEnv(allow_scalar_outputs=True, allow_dynamic_output_shape_ops=True)
    return FakeTensorMode(shape_env=sizes)


def storage_of(tensor: torch.Tensor) -> int:
    """Which memory a tensor, fake or not, lies in."""
    return tensor.untyped_storage()._cdata


def is_wait_with_backward(node: Node) -> bool:
    """Whether `node` is a function with a backward that only waits for an exchange, as PyTorch 2.11
    has it in the graphs of Dynamo.
    """
    if node.target is not torch.ops.higher_order.autograd_function_apply:
        return False
    wait = torch.ops._c10d_functional.wait_tensor
    allowed = {wait, wait.default, torch._C._set_grad_enabled}
    for body in node.all_input_nodes[:2]:
        nodes = getattr(node.graph.owning_module, str(body.target)).graph.nodes
        if not allowed.issuperset(n.target for n in nodes if n.op.startswith("call_")):
            return False
    return True
