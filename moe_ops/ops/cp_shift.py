"""Every rank hands its buffer on to the rank `hops` further in the ring.

    cp_shift: out on rank r = buf of rank (r - hops) mod P; `dep` is not read

`dep` says after what: a shift in a backward that names the gradient there cannot be computed in the
forward, where the partitioner would do it and keep its result, every rank's keys and values.

Private, made by `fx_passes.split_exchange`, and by `cp_attention` without a compiler:

    cp_shift_wait(cp_shift_start(buf, dep, ...), buf) = cp_shift(buf, dep, ...)

Letters: P ranks, N elements.

    P = 2, hops = 1, 4 tokens' values (K = 2, E = 3 or any other), buf = [1, 2, 3, 4] on rank 0 and
    [5, 6, 7, 8] on rank 1: rank 0 gets [5, 6, 7, 8], rank 1 [1, 2, 3, 4]
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from .. import _library, checks, comm
from ..comm import in_flight
from ..comm.collectives import all_to_all_rows


def cp_shift(
    buf: torch.Tensor,
    dep: torch.Tensor | None = None,
    hops: int = 1,
    *,
    group: dist.ProcessGroup | str | None,
) -> torch.Tensor:
    """[N], the buffer of the rank `hops` before this one in the ring. Collective.

    Args:
        buf: [N], any dtype, equally long on all ranks; flat, since one message is.
        dep: any tensor on buf's device, not read: the shift is not done before it exists. Default:
            buf.
        hops: equal on all ranks; negative ones go the other way.

    Raises:
        TypeError, ValueError: on every rank, if one of them gave a wrong rank or device, or if
            they differ.

    Gradients: shifted back; none for `dep`.
    """
    return _cp_shift(buf, buf if dep is None else dep, hops, comm.group_name_of(group))


def _check(
    op: str, buf: torch.Tensor, dep: torch.Tensor, hops: int, group_name: str
) -> tuple[object, ...]:
    comm.group_size(group_name, op)
    checks.tensor(op, "buf", buf, 1)
    checks.tensor(op, "dep", dep, dep.dim(), like=buf)
    return buf.shape[0], buf.dtype, hops


def _reference(buf: torch.Tensor, dep: torch.Tensor, hops: int, group_name: str) -> torch.Tensor:
    num_ranks, rank = comm.group_size(group_name), comm.group_rank(group_name)
    send, receive = [0] * num_ranks, [0] * num_ranks
    send[(rank + hops) % num_ranks] = receive[(rank - hops) % num_ranks] = buf.shape[0]
    return all_to_all_rows(buf, send, receive, group_name)


def _fake(buf: torch.Tensor, dep: torch.Tensor, hops: int, group_name: str) -> torch.Tensor:
    return buf.new_empty(buf.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, _, ctx.hops, ctx.group_name = inputs


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _cp_shift(grad, grad, -ctx.hops, ctx.group_name), None, None, None


def _start(buf: torch.Tensor, dep: torch.Tensor, hops: int, group_name: str) -> torch.Tensor:
    return in_flight.start(lambda: [_reference(buf, dep, hops, group_name)], buf)


def _start_fake(buf: torch.Tensor, dep: torch.Tensor, hops: int, group_name: str) -> torch.Tensor:
    return buf.new_empty(1, dtype=torch.int64)


def _check_wait(ticket_1: torch.Tensor, buf: torch.Tensor) -> None:
    checks.tensor("cp_shift_wait", "ticket_1", ticket_1, 1, (torch.int64,), like=buf)


def _wait(ticket_1: torch.Tensor, buf: torch.Tensor) -> torch.Tensor:
    (shifted,) = in_flight.wait("cp_shift_wait", ticket_1)
    return shifted


_cp_shift = _library.define(
    "cp_shift(Tensor buf, Tensor dep, int hops, str group_name) -> Tensor",
    check=functools.partial(_check, "cp_shift"),
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
_library.define(
    "cp_shift_start(Tensor buf, Tensor dep, int hops, str group_name) -> Tensor ticket_1",
    check=functools.partial(_check, "cp_shift_start"),
    reference=_start,
    fake=_start_fake,
    private=True,
)
_library.define(
    "cp_shift_wait(Tensor ticket_1, Tensor buf) -> Tensor",
    check=_check_wait,
    reference=_wait,
    fake=lambda ticket_1, buf: buf.new_empty(buf.shape),
    private=True,
)
