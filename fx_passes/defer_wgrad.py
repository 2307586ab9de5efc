"""Gradients of weights, which nothing waits for, are computed while an exchange is under way.

    wgrad = grouped_mm_wgrad(g, a, offsets)          ticket = combine_start(...)
    ticket = combine_start(...)                  ->  wgrad = grouped_mm_wgrad(g, a, offsets)
    x, w = combine_wait(ticket, ...)                 x, w = combine_wait(ticket, ...)

in any later window, of this layer or another, or an earlier one if their inputs allow. They are the
matmuls that no other kernel needs. How windows are filled, and what is refused: `windows`.
"""

from __future__ import annotations

import dataclasses

from torch.fx import Graph, Node

from .cost_model import CostModel, cost_model
from .windows import Bounds, fill_windows, multiplies, runs_alone


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeferWgrad(Bounds):
    """Bounds of `defer_wgrad`."""


def find_wgrads(graph: Graph) -> list[Node]:
    """Matmuls whose results reach outputs of the graph without another kernel."""
    last: set[Node] = set()  # what no kernel needs
    for node in reversed(graph.nodes):
        if all(user.op == "output" or _passes_on(user, last) for user in node.users):
            last.add(node)
    return [node for node in graph.nodes if node in last and multiplies(node)]


def _passes_on(user: Node, last: set[Node]) -> bool:
    return user in last and not runs_alone(user) and not user.is_impure()


def defer_wgrad_pass(
    graph: Graph, costs: CostModel | None = None, bounds: Bounds | None = None
) -> int:
    """The moves; number of matmuls."""
    bounds = bounds or DeferWgrad()
    return fill_windows("defer_wgrad", graph, find_wgrads(graph), costs or cost_model(), bounds)
