"""Triton grouped_mm_wgrad for any width and stride.

    w[e] = sum over rows r of e of outer(g[r], a[r])

Letters as in `moe_ops.ops.grouped_mm`. One program sums one tile, `block_m` out features times
`block_n` in features of one expert, over all rows of that expert in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import ceil_div, computes_in_float32
from .grouped_mm_triton import (
    MANY_TILES,
    Tiles,
    block_of,
    dense_rows,
    inside,
    make_tiles,
    precision_of,
    tile_of,
    wide_block,
)
from .kernel import Kernel


@triton.jit
def grouped_mm_wgrad_kernel(
    g_ptr,
    a_ptr,
    w_ptr,
    offsets_ptr,
    WIDTH_O: tl.constexpr,
    WIDTH_I: tl.constexpr,
    STRIDE_G: tl.constexpr,
    STRIDE_A: tl.constexpr,
    STRIDE_WL: tl.constexpr,
    STRIDE_WO: tl.constexpr,
    STRIDE_WI: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of w. Both operands are zero past the expert's rows: 0 * NaN is NaN."""
    num_m, num_n = tl.cdiv(WIDTH_O, BLOCK_M), tl.cdiv(WIDTH_I, BLOCK_N)
    expert = tl.program_id(0) // (num_m * num_n)
    tile_m, tile_n = tile_of(tl.program_id(0) % (num_m * num_n), num_m, num_n, 8)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert)
    outs = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    ins = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    in_o, in_i = inside(outs, WIDTH_O, BLOCK_M), inside(ins, WIDTH_I, BLOCK_N)

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for row in range(start, end, BLOCK_K):
        rows = row + tl.arange(0, BLOCK_K)
        in_rows, rows = rows < end, rows.to(tl.int64)
        g_ptrs = g_ptr + rows[None, :] * STRIDE_G + outs[:, None]
        a_ptrs = a_ptr + rows[:, None] * STRIDE_A + ins[None, :]
        g = tl.load(g_ptrs, mask=in_rows[None, :] & in_o[:, None], other=0.0)
        a = tl.load(a_ptrs, mask=in_rows[:, None] & in_i[None, :], other=0.0)
        acc = tl.dot(g, a, acc, input_precision=PRECISION)
    w_ptrs = w_ptr + expert.to(tl.int64) * STRIDE_WL
    w_ptrs += outs[:, None] * STRIDE_WO + ins[None, :] * STRIDE_WI
    in_w = in_o[:, None] & in_i[None, :]
    if ACCUMULATE:
        acc += tl.load(w_ptrs, mask=in_w)
    tl.store(w_ptrs, acc.to(w_ptr.dtype.element_ty), mask=in_w)


def wgrad_tiles(
    g: torch.Tensor, a: torch.Tensor, num_experts: int, num_rows: int, accumulate: bool
) -> Tiles:
    """The largest block that leaves at least one program for each of 132 SMs.

    The sum that is added to is read at the end, in registers that 128 x 256 blocks do not leave.
    """
    width_o, width_i = g.shape[1], a.shape[1]
    wide = 128 if accumulate else wide_block(width_i, g.dtype)
    for block_m, block_n in ((128, wide), (128, 128), (128, 64), (64, 64)):
        per_expert = ceil_div(width_o, block_m) * ceil_div(width_i, block_n)
        if num_experts * per_expert >= MANY_TILES:
            break
    rows_each = ceil_div(num_rows, num_experts)
    return make_tiles(block_of(width_o, block_m), block_of(width_i, block_n), rows_each, g)


def grouped_mm_wgrad(
    g_CO: torch.Tensor,
    a_CI: torch.Tensor,
    offsets_L: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator `grouped_mm_wgrad`; with `out` (float32 [L, O, I]): `out` after adding to it."""
    num_experts, width_o, width_i = offsets_L.shape[0], g_CO.shape[1], a_CI.shape[1]
    tiles = wgrad_tiles(g_CO, a_CI, num_experts, g_CO.shape[0], out is not None)
    w_LOI = g_CO.new_empty(num_experts, width_o, width_i) if out is None else out
    if w_LOI.numel() == 0:
        return w_LOI
    g_CO, a_CI = dense_rows(g_CO), dense_rows(a_CI)
    per_expert = ceil_div(width_o, tiles.block_m) * ceil_div(width_i, tiles.block_n)
    grouped_mm_wgrad_kernel[(num_experts * per_expert,)](
        g_CO,
        a_CI,
        w_LOI,
        offsets_L.contiguous(),
        width_o,
        width_i,
        g_CO.stride(0),
        a_CI.stride(0),
        *w_LOI.stride(),
        out is not None,
        precision_of(g_CO.dtype),
        **tiles.blocks,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return w_LOI


KERNELS: dict[str, list[Kernel]] = {
    "grouped_mm_wgrad": [Kernel("triton", computes_in_float32, grouped_mm_wgrad)],
}
