"""Reorder chunks of rows from (a, b)-major to (b, a)-major: what lies between an all-to-all and the
experts.

Letters: A x B chunks, chunk (a, b) has counts_AB[a, b] rows; rows past the last chunk are zero and
not read.

    slots of 4 tokens (K = 2, E = 3) from 2 ranks, counts_AB = [[1, 0, 2], [1, 1, 0]],
    rows = [a, b, c, d, e, 0] -> [a, d, e, b, c, 0]: expert 0 of both ranks, expert 1, expert 2;
    the same with counts_AB.T undoes it
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _library, checks, layout


def sort_chunks(rows: torch.Tensor, counts_AB: torch.Tensor) -> torch.Tensor:
    """Rows [N, ...] with their chunks in (b, a)-major order. Never reads the device.

    Args:
        rows: [N, ...], any dtype; chunks follow each other without gaps.
        counts_AB: [A, B] int32, counts_AB.sum() <= N.

    Raises:
        TypeError, ValueError: wrong dtype, rank or device.

    Gradients: itself with counts_AB.T.
    """
    return _sort_chunks(rows, counts_AB)


def _check(rows: torch.Tensor, counts_AB: torch.Tensor) -> None:
    op = "sort_chunks"
    checks.rows(op, "rows", rows)
    checks.tensor(op, "counts_AB", counts_AB, 2, checks.INDICES, like=rows)


def _reference(rows: torch.Tensor, counts_AB: torch.Tensor) -> torch.Tensor:
    counts_AB = counts_AB.long()
    starts_BA = layout.starts_of(counts_AB.reshape(-1)).reshape(counts_AB.shape).T
    counts_BA = counts_AB.T.reshape(-1)
    index = torch.arange(rows.shape[0], device=rows.device)
    if counts_BA.shape[0] == 0:
        return torch.zeros_like(rows, memory_format=torch.contiguous_format)
    chunk = torch.searchsorted(counts_BA.cumsum(0), index, right=True)
    inside = chunk < counts_BA.shape[0]
    chunk = chunk.clamp(max=counts_BA.shape[0] - 1)
    source = starts_BA.reshape(-1)[chunk] + index - layout.starts_of(counts_BA)[chunk]
    return layout.take(rows, torch.where(inside, source, -1))


def _fake(rows: torch.Tensor, counts_AB: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    (counts_AB,) = ctx.saved_tensors
    return _sort_chunks(grad, counts_AB.T), None


_sort_chunks = _library.define(
    "sort_chunks(Tensor rows, Tensor counts_AB) -> Tensor",
    check=_check,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
