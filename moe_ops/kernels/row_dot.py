"""Triton kernel of row_dot: one program takes the products of a token with up to 8 of its rows.

Letters as in `moe_ops.ops.row_dot`: T tokens, K top-k, C rows, H hidden; -1 = none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import ceil_div, computes_in_float32, power_of_two_from
from .kernel import Kernel

_UNROLL_H = 4


@triton.jit
def row_dot_kernel(
    rows_ptr,
    x_ptr,
    row_of_slot_ptr,
    dots_ptr,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """BLOCK_H is what one warp loads of a row at once, so a dot product stays within a warp."""
    BLOCKS_K: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    program = tl.program_id(0)
    token = (program // BLOCKS_K).to(tl.int64)
    choices_K = (program % BLOCKS_K) * BLOCK_K + tl.arange(0, BLOCK_K)
    slots_K = token * K + choices_K
    row_K = tl.load(row_of_slot_ptr + slots_K, mask=choices_K < K, other=-1)
    held_K = row_K >= 0
    starts_K1 = row_K.to(tl.int64)[:, None] * H
    total_KH = tl.zeros([BLOCK_K, BLOCK_H], tl.float32)
    for first in range(0, H, BLOCK_H * UNROLL):
        for step in tl.static_range(UNROLL):
            columns_1H = (first + step * BLOCK_H + tl.arange(0, BLOCK_H))[None, :]
            mask = held_K[:, None] & (columns_1H < H)
            # x once a row, not once: each warp has its own and needs none from the others.
            x_KH = tl.load(x_ptr + token * H + columns_1H + 0 * starts_K1, mask=mask, other=0)
            rows_KH = tl.load(
                rows_ptr + starts_K1 + columns_1H,
                mask=mask,
                other=0,
                eviction_policy="evict_first",
            )
            total_KH += rows_KH.to(tl.float32) * x_KH.to(tl.float32)
    tl.store(dots_ptr + slots_K, tl.sum(total_KH, 1), mask=choices_K < K)


def row_dot(
    rows_CH: torch.Tensor,
    x_TH: torch.Tensor,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> torch.Tensor:
    """The operator `row_dot`."""
    width, (num_tokens, top_k) = rows_CH.shape[1], row_of_slot_TK.shape
    dots_TK = rows_CH.new_empty(num_tokens, top_k, dtype=torch.float32)
    if dots_TK.numel() == 0:
        return dots_TK
    block_k = min(power_of_two_from(top_k), 8)
    block_h = min(512 // rows_CH.element_size(), power_of_two_from(max(width, 1)))
    row_dot_kernel[(num_tokens * ceil_div(top_k, block_k),)](
        rows_CH.contiguous(),
        x_TH.contiguous(),
        row_of_slot_TK.contiguous(),
        dots_TK,
        H=width,
        K=top_k,
        BLOCK_K=block_k,
        BLOCK_H=block_h,
        UNROLL=min(_UNROLL_H, max(ceil_div(width, block_h), 1)),
        num_warps=block_k,
    )
    return dots_TK


KERNELS: dict[str, list[Kernel]] = {
    "row_dot": [Kernel("triton", computes_in_float32, row_dot)],
}
