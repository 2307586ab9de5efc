"""The graphs, forward and backward, that the smallest layer of plain PyTorch ends with."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from expecttest import assert_expected_inline
from torch.fx import Graph, Node

from fx_passes.graph import arguments, is_call, name_of

from .captured import Captured, fake_ranks
from .stock_pieces import Pieces
from .test_fuse_permute_all_to_all import ON, pieces_layer, reads_captured

# What a node comes from, by its name, which is the same in both graphs.
Sources = dict[str, set[str]]


def draw(graph: Graph, num_results: int, sources: Sources) -> str:
    """Our operators as `name(arguments)`, in order; None is `-`, other constants are left out, and
    so are PyTorch's operators, which differ between versions: what they need, joined by `+`, stands
    for them.
    """
    lines = []
    for node in graph.nodes:
        needed = set().union(*(sources[each.name] for each in node.all_input_nodes))
        if _is_ours(node):
            name = name_of(node)
            while {name} in sources.values():
                name += "'"
            lines.append(f"{name}({_join(arguments(node), sources)})")
            sources[node.name] = {name}
        elif is_call(node, operator.getitem) and _is_ours(node.args[0]):
            sources[node.name] = {f"{name}[{node.args[1]}]" for name in needed}
        elif node.op != "placeholder":
            sources[node.name] = needed
        else:
            sources.setdefault(node.name, set())  # of a size
    results = filter(None, graph.output_node().args[0][:num_results])
    return "\n".join([*lines, f"return {_join(results, sources)}", ""])


def _is_ours(node: Node) -> bool:
    return str(node.target).startswith("moe_ops.")


def _join(values: Iterable[Any], sources: Sources) -> str:
    return ", ".join(filter(None, (_text(value, sources) for value in values)))


def _text(value: Any, sources: Sources) -> str:
    if isinstance(value, Node):
        return "+".join(sorted(sources[value.name]))
    if isinstance(value, list):  # the tensors of a plan
        return "+".join(sorted({_text(each, sources).partition("[")[0] for each in value}))
    return "-" if value is None else ""


def test_graphs_of_the_smallest_layer() -> None:
    with reads_captured(), fake_ranks(2) as group:
        layer = pieces_layer(Pieces(experts=lambda rows_CH, layer: rows_CH.sin()), group)
        backend, x = Captured(**ON), torch.randn(11, layer.sizes.hidden, requires_grad=True)
        backend.compile(layer, dynamic=True)(x).sum().backward()
    (forward,), (backward,) = backend.forward, backend.backward
    gate, tokens = (
        node.name
        for node in forward.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], torch.Tensor)
    )
    sources: Sources = {gate: {"gate"}, tokens: {"x"}, "tangents_1": {"grad"}}
    assert_expected_inline(
        draw(forward, 1, sources),
        """\
exchange_plan(gate+x, -, -)
dispatch(x, gate+x, exchange_plan)
permute(dispatch[0], -, exchange_plan[3], exchange_plan[4])
unpermute(permute, dispatch[1], exchange_plan[3], exchange_plan[4])
combine(unpermute, -, -, exchange_plan)
return combine[0]
""",
    )
    assert_expected_inline(
        draw(backward, 3, sources),
        """\
dispatch'(grad, -, exchange_plan)
permute'(dispatch'[0], dispatch[1], exchange_plan[3], exchange_plan[4])
row_dot(permute, dispatch'[0], exchange_plan[3], exchange_plan[4])
unpermute'(permute+permute', -, exchange_plan[3], exchange_plan[4])
combine'(unpermute', row_dot, -, exchange_plan)
return combine'[1]+gate+x, combine'[0]+combine'[1]+gate+x
""",
    )
