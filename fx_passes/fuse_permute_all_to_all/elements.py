"""Which numbers of a vector a 0-d tensor, or a size that was read from it, sums.

counts.view(2, 2).sum(1)[1]          ->  elements(counts, (2, 3))
torch.stack([counts, other])[0, 2]   ->  elements(counts, (2,))
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from .term import EXACT, Term, bare, is_integral, size_of, uncast

# Counts of all experts are fewer; a sum over slots is not written out.
_MOST = 1 << 14
Element = tuple[Term, int]


def elements(make: Any, x: Term, places: Iterable[int]) -> Term | None:
    """The sum of the numbers at `places` of `x`, flat; None if no one vector holds them."""
    return total(make, [part for place in places for part in _origin(x, place)])


def total(make: Any, parts: list[Element]) -> Term | None:
    """The sum of parts of one vector, each of them once."""
    vectors = {vector for vector, _ in parts}
    places = sorted({place for _, place in parts})
    if len(vectors) != 1 or len(places) != len(parts):
        return None
    return make("elements", vectors.pop(), tuple(places))


def elements_of(number: Any) -> list[Element] | None:
    """What a size sums, if it was read from a tensor."""
    if not isinstance(number, Term) or number.op != "item":
        return None
    (value,) = number.args
    return _origin(value, 0) if size_of(value.shape) == 1 else None


def places_of(sizes: Any) -> tuple[Term, list[tuple[int, ...]]] | None:
    """The vector of which every size sums some numbers, and the places of these."""
    found = [elements_of(size) for size in sizes]
    parts = [part for part in found if part is not None]
    vectors = {vector for part in parts for vector, _ in part}
    if len(parts) != len(found) or len(vectors) != 1:
        return None
    return vectors.pop(), [tuple(sorted(place for _, place in part)) for part in parts]


def _origin(x: Term, place: int) -> list[Element]:
    """The numbers of which `x` holds the sum at `place`, flat."""
    x = uncast(x)
    if x.op == "elements":
        return [(x.args[0], index) for index in x.args[1]]
    if x.op in ("stack", "cat"):
        return _of_parts(x, place)
    inner: Any = x.args[0] if x.args else None
    if not isinstance(inner, Term) or None in (size_of(x.shape), size_of(inner.shape)):
        return [(x, place)]
    if x.op == "view":
        return _origin(inner, place)
    index = _unravel(place, x.shape)
    if x.op == "transpose":
        into = dict(zip(x.args[1], index, strict=True))
        return _origin(inner, _ravel([into[dim] for dim in range(len(index))], inner.shape))
    if x.op == "select" and _are_numbers(x.args[1:]):
        _, dim, chosen = x.args
        index.insert(dim, chosen % inner.shape[dim])
        return _origin(inner, _ravel(index, inner.shape))
    if x.op == "slice" and bare(inner).op != "all_gather" and _are_numbers(x.args[1:]):
        _, dim, start, end, step = x.args
        index[dim] = range(inner.shape[dim])[start:end:step][index[dim]]
        return _origin(inner, _ravel(index, inner.shape))
    if x.op == "sum" and x.dtype in EXACT and is_integral(inner):
        return _summed(x, inner, index) or [(x, place)]
    return [(x, place)]


def _are_numbers(args: tuple[Any, ...]) -> bool:
    return all(arg is None or isinstance(arg, int) for arg in args)


def _of_parts(x: Term, place: int) -> list[Element]:
    """Of a stack or cat along the first dimension."""
    for part in x.args[0]:
        size = size_of(part.shape)
        if size is None or part.dtype != x.dtype:
            break
        if place < size:
            return _origin(part, place)
        place -= size
    return [(x, place)]


def _summed(x: Term, inner: Term, index: list[int]) -> list[Element] | None:
    dims = x.args[1]
    if (size_of(inner.shape) or 0) > _MOST or len(index) + len(dims) != len(inner.shape):
        return None
    left = iter(index)
    ranges = [range(size) if dim in dims else [next(left)] for dim, size in enumerate(inner.shape)]
    places = (_ravel(list(at), inner.shape) for at in itertools.product(*ranges))
    return [part for at in places for part in _origin(inner, at)]


def _unravel(place: int, shape: tuple[int, ...]) -> list[int]:
    index: list[int] = []
    for size in reversed(shape):
        place, rest = divmod(place, size)
        index.insert(0, rest)
    return index


def _ravel(index: list[int], shape: tuple[int, ...]) -> int:
    place = 0
    for at, size in zip(index, shape, strict=True):
        place = place * size + at
    return place
