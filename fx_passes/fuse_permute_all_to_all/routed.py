"""Every routing of a graph: what is exchanged by it, and what stands in the way of fusing that."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.fx import Graph, Node

from moe_ops import checks

from ..compat import storage_of
from . import library_ops
from .chunk_order import Arrived, ChunkOrders
from .liveness import Edge, live_nodes
from .routing import NotRoutedError, Routing, Sent
from .slots import counted, exchanged, per_rank, received, sent
from .sums import NO_SUM, Summed, summed
from .term import Term, uncast
from .terms import Reading

# What leads from rows that come back to their sums.
_ON_THE_WAY = ("add_at", "sum", "cast", "mul", "view", "put", "take", "aten.bmm.default")
# Rows of layout.Plan's splits_4P.
_SLOTS_SENT, _SLOTS_RECEIVED = 2, 3


@dataclasses.dataclass
class Match:
    """All exchanges by one routing; terms to replace, and what each of them is.

    `exchanges`: all-to-alls of values, whether they send to the experts. `arrived`: rows or weights
    by (expert, rank), `parts` those of them that are of one expert; `sums`: sums by token;
    `counts`: rows from each rank for each expert; `splits`: rows of the plan's splits. `obstacle`:
    why all must stay, if it is known.
    """

    graph: Graph
    reading: Reading
    routing: Routing
    name: str
    exchanges: dict[Term, bool] = dataclasses.field(default_factory=dict)
    arrived: dict[Term, Sent] = dataclasses.field(default_factory=dict)
    parts: dict[Term, Arrived] = dataclasses.field(default_factory=dict)
    sums: dict[Term, Summed] = dataclasses.field(default_factory=dict)
    counts: set[Term] = dataclasses.field(default_factory=set)
    splits: dict[Term, int] = dataclasses.field(default_factory=dict)
    obstacle: str | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def top_k(self) -> set[int]:
        """K; one number, if all agree."""
        found = {values.top_k for values in self.arrived.values() if values.top_k}
        return {*found, *(total.top_k for total in self.sums.values())}

    @property
    def x(self) -> list[Term]:
        """Tokens that are sent."""
        return list(dict.fromkeys(values.x for values in self.arrived.values() if values.x))

    @property
    def weights(self) -> list[Term]:
        """Weights that are sent or that sums take."""
        early = [values.weights for values in self.arrived.values()]
        late = [total.weights for total in self.sums.values()]
        return list(dict.fromkeys(weights for weights in (*early, *late) if weights))

    def edges(self) -> list[tuple[Edge, Term]]:
        """Where a term to replace is read, in order of the graph."""
        wanted = {*self.arrived, *self.sums, *self.counts, *self.splits}
        return [
            ((node, value), term)
            for node, inputs in self.reading.used.items()
            for value, term in inputs.items()
            if term in wanted and self._is_replaced(value, term)
        ]

    def _is_replaced(self, value: Node, term: Term) -> bool:
        tensor = self.reading.tensors[value]
        return term not in self.splits or term in self.counts or tensor.device.type == "cpu"

    def sizes(self) -> list[Edge]:
        """Where a number is read that is how many rows arrived, after they have."""
        tensors = [
            n
            for n, t in self.reading.made.items()
            if t in self.exchanges or (t in self.arrived and t not in self.parts)
        ]
        sizes = {
            str(n.meta["example_value"].shape[0])
            for n in tensors
            if self.exchanges.get(self.reading.made[n], True) and "example_value" in n.meta
        }
        found, arrived = [], False
        for node in self.graph.nodes:
            arrived = arrived or self.reading.made.get(node) in self.arrived
            for value in node.all_input_nodes if arrived else ():
                number = value.meta.get("example_value")
                if isinstance(number, torch.SymInt) and str(number) in sizes:
                    found.append((node, value))
        return found

    def sources(self) -> dict[Term, set[Term]]:
        """What the fused operators read, and the terms in the place of which they read it."""
        arrived = set(self.arrived)
        found = dict.fromkeys((self.routing.ids, *self.x, *self.weights), arrived)
        for term, total in self.sums.items():
            for value in (*total.rows, total.addend):
                if value:
                    found[value] = found.get(value, set()) | {term}
        return found

    def cut(self) -> set[Edge]:
        """Every edge that the rewrite redirects."""
        return {*(edge for edge, _ in self.edges()), *self.sizes()}

    def live(self) -> set[Node]:
        """Nodes that stay."""
        kept = [node for term in self.sources() if (node := self.node_of(term)) is not None]
        return live_nodes(self.graph, self.reading, self.cut(), kept)

    def first_readers(self, live: set[Node]) -> dict[Term, Node]:
        """The first node of `live` that reads it, of each term to replace."""
        first: dict[Term, Node] = {}
        for (node, _), term in self.edges():
            if node in live:
                first.setdefault(term, node)
        return first

    def node_of(self, term: Term) -> Node | None:
        """The first node that makes `term`, in memory that is not written later."""
        reading = self.reading
        nodes = list(self.graph.nodes)
        for index, node in enumerate(nodes):
            if reading.made.get(node) is not term:
                continue
            storage = storage_of(reading.tensors[node])
            later = (reading.writes.get(n, ()) for n in nodes[index + 1 :])
            if not any(storage in written for written in later):
                return node
        return None


def find_matches(graph: Graph, reading: Reading) -> list[Match]:
    """Every routing by which rows are exchanged."""
    orders = ChunkOrders(reading.terms)
    matches: dict[Routing, Match] = {}
    for node, term in reading.made.items():
        if _is_routed(term) and (found := _routing_of(term)) is not None:
            routing, forward = found
            match = matches.setdefault(routing, Match(graph, reading, routing, node.name))
            match.exchanges.setdefault(term, forward)
    for term in dict.fromkeys(t for inputs in reading.used.values() for t in inputs.values()):
        _classify(term, orders, matches)
    for match in matches.values():
        match.obstacle = match.obstacle or _why_not_all(match, orders)
    return list(matches.values())


def lost_exchanges(reading: Reading) -> dict[str, str]:
    """Exchanges of rows that no routing explains, by name, and why."""
    reasons: dict[Term, tuple[str, str]] = {}
    for node, term in reading.made.items():
        if _is_routed(term) and term not in reasons:
            try:
                exchanged(term)
            except NotRoutedError as error:
                reasons[term] = node.name, error.reason
    return dict(reasons.values())


def _is_routed(term: Term) -> bool:
    """Whether chunks of sizes that are read from a tensor are exchanged."""
    if term.op == library_ops.ALL_TO_ALL:
        return True
    return term.op == "all_to_all" and not all(isinstance(size, int) for size in term.args[1])


def _routing_of(term: Term) -> tuple[Routing, bool] | None:
    try:
        return exchanged(term)
    except NotRoutedError:
        return None


def _classify(term: Term, orders: ChunkOrders, matches: dict[Routing, Match]) -> None:
    if (arrived := orders.sorted_rows(term)) is not None:
        match = matches[exchanged(arrived.exchange)[0]]
        if arrived.expert is not None:
            match.parts[term] = arrived
        try:
            match.arrived[term] = _sent_by(match.routing, arrived.exchange.args[0])
        except NotRoutedError as error:
            match.obstacle = match.obstacle or _because(match.reading, error)
    counts = uncast(term)
    routing = received(counts) if counts.op in ("all_to_all", "slice") else None
    if routing is not None and routing in matches:
        matches[routing].counts.add(term)
    _classify_splits(term, matches)
    try:
        total = summed(term, orders)
    except NotRoutedError:
        return
    matches[total.routing].sums[term] = total


def _classify_splits(term: Term, matches: dict[Routing, Match]) -> None:
    """Note that `term` [P] holds the splits of a routing."""
    counts = per_rank(term)
    if counts is None:
        return
    here, there = received(counts), counted(counts)
    for routing, match in matches.items():
        if routing.plan is None and term.shape == (routing.num_ranks,):
            if routing == here:
                match.splits[term] = _SLOTS_RECEIVED
            elif (routing.ids, routing.num_experts) == there:
                match.splits[term] = _SLOTS_SENT


def _sent_by(routing: Routing, payload: Term) -> Sent:
    values = sent(payload)
    if values.ids is not routing.ids:
        raise NotRoutedError(payload, "its slots are sorted by other ids")
    return values


def _why_not_all(match: Match, orders: ChunkOrders) -> str | None:
    """Why an exchange of the match is not understood, if there is one."""
    if orders.terms.sorts(match.routing.ids) > 1 or len(orders.ways[match.routing]) > 1:
        return "rows are sorted in two ways, one of them unstable"
    found = [orders.sorted_rows(term) for term in match.arrived]
    understood = {arrived.exchange for arrived in found if arrived}
    understood |= {total.returned for total in match.sums.values()}
    for node, term in match.reading.made.items():
        if term in match.exchanges and term not in understood and term.dtype.is_floating_point:
            try:
                return _why_not_one(match, orders, node, term)
            except NotRoutedError as error:
                return _because(match.reading, error)
    return None


def _why_not_one(match: Match, orders: ChunkOrders, node: Node, term: Term) -> str:
    """Why an exchange is not understood.

    Raises:
        NotRoutedError: likewise.
    """
    if match.exchanges[term]:
        _sent_by(match.routing, term.args[0])
        return f"{node.name}: what arrives is not sorted by expert, or is padded"
    orders.unsorted_rows(term.args[0], match.routing)
    reason, furthest = None, node
    for reader, made in match.reading.made.items():
        if made is not term and _may_sum(made, term):
            furthest = reader
            try:
                summed(made, orders)
            except NotRoutedError as error:
                if error.reason != NO_SUM:
                    reason = _because(match.reading, error)
    return reason or f"{next(iter(furthest.users)).name}: {NO_SUM}"


def _may_sum(term: Any, inner: Term) -> bool:
    """Whether what a sum is made of leads from `term` to `inner`."""
    if not isinstance(term, Term) or term is inner:
        return term is inner
    return term.op in _ON_THE_WAY and any(_may_sum(arg, inner) for arg in term.args)


def _because(reading: Reading, error: NotRoutedError) -> str:
    """The reason with the name of the node that stands in the way."""
    names = [node.name for node, term in reading.made.items() if term is error.term]
    return f"{names[0] if names else error.term.op}: {error.reason}"


def why_not(match: Match) -> str | None:
    """Why the exchanges must stay as they are."""
    if match.obstacle:
        return match.obstacle
    if not isinstance(match.routing.group, str | dist.ProcessGroup):
        return f"the group is {match.routing.group!r}"
    if not match.x or not match.sums:
        return "rows go to the experts but not back" if match.x else "no rows go to the experts"
    live = match.live()
    return _why_not_values(match) or _why_not_order(match, live) or _why_not_alone(match, live)


def _why_not_values(match: Match) -> str | None:
    if len(match.top_k) != 1:
        return f"top_k must be one number, got {sorted(match.top_k)}"
    if len(match.weights) > 1:
        return "rows are weighted in two ways"
    (top_k,), ids = match.top_k, match.routing.ids
    if ids.dtype not in checks.IDS:
        return f"ids are {ids.dtype}"
    if wrong := {values.dtype for values in (*match.x, *match.weights)} - {*checks.FLOATS}:
        return f"{wrong.pop()} is sent"
    num_slots = math.prod(ids.shape)
    for x in match.x:
        if len(x.shape) != 2 or x.shape[0] * top_k != num_slots:
            return f"tokens {x.shape} have no {top_k} ids each"
    for weights in match.weights:
        if math.prod(weights.shape) != num_slots:
            return f"weights {weights.shape} are not one a slot"
    for term, values in match.arrived.items():
        source = values.x or values.weights
        if source is not None and source.dtype != term.dtype:
            return f"rows of {source.dtype} are sent as {term.dtype}"
    if any(term.shape[0] != match.x[0].shape[0] for term in match.sums):
        return "there are more sums than tokens"
    if any(
        total.addend and total.addend.shape != match.x[0].shape for total in match.sums.values()
    ):
        return "what is added to the sums has another shape"
    return None


def _why_not_order(match: Match, live: set[Node]) -> str | None:
    place = {node: index for index, node in enumerate(match.graph.nodes)}
    readers = match.first_readers(live)
    for term, before in match.sources().items():
        node = match.node_of(term)
        if node is None:
            return f"{term.op} has no node, or is written in place"
        if any(place[node] >= place[reader] for t, reader in readers.items() if t in before):
            return f"{node.name} is computed after the exchange"
    arrived = [place[readers[term]] for term in match.arrived if term in readers]
    summed_at = [place[readers[term]] for term in match.sums if term in readers]
    if not arrived or not summed_at or min(summed_at) <= min(arrived):
        return "the sums do not follow from what arrives"
    return None


def _why_not_alone(match: Match, live: set[Node]) -> str | None:
    for node, term in match.reading.made.items():
        if term in match.exchanges and node in live:
            user = next((user for user in node.users if user in live), node)
            return f"{user.name} reads rows in the order of the exchange"
    return None
