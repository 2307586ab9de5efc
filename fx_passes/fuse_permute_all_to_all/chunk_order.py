"""Which terms sort rows that arrived by (rank, expert) into (expert, rank) order, or back.

As an index: the start of the row's chunk among what arrived, plus the row's place in its chunk; or
a stable sort of the experts of what arrived. As chunks: cut by sizes that were read, and joined.

Letters: E experts, P ranks, L = E / P experts here.
"""

from __future__ import annotations

import functools
from typing import Any

from . import library_ops
from .routing import NotRoutedError, Routing
from .slots import exchanged, ordered, received
from .term_rules import RULES, Term, bare, is_fill, uncast
from .terms import Terms


class ChunkOrders:
    """Recognises the sort of chunks between an all-to-all and the experts, and its mirror."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.chunk_order = functools.cache(self._chunk_order)

    def sorted_rows(self, term: Term) -> Term | None:
        """The all-to-all whose rows `term` holds by (expert, rank)."""
        if (column := _column(term)) is not term:
            return self.sorted_rows(column)
        if term.op == library_ops.SORT_CHUNKS:
            return self._sorted_by_library(term)
        arrived: Term | None = term
        routing: Routing | None = None
        if term.op == "take":
            arrived, routing = _column(term.args[0]), self.chunk_order(term.args[1])
        elif term.op == "cat":
            arrived, routing = _joined(term, by_rank=True)
        if arrived is None or arrived.op != "all_to_all":
            return None
        try:
            found, forward = exchanged(arrived)
        except NotRoutedError:
            return None
        alone = arrived is term and found.num_local == 1
        return arrived if forward and (alone or found == routing) else None

    def _sorted_by_library(self, term: Term) -> Term | None:
        found = library_ops.sorted_rows(term)
        if found is None or found[0].op != library_ops.ALL_TO_ALL:
            return None
        try:
            routing, forward = exchanged(found[0])
        except NotRoutedError:
            return None
        return found[0] if forward and routing.plan == found[1] else None

    def unsorted_rows(self, term: Term, routing: Routing) -> Term:
        """The rows by (expert, rank) that `term` holds by (rank, expert).

        Raises:
            NotRoutedError: it does not sort them so.
        """
        if routing.plan is not None:
            found = library_ops.unsorted_rows(term) if term.op == library_ops.SORT_CHUNKS else None
            if found is None or found[1] != routing.plan:
                raise NotRoutedError(term, "it does not sort rows by the rank they came from")
            return found[0]
        rows = order = None
        if term.op == "put" or (term.op == "add_at" and is_fill(term.args[0], 0)):
            _, place, rows = term.args
            order = self.chunk_order(place)
        elif term.op == "take":
            rows, place = term.args
            order = self._inverted_order(place)
        elif term.op == "cat":
            rows, order = _joined(term, by_rank=False)
        if rows is not None and order == routing:
            return rows
        if routing.num_local == 1:
            return term
        raise NotRoutedError(term, "it does not sort rows by the rank they came from")

    def _inverted_order(self, place: Term) -> Routing | None:
        inverse = inverted(place)
        return None if inverse is None else self.chunk_order(inverse)

    def _chunk_order(self, place: Term) -> Routing | None:
        """The routing whose rows in (rank, expert) order `place` takes in (expert, rank) order."""
        place = uncast(place)
        if place.op == "argsort":
            return _labelled(place.args[0])
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

        def make(op: str, *args: Any) -> Term:
            return self.terms.make(op, *args, shape=like.shape, dtype=inner.dtype)

        if like.op == "view":
            found = RULES["view"](make, [inner], 0)
            assert found is not None
            return found
        return make(like.op, inner, *rest)


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


def _joined(term: Term, *, by_rank: bool) -> tuple[Term | None, Routing | None]:
    """Rows cut in chunks and joined in the other order, which is by expert if they came `by_rank`,
    and their routing.
    """
    parts = term.args[0]
    if any(part.op != "chunk" or part.args[:2] != parts[0].args[:2] for part in parts):
        return None, None
    rows, sizes, _ = parts[0].args
    found = _sizes(sizes)
    if found is None or (routing := received(found[0])) is None:
        return None, None
    num_ranks, num_local = routing.num_ranks, routing.num_local
    arrival = list(range(routing.num_experts))
    by_expert = [rank * num_local + e for e in range(num_local) for rank in range(num_ranks)]
    before, after = (arrival, by_expert) if by_rank else (by_expert, arrival)
    joined = [found[1][part.args[2]] for part in parts]
    return (rows, routing) if (found[1], joined) == (before, after) else (None, None)


def _sizes(sizes: Any) -> tuple[Term, list[int]] | None:
    """Counts and which of them, flat, each of `sizes` is."""
    numbers = [bare(size.args[0]) for size in sizes if isinstance(size, Term) and size.op == "item"]
    if len(numbers) != len(sizes) or any(n.op != "select" or n.args[1] != 0 for n in numbers):
        return None
    vectors = {number.args[0] for number in numbers}
    if len(vectors) != 1:
        return None
    vector, places = uncast(vectors.pop()), [number.args[2] for number in numbers]
    found = _transposed(vector)
    if found is None:
        return (vector, places) if len(vector.shape) == 1 else None
    counts, (rows, columns) = found
    return counts, [place % rows * columns + place // rows for place in places]
