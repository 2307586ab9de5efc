"""Shared experts, auxiliary losses and whatever else needs nothing of an exchange run beside it.

    shared = mm(silu(mm(x, w1)), w2)                 ticket = dispatch_start(x, ...)
    ticket = dispatch_start(x, ...)              ->  shared = mm(silu(mm(x, w1)), w2)
    rows, w = dispatch_wait(ticket, x, ...)          rows, w = dispatch_wait(ticket, x, ...)

forward and backward. Before that the matmul of a sum that needs an exposed exchange for its other
part alone is set free, if Inductor made one call of both:

    addmm(rows, a, b)                            ->  add(rows, mm(a, b))

Gradients of weights are left to `defer_wgrad`, which comes after: it may take
them to any window, while shared experts have to be done with by the end of their layer. How windows
are filled, and what is refused: `windows`.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Graph, Node

from .compat import is_sum_by_inductor
from .cost_model import CostModel, cost_model
from .defer_wgrad import find_wgrads
from .graph import add_call, arguments, depends_on, find_calls, replace, rewrite_matches
from .windows import Bounds, Schedule, fill_windows, find_windows, runs_alone

_NAME = "overlap_shared_experts"
_ATEN = torch.ops.aten


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverlapSharedExperts(Bounds):
    """Bounds of `overlap_shared_experts`."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """`addmm` adds what a `wait` hands out, or what follows from it."""

    addmm: Node
    wait: Node


def find_sums(graph: Graph) -> list[Sum]:
    """Each sum with the last wait that it needs."""
    waits = [window.wait for window in reversed(find_windows(graph))]
    sums = []
    for addmm in find_calls(graph, _ATEN.addmm.default):
        wait = next((wait for wait in waits if depends_on([addmm], wait)), None)
        if wait is not None:
            sums.append(Sum(addmm, wait))
    return sums


def why_not(match: Sum) -> str | None:
    """Why the sum stays one call."""
    if not is_sum_by_inductor(match.addmm):
        return "the sum is rounded once in the model, too"
    if match.addmm.kwargs:
        return "the sum is weighted"
    if depends_on(match.addmm.args[1:], match.wait):
        return "the matmul needs the exchange"
    return None


def rewrite(match: Sum) -> None:
    """Put two calls in its place."""
    addmm = match.addmm
    rows, *factors = arguments(addmm)[:3]
    value = addmm.meta["val"]
    matmul = add_call(addmm, _ATEN.mm.default, factors, like=addmm, value=value)
    replace(addmm, add_call(addmm, _ATEN.add.Tensor, (rows, matmul), like=addmm, value=value))


def find_calls_to_overlap(graph: Graph) -> list[Node]:
    """Kernels but weights' gradients; which are independent of an exchange, its window tells."""
    wgrads = set(find_wgrads(graph))
    return [node for node in graph.nodes if runs_alone(node) and node not in wgrads]


def overlap_shared_experts_pass(
    graph: Graph, costs: CostModel | None = None, bounds: Bounds | None = None
) -> int:
    """The moves; number of kernels."""
    bounds, costs = bounds or OverlapSharedExperts(), costs or cost_model()
    if sums := find_sums(graph):
        schedule = Schedule(graph, costs)
        sums = [match for match in sums if 1e6 * schedule.waited[match.wait] >= bounds.min_us]
        rewrite_matches(_NAME, graph, sums, why_not, rewrite)
    return fill_windows(_NAME, graph, find_calls_to_overlap(graph), costs, bounds)
