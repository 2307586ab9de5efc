"""Rows that layers of plain PyTorch sort, send, and sort again become one exchange of tokens.

    order = argsort(ids); rows = x[order // K]          plan = exchange_plan(ids)
    rows = all_to_all(rows, splits)[chunk order]   ->   copies, w = dispatch(x, weights, plan)
    experts                                             rows = permute(copies, w?, plan)
    all_to_all(rows[order back], splits)                experts
    summed by token, weighted or not                    combine(unpermute(rows, w?, plan), addend?)

and likewise gate weights that are sent along. Rows reach the experts in the same order: by expert,
source rank, token, k. Counts and splits come from the plan, and so do the sizes of experts' rows
where the layer joins chunks expert by expert.

It runs on the graph that Dynamo leaves, before autograd: the backward of these operators then
stands in place of that of the old nodes, whatever form it would have had. Nodes are matched by what
they compute (`terms`), not by how that is written. It refuses routed rows that are used in another
way, rounded on the way or padded; values that are written in place; a way to the experts without a
way back.
"""

from __future__ import annotations

import functools
import logging
import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from moe_ops import comm

from .liveness import sweep
from .routed import Match, find_matches, lost_exchanges, why_not
from .term import Term
from .terms import UnreadableError, read

__all__ = ["Match", "find_matches", "fuse_permute_all_to_all_pass", "rewrite", "why_not"]

_log = logging.getLogger(__name__)

_NAME = "fuse_permute_all_to_all"
_OPS = torch.ops.moe_ops
_PLAN_LENGTH = 9
_SLOT_OF_ROW, _ROW_OF_SLOT, _COUNTS, _SPLITS = 3, 4, 6, 8
# Belong to one node, not to another in its place.
_OWN_META = ("example_value", "unbacked_bindings", "val", "tensor_meta")


class _Builder:
    """Adds calls before a node, with the meta of it that says where it stands."""

    def __init__(self, before: Node) -> None:
        self.before = before

    def call(self, target: Any, *args: Any) -> Node:
        return self._add("call_function", target, args)

    def method(self, name: str, *args: Any) -> Node:
        return self._add("call_method", name, args)

    def _add(self, kind: str, target: Any, args: tuple[Any, ...]) -> Node:
        graph = self.before.graph
        with graph.inserting_before(self.before):
            node = graph.create_node(kind, target, args)
        meta = self.before.meta.items()
        node.meta = {key: kept for key, kept in meta if key not in _OWN_META}
        return node

    def outputs(self, call: Node, number: int) -> list[Node]:
        return [self.call(operator.getitem, call, index) for index in range(number)]


class _Fused:
    """The operators that take the place of a match."""

    def __init__(self, match: Match, live: set[Node]) -> None:
        self.match = match
        self.first = match.first_readers(live)
        (self.top_k,) = match.top_k
        self.group = comm.group_name_of(match.routing.group)
        self.plan = self._plan()
        self.weights: Node | None = None
        self.copies: dict[Term, Node] = {}
        self.of_experts: dict[Any, list[Node]] = {}
        self._dispatch()

    def _plan(self) -> list[Node]:
        routing = self.match.routing
        if (call := self._old_plan()) is not None:
            return _Builder(_after(call)).outputs(call, _PLAN_LENGTH)
        ids = self._source(routing.ids)
        build = _Builder(_after(ids))
        ids = build.method("reshape", ids, (-1, self.top_k))
        call = build.call(_OPS.exchange_plan.default, ids, routing.num_experts, self.group)
        return build.outputs(call, _PLAN_LENGTH)

    @functools.cached_property
    def num_rows(self) -> Node:
        """How many rows arrive."""
        return _Builder(_after(self.plan[-1])).method("size", self.plan[_SLOT_OF_ROW], 0)

    def _old_plan(self) -> Node | None:
        """The call of `exchange_plan` by which the match goes."""
        for node, term in self.match.reading.made.items():
            if (
                term.op == str(_OPS.exchange_plan.default)
                and term.args[:-1] == self.match.routing.plan
            ):
                return node.all_input_nodes[0]
        return None

    def _source(self, term: Term) -> Node:
        node = self.match.node_of(term)
        assert node is not None
        return node

    def new(self, term: Term, on_cpu: bool) -> Node:
        """What takes the place of `term`, a tensor on the CPU or on the device of the tokens."""
        match = self.match
        build = _Builder(self.first[term])
        if term in match.parts:
            return self._part(build, term)
        if term in match.arrived:
            return self._arrived(build, term)
        if term in match.sums:
            return self._sum(build, term)
        if term in match.splits and (on_cpu or term not in match.counts):
            node = build.call(operator.getitem, self.plan[_SPLITS], match.splits[term])
        else:
            node = build.method("reshape", self.plan[_COUNTS], term.shape)
        return build.method("to", node, term.dtype)

    def _dispatch(self) -> None:
        """The exchange of tokens, and of the weights with the first of them."""
        match = self.match
        place = {node: index for index, node in enumerate(match.graph.nodes)}
        first = min(
            (self.first[t] for t in match.arrived if t in self.first), key=place.__getitem__
        )
        build = _Builder(first)
        weights = self._gates(build)
        for x in match.x:
            source = self._source(x)
            call = build.call(_OPS.dispatch.default, source, weights, self.plan, self.group, "full")
            self.copies[x], received = build.outputs(call, 2)
            if weights is not None:
                self.weights, weights = received, None

    def _gates(self, build: _Builder) -> Node | None:
        if not self.match.weights:
            return None
        (weights,) = self.match.weights
        node = build.method("reshape", self._source(weights), (-1, self.top_k))
        wide = torch.promote_types(self.match.x[0].dtype, torch.float32)
        return build.method("to", node, wide)

    def _maps(self, build: _Builder, each_slot: bool = False) -> list[Node]:
        slots, rows = self.plan[_SLOT_OF_ROW], self.plan[_ROW_OF_SLOT]
        return [slots, build.method("reshape", rows, (-1, 1)) if each_slot else rows]

    def _arrived(self, build: _Builder, term: Term) -> Node:
        values = self.match.arrived[term]
        if values.x is not None:
            weights = self.weights if values.weights else None
            maps = self._maps(build)
            return build.call(_OPS.permute.default, self.copies[values.x], weights, *maps)
        column = build.method("reshape", self.weights, (-1, 1))
        rows = build.call(_OPS.permute.default, column, None, *self._maps(build, each_slot=True))
        shaped = build.method("reshape", rows, (-1, *term.shape[1:]))
        return build.method("to", shaped, term.dtype)

    def _part(self, build: _Builder, term: Term) -> Node:
        """Of the rows that arrived those of one expert."""
        part = self.match.parts[term]
        key = part.exchange, term.shape[1:], term.dtype
        if key not in self.of_experts:
            self.of_experts[key] = self._split(build, self._arrived(build, term))
        assert part.expert is not None
        return self.of_experts[key][part.expert]

    def _split(self, build: _Builder, rows: Node) -> list[Node]:
        """`rows` of each expert."""
        counts = build.method("sum", self.plan[_COUNTS], 0)
        sizes = [
            build.method("item", build.call(operator.getitem, counts, index))
            for index in range(self.match.routing.num_local)
        ]
        for size in sizes:
            build.call(torch._check, build.call(operator.ge, size, 0))
        return build.outputs(build.method("split", rows, sizes), len(sizes))

    def _sum(self, build: _Builder, term: Term) -> Node:
        total = self.match.sums[term]
        sources = [self._source(rows) for rows in total.rows]
        rows = build.call(torch.cat, sources) if len(sources) > 1 else sources[0]
        weights = self.weights if total.weights else None
        partial = build.call(_OPS.unpermute.default, rows, weights, *self._maps(build))
        addend = self._source(total.addend) if total.addend else None
        call = build.call(_OPS.combine.default, partial, None, addend, self.plan, self.group)
        return build.call(operator.getitem, call, 0)


def _after(node: Node) -> Node:
    """Where something computed from `node` can stand: no placeholder may follow it."""
    following = node.next
    while following.op == "placeholder":
        following = following.next
    return following


def rewrite(match: Match) -> None:
    """Let every reader of routed rows, their counts and sums read the fused ones."""
    reading, live, cut = match.reading, match.live(), match.cut()
    edges, sizes = match.edges(), match.sizes()
    fused = _Fused(match, live)
    new: dict[tuple[Term, bool], Node] = {}
    for (node, value), term in edges:
        if node not in live:
            continue
        on_cpu = reading.tensors[value].device.type == "cpu"
        if (term, on_cpu) not in new:
            new[term, on_cpu] = fused.new(term, on_cpu)
            reading.note(new[term, on_cpu], value, term)
        node.replace_input_with(value, new[term, on_cpu])
    for node, value in sizes:
        if node in live:
            node.replace_input_with(value, fused.num_rows)
    reading.update(match.graph, sweep(match.graph, reading, cut))


def fuse_permute_all_to_all_pass(graph: Graph) -> int:
    """The rewrite; number of routings."""
    if not any("all_to_all" in str(node.target) for node in graph.nodes):
        return 0
    try:
        reading = read(graph)
    except UnreadableError as error:
        _log.debug("%s: left the graph alone: %s", _NAME, error)
        return 0
    for name, obstacle in lost_exchanges(reading).items():
        _log.debug("%s: left %s alone: %s", _NAME, name, obstacle)
    count = 0
    for match in find_matches(graph, reading):
        if reason := why_not(match):
            _log.debug("%s: left %s alone: %s", _NAME, match, reason)
            continue
        rewrite(match)
        _log.debug("%s: rewrote %s", _NAME, match)
        count += 1
    return count
