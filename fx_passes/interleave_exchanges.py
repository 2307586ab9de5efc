"""Exchanges of which neither needs the other take turns, so that one passes under the other's work.

    start a1, wait a1, f(a1), start a2, wait a2        start a1, start b1, wait a1, f(a1), start a2,
    start b1, wait b1, f(b1), start b2, wait b2   ->   wait b1, f(b1), start b2, wait a2, wait b2

as those of two micro-batches in one graph do, or of the chunks of a layer; forward and backward.
First come exchanges that need no other, then those that need one, and so on. What an exchange needs
is computed right before it starts; but a plan, which waits until all exchanges that started before
it are over, before the first start for which all kernels that it needs have to run anyway:

    ids, plan 1, start 1, plan 2, start 2      ->      ids, plan 1, plan 2, start 1, start 2

The rest, gradients of weights among it, comes after the exchange that it came after, once its
inputs are there. The order follows from the graph alone, neither from sizes nor from costs, so that
it is the same on all ranks.

What changes a tensor in place or draws random numbers keeps its place among what touches the same
tensor, or draws. It refuses exchanges that are in turn already, as those of a single batch are.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node

from .aliases import changed_roots, draws, may_change, roots_of
from .graph import is_call, reorder, rewrite_matches
from .windows import STARTS, WAITS, runs_alone

_PLANS = (torch.ops.moe_ops.exchange_plan.default, torch.ops.moe_ops.gather_plan.default)
_NEEDED, _START, _REST = range(3)  # the order within a turn


@dataclasses.dataclass(frozen=True)
class Match:
    """The starts of a graph's exchanges, in order and by turns. `before`: what has to precede each
    node of the graph.
    """

    starts: tuple[Node, ...]
    turns: tuple[Node, ...]
    before: dict[Node, list[Node]] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return f"{len(self.starts)} exchanges"

    def turn(self) -> dict[Node, int]:
        """The number of each start's turn."""
        return {start: number for number, start in enumerate(self.turns)}


def find_turns(graph: Graph) -> list[Match]:
    """All exchanges of the graph, if there are any."""
    starts = tuple(node for node in graph.nodes if is_call(node, *STARTS))
    before = _before(list(graph.nodes))
    num_needed: dict[Node, int] = {}  # exchanges in the longest chain of them up to a node
    for node in graph.nodes:
        longest = max((num_needed[each] for each in before[node]), default=0)
        num_needed[node] = longest + is_call(node, *STARTS)
    turns = tuple(sorted(starts, key=num_needed.__getitem__))
    return [Match(starts, turns, before)] if starts else []


def _before(order: Sequence[Node]) -> dict[Node, list[Node]]:
    roots = roots_of(order)
    changed = changed_roots(order, roots)
    writer: dict[object, Node] = {}
    readers: defaultdict[object, list[Node]] = defaultdict(list)  # since the writer
    before: dict[Node, list[Node]] = {}
    for node in order:
        before[node] = [*node.all_input_nodes]
        touched: set[object] = {roots[each] for each in (node, *before[node])}
        touched = {each for each in touched if each in changed} | (
            {draws} if draws(node) else set()
        )
        writes = may_change(node) or draws(node)
        for each in touched:
            before[node] += [writer[each]] if each in writer else []
            if writes:
                before[node] += readers.pop(each, [])
                writer[each] = node
            else:
                readers[each].append(node)
    return before


def why_not(match: Match) -> str | None:
    """Why the exchanges stay in order."""
    if match.starts != match.turns or _plans_first(match):
        return None
    return "the exchanges are in turn"


def _plans_first(match: Match) -> bool:
    """Whether a plan would come before a start that it stands behind."""
    turn, latest = match.turn(), -1
    needed = _turn_needed(match, turn)
    for node in match.before:
        if is_call(node, *_PLANS) and node in needed and needed[node] <= latest:
            return True
        latest = turn.get(node, latest)
    return False


def rewrite(match: Match) -> None:
    """Put the nodes in the order of the turns."""
    order, turn = list(match.before), match.turn()
    needed = _turn_needed(match, turn)
    place: dict[Node, tuple[int, int]] = {}  # the turn, and where in it
    latest = -1
    for node in order:
        if node.op in ("placeholder", "get_attr"):
            place[node] = -1, _NEEDED
        elif node.op == "output":
            place[node] = len(turn), _REST
        elif node in needed:
            place[node] = needed[node], _START if node in turn else _NEEDED
        else:
            after = [latest, *(place[each][0] for each in match.before[node])]
            start = node.args[0] if is_call(node, *WAITS) else None
            # Nor does it help to wait before the next starts.
            if isinstance(start, Node) and start in turn:
                after.append(min(turn[start] + 1, len(turn) - 1))
            place[node] = max(after), _REST
        latest = turn.get(node, latest)
    reorder(sorted(order, key=place.__getitem__))


def _turn_needed(match: Match, turn: dict[Node, int]) -> dict[Node, int]:
    """The first turn for which a node is needed, of all that are."""
    needed: dict[Node, int] = {}
    for node in reversed(match.before):
        if node in turn:
            needed[node] = turn[node]
        if node in needed:
            for each in match.before[node]:
                needed[each] = min(needed.get(each, len(turn)), needed[node])
    for plan in match.before:
        if plan in needed and is_call(plan, *_PLANS):
            _hasten(plan, match, needed)
    return needed


def _hasten(plan: Node, match: Match, needed: dict[Node, int]) -> None:
    """Have a plan needed, with the cheap calls that lead to it, as early as its kernels are."""
    along, pending, earliest = {plan}, [plan], 0
    while pending:
        for each in match.before[pending.pop()]:
            if runs_alone(each):
                earliest = max(earliest, needed[each] + is_call(each, *STARTS))
            elif each not in along:
                along.add(each)
                pending.append(each)
    needed |= {each: min(needed[each], earliest) for each in along}


def interleave_exchanges_pass(graph: Graph) -> int:
    """The rewrite; 1 if exchanges change places."""
    return rewrite_matches("interleave_exchanges", graph, find_turns(graph), why_not, rewrite)
