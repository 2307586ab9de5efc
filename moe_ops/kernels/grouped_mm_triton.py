"""Triton grouped_mm for any width and stride, in float32, bfloat16 and float16.

    c[r] = w[e] @ a[r]    for the expert e that owns row r; zero past the last offset

Letters as in `moe_ops.ops.grouped_mm`: L experts here, C rows, I and O in and out features.

One program computes one tile, `block_m` rows of one expert times `block_n` features. The grid
depends on C and L alone; a program finds its expert from offsets_L on the device.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .blocks import ceil_div, computes_in_float32, power_of_two_from
from .kernel import Kernel

MANY_TILES = 132  # one for each multiprocessor of an H200


class Tiles(NamedTuple):
    """The block of the output that one program computes, in steps of k, and how it is run."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    @property
    def blocks(self) -> dict[str, int]:
        """By the names of the kernels' parameters."""
        return dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), self[:3]))


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that one program may use."""
    if device.type != "cuda":
        return 1 << 20  # Triton's interpreter has no limit
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def precision_of(dtype: torch.dtype) -> str:
    """float32 is full float32 unless the user allows TF32 in matmuls; the others are exact."""
    allowed = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if allowed else "ieee"


def block_of(width: int, largest: int) -> int:
    """Size of blocks along a dimension; tl.dot takes no fewer than 16."""
    return min(largest, max(16, power_of_two_from(width)))


def wide_block(width: int, dtype: torch.dtype) -> int:
    """256 for 16-bit data, unless that pads the dimension by over 1/16 more than 128 would."""
    padded = {block: ceil_div(width, block) * block for block in (128, 256)}
    fits = dtype.itemsize == 2 and padded[256] * 16 <= padded[128] * 17
    return 256 if fits else 128


def make_tiles(block_m: int, block_n: int, width_k: int, like: torch.Tensor) -> Tiles:
    """Completes a block: steps of 128 bytes, and as many in flight as fit in shared memory.

    128 x 128 blocks are given 3 stages, so that a multiprocessor of Hopper holds two of them. Full
    float32 goes without tensor cores and keeps what it reads in a step in registers: steps of 16.
    """
    full_float32 = like.dtype == torch.float32 and precision_of(like.dtype) == "ieee"
    block_k = block_of(width_k, 16 if full_float32 else 128 // like.dtype.itemsize)
    num_stages = 3 if block_m * block_n == 128 * 128 else 4
    step_bytes = (block_m + block_n) * block_k * like.dtype.itemsize
    num_stages = max(1, min(num_stages, _shared_memory(like.device) // step_bytes))
    num_warps = 8 if block_m * block_n >= 128 * (64 if full_float32 else 128) else 4
    return Tiles(block_m, block_n, block_k, num_warps, num_stages)


def grouped_mm_tiles(a: torch.Tensor, w_LOI: torch.Tensor, num_rows: int) -> Tiles:
    """As many rows as an expert has on average, and at least one program for each of 132 SMs."""
    num_experts, width_o, width_i = w_LOI.shape
    block_m = block_of(ceil_div(num_rows, num_experts), 128)
    block_n = wide_block(width_o, a.dtype) if block_m >= 64 else 128
    num_m = max(num_rows // block_m, min(num_rows, num_experts))
    while block_n > 64 and num_m * ceil_div(width_o, block_n) < MANY_TILES:
        block_n //= 2
    return make_tiles(block_m, block_of(width_o, block_n), width_i, a)


@triton.jit
def inside(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of an index into a dimension; constant, so it costs nothing, if blocks fill it."""
    if SIZE % BLOCK == 0:
        return tl.full(index.shape, True, tl.int1)
    else:
        return index < SIZE


@triton.jit
def tile_of(program, num_m, num_n, GROUP_M: tl.constexpr):
    """(m, n) of a program: all n of GROUP_M m-tiles before the next ones, to stay in L2."""
    group, place = program // (GROUP_M * num_n), program % (GROUP_M * num_n)
    height = tl.minimum(num_m - group * GROUP_M, GROUP_M)
    return group * GROUP_M + place % height, place // height


@triton.jit
def rows_of(tile, offsets_ptr, num_rows, L: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, first row, end of the expert's rows) of an m-tile; the tail is expert L.

    Expert e, whose rows start at s, is given the tiles from s // BLOCK_M + e on: enough for any
    counts, and no prefix sum is needed. Tiles that are left over start past the end.
    """
    LANES: tl.constexpr = triton.next_power_of_2(L)
    lanes = tl.arange(0, LANES)
    ends = tl.load(offsets_ptr + lanes, mask=lanes < L, other=0)
    passed = (lanes < L) & (ends // BLOCK_M + lanes + 1 <= tile)
    expert = tl.sum(passed.to(tl.int32), 0)
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets_ptr + expert, mask=expert < L, other=num_rows)
    return expert, start + (tile - start // BLOCK_M - expert) * BLOCK_M, end


@triton.jit(do_not_specialize=["num_rows"])
def grouped_mm_kernel(
    a_ptr,
    w_ptr,
    c_ptr,
    offsets_ptr,
    num_rows,
    L: tl.constexpr,
    WIDTH_O: tl.constexpr,
    WIDTH_I: tl.constexpr,
    STRIDE_A: tl.constexpr,
    STRIDE_WL: tl.constexpr,
    STRIDE_WO: tl.constexpr,
    STRIDE_WI: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of c. Widths and strides are constants, so that rows of 1404 bfloat16, say, are seen
    to start at multiples of 8 bytes and are read in pieces of 8 instead of 2.
    """
    num_m = num_rows // BLOCK_M + L + 1
    tile_m, tile_n = tile_of(tl.program_id(0), num_m, tl.cdiv(WIDTH_O, BLOCK_N), 8)
    expert, row, end = rows_of(tile_m, offsets_ptr, num_rows, L, BLOCK_M)
    if row >= end:
        return
    rows = row + tl.arange(0, BLOCK_M)
    in_rows = rows < end
    outs = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    in_o = inside(outs, WIDTH_O, BLOCK_N)
    ins = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + rows[:, None].to(tl.int64) * STRIDE_A + ins[None, :]
    w_ptrs = w_ptr + expert.to(tl.int64) * STRIDE_WL
    w_ptrs += outs[None, :] * STRIDE_WO + ins[:, None] * STRIDE_WI

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    depth = tl.where(expert < L, WIDTH_I, 0)  # the tail: nothing is read
    for k in range(0, depth, BLOCK_K):
        in_i = inside(k + ins, WIDTH_I, BLOCK_K)
        a = tl.load(a_ptrs, mask=in_rows[:, None] & in_i[None, :], other=0.0)
        w = tl.load(w_ptrs, mask=in_i[:, None] & in_o[None, :], other=0.0)
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * STRIDE_WI
    c_ptrs = c_ptr + rows[:, None].to(tl.int64) * WIDTH_O + outs[None, :]
    tl.store(c_ptrs, acc.to(c_ptr.dtype.element_ty), mask=in_rows[:, None] & in_o[None, :])


def dense_rows(rows: torch.Tensor) -> torch.Tensor:
    """Rows whose elements lie side by side."""
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _readable(w_LOI: torch.Tensor, precision: str, num_rows: int) -> torch.Tensor:
    """A view that the kernel reads fast, copied if it must be.

    In full float32 the threads of a warp read the out features of a step, which lie in shared
    memory as in w: unless those are contiguous, 8 threads meet in one bank. A copy pays where
    experts have rows enough to reuse it.
    """
    if precision == "ieee" and w_LOI.dtype == torch.float32 and num_rows >= 64 * w_LOI.shape[0]:
        return w_LOI.mT.contiguous().mT
    return w_LOI if 1 in w_LOI.stride()[1:] else w_LOI.contiguous()


def grouped_mm(a_CI: torch.Tensor, w_LOI: torch.Tensor, offsets_L: torch.Tensor) -> torch.Tensor:
    """The operator `grouped_mm`."""
    num_rows, (num_experts, width_o, width_i) = a_CI.shape[0], w_LOI.shape
    c_CO = a_CI.new_empty(num_rows, width_o)
    if c_CO.numel() == 0:
        return c_CO
    precision, tiles = precision_of(a_CI.dtype), grouped_mm_tiles(a_CI, w_LOI, num_rows)
    a_CI, w_LOI = dense_rows(a_CI), _readable(w_LOI, precision, num_rows)
    num_m = num_rows // tiles.block_m + num_experts + 1
    grouped_mm_kernel[(num_m * ceil_div(width_o, tiles.block_n),)](
        a_CI,
        w_LOI,
        c_CO,
        offsets_L.contiguous(),
        num_rows,
        num_experts,
        width_o,
        width_i,
        a_CI.stride(0),
        *w_LOI.stride(),
        precision,
        **tiles.blocks,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return c_CO


KERNELS: dict[str, list[Kernel]] = {
    "grouped_mm": [Kernel("triton", computes_in_float32, grouped_mm)],
}
