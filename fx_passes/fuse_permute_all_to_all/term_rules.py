"""The term of each ATen operator that moves rows or computes where they go.

A rule gets `make(op, *args)`, which makes a term of the output's shape and dtype or of those given;
the operator's arguments in the order of its schema with terms for tensors, and the number of the
output; None says that these arguments have no rule.

    take(x, i)       x[i] along dim 0            put(x, i, v)     x with x[i] = v
    iota()           0, 1, 2, ...                add_at(x, i, v)  x with x[i] += v
    sorted, argsort  of a vector, ascending      counts(i, n)     how often 0 .. n-1 occur in i
    segments(c)      0 c[0] times, 1 c[1] times  one_hot(i)       1 at i in the last dimension
    pick(x, i)       x[n, i[n]] for every n      elements(x, p)   sum of x at places p, flat
    cumsum(x)        along dim 0                 sum(x, dims)     without these dims
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .counting import destination
from .elements import elements
from .term import EXACT, Term, bare, is_fill, one_hot, size_of, uncast, viewed

# ATen operator -> its rule.
Rule = Callable[..., Term | None]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Have these operators' terms written by what this decorates."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def counts(make: Any, ids: Term, number: int) -> Term | None:
    """How often 0 .. number-1 occur in `ids`, unless that is rounded."""
    new = make("counts", bare(ids), number, shape=(number,))
    return new if new.dtype in EXACT else None


@rule("alias", "detach", "clone", "lift_fresh", "wait_tensor", "contiguous")
def _same(make: Any, args: list[Any], index: int) -> Term | None:
    return args[0]


@rule("_to_copy")
def _cast(make: Any, args: list[Any], index: int) -> Term | None:
    x = args[0]
    new = make("cast", x)
    return x if new.dtype == x.dtype else new


@rule("copy")
def _copied(make: Any, args: list[Any], index: int) -> Term | None:
    target, source = args[:2]
    return source if (target.shape, target.dtype) == (source.shape, source.dtype) else None


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze")
def _view(make: Any, args: list[Any], index: int) -> Term | None:
    if isinstance(args[-1], torch.dtype):
        return None
    return viewed(make, args[0])


@rule("t", "transpose", "permute")
def _transpose(make: Any, args: list[Any], index: int) -> Term | None:
    x, *dims = args
    rank = len(x.shape)
    order = list(range(rank))
    if not dims:
        order.reverse()
    elif len(dims) == 2:
        order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
    else:
        order = [dim % rank for dim in dims[0]]
    return make("transpose", x, tuple(order))


@rule("expand")
def _expand(make: Any, args: list[Any], index: int) -> Term | None:
    new = make("expand", args[0])
    return args[0] if new.shape == args[0].shape else new


@rule("select")
def _select(make: Any, args: list[Any], index: int) -> Term | None:
    x, dim, place = args
    dim %= len(x.shape)
    is_last = isinstance(place, int) and place in (-1, x.shape[dim] - 1)
    hot = one_hot(x.args[0]) if x.op == "cumsum" and dim == 0 and is_last else None
    if hot is not None and len(x.shape) == 2:
        return counts(make, hot, x.shape[-1])
    chosen = make("select", x, dim, place)
    return elements(make, chosen, [0]) if chosen.shape == () else chosen


@rule("slice")
def _slice(make: Any, args: list[Any], index: int) -> Term | None:
    new = make("slice", *args)
    return args[0] if new.shape == args[0].shape else new


@rule("index")
def _index(make: Any, args: list[Any], index: int) -> Term | None:
    x, (place, *others) = args
    if len(others) == 1 and len(x.shape) == 2 and None not in (place, others[0]):
        each = place.op == "iota" and place.shape == others[0].shape
        return pick(make, x, others[0]) if each else None
    return _take(make, x, place) if place is not None and not any(others) else None


@rule("index_select")
def _index_select(make: Any, args: list[Any], index: int) -> Term | None:
    x, dim, place = args
    return _take(make, x, place) if dim == 0 else None


@rule("gather")
def _gather(make: Any, args: list[Any], index: int) -> Term | None:
    x, dim, place = args[:3]
    if len(x.shape) == 2 and dim % 2 == 1 and place.shape == (x.shape[0], 1):
        return pick(make, x, place)
    place = _along_rows(make, place, x)
    return _take(make, x, place) if dim == 0 and place is not None else None


def pick(make: Any, x: Term, place: Term) -> Term | None:
    """x[n, place[n]] for every n."""
    if size_of(place.shape) != x.shape[0]:
        return None
    return placed(make, make("pick", x, bare(place)))


def placed(make: Any, place: Term) -> Term:
    """`place`, as the inverse of a sort if that is what it is."""
    ids = destination(place)
    if ids is None:
        return place
    how = {"shape": (size_of(ids.shape),), "dtype": torch.int64}
    return viewed(make, make("argsort", make("argsort", ids, **how), **how))


def _take(make: Any, x: Term, place: Term) -> Term | None:
    if len(place.shape) != 1:
        return None
    place = uncast(place)
    return place if x.op == "iota" else make("take", x, place)


def _along_rows(make: Any, place: Term, x: Term) -> Term | None:
    """The [N] that a [N, H] index of `x` repeats along its rows."""
    if len(place.shape) == 1:
        return place
    if place.shape[1:] != x.shape[1:]:
        return None
    column = place.args[0] if place.op == "expand" and place.shape[1:] != (1,) else place
    repeats_rows = column.shape[0] == 1 != place.shape[0]
    if len(column.shape) != 2 or column.shape[1] != 1 or repeats_rows:
        return None
    return viewed(make, column, shape=column.shape[:1])


@rule("index_put")
def _index_put(make: Any, args: list[Any], index: int) -> Term | None:
    x, (place, *others), values, accumulate = args
    if place is None or any(others) or len(place.shape) != 1:
        return None
    return _put(make, "add_at" if accumulate else "put", x, place, values)


@rule("index_copy", "scatter")
def _scatter(make: Any, args: list[Any], index: int) -> Term | None:
    x, dim, place, values, *reduction = args
    if not isinstance(values, Term):
        return _one_hot(make, x, dim, place, values)
    place = _along_rows(make, place, x)
    if dim != 0 or place is None or any(reduction):
        return None
    return _put(make, "put", x, place, values)


@rule("scatter_add", "index_add")
def _scatter_add(make: Any, args: list[Any], index: int) -> Term | None:
    x, dim, place, values, *alpha = args
    place = _along_rows(make, place, x)
    if dim != 0 or place is None or alpha not in ([], [1]):
        return None
    if is_fill(x, 0) and is_fill(values, 1) and len(x.shape) == 1:
        return counts(make, place, x.shape[0])
    return _put(make, "add_at", x, place, values)


def _put(make: Any, op: str, x: Term, place: Term, values: Term) -> Term | None:
    place = uncast(place)
    if values.shape[1:] != x.shape[1:]:
        return None
    whole = x.shape[:1] == place.shape == values.shape[:1] and place.op == "argsort"
    if whole and (op == "put" or is_fill(x, 0)):
        order = place.args[0]
        if order.op == "argsort":
            return _take(make, values, order)
        if uncast(values).op == "iota":
            return make("argsort", place, dtype=torch.int64)
    return make(op, x, place, values)


def _one_hot(make: Any, x: Term, dim: int, place: Term, value: Any) -> Term | None:
    last = len(x.shape) - 1
    if not is_fill(x, 0) or value != 1 or dim % len(x.shape) != last:
        return None
    distinct = place.shape[-1] == 1 or place.op == "aten.topk.default"
    return make("one_hot", bare(place)) if distinct else None


@rule("repeat_interleave")
def _repeat_interleave(make: Any, args: list[Any], index: int) -> Term | None:
    return make("segments", args[0])


@rule("split_with_sizes")
def _split(make: Any, args: list[Any], index: int) -> Term | None:
    x, sizes, *dim = args
    return make("chunk", x, sizes, index) if dim in ([], [0]) else None


@rule("cat")
def _cat(make: Any, args: list[Any], index: int) -> Term | None:
    parts, *dim = args
    if dim not in ([], [0]):
        return None
    new = make("cat", parts)
    return parts[0] if len(parts) == 1 and parts[0].dtype == new.dtype else new


@rule("stack")
def _stack(make: Any, args: list[Any], index: int) -> Term | None:
    parts, *dim = args
    return make("stack", parts) if dim in ([], [0]) else None


@rule("constant_pad_nd")
def _pad(make: Any, args: list[Any], index: int) -> Term | None:
    """A number before a vector."""
    x, around, value = args
    if len(x.shape) != 1 or around != (1, 0):
        return None
    return make("cat", (make("fill", value, shape=(1,)), x))


@rule("repeat")
def _repeat(make: Any, args: list[Any], index: int) -> Term | None:
    """Repeats of dimensions of size 1, which are as good as expanded."""
    x, times = args
    sizes = (1,) * (len(times) - len(x.shape)) + x.shape
    single = len(x.shape) > 1 and all(1 in pair for pair in zip(sizes, times, strict=True))
    return make("expand", x) if single else None


@rule("all_to_all_single")
def _all_to_all(make: Any, args: list[Any], index: int) -> Term | None:
    return make("all_to_all", *args)


@rule("all_gather_into_tensor")
def _all_gather(make: Any, args: list[Any], index: int) -> Term | None:
    return make("all_gather", args[0], args[-1])
