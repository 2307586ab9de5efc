"""Which terms bring back what experts returned and sum it for each token.

Letters: T tokens, K top-k, S = T * K slots, C rows, H hidden.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from . import library_ops
from .chunk_order import ChunkOrders, inverted
from .routing import NotRoutedError, Routing
from .slots import exchanged, is_top_1, ordered, sent, token_of, token_of_slot
from .term import Term, bare, is_fill

NO_SUM = "it is no sum over the slots of a token"


@dataclasses.dataclass(frozen=True)
class Summed:
    """addend[t] + the sum over k of the row of (t, k) among `rows` [C, H] times weights[t, k].

    `rows`: one after another, by expert; `returned`: the all-to-all that brings them.
    """

    rows: tuple[Term, ...]
    weights: Term | None
    addend: Term | None
    top_k: int
    routing: Routing
    returned: Term


@dataclasses.dataclass(frozen=True)
class _Values:
    """A row for each slot, in some order; `dtypes` that it went through."""

    rows: tuple[Term, ...]
    routing: Routing
    returned: Term
    weights: Term | None = None
    dtypes: frozenset[torch.dtype | None] = frozenset()


def summed(term: Term, orders: ChunkOrders) -> Summed:
    """What `term` sums.

    Raises:
        NotRoutedError: not the rows that experts returned, or not in a form that keeps values.
    """
    body = term
    while body.op == "cast":
        body = body.args[0]
    addend = None
    if body.op == "add_at":
        base, place, rows = body.args
        values, ids, top_k = _added(place, rows, orders)
        addend = None if is_fill(base, 0) else base
    elif body.op == library_ops.UNPERMUTE and (own := library_ops.summed(body)) is not None:
        rows, weights, ids, top_k = own
        values = dataclasses.replace(_sorted_values(rows, orders), weights=weights)
    elif body.op == "sum" and body.args[1] == (1,) and len(body.args[0].shape) == 3:
        values = _slot_values(body.args[0], orders)
        ids, top_k = values.routing.ids, body.args[0].shape[1]
    elif body.op == "view" and body.args[0].op == "aten.bmm.default":
        values, top_k = _products(body.args[0], orders)
        ids = values.routing.ids
    else:
        raise NotRoutedError(term, NO_SUM)
    dtype = values.rows[0].dtype
    if ids is not values.routing.ids:
        raise NotRoutedError(body, "it sums over the slots of other ids")
    if term.dtype != dtype or (addend is not None and addend.dtype != dtype):
        raise NotRoutedError(term, f"sums of {dtype} are kept in {term.dtype}")
    dtypes = {*values.dtypes, body.dtype}
    if any(torch.promote_types(d, dtype) != d for d in dtypes if d is not None and dtype):
        raise NotRoutedError(body, f"it rounds below {dtype} on the way")
    return Summed(values.rows, values.weights, addend, top_k, values.routing, values.returned)


def _added(place: Term, rows: Term, orders: ChunkOrders) -> tuple[_Values, Term, int]:
    """Values, ids and K of rows that are added to their tokens at `place`."""
    if (found := token_of(place)) is not None:
        return _sorted_values(rows, orders), *found
    if (sorted_ids := ordered(place)) is not None and is_top_1(sorted_ids):
        return _sorted_values(rows, orders), sorted_ids, 1
    if (top_k := token_of_slot(place)) is not None:
        values = _slot_values(rows, orders)
        return values, values.routing.ids, top_k
    raise NotRoutedError(place, NO_SUM)


def _sorted_values(term: Term, orders: ChunkOrders) -> _Values:
    """A row for each slot sorted by expert."""
    if term.op == "cast":
        return _through(term, _sorted_values(term.args[0], orders))
    if term.op == "mul":
        wide, narrow = _wide_first(term)
        values, weights = _sorted_values(wide, orders), sent(narrow)
        if weights.x is None and weights.ids is values.routing.ids and narrow.shape[1:] == (1,):
            return _weighted(term, values, weights.weights)
    if term.op in ("all_to_all", library_ops.ALL_TO_ALL):
        routing, forward = exchanged(term)
        if not forward:
            return _Values(orders.unsorted_rows(term.args[0], routing), routing, term)
    raise NotRoutedError(term, "it holds no rows that experts returned")


def _slot_values(term: Term, orders: ChunkOrders) -> _Values:
    """A row for each slot, by token, flat or [T, K, H]."""
    if term.op == "cast":
        return _through(term, _slot_values(term.args[0], orders))
    if term.op == "view" and len(term.args[0].shape) == 2 and len(term.shape) == 3:
        values = _slot_values(term.args[0], orders)
        if math.prod(term.shape[:2]) == math.prod(values.routing.ids.shape):
            return values
    if term.op == "mul":
        wide, narrow = _wide_first(term)
        if narrow.shape[-1:] == (1,) and len(narrow.shape) == len(wide.shape):
            return _weighted(term, _slot_values(wide, orders), bare(narrow))
    sorted_values = order = None
    if term.op == "put" or (term.op == "add_at" and is_fill(term.args[0], 0)):
        _, order, sorted_values = term.args
    elif term.op == "take":
        sorted_values, order = term.args[0], inverted(term.args[1])
    if sorted_values is not None and order is not None and (ids := ordered(order)) is not None:
        values = _sorted_values(sorted_values, orders)
        if ids is values.routing.ids:
            return values
    raise NotRoutedError(term, "it does not bring rows back in the order of their slots")


def _products(term: Term, orders: ChunkOrders) -> tuple[_Values, int]:
    """[T, 1, K] weights @ [T, K, H] rows, and K."""
    weights, rows = term.args[:2]
    if weights.shape[1] != 1:
        raise NotRoutedError(term, NO_SUM)
    return _weighted(term, _slot_values(rows, orders), bare(weights)), rows.shape[1]


def _wide_first(term: Term) -> tuple[Term, Term]:
    left, right = term.args
    if not (isinstance(left, Term) and isinstance(right, Term)):
        raise NotRoutedError(term, "it scales rows by a number")
    return (right, left) if left.shape[-1:] == (1,) else (left, right)


def _through(term: Term, values: _Values) -> _Values:
    return dataclasses.replace(values, dtypes=values.dtypes | {term.dtype})


def _weighted(term: Term, values: _Values, weights: Term | None) -> _Values:
    if values.weights is not None:
        raise NotRoutedError(term, "rows are weighted twice")
    return dataclasses.replace(_through(term, values), weights=weights)
