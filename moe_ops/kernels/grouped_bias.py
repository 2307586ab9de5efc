"""Triton kernels of grouped_bias and grouped_bias_backward.

The bias' gradient is a sum over each expert's rows in two steps of fixed order. Rows are cut into
chunks of equal length; each stretch of one chunk that belongs to one expert is summed by one
program, then one program sums the expert's stretches. Walking through the rows, either the chunk or
the expert advances, so chunk + expert numbers the stretches without gaps to look up.

Letters as in `moe_ops.ops.grouped_bias`: L experts here, C rows, O features. `end` is the first row
of the tail, which is not read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import ceil_div, column_block, computes_in_float32, power_of_two_from
from .intervals import interval_of
from .kernel import Kernel

_TILE = 2048
# Chunks are at least so long, and about 1024 at most.
_SHORTEST_CHUNK, _MOST_CHUNKS = 64, 1024


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def grouped_bias_kernel(
    rows_ptr,
    bias_ptr,
    row_weights_ptr,
    offsets_ptr,
    out_ptr,
    num_rows,
    num_experts,
    O: tl.constexpr,  # noqa: E741 - the letter of the operator
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Each program computes one block of columns of ROWS rows."""
    BLOCKS_O: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    program = tl.program_id(0)
    rows_R = (program // BLOCKS_O) * ROWS + tl.arange(0, ROWS)
    columns = (program % BLOCKS_O) * BLOCK_O + tl.arange(0, BLOCK_O)
    column_mask = (columns < O)[None, :]
    held_R = rows_R < tl.load(offsets_ptr + num_experts - 1)
    mask = held_R[:, None] & column_mask
    at = rows_R.to(tl.int64)[:, None] * O + columns[None, :]
    values = tl.load(rows_ptr + at, mask=mask, other=0, eviction_policy="evict_first")
    experts_R = interval_of(rows_R, offsets_ptr, num_experts, STEPS)
    starts_R1 = experts_R.to(tl.int64)[:, None] * O
    bias = tl.load(bias_ptr + starts_R1 + columns[None, :], mask=mask, other=0).to(tl.float32)
    if row_weights_ptr is not None:
        bias *= tl.load(row_weights_ptr + rows_R, mask=held_R, other=0)[:, None]
    out = (values.to(tl.float32) + bias).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=(rows_R < num_rows)[:, None] & column_mask)


@triton.jit(do_not_specialize=["num_rows", "num_experts", "chunk_rows"])
def bias_stretches_kernel(
    grad_ptr,
    bias_ptr,
    row_weights_ptr,
    offsets_ptr,
    stretches_ptr,
    row_dots_ptr,
    num_rows,
    num_experts,
    chunk_rows,
    O: tl.constexpr,  # noqa: E741
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Each program sums one block of columns of the stretches of one chunk and, if there are
    weights, takes each row's product with its bias over these columns.
    """
    BLOCKS_O: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    chunk, block = tl.program_id(0) // BLOCKS_O, tl.program_id(0) % BLOCKS_O
    columns = block * BLOCK_O + tl.arange(0, BLOCK_O)
    inside = columns < O
    row_dots_ptr += block.to(tl.int64) * num_rows
    start, stop = chunk * chunk_rows, tl.minimum((chunk + 1) * chunk_rows, num_rows)
    held_stop = tl.minimum(stop, tl.load(offsets_ptr + num_experts - 1))
    if start < held_stop:
        first_expert = interval_of(start, offsets_ptr, num_experts, STEPS)
        last_expert = interval_of(held_stop - 1, offsets_ptr, num_experts, STEPS)
        for expert in range(first_expert, last_expert + 1):
            expert_start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
            from_row = tl.maximum(start, expert_start)
            to_row = tl.minimum(held_stop, tl.load(offsets_ptr + expert))
            bias_O = tl.load(
                bias_ptr + tl.cast(expert, tl.int64) * O + columns, mask=inside, other=0
            ).to(tl.float32)
            total = tl.zeros([ROWS, BLOCK_O], tl.float32)
            for first in range(from_row, to_row, ROWS):
                rows_R = first + tl.arange(0, ROWS)
                held_R = rows_R < to_row
                at = rows_R.to(tl.int64)[:, None] * O + columns[None, :]
                mask = held_R[:, None] & inside[None, :]
                grad = tl.load(grad_ptr + at, mask=mask, other=0).to(tl.float32)
                if row_weights_ptr is not None:
                    dots_R = tl.sum(grad * bias_O[None, :], 1)
                    tl.store(row_dots_ptr + rows_R, dots_R, mask=held_R)
                    grad *= tl.load(row_weights_ptr + rows_R, mask=held_R, other=0)[:, None]
                total += grad
            stretch = (chunk + expert).to(tl.int64) * O
            tl.store(stretches_ptr + stretch + columns, tl.sum(total, 0), mask=inside)
    if row_weights_ptr is not None:
        for first in range(tl.maximum(start, held_stop), stop, ROWS):
            rows_R = first + tl.arange(0, ROWS)
            tl.store(row_dots_ptr + rows_R, tl.zeros([ROWS], tl.float32), mask=rows_R < stop)


@triton.jit(do_not_specialize=["chunk_rows"])
def bias_sums_kernel(
    stretches_ptr,
    offsets_ptr,
    grad_bias_ptr,
    chunk_rows,
    O: tl.constexpr,  # noqa: E741
    STRETCHES: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Each program sums one block of columns of the stretches of one expert."""
    BLOCKS_O: tl.constexpr = (O + BLOCK_O - 1) // BLOCK_O
    expert = tl.program_id(0) // BLOCKS_O
    columns = (tl.program_id(0) % BLOCKS_O) * BLOCK_O + tl.arange(0, BLOCK_O)
    inside = columns < O
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    from_chunk = start // chunk_rows
    to_chunk = tl.where(start < end, (end + chunk_rows - 1) // chunk_rows, from_chunk)
    total = tl.zeros([STRETCHES, BLOCK_O], tl.float32)
    for first in range(from_chunk, to_chunk, STRETCHES):
        chunks = first + tl.arange(0, STRETCHES)
        at = (chunks + expert).to(tl.int64)[:, None] * O + columns[None, :]
        mask = (chunks < to_chunk)[:, None] & inside[None, :]
        total += tl.load(stretches_ptr + at, mask=mask, other=0)
    sums = tl.sum(total, 0).to(grad_bias_ptr.dtype.element_ty)
    tl.store(grad_bias_ptr + expert.to(tl.int64) * O + columns, sums, mask=inside)


def grouped_bias(
    rows_CO: torch.Tensor,
    bias_LO: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
) -> torch.Tensor:
    """The operator `grouped_bias`."""
    num_rows, width = rows_CO.shape
    out_CO = rows_CO.new_empty(rows_CO.shape)
    if out_CO.numel() == 0:
        return out_CO
    block = column_block(width, 128, 512)
    tile = _TILE // block
    grouped_bias_kernel[(ceil_div(num_rows, tile) * ceil_div(width, block),)](
        rows_CO.contiguous(),
        bias_LO.contiguous(),
        None if row_weights_C is None else row_weights_C.contiguous(),
        offsets_L.contiguous(),
        out_CO,
        num_rows,
        offsets_L.shape[0],
        O=width,
        STEPS=offsets_L.shape[0].bit_length(),
        ROWS=tile,
        BLOCK_O=block,
        num_warps=4,
    )
    return out_CO


def grouped_bias_backward(
    grad_CO: torch.Tensor,
    bias_LO: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator `grouped_bias_backward`."""
    (num_rows, width), num_experts = grad_CO.shape, offsets_L.shape[0]
    grad_bias_LO = bias_LO.new_empty(bias_LO.shape)
    block = column_block(max(width, 1), 64, 256)
    blocks, tile = ceil_div(width, block), max(_TILE // block, 1)
    chunk_rows = power_of_two_from(max(ceil_div(num_rows, _MOST_CHUNKS), _SHORTEST_CHUNK))
    chunks = ceil_div(num_rows, chunk_rows)
    stretches = grad_CO.new_empty(chunks + num_experts, width, dtype=torch.float32)
    weighted = row_weights_C is not None
    row_dots = grad_CO.new_empty(blocks, num_rows if weighted else 0, dtype=torch.float32)
    offsets_L = offsets_L.contiguous()
    bias_stretches_kernel[(chunks * blocks,)](
        grad_CO.contiguous(),
        bias_LO.contiguous(),
        None if row_weights_C is None else row_weights_C.contiguous(),
        offsets_L,
        stretches,
        row_dots,
        num_rows,
        num_experts,
        chunk_rows,
        O=width,
        STEPS=num_experts.bit_length(),
        ROWS=tile,
        BLOCK_O=block,
        num_warps=4,
    )
    block = min(block, 128)
    bias_sums_kernel[(num_experts * ceil_div(width, block),)](
        stretches,
        offsets_L,
        grad_bias_LO,
        chunk_rows,
        O=width,
        STRETCHES=16,
        BLOCK_O=block,
        num_warps=4,
    )
    return grad_bias_LO, row_dots.sum(0)


KERNELS: dict[str, list[Kernel]] = {
    "grouped_bias": [Kernel("triton", computes_in_float32, grouped_bias)],
    "grouped_bias_backward": [Kernel("triton", computes_in_float32, grouped_bias_backward)],
}
