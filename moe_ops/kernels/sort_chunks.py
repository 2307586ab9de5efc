"""Triton kernels of sort_chunks: a table of where chunks lie, then one copy, whatever the dtype.

Letters as in `moe_ops.ops.sort_chunks`: A x B chunks; N rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import ceil_div, column_block
from .intervals import interval_of
from .kernel import Kernel

_TILE = 2048
_INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@triton.jit(do_not_specialize=["stride_a", "stride_b", "num_a", "num_b"])
def chunk_table_kernel(
    counts_ptr, table_ptr, stride_a, stride_b, num_a, num_b, BLOCK: tl.constexpr
):
    """Rows of the table, by chunk in (b, a)-major order: ends there, starts there, starts in
    (a, b)-major order.
    """
    num_chunks = num_a * num_b
    carry_ab = tl.full((), 0, tl.int64)
    carry_ba = tl.full((), 0, tl.int64)
    for first in range(0, num_chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        inside = chunk < num_chunks
        a, b = chunk // num_b, chunk % num_b
        counts = tl.load(counts_ptr + a * stride_a + b * stride_b, mask=inside, other=0)
        counts = counts.to(tl.int64)
        starts = tl.cumsum(counts, 0) - counts + carry_ab
        tl.store(table_ptr + 2 * num_chunks + b * num_a + a, starts, mask=inside)
        carry_ab += tl.sum(counts)
        a, b = chunk % num_a, chunk // num_a
        counts = tl.load(counts_ptr + a * stride_a + b * stride_b, mask=inside, other=0)
        counts = counts.to(tl.int64)
        ends = tl.cumsum(counts, 0) + carry_ba
        tl.store(table_ptr + chunk, ends, mask=inside)
        tl.store(table_ptr + num_chunks + chunk, ends - counts, mask=inside)
        carry_ba += tl.sum(counts)


@triton.jit(do_not_specialize=["num_rows", "num_chunks"])
def sort_chunks_kernel(
    rows_ptr,
    table_ptr,
    sorted_ptr,
    num_rows,
    num_chunks,
    WIDTH: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program copies one block of columns of ROWS sorted rows."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    rows_R = (program // BLOCKS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (program % BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    column_mask = (columns < WIDTH)[None, :]
    chunk_R = interval_of(rows_R, table_ptr, num_chunks, STEPS)
    held_R = chunk_R < num_chunks
    begin_R = tl.load(table_ptr + num_chunks + chunk_R, mask=held_R, other=0)
    start_R = tl.load(table_ptr + 2 * num_chunks + chunk_R, mask=held_R, other=0)
    source_R1 = (start_R + rows_R - begin_R)[:, None] * WIDTH
    values = tl.load(
        rows_ptr + source_R1 + columns[None, :],
        mask=held_R[:, None] & column_mask,
        other=0,
        eviction_policy="evict_first",
    )
    target = sorted_ptr + rows_R[:, None] * WIDTH + columns[None, :]
    tl.store(target, values, mask=(rows_R < num_rows)[:, None] & column_mask)


def _as_integers(rows: torch.Tensor, size: int) -> torch.Tensor:
    return rows.reshape(rows.shape[0], -1).view(_INTEGERS[size])


def sort_chunks(rows: torch.Tensor, counts_AB: torch.Tensor) -> torch.Tensor:
    """The operator `sort_chunks`."""
    sorted_rows = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if rows.numel() == 0:
        return sorted_rows
    rows, (num_a, num_b) = rows.contiguous(), counts_AB.shape
    item, num_rows, num_chunks = rows.element_size(), rows.shape[0], num_a * num_b
    row_bytes = rows.numel() // num_rows * item
    offset = rows.storage_offset() * item
    size = next(s for s in _INTEGERS if row_bytes % s == 0 and offset % s == 0)
    width = row_bytes // size
    table = counts_AB.new_empty(3, num_chunks, dtype=torch.int64)
    chunk_table_kernel[(1,)](
        counts_AB, table, *counts_AB.stride(), num_a, num_b, BLOCK=256, num_warps=4
    )
    block = column_block(width, 256, 1024)
    tile = max(_TILE // block, 1)
    sort_chunks_kernel[(ceil_div(num_rows, tile) * ceil_div(width, block),)](
        _as_integers(rows, size),
        table,
        _as_integers(sorted_rows, size),
        num_rows,
        num_chunks,
        WIDTH=width,
        STEPS=num_chunks.bit_length(),
        ROWS=tile,
        BLOCK=block,
        num_warps=4,
    )
    return sorted_rows


def _takes(rows: torch.Tensor, counts_AB: torch.Tensor) -> bool:
    return not rows.is_complex()


KERNELS: dict[str, list[Kernel]] = {"sort_chunks": [Kernel("triton", _takes, sort_chunks)]}
