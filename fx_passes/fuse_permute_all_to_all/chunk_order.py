"""Which terms sort rows that arrived by (rank, expert) into (expert, rank) order, or back.

As an index: the start of the row's chunk among what arrived, plus the row's place in its chunk; or
a stable sort of the experts of what arrived. As chunks: cut by sizes that were read, and joined.

Letters: E experts, P ranks, L = E / P experts here.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

from . import library_ops
from .elements import places_of
from .number_rules import UNSTABLE
from .routing import NotRoutedError, Routing
from .slots import exchanged, ordered, received
from .term import Term, bare, is_fill, uncast, viewed
from .terms import Terms


@dataclasses.dataclass(frozen=True)
class Arrived:
    """Rows that `exchange` brought, by (expert, rank); of one `expert`, if it says so."""

    exchange: Term
    expert: int | None = None


class ChunkOrders:
    """Recognises the sort of chunks between an all-to-all and the experts, and its mirror."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        # Sorts that leave open how rows of an expert are ordered, and None for all others.
        self.ways: dict[Routing, set[Term | None]] = collections.defaultdict(set)
        self.chunk_order = functools.cache(self._chunk_order)

    def sorted_rows(self, term: Term) -> Arrived | None:
        """What `term` holds by (expert, rank)."""
        if (column := _column(term)) is not term:
            return self.sorted_rows(column)
        if term.op == library_ops.SORT_CHUNKS:
            return self._sorted_by_library(term)
        arrived: Term | None = term
        routing: Routing | None = None
        expert: int | None = None
        if term.op == "take":
            arrived, routing = _column(term.args[0]), self.chunk_order(term.args[1])
        elif term.op == "cat":
            arrived, routing, expert = _joined_by_expert(term.args[0])
        if arrived is None or arrived.op != "all_to_all":
            return None
        try:
            found, forward = exchanged(arrived)
        except NotRoutedError:
            return None
        alone = arrived is term and found.is_in_order
        if not forward or not (alone or found == routing):
            return None
        if term.op != "take":
            self.ways[found].add(None)
        return Arrived(arrived, expert)

    def _sorted_by_library(self, term: Term) -> Arrived | None:
        found = library_ops.sorted_rows(term)
        if found is None or found[0].op != library_ops.ALL_TO_ALL:
            return None
        try:
            routing, forward = exchanged(found[0])
        except NotRoutedError:
            return None
        return Arrived(found[0]) if forward and routing.plan == found[1] else None

    def unsorted_rows(self, term: Term, routing: Routing) -> tuple[Term, ...]:
        """The rows by (expert, rank), one after another, that `term` holds by (rank, expert).

        Raises:
            NotRoutedError: it does not sort them so.
        """
        if routing.plan is not None:
            found = library_ops.unsorted_rows(term) if term.op == library_ops.SORT_CHUNKS else None
            if found is None or found[1] != routing.plan:
                raise NotRoutedError(term, "it does not sort rows by the rank they came from")
            return (found[0],)
        if term.op == "cat" and (sources := _joined_by_rank(term.args[0], routing)):
            self.ways[routing].add(None)
            return sources
        rows = order = None
        if term.op == "put" or (term.op == "add_at" and is_fill(term.args[0], 0)):
            _, place, rows = term.args
            order = self.chunk_order(place)
        elif term.op == "take":
            rows, place = term.args
            order = self._inverted_order(place)
        if rows is not None and order == routing:
            return (rows,)
        if routing.is_in_order:
            return (term,)
        raise NotRoutedError(term, "it does not sort rows by the rank they came from")

    def _inverted_order(self, place: Term) -> Routing | None:
        inverse = inverted(place)
        return None if inverse is None else self.chunk_order(inverse)

    def _chunk_order(self, place: Term) -> Routing | None:
        """The routing whose rows in (rank, expert) order `place` takes in (expert, rank) order."""
        place = uncast(place)
        by_labels = place.op == "argsort"
        routing = _labelled(place.args[0]) if by_labels else self._computed(place)
        unstable = place.args[1:] == (UNSTABLE,)
        if routing is None or (unstable and routing.is_in_order):
            return None
        self.ways[routing].add(place if unstable else None)
        return routing

    def _computed(self, place: Term) -> Routing | None:
        parts = self._linear(place)
        if len(parts) != 3:
            return None
        by_sign = {(term.op, sign): term for term, sign in parts.items()}
        start, end = by_sign.get(("take", 1)), by_sign.get(("take", -1))
        if start is None or end is None or ("iota", 1) not in by_sign:
            return None
        # place = starts of the chunk among what arrived + index - start of the chunk in order,
        # with starts = cumsum - lengths on both sides, of which the lengths cancel.
        segments = start.args[1]
        if segments.op != "segments" or end.args[1] is not segments:
            return None
        lengths = uncast(segments.args[0])
        if end.args[0].op != "cumsum" or uncast(end.args[0].args[0]) is not lengths:
            return None
        counts, ends = _transposed(lengths), _transposed(start.args[0])
        if counts is None or ends is None or ends[0].op != "cumsum" or ends[1] != counts[1]:
            return None
        routing = received(counts[0])
        ends_of = ends[0].args[0]
        same = uncast(ends_of) is uncast(counts[0])
        return routing if routing and same and _is_by_rank(counts[1], routing) else None

    def _linear(self, term: Term) -> dict[Term, int]:
        """Integers as a sum of terms with factors; those that cancel are gone."""
        term = uncast(term)
        if term.op in ("add", "sub") and all(isinstance(arg, Term) for arg in term.args):
            total = dict(self._linear(term.args[0]))
            sign = 1 if term.op == "add" else -1
            for part, factor in self._linear(term.args[1]).items():
                total[part] = total.get(part, 0) + sign * factor
            return {part: factor for part, factor in total.items() if factor}
        if term.op in ("take", "view", "transpose"):
            inner, *rest = term.args
            parts = self._linear(inner)
            if len(parts) > 1 or inner not in parts:
                return {self._again(term, part, rest): f for part, f in parts.items()}
        return {term: 1}

    def _again(self, like: Term, inner: Term, rest: list[Any]) -> Term:
        """`like` with another first argument."""
        make = functools.partial(self.terms.make, shape=like.shape)
        if like.op == "view":
            return viewed(make, inner)
        return make(like.op, inner, *rest, dtype=inner.dtype)


def _column(term: Term) -> Term:
    """One value a row, whether it is [C] or [C, 1]."""
    single = (), (1,)
    is_same = term.op == "view" and term.shape[1:] in single and term.args[0].shape[1:] in single
    return term.args[0] if is_same else term


def inverted(place: Term) -> Term | None:
    """The permutation of which `place` is the inverse."""
    place = uncast(place)
    if place.op == "argsort":
        return place.args[0]
    if place.op == "put" and uncast(place.args[2]).op == "iota":
        return place.args[1]
    return None


def _is_by_rank(shape: tuple[Any, ...], routing: Routing) -> bool:
    return shape == (routing.num_ranks, routing.num_local)


def _transposed(term: Term) -> tuple[Term, tuple[Any, ...]] | None:
    """A vector and the shape [A, B] as which `term` is its transpose, flat."""
    if term.op != "view" or term.args[0].op != "transpose" or term.args[0].args[1] != (1, 0):
        return None
    matrix = term.args[0].args[0]
    vector = matrix.args[0] if matrix.op == "view" else matrix
    return vector, matrix.shape


def _labelled(labels: Term) -> Routing | None:
    """The routing, if `labels` are experts of what arrived, in the order of arrival."""
    if labels.op == "take" and labels.args[1].op == "segments":
        routing = received(uncast(labels.args[1].args[0]))
        return routing if routing and _is_local_expert(uncast(labels.args[0]), routing) else None
    numbers: dict[str, int] = {}
    while labels.op in ("mod", "sub") and isinstance(labels.args[1], int):
        if numbers:
            return None
        numbers[labels.op] = labels.args[1]
        labels = bare(labels.args[0])
    if labels.op != "all_to_all":
        return None
    try:
        routing, forward = exchanged(labels)
    except NotRoutedError:
        return None
    ids = uncast(labels.args[0])
    if ids.op == "take" and ordered(ids.args[1]) is bare(ids.args[0]):
        ids = bare(ids.args[0])
    elif ids.op == "sorted":
        ids = ids.args[0]
    rising = numbers.get("mod") in (None, routing.num_local)
    right = ids is routing.ids and forward and rising
    return routing if right else None


def _is_local_expert(labels: Term, routing: Routing) -> bool:
    """Whether `labels` [E] says which expert of its rank each of them is."""
    num_ranks, num_local = routing.num_ranks, routing.num_local
    if labels.shape != (routing.num_experts,):
        return False
    if labels.op == "mod":
        return labels.args[0].op == "iota" and labels.args[1] == num_local
    if labels.op == "aten.repeat.default":
        local, times = labels.args[:2]
        return local.op == "iota" and local.shape == (num_local,) and times == (num_ranks,)
    if labels.op != "view" or labels.args[0].op != "expand":
        return False
    wide = labels.args[0]
    local = bare(wide.args[0])
    same = local.op == "iota" and wide.args[0].shape in ((num_local,), (1, num_local))
    return same and wide.shape == (num_ranks, num_local)


Joined = tuple[Term | None, Routing | None, int | None]


def _joined_by_expert(parts: tuple[Term, ...]) -> Joined:
    """What arrived, if `parts` are its chunks in (expert, rank) order, and its routing; and which
    expert's, if they are those of one.
    """
    chunks = [_chunk(part) for part in parts]
    sources = {chunk and (chunk.rows, chunk.sizes) for chunk in chunks}
    first = chunks[0]
    if len(sources) != 1 or first is None:
        return None, None, None
    routing = received(first.counts)
    if routing is None or first.places != tuple(range(routing.num_experts)):
        return None, None, None
    wanted, num_ranks = _by_expert(routing), routing.num_ranks
    joined = [chunk.place for chunk in chunks if chunk]
    if joined == wanted:
        return first.rows, routing, None
    expert = joined[0] % routing.num_local
    one = joined == wanted[expert * num_ranks : (expert + 1) * num_ranks]
    return (first.rows, routing, expert) if one else (None, None, None)


def _joined_by_rank(parts: tuple[Term, ...], routing: Routing) -> tuple[Term, ...]:
    """Rows in (expert, rank) order, one after another, of which `parts` are all chunks in (rank,
    expert) order; empty if they are not.
    """
    chunks = [chunk for part in parts if (chunk := _chunk(part)) is not None]
    in_order = [chunk.place for chunk in chunks] == list(range(routing.num_experts))
    if (
        len(chunks) < len(parts)
        or not in_order
        or {received(c.counts) for c in chunks} != {routing}
    ):
        return ()
    wanted = _by_expert(routing)
    sources = {chunk.rows: chunk.places for chunk in chunks}
    if any(sources[chunk.rows] != chunk.places for chunk in chunks):
        return ()
    rows = sorted(sources, key=lambda source: wanted.index(sources[source][0]))
    places = [place for source in rows for place in sources[source]]
    same = len({source.dtype for source in rows}) == 1
    return tuple(rows) if same and places == wanted else ()


def _by_expert(routing: Routing) -> list[int]:
    """Places, by (rank, expert), of chunks in (expert, rank) order."""
    num_local = routing.num_local
    return [place for e in range(num_local) for place in range(e, routing.num_experts, num_local)]


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """Chunk `index` of `rows`, cut by `sizes`, which are numbers at `places` of `counts`."""

    rows: Term
    sizes: Any
    index: int
    counts: Term
    places: tuple[int, ...]

    @property
    def place(self) -> int:
        return self.places[self.index]


def _chunk(term: Term) -> _Chunk | None:
    found = places_of(term.args[1]) if term.op == "chunk" else None
    if found is None or any(len(places) != 1 for places in found[1]):
        return None
    counts, places = found
    rows, sizes, index = term.args
    return _Chunk(rows, sizes, index, counts, tuple(place for (place,) in places))
