"""Slots sorted by counting: where the stable sort by expert puts each of them.

    place of slot s = start of its expert + how many slots before s are for the same expert
                    = (cumsum(one_hot(ids)) - 1 + cumsum(counts) - counts)[s, ids[s]]

Letters: S slots, E experts.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from .term import EXACT, Term, bare, is_fill, one_hot, size_of, uncast

# What the place of a slot is a sum of. _SEEN: slots of its expert up to it, itself included; _ENDS:
# slots of experts up to its own; _COUNT: slots of its own.
_SEEN, _ENDS, _COUNT, _ONE = "seen", "ends", "count", "one"
_PLACE = {_SEEN: 1, _ENDS: 1, _COUNT: -1, _ONE: -1}
Parts = collections.Counter[str]


class _OtherError(Exception):
    """A number that is no such part."""


def destination(term: Term) -> Term | None:
    """ids [S], flat, if `term` says for every slot where their stable sort puts it."""
    ids = _ids_of(term)
    try:
        parts = None if ids is None else _by_slot(term, ids)
    except _OtherError:
        return None
    return ids if parts is not None and _without_zeros(parts) == _PLACE else None


def _without_zeros(parts: Parts) -> dict[str, int]:
    return {part: factor for part, factor in parts.items() if factor}


def _ids_of(term: Any) -> Term | None:
    """The ids at which `term` picks a number for each slot."""
    if not isinstance(term, Term):
        return None
    term = bare(term)
    if term.dtype is None or term.dtype.is_floating_point:
        return None
    if term.op == "pick":
        return term.args[1]
    if term.op in ("add", "sub"):
        return _ids_of(term.args[0]) or _ids_of(term.args[1])
    return None


def _constant(number: Any) -> Parts:
    if not isinstance(number, int):
        raise _OtherError
    return Parts({_ONE: number})


def _by_slot(term: Any, ids: Term) -> Parts:
    """Parts of a number for each slot.

    Raises:
        _OtherError: it has other ones.
    """
    if not isinstance(term, Term):
        return _constant(term)
    term = bare(term)
    if term.op in ("add", "sub"):
        if any(isinstance(arg, Term) and arg.shape != term.shape for arg in term.args):
            raise _OtherError
        return _combined(term, *(_by_slot(arg, ids) for arg in term.args))
    if term.op == "pick" and term.args[1] is ids:
        return _by_slot_and_expert(term.args[0], ids)
    if term.op == "take" and bare(term.args[1]) is ids and len(term.args[0].shape) == 1:
        return _by_expert(term.args[0], ids)
    raise _OtherError


def _by_slot_and_expert(term: Any, ids: Term) -> Parts:
    """Parts of [S, E], or of what is broadcast to it, at the expert of each slot.

    Raises:
        _OtherError: it has other ones.
    """
    if not isinstance(term, Term):
        return _constant(term)
    term = uncast(term)
    if len(term.shape) < 2 or term.shape[0] == 1:
        return _by_expert(term, ids)
    if term.op in ("add", "sub"):
        if any(isinstance(arg, Term) and arg.shape[-1:] != term.shape[-1:] for arg in term.args):
            raise _OtherError
        return _combined(term, *(_by_slot_and_expert(arg, ids) for arg in term.args))
    if _is_mask(term, ids):
        return Parts({_ONE: 1})
    if term.op == "cumsum" and term.dtype in EXACT and _is_mask(term.args[0], ids):
        return Parts({_SEEN: 1})
    raise _OtherError


def _is_mask(term: Term, ids: Term) -> bool:
    """Whether it is 1 at the expert of each slot, [S, E]."""
    num_slots = size_of(ids.shape)
    return one_hot(term) is ids and len(term.shape) == 2 and term.shape[0] == num_slots


def _by_expert(term: Any, ids: Term) -> Parts:
    """Parts of a number for each expert.

    Raises:
        _OtherError: it has other ones.
    """
    if not isinstance(term, Term):
        return _constant(term)
    term = bare(term)
    if is_fill(term, 0):
        return Parts()
    if term.op in ("add", "sub"):
        size = size_of(term.shape)
        if any(isinstance(arg, Term) and size_of(arg.shape) != size for arg in term.args):
            raise _OtherError
        return _combined(term, *(_by_expert(arg, ids) for arg in term.args))
    if _is_count(term, ids):
        return Parts({_COUNT: 1})
    if _is_cumulated(term, ids):
        return Parts({_ENDS: 1})
    if _is_moved(term, _is_cumulated, ids) or (
        _is_cumsum(term) and _is_moved(bare(term.args[0]), _is_count, ids)
    ):
        return Parts({_ENDS: 1, _COUNT: -1})
    raise _OtherError


def _is_count(term: Term, ids: Term) -> bool:
    return term.op == "counts" and term.args[0] is ids


def _is_cumulated(term: Term, ids: Term) -> bool:
    return _is_cumsum(term) and _is_count(bare(term.args[0]), ids)


def _is_cumsum(term: Term) -> bool:
    return term.op == "cumsum" and len(term.shape) == 1 and term.dtype in EXACT


def _is_moved(term: Term, of: Callable[[Term, Term], bool], ids: Term) -> bool:
    """A zero before all numbers but the last."""
    if term.op != "cat" or len(term.args[0]) != 2:
        return False
    zero, rest = map(bare, term.args[0])
    if not is_fill(zero, 0) or term.args[0][0].shape != (1,) or rest.op != "slice":
        return False
    whole, _, start, _, step = rest.args
    first = start in (None, 0) and step == 1
    return first and whole.shape == term.shape and of(bare(whole), ids)


def _combined(term: Term, left: Parts, right: Parts) -> Parts:
    if term.dtype not in EXACT:
        raise _OtherError
    total = Parts(left)
    for part, factor in right.items():
        total[part] += factor if term.op == "add" else -factor
    return total
