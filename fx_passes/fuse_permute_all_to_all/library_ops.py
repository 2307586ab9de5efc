"""The same of this library's operators, as the alltoall dispatcher calls them.

exchange_plan(ids), sort_slots(ids)
sort_chunks(all_to_all(permute(x, slots), splits), counts)        to the experts
unpermute(all_to_all(sort_chunks(rows, counts.T), splits), slots) and back
"""

from __future__ import annotations

from typing import Any

from .routing import NotRoutedError, Routing, Sent
from .term import Term, bare

PERMUTE = "moe_ops.permute.default"
UNPERMUTE = "moe_ops.unpermute.default"
ALL_TO_ALL = "moe_ops.all_to_all.default"
SORT_CHUNKS = "moe_ops.sort_chunks.default"
_PLAN = "moe_ops.exchange_plan.default"
_SORT_SLOTS = "moe_ops.sort_slots.default"
# Places in layout.Plan, and in its splits_4P.
_COUNTS, _SPLITS = 6, 8
_SLOTS_SENT, _SLOTS_RECEIVED = 2, 3


def _plan_output(term: Term, index: int) -> tuple[Any, ...] | None:
    """The arguments of the plan of which `term` is an output; None with capacities."""
    if term.op != _PLAN or term.args[-1] != index or term.args[4:6] != (None, None):
        return None
    return term.args[:-1]


def exchanged(term: Term) -> tuple[Routing, bool]:
    """The routing of an all-to-all and whether it goes to the experts.

    Raises:
        NotRoutedError: its splits are not those of slots.
    """
    _, send, receive, _, group, _ = term.args
    if send.op == receive.op == "aten.unbind.int" and send.args[:2] == receive.args[:2]:
        plan = _plan_output(send.args[0], _SPLITS)
        rows = send.args[2], receive.args[2]
        if plan is not None and plan[2] == group and set(rows) == {_SLOTS_SENT, _SLOTS_RECEIVED}:
            ids, num_experts, *_ = plan
            num_ranks = send.shape[0] if send.shape else send.args[0].shape[1]
            return Routing(bare(ids), num_experts, num_ranks, group, plan), rows[0] == _SLOTS_SENT
    raise NotRoutedError(term, "its splits are not those of a plan without capacities")


def _sorted_ids(slots: Term, rows: Term) -> Term | None:
    """ids, if these are the two maps that sort their slots."""
    rows = rows.args[0] if rows.op == "view" else rows
    same = slots.op == rows.op == _SORT_SLOTS and slots.args[:-1] == rows.args[:-1]
    whole = same and slots.args[2:] == (None, None, 0) and rows.args[-1] == 1
    return bare(slots.args[0]) if whole else None


def sent(term: Term) -> Sent:
    """What a permute makes of tokens or of one weight a slot.

    Raises:
        NotRoutedError: not rows of slots sorted by expert.
    """
    x, weights, slots, rows, _ = term.args
    ids = _sorted_ids(slots, rows)
    if ids is None:
        raise NotRoutedError(term, "its slots are padded or not sorted by sort_slots")
    if rows.shape[1] == 1 and x.shape[1] == 1:
        return Sent(ids, None, bare(x), None)
    return Sent(ids, x, weights, rows.shape[1])


def summed(term: Term) -> tuple[Term, Term | None, Term, int] | None:
    """(rows by slot, weights, ids, K) of an unpermute."""
    rows, weights, slots, row_of_slot, _ = term.args
    ids = _sorted_ids(slots, row_of_slot)
    return None if ids is None else (rows, weights, ids, row_of_slot.shape[1])


def sorted_rows(term: Term) -> tuple[Term, tuple[Any, ...]] | None:
    """(what arrived, plan) if `term` sorts it by expert."""
    rows, counts, _ = term.args
    plan = _plan_output(counts, _COUNTS)
    return None if plan is None else (rows, plan)


def unsorted_rows(term: Term) -> tuple[Term, tuple[Any, ...]] | None:
    """(what experts returned, plan) if `term` sorts it by rank."""
    rows, counts, _ = term.args
    if counts.op != "transpose":
        return None
    plan = _plan_output(counts.args[0], _COUNTS)
    return None if plan is None else (rows, plan)
