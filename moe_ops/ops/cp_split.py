"""A sequence over the ranks of a context-parallel group in zigzag order, and back.

Of 2P equal chunks rank r holds chunks r and 2P-1-r, so that under a causal mask every rank has as
much to do. Several documents packed into the sequence can each be split so (`cu_seqlens_N1`).

    cp_split:            part of rank r = (chunk r, chunk 2P-1-r) of its whole sequence
    cp_unsplit:          whole sequence from the parts of all ranks
    cp_split_backward:   this rank's part in its place, zeros elsewhere
    cp_unsplit_backward: sum over ranks q, in order, of this rank's part of q's whole sequence

Letters: P ranks, S tokens of the whole sequence, N documents.

    P = 2, 4 tokens [1, 2, 3, 4] (K = 2, E = 3 or any other): cp_split gives [1, 4] on rank 0 and
    [2, 3] on rank 1, cp_unsplit of those [1, 2, 3, 4] on both; cp_split_backward of the parts gives
    [1, 0, 0, 4] and [0, 2, 3, 0], cp_unsplit_backward of [1, 2, 3, 4] on both [2, 8] and [4, 6]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import _library, checks, comm, layout
from ..comm import zigzag
from ..comm.collectives import all_to_all_rows


def cp_split(
    x: torch.Tensor,
    dim: int,
    *,
    cu_seqlens_N1: torch.Tensor | None = None,
    group: dist.ProcessGroup | str | None,
) -> torch.Tensor:
    """This rank's part of a whole sequence: S / P long in dimension `dim`.

    For tokens, labels, positions, masks alike. Labels are shifted before they are split.

    Args:
        x: any dtype, equal in shape on all ranks; S must be a multiple of 2P.
        cu_seqlens_N1: [N + 1] int32 or int64 on x's device, equal on all ranks, multiples of 2P:
            where each of N documents begins, and S. Each is split by itself; the part is one of
            each after another. Not read by the host.

    Raises:
        TypeError, ValueError: on every rank, if one of them gave a wrong dimension or size, or if
            they differ.
        RuntimeError: `cu_seqlens_N1` breaks the rule above; on CUDA an assertion on the device, on
            that rank alone. Values that differ by rank are not noticed.

    Gradients: of this rank's own part alone, zero elsewhere. The gradient of the sum of all ranks'
    losses is its sum over ranks.
    """
    name = comm.group_name_of(group)
    if cu_seqlens_N1 is None:
        return _cp_split(x, dim, name)
    num_chunks = 2 * zigzag.group_size(name)
    zigzag.check_documents("cp_split", cu_seqlens_N1, x, dim, num_chunks, name)
    order = zigzag.chunk_order(cu_seqlens_N1, num_chunks, x.shape[dim], name)
    part = _cp_split(x.index_select(dim, order), dim, name)
    order = zigzag.chunk_order(cu_seqlens_N1, 2, part.shape[dim], name)
    return part.index_select(dim, order.argsort())


def cp_unsplit(
    x: torch.Tensor,
    dim: int,
    dep: torch.Tensor | None = None,
    *,
    cu_seqlens_N1: torch.Tensor | None = None,
    group: dist.ProcessGroup | str | None,
) -> torch.Tensor:
    """The whole sequence, on every rank, from every rank's part: P times as long. Collective.

    Args:
        x: any dtype, equal in shape on all ranks; of even size in dimension `dim`.
        dep: any tensor on x's device, not read: the sequence is not put together before it exists
            (as in `cp_shift`).
        cu_seqlens_N1: as given to `cp_split`.

    Raises:
        TypeError, ValueError: on every rank, if one of them gave a wrong dimension or size, or if
            they differ.
        RuntimeError: `cu_seqlens_N1` breaks the rule above; on CUDA an assertion on the device, on
            that rank alone. Values that differ by rank are not noticed.

    Gradients: summed over the ranks, in rank order, in at least float32; none for `dep`.
    """
    name = comm.group_name_of(group)
    if cu_seqlens_N1 is None:
        return _cp_unsplit(x, dim, name, dep)
    zigzag.check_documents("cp_unsplit", cu_seqlens_N1, x, dim, 2, name)
    order = zigzag.chunk_order(cu_seqlens_N1, 2, x.shape[dim], name)
    whole = _cp_unsplit(x.index_select(dim, order), dim, name, dep)
    num_chunks = 2 * zigzag.group_size(name)
    order = zigzag.chunk_order(cu_seqlens_N1, num_chunks, whole.shape[dim], name)
    return whole.index_select(dim, order.argsort())


def _check(
    op: str, x: torch.Tensor, dim: int, group_name: str, dep: torch.Tensor | None = None
) -> tuple[object, ...]:
    num_ranks = comm.group_size(group_name, op)
    whole = op in ("cp_split", "cp_unsplit_backward")
    num_chunks = 2 * num_ranks if whole else 2
    checks.rows(op, "x", x)
    if dep is not None:
        checks.tensor(op, "dep", dep, dep.dim(), like=x)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{op}: dim must be one of x's {x.dim()} dimensions, got {dim}")
    size = x.shape[dim]
    checks.holds(
        op,
        size % num_chunks == 0,
        lambda: (
            f"x must have a multiple of {num_chunks} tokens in dimension {dim}, for a group of "
            f"{num_ranks} ranks, got {size}; pad the sequence"
        ),
    )
    return tuple(x.shape), x.dtype, dim


def _part(x: torch.Tensor, dim: int, rank: int, num_ranks: int) -> torch.Tensor:
    """Rank `rank`'s part of the whole sequence."""
    chunk = x.shape[dim] // (2 * num_ranks)
    first, last = (x.narrow(dim, c * chunk, chunk) for c in (rank, 2 * num_ranks - 1 - rank))
    return torch.cat([first, last], dim)


def _whole(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    """The whole sequence of all ranks' parts."""
    half = parts[0].shape[dim] // 2
    first = [part.narrow(dim, 0, half) for part in parts]
    last = [part.narrow(dim, half, half) for part in reversed(parts)]
    return torch.cat([*first, *last], dim)


def _split_reference(x: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    return _part(x, dim, comm.group_rank(group_name), comm.group_size(group_name))


def _split_backward_reference(x: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    parts = [torch.zeros_like(x)] * comm.group_size(group_name)
    parts[comm.group_rank(group_name)] = x
    return _whole(parts, dim)


def _unsplit_reference(
    x: torch.Tensor, dim: int, group_name: str, dep: torch.Tensor | None = None
) -> torch.Tensor:
    return _whole(list(comm.all_gather(x, group_name).unbind(0)), dim)


def _unsplit_backward_reference(x: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    num_ranks = comm.group_size(group_name)
    outgoing = torch.stack([_part(x, dim, rank, num_ranks) for rank in range(num_ranks)])
    incoming = all_to_all_rows(outgoing, [1] * num_ranks, [1] * num_ranks, group_name)
    total, *others = incoming.to(layout.accumulate_dtype(x.dtype)).unbind(0)
    for part in others:
        total = total + part
    return total.to(x.dtype).contiguous() if num_ranks > 1 else total.to(x.dtype, copy=True)


def _smaller(x: torch.Tensor, dim: int, group_name: str) -> torch.Tensor:
    return _resized(x, dim, x.shape[dim] // comm.group_size(group_name))


def _larger(
    x: torch.Tensor, dim: int, group_name: str, dep: torch.Tensor | None = None
) -> torch.Tensor:
    return _resized(x, dim, x.shape[dim] * comm.group_size(group_name))


def _resized(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = size
    return x.new_empty(shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.dim, ctx.group_name, *others = inputs
    ctx.num_others = len(others)


def _define(
    op: str, mirror: str, reference: Callable[..., Any], fake: Callable[..., Any], more: str = ""
) -> Any:
    """`op`, whose gradient is `mirror` and the other way round; `more` arguments, without one."""

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        overload = getattr(torch.ops.moe_ops, mirror).default
        return overload(grad, ctx.dim, ctx.group_name), *[None] * (2 + ctx.num_others)

    return _library.define(
        f"{op}(Tensor x, int dim, str group_name{more}) -> Tensor",
        check=functools.partial(_check, op),
        reference=reference,
        fake=fake,
        setup_context=_setup_context,
        backward=backward,
    )


_cp_split = _define("cp_split", "cp_split_backward", _split_reference, _smaller)
_define("cp_split_backward", "cp_split", _split_backward_reference, _larger)
_cp_unsplit = _define(
    "cp_unsplit", "cp_unsplit_backward", _unsplit_reference, _larger, ", Tensor? dep=None"
)
_define("cp_unsplit_backward", "cp_unsplit", _unsplit_backward_reference, _smaller)
