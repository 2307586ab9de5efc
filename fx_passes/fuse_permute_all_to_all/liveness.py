"""Which nodes of a graph as Dynamo leaves it matter once some nodes no longer read some inputs.

Such a graph is not functional, so an unused node may write what another one reads.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from ..compat import storage_of
from ..graph import is_call
from .terms import Reading

_ATEN = torch.ops.aten
_ASSERTS = (
    _ATEN._assert_scalar.default,
    _ATEN.sym_constrain_range.default,
    _ATEN.sym_constrain_range_for_size.default,
    torch._check,
    torch._check_is_size,
)
_WAITS = (torch.ops._c10d_functional.wait_tensor, torch.ops._c10d_functional.wait_tensor.default)

Edge = tuple[Node, Node]
"""A node and an input of it."""


def live_nodes(
    graph: Graph, reading: Reading, cut: set[Edge], kept: Iterable[Node] = ()
) -> set[Node]:
    """Nodes that matter without the edges `cut`, `kept` among them. Waits for what only those edges
    need, and assertions on such numbers, do not.
    """
    replaced = _origins(reading, cut)
    asserts = [node for node in graph.nodes if is_call(node, *_ASSERTS)]
    droppable = {a for a in asserts if _is_about(a, replaced)}
    idle = droppable | {n for n in replaced if is_call(n, *_WAITS)}
    idle |= {n for n, written in reading.writes.items() if written}
    lasting = [node for node in graph.nodes if node.is_impure() or node.op == "get_attr"]
    live: set[Node] = set()
    _mark(live, kept, cut)
    _mark(live, (node for node in lasting if node not in idle), cut)
    while True:
        before = len(live)
        _mark(live, _writers(reading, live), cut)
        _mark(live, (a for a in droppable if _leaves(a) <= live), cut)
        if len(live) == before:
            return live


def sweep(graph: Graph, reading: Reading, cut: set[Edge]) -> set[Node]:
    """Erase what only the edges `cut`, which are gone, needed; the nodes erased."""
    live = live_nodes(graph, reading, cut)
    dead = {node for node in _origins(reading, cut) if node not in live}
    for node in graph.nodes:
        if node not in live and not dead.isdisjoint(node.all_input_nodes):
            dead.add(node)
    for node in reversed(graph.nodes):
        if node in dead:
            inputs = node.all_input_nodes
            graph.erase_node(node)
            dead.update(i for i in inputs if i not in live and not i.users)
    return dead


def _origins(reading: Reading, cut: set[Edge]) -> set[Node]:
    """What the inputs of `cut` are computed from, by writes in place, too."""
    found: set[Node] = set()
    _mark(found, (value for _, value in cut), set())
    while not found.issuperset(writers := _writers(reading, found)):
        _mark(found, writers, set())
    return found


def _writers(reading: Reading, nodes: set[Node]) -> list[Node]:
    """What writes the memory in which `nodes` lie."""
    held = {storage_of(reading.tensors[node]) for node in nodes if node in reading.tensors}
    return [node for node, written in reading.writes.items() if written & held]


def _mark(found: set[Node], nodes: Iterable[Node], cut: set[Edge]) -> None:
    pending = [node for node in nodes if node not in found]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(i for i in node.all_input_nodes if (node, i) not in cut)


def _leaves(node: Node) -> set[Node]:
    """Where the numbers of an assertion come from."""
    pending, leaves = list(node.all_input_nodes), set()
    while pending:
        number = pending.pop()
        if number.op == "call_function" and _is_arithmetic(number):
            pending.extend(number.all_input_nodes)
        else:
            leaves.add(number)
    return leaves


def _is_arithmetic(number: Node) -> bool:
    symbolic = (torch.SymInt, torch.SymBool)
    values = [i.meta.get("example_value") for i in number.all_input_nodes]
    return bool(values) and all(isinstance(value, symbolic) for value in values)


def _is_about(node: Node, replaced: set[Node]) -> bool:
    """Whether an assertion looks at a number or a size of `replaced` nodes."""
    return any(
        leaf in replaced or not replaced.isdisjoint(leaf.all_input_nodes) for leaf in _leaves(node)
    )
