"""The order of the graph binds Inductor, which would look for one that needs less memory.

    start, call, wait      ->      start, control_deps((start,), call), control_deps((call,), wait)

for every kernel between a start and its wait. Everything else goes where Inductor likes, but
exchanges and plans, which keep the order of the graph with or without passes. It refuses a window
without kernels.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from torch.fx import Graph, Node

from .compat import pin
from .graph import is_call, rewrite_matches
from .windows import WAITS, Window, find_windows, runs_alone


@dataclasses.dataclass(frozen=True)
class Match:
    """`kernels` run between the halves of an exchange."""

    window: Window
    kernels: tuple[Node, ...]


def find_order(graph: Graph) -> list[Match]:
    """Every window, with what the graph places in it."""
    order = list(graph.nodes)
    place = {node: number for number, node in enumerate(order)}
    matches = []
    for window in find_windows(graph):
        inside = order[place[window.start] + 1 : place[window.wait]]
        kernels = [node for node in inside if runs_alone(node) and not is_call(node, *WAITS)]
        matches.append(Match(window, tuple(kernels)))
    return matches


def why_not(match: Match) -> str | None:
    """Why the order of a window is not pinned."""
    return None if match.kernels else "nothing is in the window"


def pin_order_pass(graph: Graph) -> int:
    """The rewrite; number of windows."""
    after: defaultdict[Node, list[Node]] = defaultdict(list)

    def rewrite(match: Match) -> None:
        for kernel in match.kernels:
            after[kernel].append(match.window.start)
        after[match.window.wait] += match.kernels

    count = rewrite_matches("pin_order", graph, find_order(graph), why_not, rewrite)
    pin(graph, after)
    return count
