"""What is left of the plain graph becomes private operators that skip work it shows to be unneeded.

    grouped_mm_wgrad(g, a, offsets) in 16 bits, then     ->  grouped_mm_wgrad_f32(g, a, offsets)
    its conversion to float32 (autocast's parameters)
    gather_grouped_mm_wgrad(...), then the same          ->  gather_grouped_mm_wgrad(..., f32=True)

The float32 sums are not rounded on the way. It refuses a gradient that something else reads in 16
bits, and what no kernel of the device does in one.

Every other node keeps its operator, which chooses a kernel when it runs; which one that will be is
logged.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from torch.fx import Graph, Node

from moe_ops import _library

from .graph import (
    add_call,
    arguments,
    find_calls,
    fuses,
    is_call,
    kernel_name,
    name_of,
    replace,
    rewrite_matches,
)

_log = logging.getLogger(__name__)

_OPS = torch.ops.moe_ops
_WGRAD = _OPS.grouped_mm_wgrad.default
_GATHER_WGRAD = _OPS.gather_grouped_mm_wgrad.default
_CAST = torch.ops.prims.convert_element_type.default


@dataclasses.dataclass(frozen=True)
class Match:
    """`cast` makes float32 of a 16-bit `wgrad`."""

    wgrad: Node
    cast: Node


def find_widened_wgrads(graph: Graph) -> list[Match]:
    """Gradients of weights that are converted to float32."""
    found = []
    for cast in find_calls(graph, _CAST):
        wgrad, dtype = arguments(cast)
        if is_call(wgrad, _WGRAD, _GATHER_WGRAD) and dtype == torch.float32:
            found.append(Match(wgrad, cast))
    return [match for match in found if match.wgrad.meta["val"].dtype.itemsize == 2]


def why_not(match: Match) -> str | None:
    """Why the 16-bit gradient must exist."""
    if len(match.wgrad.users) > 1:
        return "something else reads the 16-bit gradient"
    if not fuses(*_widened(match)):
        return f"no kernel of {name_of(match.wgrad)} returns float32"
    return None


def _widened(match: Match) -> tuple[Any, list[Any]]:
    args = arguments(match.wgrad)
    if is_call(match.wgrad, _WGRAD):
        return _OPS.grouped_mm_wgrad_f32.default, args
    return _GATHER_WGRAD, [*args[:-1], True]


def rewrite(match: Match) -> None:
    """One call makes the float32 gradient, in the place of the wgrad: were it in that of the cast,
    which may be the last thing of all, the operands would live on until then.
    """
    target, args = _widened(match)
    replace(match.cast, add_call(match.wgrad, target, args, match.wgrad, match.cast.meta["val"]))
    match.wgrad.graph.erase_node(match.wgrad)


def lower_pass(graph: Graph) -> int:
    """The rewrite; number of gradients."""
    count = rewrite_matches("lower", graph, find_widened_wgrads(graph), why_not, rewrite)
    if _log.isEnabledFor(logging.DEBUG):
        for node in graph.nodes:
            if _is_plain(node):
                _log.debug("lower: %s runs %s", node.name, kernel_name(node))
    return count


def _is_plain(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "moe_ops":
        return False
    return target._opname in _library.OPS
