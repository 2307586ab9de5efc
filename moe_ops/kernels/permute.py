"""Triton kernels of permute and unpermute.

permute reads each token once and writes its K rows; narrow rows are gathered row by row instead,
so that writes stay contiguous. unpermute reads a token's K rows and sums them in the order of k.

Letters as in `moe_ops.ops.permute`: T tokens, K top-k, C rows, H hidden; -1 = none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import ceil_div, column_block, computes_in_float32, power_of_two_from, warps_for
from .kernel import Kernel

# Choices k in flight at a time, at most; a larger K loops over groups of them.
_MOST_STEPS = 8
# Rows narrower than this are gathered row by row.
_NARROW_BYTES = 256
# Rows that one program looks through for rows without a slot.
_ZERO_ROWS = 64


def _steps_of(top_k: int) -> int:
    """Choices that a kernel takes in one go, such that it takes as many each time."""
    rounds = max(ceil_div(top_k, _MOST_STEPS), 1)
    return max(ceil_div(top_k, rounds), 1)


@triton.jit
def _load_steps(ptr, slots, mask, other, first, K, UNROLL):
    """A tuple with what `ptr` holds of the choices first .. first + UNROLL - 1 of K."""
    values = ()
    for step in tl.static_range(UNROLL):
        known = mask & (first + step < K)
        values += (tl.load(ptr + slots + (first + step), mask=known, other=other),)
    return values


@triton.jit
def _load_rows(rows_ptr, row_of_step, columns, H, UNROLL):
    """A tuple with a block of columns of each step's rows, zero where there is none."""
    values = ()
    for step in tl.static_range(UNROLL):
        row_N = row_of_step[step]
        source = rows_ptr + row_N.to(tl.int64)[:, None] * H + columns[None, :]
        mask = (row_N >= 0)[:, None] & (columns < H)[None, :]
        values += (tl.load(source, mask=mask, other=0, eviction_policy="evict_first"),)
    return values


@triton.jit
def _zero_rows_without_slot(
    program,
    slot_of_row_ptr,
    rows_ptr,
    num_rows,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    rows_R = program * ROWS + tl.arange(0, ROWS)
    slots_R = tl.load(slot_of_row_ptr + rows_R, mask=rows_R < num_rows, other=0)
    if tl.min(slots_R) < 0:
        starts_R1 = rows_R.to(tl.int64)[:, None] * H
        zeros = tl.zeros([ROWS, BLOCK_H], rows_ptr.dtype.element_ty)
        for first in range(0, H, BLOCK_H):
            columns = first + tl.arange(0, BLOCK_H)
            mask = (slots_R < 0)[:, None] & (columns < H)[None, :]
            tl.store(rows_ptr + starts_R1 + columns[None, :], zeros, mask=mask)


@triton.jit(do_not_specialize=["num_token_programs", "num_rows"])
def permute_tokens_kernel(
    x_ptr,
    weights_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    rows_ptr,
    num_token_programs,
    num_rows,
    H: tl.constexpr,
    K: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    ZERO_ROWS: tl.constexpr,
    ZERO_BLOCK_H: tl.constexpr,
):
    """The first programs each write one block of columns of one token to its K rows, the others
    zero the rows without a slot.
    """
    BLOCKS_H: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    if program >= num_token_programs:
        _zero_rows_without_slot(
            program - num_token_programs,
            slot_of_row_ptr,
            rows_ptr,
            num_rows,
            H,
            ZERO_ROWS,
            ZERO_BLOCK_H,
        )
    else:
        token = (program // BLOCKS_H).to(tl.int64)
        columns = (program % BLOCKS_H) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = columns < H
        x = tl.load(
            x_ptr + token * H + columns, mask=inside, other=0, eviction_policy="evict_first"
        )
        for first in range(0, K, UNROLL):
            # Indices and weights come before the stores, which no later load may overtake.
            slot = token * K
            row_of_step = _load_steps(row_of_slot_ptr, slot, True, -1, first, K, UNROLL)
            if weights_ptr is not None:
                weight_of_step = _load_steps(weights_ptr, slot, True, 0, first, K, UNROLL)
            for step in tl.static_range(UNROLL):
                value = x
                if weights_ptr is not None:
                    value = (x.to(tl.float32) * weight_of_step[step]).to(x.dtype)
                row = row_of_step[step].to(tl.int64)
                tl.store(rows_ptr + row * H + columns, value, mask=inside & (row >= 0))


@triton.jit(do_not_specialize=["num_rows"])
def permute_rows_kernel(
    x_ptr,
    weights_ptr,
    slot_of_row_ptr,
    rows_ptr,
    num_rows,
    H: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Each program gathers ROWS whole rows."""
    rows_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R = rows_R < num_rows
    slots_R = tl.load(slot_of_row_ptr + rows_R, mask=inside_R, other=-1)
    held_R = slots_R >= 0
    columns = tl.arange(0, BLOCK_H)
    column_mask = (columns < H)[None, :]
    starts_R1 = (slots_R // K).to(tl.int64)[:, None] * H
    value = tl.load(
        x_ptr + starts_R1 + columns[None, :], mask=held_R[:, None] & column_mask, other=0
    )
    if weights_ptr is not None:
        weights_R = tl.load(weights_ptr + slots_R, mask=held_R, other=0)
        value = (value.to(tl.float32) * weights_R[:, None]).to(value.dtype)
    target = rows_ptr + rows_R.to(tl.int64)[:, None] * H + columns[None, :]
    tl.store(target, value, mask=inside_R[:, None] & column_mask)


@triton.jit(do_not_specialize=["num_tokens"])
def unpermute_kernel(
    rows_ptr,
    weights_ptr,
    row_of_slot_ptr,
    x_ptr,
    num_tokens,
    H: tl.constexpr,
    K: tl.constexpr,
    UNROLL: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Each program sums one block of columns of TOKENS tokens."""
    BLOCKS_H: tl.constexpr = (H + BLOCK_H - 1) // BLOCK_H
    program = tl.program_id(0)
    tokens_N = (program // BLOCKS_H) * TOKENS + tl.arange(0, TOKENS)
    columns = (program % BLOCKS_H) * BLOCK_H + tl.arange(0, BLOCK_H)
    inside_N = tokens_N < num_tokens
    column_mask = (columns < H)[None, :]
    total = tl.zeros([TOKENS, BLOCK_H], tl.float32)
    slots_N = tokens_N.to(tl.int64) * K
    for first in range(0, K, UNROLL):
        row_of_step = _load_steps(row_of_slot_ptr, slots_N, inside_N, -1, first, K, UNROLL)
        if weights_ptr is not None:
            weight_of_step = _load_steps(weights_ptr, slots_N, inside_N, 0, first, K, UNROLL)
        # All of a token's rows are on their way before the first one is needed.
        value_of_step = _load_rows(rows_ptr, row_of_step, columns, H, UNROLL)
        for step in tl.static_range(UNROLL):
            term = value_of_step[step].to(tl.float32)
            if weights_ptr is not None:
                weight_N = tl.where(row_of_step[step] >= 0, weight_of_step[step], 0.0)
                term *= weight_N[:, None]
            total += term
    target = x_ptr + tokens_N.to(tl.int64)[:, None] * H + columns[None, :]
    tl.store(target, total.to(x_ptr.dtype.element_ty), mask=inside_N[:, None] & column_mask)


def permute(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> torch.Tensor:
    """The operator `permute`."""
    num_rows, width = slot_of_row_C.shape[0], x_TH.shape[1]
    num_tokens, top_k = row_of_slot_TK.shape
    rows_CH = x_TH.new_empty(num_rows, width)
    if rows_CH.numel() == 0:
        return rows_CH
    x_TH, slot_of_row_C = x_TH.contiguous(), slot_of_row_C.contiguous()
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    if width * x_TH.element_size() < _NARROW_BYTES:
        block = power_of_two_from(width)
        tile = max(1024 // block, 1)
        permute_rows_kernel[(ceil_div(num_rows, tile),)](
            x_TH,
            weights_TK,
            slot_of_row_C,
            rows_CH,
            num_rows,
            H=width,
            K=max(top_k, 1),
            ROWS=tile,
            BLOCK_H=block,
            num_warps=4,
        )
        return rows_CH
    block = column_block(width, 512, 2048)
    token_programs = num_tokens * ceil_div(width, block)
    permute_tokens_kernel[(token_programs + ceil_div(num_rows, _ZERO_ROWS),)](
        x_TH,
        weights_TK,
        slot_of_row_C,
        row_of_slot_TK.contiguous(),
        rows_CH,
        token_programs,
        num_rows,
        H=width,
        K=top_k,
        UNROLL=_steps_of(top_k),
        BLOCK_H=block,
        ZERO_ROWS=_ZERO_ROWS,
        ZERO_BLOCK_H=min(block, 128),
        num_warps=warps_for(block, 16),
    )
    return rows_CH


def unpermute(
    rows_CH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
    x_TH: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator `unpermute`; bitwise the plain loop over k in float32. Into `x_TH` if given."""
    width, (num_tokens, top_k) = rows_CH.shape[1], row_of_slot_TK.shape
    if x_TH is None:
        x_TH = rows_CH.new_empty(num_tokens, width)
    if x_TH.numel() == 0:
        return x_TH
    block = column_block(width, 512, 2048)
    tokens = max(1024 // block, 1)
    unpermute_kernel[(ceil_div(num_tokens, tokens) * ceil_div(width, block),)](
        rows_CH.contiguous(),
        None if weights_TK is None else weights_TK.contiguous(),
        row_of_slot_TK.contiguous(),
        x_TH,
        num_tokens,
        H=width,
        K=top_k,
        UNROLL=_steps_of(top_k),
        TOKENS=tokens,
        BLOCK_H=block,
        num_warps=warps_for(tokens * block, 8),
        enable_fp_fusion=False,  # product and sum rounded one after the other, as in PyTorch
    )
    return x_TH


KERNELS: dict[str, list[Kernel]] = {
    "permute": [Kernel("triton", computes_in_float32, permute)],
    "unpermute": [Kernel("triton", computes_in_float32, unpermute)],
}
