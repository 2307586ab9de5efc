"""Collectives over rows with sizes known on the host. They wait; with one rank they copy."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..layout import read_splits
from .groups import backend_of, resolve


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


def check_pairs(op: str, send: list[int], receive: list[int], group_name: str) -> None:
    """Raise on every rank unless each receives exactly the rows that the others send it.

    gloo would abort the process for too few and leave memory unwritten for too many. With NCCL
    reading the answer would wait for the device, so nothing is checked.
    """
    if group_name and backend_of(resolve(group_name)) != "gloo":
        return
    numbers = read_splits(all_gather(torch.tensor([send, receive]), group_name).flatten())
    lists = [numbers[start : start + len(send)] for start in range(0, len(numbers), len(send))]
    sent, received = lists[::2], lists[1::2]
    if sent != [list(column) for column in zip(*received)]:
        raise ValueError(
            f"{op}: what rank r sends to rank q must be what q receives from r, got rows to send "
            f"{sent} and to receive {received}, a list a rank"
        )


def all_gather(values: torch.Tensor, group_name: str) -> torch.Tensor:
    """Stack the equally shaped `values` of all ranks: [P, ...]."""
    if not group_name:
        return values.clone().unsqueeze(0)
    group = resolve(group_name)
    gathered = values.new_empty((group.size(), *values.shape))
    dist.all_gather(list(gathered.unbind(0)), values.contiguous(), group=group)
    return gathered
