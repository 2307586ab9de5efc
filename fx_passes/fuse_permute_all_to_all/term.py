"""Terms, and what is the same for every kind of them."""

from __future__ import annotations

import dataclasses
import math
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


# Integers of integers.
_SAME_KIND = {"view", "cast", "transpose", "cumsum", "sum", "select", "slice", "elements"}
_SAME_KIND |= {"all_to_all"}
# Hold every number of an expert, token or row.
EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)


def uncast(term: Term) -> Term:
    """The integers of which `term` is an exact copy in another dtype."""
    while term.op == "cast" and term.dtype in EXACT and is_integral(term.args[0]):
        term = term.args[0]
    return term


def bare(term: Term) -> Term:
    """What `term` is a view of, or an exact copy of integers in another dtype."""
    while (inner := uncast(term)).op == "view" or inner is not term:
        term = inner.args[0] if inner.op == "view" else inner
    return term


def is_integral(term: Term) -> bool:
    """Whether `term` holds integers, whatever its dtype."""
    if term.dtype is not None and not term.dtype.is_floating_point:
        return True
    return term.op == "counts" or (term.op in _SAME_KIND and is_integral(term.args[0]))


def is_fill(term: Any, value: float) -> bool:
    """Whether all numbers of a tensor are `value`."""
    while term.op in ("view", "expand", "cast"):
        term = term.args[0]
    return term.op == "fill" and term.args == (value,)


def size_of(shape: tuple[Any, ...]) -> int | None:
    """How many numbers a tensor holds, if that is known."""
    return math.prod(shape) if all(isinstance(n, int) for n in shape) else None


def one_hot(term: Term) -> Term | None:
    """What `term` [.., n] is one_hot of, whatever its dtype and the dimensions before the last."""
    inner = bare(term)
    return inner.args[0] if inner.op == "one_hot" and inner.shape[-1:] == term.shape[-1:] else None


def viewed(make: Any, x: Term, **shape: Any) -> Term:
    """`x` in another shape."""
    base = x.args[0] if x.op == "view" else x
    new = make("view", base, dtype=base.dtype, **shape)
    return base if new.shape == base.shape else new
