"""The term of each ATen operator that compares, counts, sums or sorts numbers, among `RULES`."""

from __future__ import annotations

from typing import Any

from .elements import elements
from .term import Term, bare, one_hot
from .term_rules import RULES, counts, pick, placed, rule

__all__ = ["RULES", "UNSTABLE"]

# A second argument of argsort: equal numbers come in some order.
UNSTABLE = "unstable"


@rule("sort")
def _sort(make: Any, args: list[Any], index: int) -> Term | None:
    x, *stable, _, descending = args
    if len(x.shape) != 1 or descending:
        return None
    ordered = bare(x)
    if index == 0:
        return make("sorted", ordered)
    how = [] if stable == [True] or ordered.op == "argsort" else [UNSTABLE]
    return make("argsort", ordered, *how)


@rule("argsort")
def _argsort(make: Any, args: list[Any], index: int) -> Term | None:
    return _sort(make, args, 1)


@rule("floor_divide")
def _floor_divide(make: Any, args: list[Any], index: int) -> Term | None:
    x, divisor = args
    return make("floordiv", bare(x), _number(divisor))


@rule("div")
def _divide(make: Any, args: list[Any], index: int) -> Term | None:
    return _floor_divide(make, args[:2], index) if args[2:] == ["floor"] else None


@rule("remainder")
def _remainder(make: Any, args: list[Any], index: int) -> Term | None:
    x, divisor = args
    return make("mod", bare(x), _number(divisor))


def _number(value: Any) -> Any:
    return value.args[0] if isinstance(value, Term) and value.op == "fill" else value


@rule("add")
def _add(make: Any, args: list[Any], index: int) -> Term | None:
    x, y, *alpha = args
    if alpha not in ([], [1]):
        return None
    if isinstance(y, Term) and x.op == y.op == "elements":
        return elements(make, make("stack", (x, y), shape=(2,)), [0, 1])
    return placed(make, make("add", x, y))


@rule("sub")
def _sub(make: Any, args: list[Any], index: int) -> Term | None:
    x, y, *alpha = args
    return placed(make, make("sub", x, y)) if alpha in ([], [1]) else None


@rule("arange")
def _arange(make: Any, args: list[Any], index: int) -> Term | None:
    # (end, ...), (start, end, ...) or (start, end, step, ...), then dtype, layout, device, pin.
    start, _, step = (0, *args[:1], 1) if len(args) == 5 else (*args[:-4], 1)[:3]
    return make("iota") if (start, step) == (0, 1) else None


@rule("eq")
def _equal(make: Any, args: list[Any], index: int) -> Term | None:
    """A comparison of [..., 1] with 0 .. n-1."""
    x, y = args
    if not isinstance(y, Term):
        return None
    x, y = (y, x) if bare(x).op == "iota" else (x, y)
    if bare(y).op != "iota" or x.shape[-1:] != (1,):
        return None
    return make("one_hot", bare(x)) if bare(y).shape[-1:] == make("").shape[-1:] else None


@rule("zeros", "zeros_like", "new_zeros", "zero")
def _zeros(make: Any, args: list[Any], index: int) -> Term | None:
    return make("fill", 0)


@rule("ones", "ones_like", "new_ones")
def _ones(make: Any, args: list[Any], index: int) -> Term | None:
    return make("fill", 1)


@rule("full", "full_like", "fill", "scalar_tensor")
def _full(make: Any, args: list[Any], index: int) -> Term | None:
    values = [arg for arg in args if isinstance(arg, int | float)]
    return make("fill", values[0]) if values else None


@rule("cumsum")
def _cumsum(make: Any, args: list[Any], index: int) -> Term | None:
    x, dim = args[:2]
    return make("cumsum", x) if x.shape and dim % len(x.shape) == 0 else None


@rule("histc")
def _histc(make: Any, args: list[Any], index: int) -> Term | None:
    x, bins, low, high = args
    return counts(make, x, bins) if low == 0 and high in (bins - 1, bins) else None


@rule("bincount")
def _bincount(make: Any, args: list[Any], index: int) -> Term | None:
    x, weights, size = args
    # It is longer only if an id is out of range.
    return counts(make, x, size) if weights is None else None


@rule("sum")
def _sum(make: Any, args: list[Any], index: int) -> Term | None:
    x, *rest = args
    rank = len(x.shape)
    dims = rest[0] if rest and isinstance(rest[0], tuple) and rest[0] else range(rank)
    dims = tuple(sorted(dim % rank for dim in dims))
    if rest[1:2] == [True] or not rank:
        return None
    hot = one_hot(x)
    if hot is not None and dims == tuple(range(rank - 1)):
        return counts(make, hot, x.shape[-1])
    if hot is not None and rank - 1 not in dims:
        return make("one_hot", hot)
    if (picked := _picked(x)) is not None and dims == (1,):
        return pick(make, *picked)
    summed = make("sum", x, dims)
    return (elements(make, summed, [0]) if summed.shape == () else None) or summed


def _picked(x: Term) -> tuple[Term, Term] | None:
    """values [N, n] and i, if `x` is `values` at i in the last dimension and 0 elsewhere."""
    if x.op != "mul" or len(x.shape) != 2:
        return None
    for values, mask in (x.args, x.args[::-1]):
        hot = one_hot(mask) if isinstance(mask, Term) and mask.shape == x.shape else None
        if hot is not None and isinstance(values, Term) and values.shape == x.shape:
            return values, hot
    return None


@rule("mul")
def _mul(make: Any, args: list[Any], index: int) -> Term | None:
    return make("mul", *args)
