"""Gather every rank's rows everywhere, and sum every rank's contribution to one's own rows: an
adjoint pair.

    all_gather_rows:     out = rank 0's rows, rank 1's rows, ...
    reduce_scatter_rows: out = sum over ranks q, in order, of rank q's chunk for this rank

Letters: T rows here, P ranks, G rows of all ranks; chunk r has counts_P[r] rows and `gather_plan`
makes counts_P.

    rank 0 holds 4 tokens [a, b, c, d] (K = 2, E = 3 or any other), rank 1 [e], counts_P = [4, 1]:
    both gather [a, b, c, d, e]; reduce_scatter_rows of that gives 2 * [a, b, c, d] on rank 0 and 2
    * [e] on rank 1
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from .. import _library, checks, comm, layout
from ..comm.collectives import all_to_all_rows, check_pairs


def all_gather_rows(
    x: torch.Tensor, counts_P: torch.Tensor, num_rows: int, *, group: dist.ProcessGroup | str | None
) -> torch.Tensor:
    """[num_rows, ...]: all ranks' chunks in rank order, zero where a rank holds fewer rows than its
    chunk. Collective.

    Args:
        x: [T, ...], any dtype, T <= counts_P[this rank].
        counts_P: [P] int64 on the CPU, equal on all ranks.
        num_rows: G, at least counts_P.sum().

    Raises:
        TypeError, ValueError: on every rank, if one of them gave a wrong dtype, rank, device or
            size.

    Gradients: `reduce_scatter_rows`.
    """
    return _all_gather_rows(x, counts_P, num_rows, comm.group_name_of(group))


def reduce_scatter_rows(
    x: torch.Tensor, counts_P: torch.Tensor, num_rows: int, *, group: dist.ProcessGroup | str | None
) -> torch.Tensor:
    """[num_rows, ...] in x's dtype: the first rows of this rank's chunk, summed over ranks in rank
    order. Collective.

    An exchange and a sum in at least float32, so that the result does not depend on timing.

    Args:
        x: [G, ...], floating, G >= counts_P.sum(); rows past that are not read.
        counts_P: [P] int64 on the CPU, equal on all ranks.
        num_rows: T, at most counts_P[this rank].

    Raises:
        TypeError, ValueError: on every rank, if one of them gave a wrong dtype, rank, device or
            size.

    Gradients: `all_gather_rows`.
    """
    return _reduce_scatter_rows(x, counts_P, num_rows, comm.group_name_of(group))


def _check(
    op: str, x: torch.Tensor, counts_P: torch.Tensor, num_rows: int, group_name: str
) -> tuple[object, ...]:
    checks.rows(op, "x", x)
    if op == "reduce_scatter_rows" and not x.dtype.is_floating_point:
        raise TypeError(f"{op}: x must be floating, got {x.dtype}")
    checks.tensor(op, "counts_P", counts_P, 1, (torch.int64,))
    checks.on_cpu(op, "counts_P", counts_P)
    checks.same_size(
        op, "counts_P must have a count a rank", counts_P.shape[0], comm.group_size(group_name)
    )
    checks.capacity(op, "num_rows", num_rows)
    if not isinstance(counts_P, FakeTensor):
        counts = layout.read_splits(counts_P)
        own, whole = x.shape[0], num_rows
        if op == "reduce_scatter_rows":
            own, whole = whole, own
        if min(counts) < 0 or own > counts[comm.group_rank(group_name)] or whole < sum(counts):
            raise ValueError(
                f"{op}: counts_P must not be negative, cover this rank's {own} rows and sum "
                f"to at most {whole}, got {counts}"
            )
    return tuple(x.shape[1:]), x.dtype


def _all_gather_reference(
    x: torch.Tensor, counts_P: torch.Tensor, num_rows: int, group_name: str
) -> torch.Tensor:
    counts = layout.read_splits(counts_P)
    own = counts[comm.group_rank(group_name)]
    check_pairs("all_gather_rows", [own] * len(counts), counts, group_name)
    chunk = torch.cat([x, x.new_zeros(own - x.shape[0], *x.shape[1:])])
    copies = torch.cat([chunk] * len(counts))
    gathered = all_to_all_rows(copies, [own] * len(counts), counts, group_name)
    return torch.cat([gathered, x.new_zeros(num_rows - sum(counts), *x.shape[1:])])


def _reduce_scatter_reference(
    x: torch.Tensor, counts_P: torch.Tensor, num_rows: int, group_name: str
) -> torch.Tensor:
    counts = layout.read_splits(counts_P)
    own = counts[comm.group_rank(group_name)]
    check_pairs("reduce_scatter_rows", counts, [own] * len(counts), group_name)
    parts = all_to_all_rows(x[: sum(counts)], counts, [own] * len(counts), group_name)
    total = x.new_zeros((num_rows, *x.shape[1:]), dtype=layout.accumulate_dtype(x.dtype))
    for part in parts.split(own) if own else ():
        total = total + part[:num_rows].to(total.dtype)
    return total.to(x.dtype)


def _fake(x: torch.Tensor, counts_P: torch.Tensor, num_rows: int, group_name: str) -> torch.Tensor:
    return x.new_empty(num_rows, *x.shape[1:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, counts_P, _, ctx.group_name = inputs
    ctx.num_rows = x.shape[0]
    ctx.save_for_backward(counts_P)


def _all_gather_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (counts_P,) = ctx.saved_tensors
    return _reduce_scatter_rows(grad, counts_P, ctx.num_rows, ctx.group_name), None, None, None


def _reduce_scatter_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (counts_P,) = ctx.saved_tensors
    return _all_gather_rows(grad, counts_P, ctx.num_rows, ctx.group_name), None, None, None


_all_gather_rows = _library.define(
    "all_gather_rows(Tensor x, Tensor counts_P, SymInt num_rows, str group_name) -> Tensor",
    check=functools.partial(_check, "all_gather_rows"),
    reference=_all_gather_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_all_gather_backward,
)
_reduce_scatter_rows = _library.define(
    "reduce_scatter_rows(Tensor x, Tensor counts_P, SymInt num_rows, str group_name) -> Tensor",
    check=functools.partial(_check, "reduce_scatter_rows"),
    reference=_reduce_scatter_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_reduce_scatter_backward,
)
