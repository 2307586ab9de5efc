"""Graphs for several ranks of which only this one exists: compiled, never run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch.fx import Graph, GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from fx_passes.expected_sizes import ExpectedSizes, expected_sizes
from fx_passes.graph import find_calls

from .compiled import Backend, make_layer
from .graphs import HIDDEN

NUM_TOKENS = 64


def only(graph: Graph, target: Any) -> Node:
    (node,) = find_calls(graph, target)
    return node


@contextlib.contextmanager
def fake_ranks(size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


class Captured(Backend):
    """Where Backend runs a graph, this returns zeros of the sizes that are expected."""

    def _keep(self, graphs: list[Graph]) -> Any:
        compiler = super()._keep(graphs)

        def compile_only(module: GraphModule, inputs: Any) -> Any:
            compiler(module, inputs)
            sizes = expected_sizes(module.graph)
            outputs = module.graph.output_node().args[0]
            values = [node.meta["val"] if isinstance(node, Node) else node for node in outputs]
            return make_boxed_func(lambda *args: [_zeros(sizes, value) for value in values])

        return compile_only


def _zeros(sizes: ExpectedSizes, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return sizes.example(value)
    shape, stride = (
        [sizes.number(n) for n in numbers] for numbers in (value.shape, value.stride())
    )
    return torch.empty_strided(shape, stride, dtype=value.dtype).zero_()


def capture(function: Any, *args: Any, **overrides: Any) -> tuple[Graph, Graph]:
    """Forward and backward, as the passes leave them."""
    backend = Captured(**overrides)
    backend.compile(function)(*args).sum().backward()
    return backend.forward[0], backend.backward[0]


def capture_layer(group: dist.ProcessGroup, **fields: Any) -> tuple[Graph, Graph]:
    """Of a layer with `NUM_TOKENS` on this rank."""
    layer = make_layer(torch.float32, group=group, **fields)
    return capture(layer, torch.randn(NUM_TOKENS, HIDDEN, requires_grad=True))
