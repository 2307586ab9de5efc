"""What the passes that move calls ask: which nodes share memory, and which have to keep an order
that their inputs do not tell.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

from .graph import is_call

_OPS = torch.ops.moe_ops
_ALIASES = (
    operator.getitem,
    torch.ops.aten._unsafe_view.default,
    # What they hand out lies in what the start made.
    _OPS.dispatch_wait.default,
    _OPS.combine_wait.default,
)


def roots_of(order: Iterable[Node]) -> dict[Node, Node]:
    """The node that made the memory in which each node's output lies."""
    roots: dict[Node, Node] = {}
    for node in order:
        roots[node] = roots[node.args[0]] if _is_alias(node) else node  # type: ignore[index]
    return roots


def _is_alias(node: Node) -> bool:
    """Whether a node's output lies in the memory of its first input."""
    return is_call(node, *_ALIASES) or (isinstance(node.target, OpOverload) and node.target.is_view)


def changed_roots(order: Iterable[Node], roots: dict[Node, Node]) -> set[Node]:
    """What some node changes in place, or may."""
    changed: set[Node] = set()
    for node in order:
        if node.op == "call_function" and (not is_known(node) or node.is_impure()):
            changed.update(roots[each] for each in node.all_input_nodes)
    return changed


def is_known(node: Node) -> bool:
    """Whether a call does no more than its schema says, or computes a size."""
    return not isinstance(node.target, HigherOrderOperator)


def draws(node: Node) -> bool:
    """Whether a call draws random numbers."""
    target = node.target
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
