"""What the passes share: reading calls, asking which kernel would run, replacing nodes."""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch._inductor.pattern_matcher import stable_topological_sort
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils.checkpoint import CheckpointPolicy

from moe_ops import kernels

from .journal import Decision, current

_log = logging.getLogger(__name__)

# Stands for a size that only the device knows when a kernel is chosen for it.
_UNKNOWN_SIZE = 8192
# Belong to one call with its arguments, not to another node that computes the same values.
_OWN_META = ("val", "tensor_meta", "eager_input_vals")

Match = TypeVar("Match")


def is_call(node: object, *targets: Any) -> bool:
    """Whether `node` is a call of one of `targets`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def find_calls(graph: Graph, target: Any) -> list[Node]:
    """Calls of `target`, in order."""
    return list(graph.find_nodes(op="call_function", target=target))


def name_of(node: Node) -> str:
    """For messages: the operator that `node` calls, or the node's name."""
    target = node.target
    return target._opname if isinstance(target, torch._ops.OpOverload) else node.name


def arguments(node: Node) -> list[Any]:
    """All arguments of an operator's call in the order of its schema, defaults filled in."""
    assert isinstance(node.target, torch._ops.OpOverload)
    rest = node.target._schema.arguments[len(node.args) :]
    return [*node.args, *(node.kwargs.get(a.name, a.default_value) for a in rest)]


def depends_on(values: Iterable[object], ancestor: Node) -> bool:
    """Whether one of `values` is computed from `ancestor`, or is it."""
    pending = [value for value in values if isinstance(value, Node)]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node is ancestor:
            return True
        new = set(node.all_input_nodes) - seen
        seen |= new
        pending.extend(new)
    return False


def mark_recomputed(node: Node) -> bool:
    """Have the partitioner compute `node` again in backward, if nobody said anything else of it."""
    if "recompute" in node.meta or "ac_graph_id" in node.meta:
        return False
    node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return True


def fuses(target: Any, args: Sequence[Any]) -> bool:
    """Whether a kernel does what the private operator `target` promises for these arguments."""
    return kernels.fuses(target._opname, *_examples(args))


def kernel_name(node: Node) -> str:
    """Name of the kernel that would run the operator `node` calls."""
    args = _examples(arguments(node))
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return "reference"
    return kernels.name_of(name_of(node), *args)


def _examples(args: Sequence[Any]) -> list[Any]:
    """Fake tensors with numbers for sizes: a kernel's `takes` must add no guard on symbols."""
    with FakeTensorMode():
        return list(map_arg(tuple(args), lambda node: _example(node.meta["val"])))


def _example(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.hint if value.node.has_hint() else _UNKNOWN_SIZE
    if not isinstance(value, torch.Tensor):
        return value
    size = [_example(number) for number in value.shape]
    stride = [_example(number) for number in value.stride()]
    return torch.empty_strided(size, stride, dtype=value.dtype, device=value.device)


def add_call(before: Node, target: Any, args: Sequence[Any], like: Node, value: Any) -> Node:
    """A call of `target` placed before a node, with the `value` of the nodes that it replaces; the
    rest of its meta is that of `like`.
    """
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, tuple(args))
    node.meta = {key: kept for key, kept in like.meta.items() if key not in _OWN_META}
    node.meta["val"] = value
    return node


def add_outputs(call: Node, before: Node) -> list[Node]:
    """One getitem for each output of `call`."""
    return [
        add_call(before, operator.getitem, (call, index), call, value)
        for index, value in enumerate(call.meta["val"])
    ]


def reorder(order: Sequence[Node]) -> None:
    """Let a graph's nodes, all of them, follow one another so."""
    for node, following in itertools.pairwise(order):
        if node.next is not following:
            node.append(following)


def replace(old: Node, new: Node) -> None:
    """Let the users of `old` use `new`, and erase `old`."""
    old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def replace_outputs(old: Node, new: Sequence[Node]) -> None:
    """The same for each output of a call that returns several."""
    for getitem in list(old.users):
        _, index = getitem.args
        assert is_call(getitem, operator.getitem) and isinstance(index, int)
        replace(getitem, new[index])
    old.graph.erase_node(old)


def rewrite_matches(
    name: str,
    graph: Graph,
    matches: Iterable[Match],
    why_not: Callable[[Match], str | None],
    rewrite: Callable[[Match], None],
) -> int:
    """Rewrite every match that nothing speaks against; log each, and the reason of each refusal.
    Returns the number rewritten, and leaves the graph in order.
    """
    count, journal = 0, current()
    for match in matches:
        text, saved = str(match), 0
        if reason := why_not(match):
            _log.debug("%s: left %s alone: %s", name, text, reason)
        else:
            before = journal.written(graph) if journal else 0
            rewrite(match)
            saved = before - journal.written(graph) if journal else 0
            _log.debug("%s: rewrote %s", name, text)
            count += 1
        if journal:
            journal.decisions.append(Decision(journal.running or name, text, reason, saved))
    if count:
        stable_topological_sort(graph)
    return count
