"""Collectives over rows with sizes known on the host. They wait; with one rank they copy."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .groups import resolve


def all_to_all_rows(
    rows: torch.Tensor, send: list[int], receive: list[int], group_name: str
) -> torch.Tensor:
    """Send chunk q of `rows` (send[q] rows) to rank q; returns the received chunks in rank order.

    rows [sum(send), ...] of any dtype; returns [sum(receive), ...].
    """
    received = rows.new_empty((sum(receive), *rows.shape[1:]))
    if not group_name:
        return received.copy_(rows)
    if 0 in rows.shape[1:]:  # on every rank: rows are equally wide, while their number differs
        return received
    dist.all_to_all_single(received, rows.contiguous(), receive, send, group=resolve(group_name))
    return received


def all_gather(values: torch.Tensor, group_name: str) -> torch.Tensor:
    """Stack the equally shaped `values` of all ranks: [P, ...]."""
    if not group_name:
        return values.clone().unsqueeze(0)
    group = resolve(group_name)
    gathered = values.new_empty((group.size(), *values.shape))
    dist.all_gather(list(gathered.unbind(0)), values.contiguous(), group=group)
    return gathered
