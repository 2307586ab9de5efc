"""An expert-parallel layer runs in chunks of its tokens, so that one chunk's exchange passes while
the experts work on another.

    plan = exchange_plan(ids, ...)              for every chunk of tokens, [a, b):
    rows, w = dispatch(x, weights, plan)            plan = exchange_plan(ids[a:b], ...)
    z = experts(rows, w)                    ->      rows, w = dispatch(x[a:b], weights[a:b], plan)
    y = combine(z, None, addend, plan)              z = experts(rows, w)
                                                    y[a:b] = combine(z, None, addend[a:b], plan)

It runs before autograd, whose backward thereby is chunked, too. What the router computes of all
tokens, its losses among it, stays whole. In capacity mode a chunk has the layer's limits as far as
its tokens can reach them: nothing overflows that fitted before.

It refuses a layer of which something is of all tokens, and names the node that is. Every rank must
bring at least as many tokens as there are chunks.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from moe_ops import comm

from .graph import arguments, depends_on, find_calls, is_call, rewrite_matches

_OPS = torch.ops.moe_ops
_PLAN, _DISPATCH = _OPS.exchange_plan.default, _OPS.dispatch.default
_COMBINE = _OPS.combine.default
# Without outputs, and the same for a part of the tokens as for all.
_REPEATABLE = (torch.ops.aten._assert_scalar.default, "add_")


@dataclasses.dataclass(frozen=True)
class Match:
    """All that is computed from a plan, but for what follows from its combine."""

    plan: Node
    dispatch: Node
    combine: Node
    to_combine: tuple[Node, ...]  # what the combine needs of that, and itself, in order
    beside: tuple[Node, ...]  # the rest, in order

    def __str__(self) -> str:
        return f"{self.plan.name} to {self.combine.name}"

    def whole_inputs(self) -> list[Node]:
        """What has a row a token: ids, tokens, their weights, the addend."""
        addend = arguments(self.combine)[2]
        values = [arguments(self.plan)[0], *arguments(self.dispatch)[:2], addend]
        return list(dict.fromkeys(value for value in values if value is not None))


def find_layers(graph: Graph) -> list[Match]:
    """Every plan with one dispatch and one combine."""
    matches = []
    for plan in find_calls(graph, _PLAN):
        nodes = _computed_from(plan)
        dispatches, combines = (
            [node for node in nodes if is_call(node, op)] for op in (_DISPATCH, _COMBINE)
        )
        if len(dispatches) == len(combines) == 1:
            needed = [node for node in nodes if depends_on(combines, node)]
            beside = tuple(node for node in nodes if node not in needed)
            matches.append(Match(plan, dispatches[0], combines[0], tuple(needed), beside))
    return matches


def _computed_from(plan: Node) -> list[Node]:
    found = {plan: None}
    for node in plan.graph.nodes:
        inputs = node.all_input_nodes
        if not any(is_call(each, _COMBINE) for each in inputs) and found.keys() & set(inputs):
            found[node] = None
    return list(found)


def why_not(match: Match, num_chunks: int) -> str | None:
    """Why the layer stays whole."""
    num_tokens = _num_tokens(match)
    if not isinstance(num_tokens, int):
        return "the number of tokens is not known"
    if num_tokens < num_chunks:  # PyTorch would take equal plans, of no tokens, for one
        return f"there are {num_tokens} tokens for {num_chunks} chunks"
    inside = {*match.to_combine, *match.beside}
    whole = set(match.whole_inputs())
    for node in inside:
        if reason := _why_whole(node, match, inside, whole):
            return reason
    for node in _between(match.plan, match.combine):
        if node not in inside and node.is_impure():
            return f"{node.name} changes how what follows it runs"
    return None


def _why_whole(node: Node, match: Match, inside: set[Node], whole: set[Node]) -> str | None:
    if node.op == "output":
        return "a value that is made with the plan is an output"
    if is_call(node, _OPS.sort_slots.default):
        return f"{node.name} limits each expert's rows of all tokens"
    if outside := [user for user in node.users if user not in inside and node is not match.combine]:
        return f"{outside[0].name} reads {node.name}, of all tokens"
    if not node.users and node.target not in (operator.getitem, *_REPEATABLE):
        return f"{node.name} may not be the same for a part of the tokens"
    read = whole.intersection(node.all_input_nodes)
    if read and node not in (match.plan, match.dispatch, match.combine):
        return f"{node.name} reads {read.pop().name}, of all tokens"
    return None


def _between(first: Node, last: Node) -> list[Node]:
    nodes = list(first.graph.nodes)
    return nodes[nodes.index(first) : nodes.index(last)]


def _num_tokens(match: Match) -> Any:
    return arguments(match.plan)[0].meta["example_value"].shape[0]


def rewrite(match: Match, num_chunks: int) -> None:
    """Put the chunks in the layer's place, one after another."""
    graph = match.plan.graph
    each, longer = divmod(_num_tokens(match), num_chunks)
    sizes = [each + (number < longer) for number in range(num_chunks)]
    max_tokens = -(-arguments(match.plan)[3] // num_chunks)
    chunks = [_Chunk(match, max_tokens) for _ in sizes]
    with graph.inserting_before(match.combine):
        for value in match.whole_inputs():
            parts = graph.call_function(torch.split, (value, sizes))
            for number, chunk in enumerate(chunks):
                chunk.of[value] = graph.call_function(operator.getitem, (parts, number))
        for chunk in chunks:
            chunk.copy(match.to_combine)
    for node in match.beside:
        with graph.inserting_before(node):
            for chunk in chunks:
                chunk.copy([node])
    for output in list(match.combine.users):
        with graph.inserting_before(output):
            each = [graph.node_copy(output, chunk.of.__getitem__) for chunk in chunks]
            output.replace_all_uses_with(graph.call_function(torch.cat, (each,)))
        graph.erase_node(output)
    replaced = {*match.to_combine, *match.beside}
    for node in [each for each in reversed(graph.nodes) if each in replaced]:
        graph.erase_node(node)


class _Chunk:
    """`of`: this chunk's node for one of the layer. `max_tokens`: as of its plan."""

    def __init__(self, match: Match, max_tokens: int) -> None:
        self.match, self.max_tokens = match, max_tokens
        self.of: dict[Node, Node] = {}

    def copy(self, nodes: Sequence[Node]) -> None:
        """Into the place where the graph inserts."""
        for node in nodes:
            new = node.graph.node_copy(node, lambda old: self.of.get(old, old))
            for own in ("example_value", "unbacked_bindings"):
                new.meta.pop(own, None)
            if node is self.match.plan:
                new.args, new.kwargs = (new.args[0], *self._limits()), {}
            self.of[node] = new

    def _limits(self) -> list[Any]:
        """The plan's arguments after ids."""
        ids, num_experts, group, _, *limits = arguments(self.match.plan)
        copies = comm.group_size(group) * self.max_tokens
        most = (copies, copies * ids.meta["example_value"].shape[1])
        limits = [limit and min(limit, each) for limit, each in zip(limits, most)]
        return [num_experts, group, self.max_tokens, *limits]


def chunk_exchange_pass(graph: Graph, num_chunks: int) -> int:
    """The rewrite; number of layers."""
    return rewrite_matches(
        "chunk_exchange",
        graph,
        find_layers(graph),
        functools.partial(why_not, num_chunks=num_chunks),
        functools.partial(rewrite, num_chunks=num_chunks),
    )
