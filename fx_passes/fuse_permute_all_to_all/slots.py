"""Which terms are slots sorted by expert, their counts and what is sent to experts.

A layer of plain PyTorch sorts its slots by expert, sends every rank its chunk of rows, sorts what
arrives by expert, and does the mirror of all that with what the experts return:

    order = argsort(ids), or by `counting`     slots by expert; counts(ids, E) of them for each
    received = all_to_all(counts)              [P, L]: rows from each rank for each expert here
        or all_gather(counts)[:, here]
    all_to_all(x[order // K], splits)          `Sent`: rows, with or without weights, or weights
    ...[chunk order of received]               by (expert, rank)
    the mirror, then a sum over k              see `sums`

Letters: T tokens, K top-k, S = T * K slots, E experts, P ranks, L = E / P experts here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_ops import comm

from . import library_ops
from .elements import places_of
from .routing import NotRoutedError, Routing, Sent
from .term import EXACT, Term, bare, size_of, uncast


def counted(term: Term) -> tuple[Term, int] | None:
    """ids and E, if `term` counts the slots of each expert."""
    term = bare(term)
    return (term.args[0], term.args[1]) if term.op == "counts" else None


def received(term: Term) -> Routing | None:
    """The routing of which `term` holds the rows from each rank for each expert here."""
    term = bare(term)
    source = bare(term.args[0]) if term.op == "slice" else term
    if source.op != ("all_gather" if term.op == "slice" else "all_to_all"):
        return None
    counts, *splits_, group = source.args
    found = counted(counts)
    if found is None or bare(counts).shape != (found[1],):
        return None
    ids, num_experts = found
    num_ranks = term.shape[0] if term.op == "slice" else len(splits_[0])
    if not isinstance(num_ranks, int) or num_ranks == 0 or num_experts % num_ranks:
        return None
    num_local = num_experts // num_ranks
    if term.op == "slice":
        if not isinstance(group, str | dist.ProcessGroup):
            return None
        first = comm.group_rank(comm.group_name_of(group)) * num_local
        shape = num_ranks, num_local
        here = (term.shape, term.args[1:]) == (shape, (1, first, first + num_local, 1))
    else:
        here = splits_ == [(num_local,) * num_ranks] * 2
    return Routing(ids, num_experts, num_ranks, group) if here else None


def per_rank(term: Term) -> Term | None:
    """The [P, L] or [E] counts that `term` [P] sums over the experts of each rank."""
    term = uncast(term)
    if term.op != "sum":
        return term  # with one expert a rank there is nothing to sum
    counts, dims = term.args
    return counts if len(counts.shape) == 2 and dims == (1,) and term.dtype in EXACT else None


def splits(sizes: Any) -> Term | None:
    """The counts by (rank, expert), flat, of which `sizes` are the sums over the experts of a rank.

    None if they sum other numbers.
    """
    found = places_of(sizes)
    if found is None:
        return None
    counts, places = found
    number = size_of(counts.shape) or 0
    each = number // len(sizes)
    by_rank = [tuple(range(first, first + each)) for first in range(0, number, each or 1)]
    return counts if places == by_rank else None


def exchanged(term: Term) -> tuple[Routing, bool]:
    """The routing by which an all-to-all sends its rows, and whether it sends them to the experts.

    Raises:
        NotRoutedError: its splits are no counts of sorted slots.
    """
    if term.op == library_ops.ALL_TO_ALL:
        return library_ops.exchanged(term)
    _, receive, send, group = term.args
    sides: list[Term] = []
    for sizes in (receive, send):
        counts = splits(sizes)
        if counts is None:
            raise NotRoutedError(term, "its splits are not sums over the experts of a rank")
        sides.append(counts)
    for forward in (True, False):
        here, there = sides if forward else sides[::-1]
        routing, local = received(here), counted(there)
        if routing is not None and local == (routing.ids, routing.num_experts):
            if routing.group != group or routing.num_ranks != len(receive):
                raise NotRoutedError(term, "its splits were counted for another group")
            return routing, forward
    raise NotRoutedError(term, "its splits are not counts of slots by rank")


def repeated(term: Term) -> tuple[Term, int] | None:
    """(base, K) if every entry of `base` stands K times in a row in `term`."""
    if term.op == "take" and (top_k := token_of_slot(term.args[1])) is not None:
        num_slots = size_of((*term.args[0].shape[:1], top_k))
        return (term.args[0], top_k) if term.shape[0] == num_slots else None
    if term.op != "view" or term.args[0].op != "expand":
        return None
    wide = term.args[0]
    narrow = wide.args[0]
    base = narrow.args[0] if narrow.op == "view" else narrow
    if len(wide.shape) < 2:
        return None
    num, top_k = wide.shape[:2]
    fits = narrow.shape[:2] == (num, 1) and wide.shape == (num, top_k, *base.shape[1:])
    return (base, top_k) if fits and base.shape[:1] == (num,) else None


def ordered(place: Term) -> Term | None:
    """ids, if `place` is their slots sorted by expert."""
    return place.args[0] if place.op == "argsort" else None


def token_of_slot(place: Term) -> int | None:
    """K, if `place` holds the token of every slot: each of them K times in a row."""
    if place.op == "iota":
        return 1
    if place.op == "floordiv" and place.args[0].op == "iota" and isinstance(place.args[1], int):
        return place.args[1]
    found = repeated(place)
    return found[1] if found and bare(found[0]).op == "iota" else None


def is_top_1(ids: Term) -> bool:
    """Whether the slots are the tokens."""
    return ids.shape[1:] == (1,)


def token_of(place: Term) -> tuple[Term, int] | None:
    """ids and K, if `place` holds the tokens of their slots sorted by expert."""
    if place.op == "floordiv" and ordered(place.args[0]) and isinstance(place.args[1], int):
        return place.args[0].args[0], place.args[1]
    if place.op == "take" and (ids := ordered(place.args[1])):
        top_k = token_of_slot(place.args[0])
        return None if top_k is None else (ids, top_k)
    return None


def sent(term: Term) -> Sent:
    """What an all-to-all sends to the experts.

    Raises:
        NotRoutedError: no rows or weights of slots sorted by expert.
    """
    if term.op == library_ops.PERMUTE:
        return library_ops.sent(term)
    if term.op == "cast":
        inner = sent(term.args[0])
        values = inner.x or inner.weights
        assert values is not None
        exact = torch.promote_types(values.dtype, term.dtype) == term.dtype
        if exact or (inner.x and inner.weights and term.dtype == values.dtype):
            return inner
        raise NotRoutedError(term, f"it rounds to {term.dtype} on the way")
    if term.op == "view" and term.shape[1:] in ((), (1,)):
        inner = sent(term.args[0])
        if inner.x is None:
            return inner
    if term.op == "take":
        return _sent_gather(term)
    if term.op == "mul" and all(isinstance(arg, Term) for arg in term.args):
        left, right = map(sent, term.args)
        rows, weights = (left, right) if right.x is None else (right, left)
        narrow = next(arg for arg in term.args if sent(arg) == weights)
        pair = rows.x and not rows.weights and not weights.x and rows.ids is weights.ids
        if pair and narrow.shape[1:] == (1,):
            return Sent(rows.ids, rows.x, weights.weights, rows.top_k)
    raise NotRoutedError(term, "it is no row of a slot sorted by expert")


def _sent_gather(term: Term) -> Sent:
    values, place = term.args
    tokens, ids = token_of(place), ordered(place)
    if tokens is not None and len(values.shape) == 2:
        return Sent(tokens[0], values, None, tokens[1])
    if ids is not None and (copies := repeated(values)) is not None and len(values.shape) == 2:
        return Sent(ids, copies[0], None, copies[1])
    if ids is not None and values.shape[1:] in ((), (1,)):
        return Sent(ids, None, bare(values), None)
    if ids is not None and is_top_1(ids) and len(values.shape) == 2:
        return Sent(ids, values, None, 1)
    raise NotRoutedError(term, "it is no row of a slot sorted by expert")
