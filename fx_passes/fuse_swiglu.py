"""The activation runs in the epilogue of the matmul next to it, forward and backward.

    h = grouped_mm(a, w13, offsets)                  h, a = grouped_mm_swiglu(a, None, 1, w13,
    a = swiglu(h, row_weights, offsets, ...)   ->             row_weights, offsets, ...)

    grad_a = grouped_mm(g, w, offsets)               grad_h, a, grad_row_weights =
    grad_h, grad_row_weights =                           grouped_mm_swiglu_backward(g, None, 1, w,
        swiglu_backward(grad_a, h, ...)        ->            h, row_weights, offsets, ...)
    a = swiglu(h, row_weights, offsets, ...)

and, where that matmul cannot take part, swiglu_backward and swiglu -> swiglu_backward_with_output.
It refuses an h that is no matmul's (a bias stands between), different offsets or row weights, a
grad_a with another user, a backward without a recomputed swiglu, results that depend on one
another, and what no kernel of the device fuses.

Before that, in the joint graph, `recompute_activation_pass` has backward compute a again from h,
which swiglu_backward, or the plain PyTorch in the place of it, needs anyway.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Graph, Node

from .graph import (
    add_call,
    add_outputs,
    arguments,
    depends_on,
    find_calls,
    fuses,
    is_call,
    mark_recomputed,
    name_of,
    replace,
    replace_outputs,
    rewrite_matches,
)

_OPS = torch.ops.moe_ops
_GROUPED_MM = _OPS.grouped_mm.default
_WGRAD = _OPS.grouped_mm_wgrad.default
_BIAS = _OPS.grouped_bias.default
_SWIGLU = _OPS.swiglu.default
_SWIGLU_BACKWARD = _OPS.swiglu_backward.default
_FORWARD = _OPS.grouped_mm_swiglu.default
_BACKWARD = _OPS.grouped_mm_swiglu_backward.default
_WITH_OUTPUT = _OPS.swiglu_backward_with_output.default

# Outputs of swiglu_backward among those of the fused operators, whose second one is a.
_GRAD_H, _ACTIVATION, _GRAD_ROW_WEIGHTS = range(3)


@dataclasses.dataclass(frozen=True)
class Forward:
    """`matmul` makes h, `swiglu` reads it."""

    matmul: Node
    swiglu: Node


@dataclasses.dataclass(frozen=True)
class Backward:
    """`matmul` makes grad_a for `swiglu_backward`; `swiglu` computes a again from the same h.
    Without `matmul` only the last two fuse.
    """

    matmul: Node | None
    swiglu_backward: Node
    swiglu: Node | None


def find_forward(graph: Graph) -> list[Forward]:
    """Activations of something computed in this graph."""
    matches = [Forward(arguments(swiglu)[0], swiglu) for swiglu in find_calls(graph, _SWIGLU)]
    return [match for match in matches if is_call(match.matmul, _GROUPED_MM, _BIAS)]


def find_backward(graph: Graph, with_matmul: bool) -> list[Backward]:
    """Gradients of activations, each with its matmul or without."""
    matches = []
    for backward in find_calls(graph, _SWIGLU_BACKWARD):
        grad, h, *_ = arguments(backward)
        swiglu = next((user for user in h.users if is_call(user, _SWIGLU)), None)
        matches.append(Backward(grad if with_matmul else None, backward, swiglu))
    return matches


def why_not_forward(match: Forward) -> str | None:
    """Why `rewrite_forward` must not be done."""
    matmul, swiglu = match.matmul, match.swiglu
    _, row_weights, offsets, *_ = arguments(swiglu)
    if not is_call(matmul, _GROUPED_MM):
        return f"h comes from {name_of(matmul)}"
    if sum(is_call(user, _SWIGLU) for user in matmul.users) > 1:
        return "h has two activations"
    if arguments(matmul)[2] is not offsets:
        return "the offsets differ"
    if depends_on([row_weights], matmul):
        return "the row weights depend on h"
    if not fuses(_FORWARD, _forward_arguments(match)):
        return "no kernel fuses grouped_mm and swiglu"
    return None


def why_not_backward(match: Backward) -> str | None:
    """Why `rewrite_backward` must not be done."""
    matmul, backward, swiglu = match.matmul, match.swiglu_backward, match.swiglu
    if swiglu is None:
        return "the activation is not computed again here"
    if arguments(swiglu)[1:] != arguments(backward)[2:]:
        return "row weights, offsets or options differ"
    if matmul is not None and (reason := _why_not_matmul(matmul, backward)):
        return reason
    target, args = _backward_call(match)
    if depends_on(args, swiglu):
        return "the gradient depends on the activation"
    if not fuses(target, args):
        return f"no kernel of {target._opname}"
    return None


def _why_not_matmul(matmul: Node, backward: Node) -> str | None:
    if not is_call(matmul, _GROUPED_MM):
        return f"the gradient comes from {name_of(matmul)}"
    if len(matmul.users) > 1:
        return "the gradient has another user"
    if arguments(matmul)[2] is not arguments(backward)[3]:
        return "the offsets differ"
    return None


def _forward_arguments(match: Forward) -> list[Any]:
    rows, w13, offsets = arguments(match.matmul)
    _, row_weights, _, *options = arguments(match.swiglu)
    keep_h = len(match.matmul.users) > 1
    return [rows, None, 1, w13, row_weights, offsets, *options, keep_h]


def _backward_call(match: Backward) -> tuple[Any, list[Any]]:
    grad, *rest = arguments(match.swiglu_backward)
    if match.matmul is None:
        return _WITH_OUTPUT, [grad, *rest]
    g, w, _ = arguments(match.matmul)
    return _BACKWARD, [g, None, 1, w, *rest]


def rewrite_forward(match: Forward) -> None:
    """One call makes h, if anything else reads it, and a."""
    matmul, swiglu = match.matmul, match.swiglu
    args = _forward_arguments(match)
    h = matmul.meta["val"]
    if not args[-1]:
        h = h.new_empty(0, h.shape[1])
    call = add_call(swiglu, _FORWARD, args, like=swiglu, value=(h, swiglu.meta["val"]))
    new_h, new_a = add_outputs(call, swiglu)
    replace(swiglu, new_a)
    replace(matmul, new_h)


def rewrite_backward(match: Backward) -> None:
    """One call makes grad_h, a and the gradient of the row weights."""
    matmul, backward, swiglu = match.matmul, match.swiglu_backward, match.swiglu
    assert swiglu is not None
    grad_h, grad_row_weights = backward.meta["val"]
    target, args = _backward_call(match)
    value = grad_h, swiglu.meta["val"], grad_row_weights
    call = add_call(backward, target, args, like=backward, value=value)
    outputs = add_outputs(call, backward)
    replace_outputs(backward, [outputs[_GRAD_H], outputs[_GRAD_ROW_WEIGHTS]])
    replace(swiglu, outputs[_ACTIVATION])
    if matmul is not None:
        matmul.graph.erase_node(matmul)


def fuse_swiglu_pass(graph: Graph) -> int:
    """The rewrites; their number. Backward first: there a is at hand, so that a forward which
    recomputes h for it (activation checkpointing) need not write a.
    """
    count = 0
    for with_matmul in (True, False):
        matches = find_backward(graph, with_matmul)
        count += rewrite_matches("fuse_swiglu", graph, matches, why_not_backward, rewrite_backward)
    forward = find_forward(graph)
    return count + rewrite_matches("fuse_swiglu", graph, forward, why_not_forward, rewrite_forward)


def recompute_activation_pass(graph: Graph) -> int:
    """Mark what backward computes again; number of nodes marked."""
    operands = dict.fromkeys(arguments(wgrad)[1] for wgrad in find_calls(graph, _WGRAD))
    return sum(mark_recomputed(a) for a in operands if _is_cheap_activation(a))


def _is_cheap_activation(a: Node) -> bool:
    """Whether `a`, which grouped matmuls alone read, follows from an h that backward needs."""
    if not all(is_call(user, _GROUPED_MM, _WGRAD) for user in a.users):
        return False
    if is_call(a, _SWIGLU):
        return any(is_call(user, _SWIGLU_BACKWARD) for user in arguments(a)[0].users)
    pending, found_h = [a], False
    while pending:
        node = pending.pop()
        if is_call(node, _GROUPED_MM, _BIAS):
            found_h = True
        elif _is_pointwise(node):
            pending.extend(node.all_input_nodes)
        elif node is a or not _is_one_a_row(node):
            return False
    return found_h


def _is_pointwise(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _is_one_a_row(node: Node) -> bool:
    shape = node.meta["val"].shape
    return len(shape) < 2 or (isinstance(shape[-1], int) and shape[-1] == 1)
