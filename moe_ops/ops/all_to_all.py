"""Exchange chunks of rows between ranks, with sizes known on the host.

Letters: P ranks. Chunk q of the rows goes to rank q; what comes back lies in rank order, then
zeros.

    rank 0 of 2 holds 4 tokens' rows [a, b, c, d] (K = 2, E = 3 or any other), send_P = [3, 1];
    rank 1 holds [e], send_P = [0, 1]: rank 0 receives [a, b, c], recv_P = [3, 0]; rank 1 [d, e],
    recv_P = [1, 1]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from .. import _library, checks, comm, layout
from ..comm.collectives import all_to_all_rows, check_pairs


def all_to_all(
    rows: torch.Tensor,
    send_P: torch.Tensor,
    recv_P: torch.Tensor,
    num_rows: int,
    *,
    group: dist.ProcessGroup | str | None,
) -> torch.Tensor:
    """Rows received [num_rows, ...]: rank 0's chunk for this rank, rank 1's, ..., then zeros.
    Collective.

    Args:
        rows: [N, ...], any dtype; the first send_P.sum() rows are sent, later ones are not read.
        send_P, recv_P: [P] int64 on the CPU; rank r's send_P[q] must be rank q's recv_P[r].
        num_rows: at least recv_P.sum().

    Raises:
        TypeError, ValueError: on every rank, if one of them gave a wrong dtype, rank, device or
            size.

    Gradients: itself with send_P and recv_P swapped.
    """
    return _all_to_all(rows, send_P, recv_P, num_rows, comm.group_name_of(group))


def _check(
    rows: torch.Tensor, send_P: torch.Tensor, recv_P: torch.Tensor, num_rows: int, group_name: str
) -> tuple[object, ...]:
    op = "all_to_all"
    checks.rows(op, "rows", rows)
    for name, splits_P in (("send_P", send_P), ("recv_P", recv_P)):
        checks.tensor(op, name, splits_P, 1, (torch.int64,))
        checks.on_cpu(op, name, splits_P)
        checks.same_size(
            op, f"{name} must have a count a rank", splits_P.shape[0], comm.group_size(group_name)
        )
    checks.capacity(op, "num_rows", num_rows)
    if not isinstance(send_P, FakeTensor):
        _check_counts(rows, layout.read_splits(send_P), layout.read_splits(recv_P), num_rows)
    return tuple(rows.shape[1:]), rows.dtype


def _check_counts(rows: torch.Tensor, send: list[int], receive: list[int], num_rows: int) -> None:
    if min(send + receive) < 0 or sum(send) > rows.shape[0] or sum(receive) > num_rows:
        raise ValueError(
            f"all_to_all: send_P and recv_P must not be negative, nor sum to more than the "
            f"{rows.shape[0]} rows given and the num_rows = {num_rows} wanted, "
            f"got {send} and {receive}"
        )


def _reference(
    rows: torch.Tensor, send_P: torch.Tensor, recv_P: torch.Tensor, num_rows: int, group_name: str
) -> torch.Tensor:
    send, receive = layout.read_splits(send_P), layout.read_splits(recv_P)
    check_pairs("all_to_all", send, receive, group_name)
    received = all_to_all_rows(rows[: sum(send)], send, receive, group_name)
    return torch.cat([received, rows.new_zeros(num_rows - sum(receive), *rows.shape[1:])])


def _fake(
    rows: torch.Tensor, send_P: torch.Tensor, recv_P: torch.Tensor, num_rows: int, group_name: str
) -> torch.Tensor:
    return rows.new_empty(num_rows, *rows.shape[1:])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, send_P, recv_P, _, ctx.group_name = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(send_P, recv_P)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    send_P, recv_P = ctx.saved_tensors
    return _all_to_all(grad, recv_P, send_P, ctx.num_rows, ctx.group_name), None, None, None, None


_all_to_all = _library.define(
    "all_to_all(Tensor rows, Tensor send_P, Tensor recv_P, SymInt num_rows, str group_name)"
    " -> Tensor",
    check=_check,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
