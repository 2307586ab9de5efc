"""The term of each ATen operator that moves rows or computes where they go.

A rule gets `make(op, *args)`, which makes a term of the output's shape and dtype; the operator's
arguments in the order of its schema with terms for tensors, and the number of the output; None says
that these arguments have no rule.

    take(x, i)       x[i] along dim 0            put(x, i, v)     x with x[i] = v
    iota()           0, 1, 2, ...                add_at(x, i, v)  x with x[i] += v
    sorted, argsort  of a vector, ascending      counts(i, n)     how often 0 .. n-1 occur in i
    segments(c)      0 c[0] times, 1 c[1] times  one_hot(i)       1 at i in the last dimension
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, eq=False)
class Term:
    """`op` applied to `args`: terms, numbers, tuples of them. Equal terms are one object."""

    op: str
    args: tuple[Any, ...]
    shape: tuple[Any, ...]
    dtype: Any

    def __repr__(self) -> str:
        return f"{self.op}({', '.join(map(repr, self.args))})"


def uncast(term: Term) -> Term:
    """The integers of which `term` is an exact copy in another dtype."""
    while term.op == "cast" and term.dtype in _EXACT and _is_integral(term.args[0]):
        term = term.args[0]
    return term


def bare(term: Term) -> Term:
    """What `term` is a view of, or an exact copy of integers in another dtype."""
    while (inner := uncast(term)).op == "view" or inner is not term:
        term = inner.args[0] if inner.op == "view" else inner
    return term


def _is_integral(term: Term) -> bool:
    if term.dtype is not None and not term.dtype.is_floating_point:
        return True
    return term.op == "counts" or (term.op in _SAME_KIND and _is_integral(term.args[0]))


def is_fill(term: Any, value: float) -> bool:
    """Whether all numbers of a tensor are `value`."""
    while term.op in ("view", "expand", "cast"):
        term = term.args[0]
    return term.op == "fill" and term.args == (value,)


# Integers of integers.
_SAME_KIND = ("view", "cast", "transpose", "cumsum", "sum", "select", "slice", "all_to_all")
# Hold every number of an expert, token or row.
_EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)

# ATen operator -> its rule.
Rule = Callable[..., Term | None]
RULES: dict[str, Rule] = {}


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


@_rule("alias", "detach", "clone", "lift_fresh", "wait_tensor", "contiguous")
def _same(make: Any, args: list[Any], index: int) -> Term | None:
    return args[0]


@_rule("_to_copy")
def _cast(make: Any, args: list[Any], index: int) -> Term | None:
    x = args[0]
    new = make("cast", x)
    return x if new.dtype == x.dtype else new


@_rule("copy")
def _copied(make: Any, args: list[Any], index: int) -> Term | None:
    target, source = args[:2]
    return source if (target.shape, target.dtype) == (source.shape, source.dtype) else None


@_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze")
def _view(make: Any, args: list[Any], index: int) -> Term | None:
    base = args[0].args[0] if args[0].op == "view" else args[0]
    new = make("view", base)
    return base if new.shape == base.shape else new


@_rule("t", "transpose", "permute")
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


@_rule("expand")
def _expand(make: Any, args: list[Any], index: int) -> Term | None:
    new = make("expand", args[0])
    return args[0] if new.shape == args[0].shape else new


@_rule("select")
def _select(make: Any, args: list[Any], index: int) -> Term | None:
    x, dim, place = args
    return make("select", x, dim % len(x.shape), place)


@_rule("slice")
def _slice(make: Any, args: list[Any], index: int) -> Term | None:
    new = make("slice", *args)
    return args[0] if new.shape == args[0].shape else new


@_rule("index")
def _index(make: Any, args: list[Any], index: int) -> Term | None:
    x, (place, *others) = args
    return _take(make, x, place) if place is not None and not any(others) else None


@_rule("index_select")
def _index_select(make: Any, args: list[Any], index: int) -> Term | None:
    x, dim, place = args
    return _take(make, x, place) if dim == 0 else None


@_rule("gather")
def _gather(make: Any, args: list[Any], index: int) -> Term | None:
    x, dim, place = args[:3]
    place = _along_rows(place, x)
    return _take(make, x, place) if dim == 0 and place is not None else None


def _take(make: Any, x: Term, place: Term) -> Term | None:
    if len(place.shape) != 1:
        return None
    place = uncast(place)
    return place if x.op == "iota" else make("take", x, place)


def _along_rows(place: Term, x: Term) -> Term | None:
    """The [N] that a [N, H] index of `x` repeats along its rows."""
    if len(place.shape) == 1:
        return place
    if place.shape[1:] != x.shape[1:]:
        return None
    if place.op != "expand" or len(place.args[0].shape) != 2 or place.args[0].shape[1] != 1:
        return None
    return place.args[0].args[0] if place.args[0].op == "view" else None


@_rule("index_put")
def _index_put(make: Any, args: list[Any], index: int) -> Term | None:
    x, (place, *others), values, accumulate = args
    if place is None or any(others) or len(place.shape) != 1:
        return None
    return _put(make, "add_at" if accumulate else "put", x, place, values)


@_rule("index_copy", "scatter")
def _scatter(make: Any, args: list[Any], index: int) -> Term | None:
    x, dim, place, values, *reduction = args
    if not isinstance(values, Term):
        return _one_hot(make, x, dim, place, values)
    place = _along_rows(place, x)
    if dim != 0 or place is None or any(reduction):
        return None
    return _put(make, "put", x, place, values)


@_rule("scatter_add", "index_add")
def _scatter_add(make: Any, args: list[Any], index: int) -> Term | None:
    x, dim, place, values, *alpha = args
    place = _along_rows(place, x)
    if dim != 0 or place is None or alpha not in ([], [1]):
        return None
    if is_fill(x, 0) and is_fill(values, 1) and len(x.shape) == 1:
        return make("counts", bare(place), x.shape[0])
    return _put(make, "add_at", x, place, values)


def _put(make: Any, op: str, x: Term, place: Term, values: Term) -> Term | None:
    return make(op, x, uncast(place), values) if values.shape[1:] == x.shape[1:] else None


def _one_hot(make: Any, x: Term, dim: int, place: Term, value: Any) -> Term | None:
    last = len(x.shape) - 1
    if not is_fill(x, 0) or value != 1 or dim % len(x.shape) != last:
        return None
    distinct = place.shape[-1] == 1 or place.op == "aten.topk.default"
    return make("one_hot", bare(place)) if distinct else None


@_rule("sort")
def _sort(make: Any, args: list[Any], index: int) -> Term | None:
    x, descending = args[0], args[-1]
    return None if len(x.shape) != 1 or descending else make(("sorted", "argsort")[index], bare(x))


@_rule("argsort")
def _argsort(make: Any, args: list[Any], index: int) -> Term | None:
    return _sort(make, args, 1)


@_rule("floor_divide")
def _floor_divide(make: Any, args: list[Any], index: int) -> Term | None:
    x, divisor = args
    return make("floordiv", bare(x), _number(divisor))


@_rule("div")
def _divide(make: Any, args: list[Any], index: int) -> Term | None:
    return _floor_divide(make, args[:2], index) if args[2:] == ["floor"] else None


@_rule("remainder")
def _remainder(make: Any, args: list[Any], index: int) -> Term | None:
    x, divisor = args
    return make("mod", bare(x), _number(divisor))


def _number(value: Any) -> Any:
    return value.args[0] if isinstance(value, Term) and value.op == "fill" else value


@_rule("add")
def _add(make: Any, args: list[Any], index: int) -> Term | None:
    x, y, *alpha = args
    return make("add", x, y) if alpha in ([], [1]) else None


@_rule("sub")
def _sub(make: Any, args: list[Any], index: int) -> Term | None:
    x, y, *alpha = args
    return make("sub", x, y) if alpha in ([], [1]) else None


@_rule("arange")
def _arange(make: Any, args: list[Any], index: int) -> Term | None:
    # (end, ...), (start, end, ...) or (start, end, step, ...), then dtype, layout, device, pin.
    start, _, step = (0, *args[:1], 1) if len(args) == 5 else (*args[:-4], 1)[:3]
    return make("iota") if (start, step) == (0, 1) else None


@_rule("eq")
def _equal(make: Any, args: list[Any], index: int) -> Term | None:
    """A comparison of [..., 1] with 0 .. n-1."""
    x, y = args
    if not isinstance(y, Term) or bare(y).op != "iota" or x.shape[-1:] != (1,):
        return None
    return make("one_hot", bare(x)) if bare(y).shape[-1:] == make("").shape[-1:] else None


@_rule("zeros", "zeros_like", "new_zeros", "zero")
def _zeros(make: Any, args: list[Any], index: int) -> Term | None:
    return make("fill", 0)


@_rule("ones", "ones_like", "new_ones")
def _ones(make: Any, args: list[Any], index: int) -> Term | None:
    return make("fill", 1)


@_rule("full", "full_like", "fill", "scalar_tensor")
def _full(make: Any, args: list[Any], index: int) -> Term | None:
    values = [arg for arg in args if isinstance(arg, int | float)]
    return make("fill", values[0]) if values else None


@_rule("cumsum")
def _cumsum(make: Any, args: list[Any], index: int) -> Term | None:
    return make("cumsum", args[0]) if len(args[0].shape) == 1 else None


@_rule("histc")
def _histc(make: Any, args: list[Any], index: int) -> Term | None:
    x, bins, low, high = args
    return make("counts", bare(x), bins) if low == 0 and high in (bins - 1, bins) else None


@_rule("bincount")
def _bincount(make: Any, args: list[Any], index: int) -> Term | None:
    x, weights, size = args
    return make("counts", bare(x), size) if weights is None else None


@_rule("sum")
def _sum(make: Any, args: list[Any], index: int) -> Term | None:
    x = args[0]
    rank = len(x.shape)
    dims = args[1] if len(args) > 1 and args[1] else range(rank)
    dims = tuple(sorted(dim % rank for dim in dims))
    chosen = uncast(x)
    if chosen.op == "one_hot" and dims == tuple(range(rank - 1)):
        return make("counts", chosen.args[0], x.shape[-1])
    return make("sum", x, dims) if args[2:3] != [True] else None


@_rule("repeat_interleave")
def _repeat_interleave(make: Any, args: list[Any], index: int) -> Term | None:
    return make("segments", args[0])


@_rule("split_with_sizes")
def _split(make: Any, args: list[Any], index: int) -> Term | None:
    x, sizes, *dim = args
    return make("chunk", x, sizes, index) if dim in ([], [0]) else None


@_rule("cat")
def _cat(make: Any, args: list[Any], index: int) -> Term | None:
    parts, *dim = args
    return make("cat", parts) if dim in ([], [0]) else None


@_rule("all_to_all_single")
def _all_to_all(make: Any, args: list[Any], index: int) -> Term | None:
    return make("all_to_all", *args)


@_rule("all_gather_into_tensor")
def _all_gather(make: Any, args: list[Any], index: int) -> Term | None:
    return make("all_gather", args[0], args[-1])


@_rule("mul")
def _mul(make: Any, args: list[Any], index: int) -> Term | None:
    return make("mul", *args)
