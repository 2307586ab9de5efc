"""Triton kernels of swiglu and swiglu_backward: every input is read, every output written, once.

Letters as in `moe_ops.ops.swiglu`: C rows, F ffn. `end` is the first row of the tail, which is not
read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .blocks import ceil_div, column_block, computes_in_float32
from .kernel import Kernel

# Elements of one program's tile and of each of its threads. The backward keeps six values an
# element in registers, so its threads get fewer.
_FORWARD_TILE, _FORWARD_WARPS = 2048, 4
_BACKWARD_TILE, _BACKWARD_WARPS = 1024, 4

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def gate_and_slope(gate, ACT: tl.constexpr, ALPHA: tl.constexpr):
    """The activation of `gate` and its derivative."""
    if ACT == "silu":
        # rsqrt(x)^2 takes 2 instructions, 1 / x 5; exp2 takes 1, exp 5 (Triton 3.6, sm_90).
        root = tl.rsqrt(1.0 + tl.exp2(gate * (-ALPHA * _LOG2_E)))
        sigmoid = root * root
        activated = gate * sigmoid
        return activated, tl.fma(ALPHA * activated, 1.0 - sigmoid, sigmoid)
    else:
        # Phi(-|gate|) by Abramowitz and Stegun, 7.1.26: within 4e-7, half of erf's instructions.
        bell = tl.exp2(gate * gate * (-0.5 * _LOG2_E))
        root = tl.rsqrt(tl.fma(tl.abs(gate), 0.3275911 * 0.5**0.5, 1.0))
        t = root * root
        tail = tl.fma(t, 0.5307027145, -0.7265760135)
        tail = tl.fma(t, tail, 0.7107068705)
        tail = tl.fma(t, tail, -0.142248368)
        tail = tl.fma(t, tail, 0.127414796) * t * bell
        phi = tl.where(gate < 0, tail, 1.0 - tail)
        return gate * phi, tl.fma(gate, bell * 0.3989422804014327, phi)


@triton.jit
def load_halves(row_ptr, columns, mask, F: tl.constexpr):
    """gate and up in float32, zero outside the mask."""
    gate = tl.load(row_ptr + columns[None, :], mask=mask, other=0, eviction_policy="evict_first")
    up = tl.load(
        row_ptr + (F + columns)[None, :], mask=mask, other=0, eviction_policy="evict_first"
    )
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def limit_halves(gate, up, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):
    """Both halves clamped, NaN stays, then up shifted."""
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if UP_OFFSET != 0:
        up += UP_OFFSET
    return gate, up


@triton.jit
def load_row_weights(row_weights_ptr, rows, held):
    """Weights of the rows, 1 if there are none."""
    if row_weights_ptr is None:
        return 1.0
    else:
        return tl.load(row_weights_ptr + rows, mask=held, other=0)[:, None]


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def swiglu_kernel(
    h_ptr,
    row_weights_ptr,
    offsets_ptr,
    a_ptr,
    num_rows,
    num_experts,
    F: tl.constexpr,
    ACT: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Each program computes one block of columns of ROWS rows."""
    BLOCKS_F: tl.constexpr = (F + BLOCK_F - 1) // BLOCK_F
    program = tl.program_id(0)
    rows_R = (program // BLOCKS_F) * ROWS + tl.arange(0, ROWS)
    columns = (program % BLOCKS_F) * BLOCK_F + tl.arange(0, BLOCK_F)
    column_mask = (columns < F)[None, :]
    held_R = rows_R < tl.load(offsets_ptr + num_experts - 1)
    starts_R1 = rows_R.to(tl.int64)[:, None] * F
    gate, up = load_halves(h_ptr + 2 * starts_R1, columns, held_R[:, None] & column_mask, F)
    gate, up = limit_halves(gate, up, LIMIT, UP_OFFSET)
    activated, _ = gate_and_slope(gate, ACT, ALPHA)
    a = activated * up * load_row_weights(row_weights_ptr, rows_R, held_R)
    target = a_ptr + starts_R1 + columns[None, :]
    a = a.to(a_ptr.dtype.element_ty)
    tl.store(target, a, mask=(rows_R < num_rows)[:, None] & column_mask)


@triton.jit(do_not_specialize=["num_rows", "num_experts"])
def swiglu_backward_kernel(
    grad_ptr,
    h_ptr,
    row_weights_ptr,
    offsets_ptr,
    grad_h_ptr,
    a_ptr,
    grad_row_weights_ptr,
    num_rows,
    num_experts,
    F: tl.constexpr,
    ACT: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """Each program computes ROWS whole rows, so it owns their weights' gradients; the forward's
    output as well if a_ptr is given.
    """
    rows_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside_R1 = (rows_R < num_rows)[:, None]
    held_R = rows_R < tl.load(offsets_ptr + num_experts - 1)
    starts_R1 = rows_R.to(tl.int64)[:, None] * F
    weights_R1 = load_row_weights(row_weights_ptr, rows_R, held_R)
    total = tl.zeros([ROWS, BLOCK_F], tl.float32)
    for first in range(0, F, BLOCK_F):
        columns = first + tl.arange(0, BLOCK_F)
        column_mask = (columns < F)[None, :]
        mask = held_R[:, None] & column_mask
        at = starts_R1 + columns[None, :]
        grad = tl.load(grad_ptr + at, mask=mask, other=0, eviction_policy="evict_first")
        free_gate, free_up = load_halves(h_ptr + 2 * starts_R1, columns, mask, F)
        gate, up = limit_halves(free_gate, free_up, LIMIT, UP_OFFSET)
        activated, slope = gate_and_slope(gate, ACT, ALPHA)
        product = activated * up
        grad = grad.to(tl.float32)
        total = tl.fma(grad, product, total)
        grad *= weights_R1
        grad_gate, grad_up = grad * slope * up, grad * activated
        if LIMIT is not None:
            grad_gate = tl.where(free_gate <= LIMIT, grad_gate, 0.0)
            grad_up = tl.where(tl.abs(free_up) <= LIMIT, grad_up, 0.0)
        dtype = grad_h_ptr.dtype.element_ty
        target = grad_h_ptr + 2 * starts_R1 + columns[None, :]
        tl.store(target, grad_gate.to(dtype), mask=inside_R1 & column_mask)
        tl.store(target + F, grad_up.to(dtype), mask=inside_R1 & column_mask)
        if a_ptr is not None:
            a = (product * weights_R1).to(dtype)
            tl.store(a_ptr + at, a, mask=inside_R1 & column_mask)
    if row_weights_ptr is not None:
        tl.store(grad_row_weights_ptr + rows_R, tl.sum(total, 1), mask=rows_R < num_rows)


def swiglu(
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    act: str = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> torch.Tensor:
    """The operator `swiglu`."""
    num_rows, width = h_C2F.shape[0], h_C2F.shape[1] // 2
    a_CF = h_C2F.new_empty(num_rows, width)
    if a_CF.numel() == 0:
        return a_CF
    block = column_block(width, 128, 512)
    tile = _FORWARD_TILE // block
    swiglu_kernel[(ceil_div(num_rows, tile) * ceil_div(width, block),)](
        h_C2F.contiguous(),
        None if row_weights_C is None else row_weights_C.contiguous(),
        offsets_L.contiguous(),
        a_CF,
        num_rows,
        offsets_L.shape[0],
        F=width,
        ACT=act,
        LIMIT=limit,
        ALPHA=alpha,
        UP_OFFSET=up_offset,
        ROWS=tile,
        BLOCK_F=block,
        num_warps=_FORWARD_WARPS,
        enable_fp_fusion=False,  # so that the backward recomputes the very same bits
    )
    return a_CF


def _backward(
    grad_CF: torch.Tensor,
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    a_CF: torch.Tensor | None,
    options: tuple[str, float | None, float, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """grad_h and grad_row_weights; fills `a_CF` if it is given."""
    num_rows, width = grad_CF.shape
    grad_h_C2F = h_C2F.new_empty(h_C2F.shape)
    weighted = row_weights_C is not None
    grad_row_weights_C = h_C2F.new_empty(num_rows if weighted else 0, dtype=torch.float32)
    block = column_block(max(width, 1), 64, 256)
    tile = _BACKWARD_TILE // block
    act, limit, alpha, up_offset = options
    swiglu_backward_kernel[(ceil_div(num_rows, tile),)](
        grad_CF.contiguous(),
        h_C2F.contiguous(),
        None if row_weights_C is None else row_weights_C.contiguous(),
        offsets_L.contiguous(),
        grad_h_C2F,
        a_CF,
        grad_row_weights_C,
        num_rows,
        offsets_L.shape[0],
        F=width,
        ACT=act,
        LIMIT=limit,
        ALPHA=alpha,
        UP_OFFSET=up_offset,
        ROWS=tile,
        BLOCK_F=block,
        num_warps=_BACKWARD_WARPS,
        enable_fp_fusion=False,
    )
    return grad_h_C2F, grad_row_weights_C


def swiglu_backward(
    grad_CF: torch.Tensor,
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    act: str = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator `swiglu_backward`."""
    options = (act, limit, alpha, up_offset)
    return _backward(grad_CF, h_C2F, row_weights_C, offsets_L, None, options)


def swiglu_backward_with_output(
    grad_CF: torch.Tensor,
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    act: str = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(grad_h_C2F, a_CF, grad_row_weights_C): `swiglu_backward` and, bit for bit, the output of
    `swiglu`, in one pass over h.
    """
    a_CF = h_C2F.new_empty(grad_CF.shape)
    options = (act, limit, alpha, up_offset)
    grad_h, grad_row_weights = _backward(grad_CF, h_C2F, row_weights_C, offsets_L, a_CF, options)
    return grad_h, a_CF, grad_row_weights


KERNELS: dict[str, list[Kernel]] = {
    "swiglu": [Kernel("triton", computes_in_float32, swiglu)],
    "swiglu_backward": [Kernel("triton", computes_in_float32, swiglu_backward)],
    "swiglu_backward_with_output": [
        Kernel("triton", computes_in_float32, swiglu_backward_with_output)
    ],
}
