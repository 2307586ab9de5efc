"""What the passes that move calls ask: which nodes share memory, and which have to keep an order
that their inputs do not tell.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import Node

from .expected_sizes import argument
from .graph import is_call

_OPS = torch.ops.moe_ops
_ALIASES = (
    operator.getitem,
    torch.ops.aten._unsafe_view.default,
    # What they hand out lies in what the start made.
    _OPS.dispatch_wait.default,
    _OPS.combine_wait.default,
    _OPS.cp_shift_wait.default,
)


# Higher-order operators that return fresh tensors and change none.
_FUNCTIONAL = ("flex_attention", "flex_attention_backward", "triton_kernel_wrapper_functional")


def roots_of(order: Iterable[Node]) -> dict[Node, Node]:
    """The node that made the memory in which each node's output lies."""
    roots: dict[Node, Node] = {}
    for node in order:
        roots[node] = roots[node.args[0]] if _is_alias(node) else node  # type: ignore[index]
    return roots


def _is_alias(node: Node) -> bool:
    """Whether a node's output lies in the memory of its first input."""
    if is_call(node, *_ALIASES):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    return any(value.alias_info is not None for value in node.target._schema.returns[:1])


def changed_roots(order: Iterable[Node], roots: dict[Node, Node]) -> set[Node]:
    """What some node changes in place, or may."""
    changed: set[Node] = set()
    for node in order:
        if may_change(node):
            changed.update(roots[each] for each in node.all_input_nodes)
    return changed


def may_change(node: Node) -> bool:
    """Whether a call may change an input in place."""
    if node.op != "call_function":
        return False
    return not is_known(node) or node.is_impure(impure_random=draws(node))


def is_known(node: Node) -> bool:
    """Whether a call does no more than its schema says, or computes a size."""
    return not isinstance(node.target, HigherOrderOperator) or node.target.name() in _FUNCTIONAL


def draws(node: Node) -> bool:
    """Whether a call draws random numbers, which attention without dropout does not."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return argument(node, "dropout_p") != 0
