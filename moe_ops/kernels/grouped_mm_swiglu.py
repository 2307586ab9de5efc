"""csrc/grouped_mm.cuh with the activation, or its derivative, in the epilogue.

Letters as in `moe_ops.ops.grouped_mm_swiglu`.
"""

from __future__ import annotations

import math

import torch

from .blocks import ceil_div
from .grouped_mm import aligned, aligned_weights, native_takes, tickets
from .kernel import Kernel

_TILE_N = 256  # kTileN of csrc/tiles.cuh: each tile adds up its part of a row weight's gradient


def _takes(
    a: torch.Tensor,
    slot_of_row_C: torch.Tensor | None,
    top_k: int,
    w13_L2FI: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    *rest: object,
) -> bool:
    # Gathering costs such a wide matmul more than a copy of the rows does.
    return slot_of_row_C is None and w13_L2FI.shape[1] % 16 == 0 and native_takes(a, w13_L2FI)


def native_grouped_mm_swiglu(
    a: torch.Tensor,
    slot_of_row_C: torch.Tensor | None,
    top_k: int,
    w13_L2FI: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    act: str,
    limit: float | None,
    alpha: float,
    up_offset: float,
    keep_h: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator `grouped_mm_swiglu`."""
    num_rows, width = a.shape[0], w13_L2FI.shape[1]
    h_C2F = a.new_empty(num_rows if keep_h else 0, width)
    a_CF = a.new_empty(num_rows, width // 2)
    torch.ops.moe_ops_native.grouped_mm_swiglu(
        aligned(a),
        aligned(w13_L2FI),
        None if row_weights_C is None else row_weights_C.contiguous(),
        offsets_L.contiguous(),
        tickets(a),
        act,
        math.inf if limit is None else limit,
        alpha,
        up_offset,
        h_C2F if keep_h else None,
        a_CF,
    )
    return h_C2F, a_CF


def _takes_backward(
    g: torch.Tensor,
    slot_of_row_C: torch.Tensor | None,
    top_k: int,
    w_LOI: torch.Tensor,
    h_C2F: torch.Tensor,
    *rest: object,
) -> bool:
    transposed = w_LOI.mT.is_contiguous()  # as the graph has it: the view of a parameter
    return slot_of_row_C is None and transposed and native_takes(g, w_LOI)


def native_grouped_mm_swiglu_backward(
    g: torch.Tensor,
    slot_of_row_C: torch.Tensor | None,
    top_k: int,
    w_LOI: torch.Tensor,
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    act: str,
    limit: float | None,
    alpha: float,
    up_offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator `grouped_mm_swiglu_backward`."""
    num_rows, width = h_C2F.shape[0], w_LOI.shape[1]
    grad_h_C2F = h_C2F.new_empty(h_C2F.shape)
    a_CF = h_C2F.new_empty(num_rows, width)
    parts = None
    if row_weights_C is not None:
        row_weights_C = row_weights_C.contiguous()
        parts = row_weights_C.new_empty(num_rows, ceil_div(width, _TILE_N))
    torch.ops.moe_ops_native.grouped_mm_swiglu_backward(
        aligned(g),
        aligned_weights(w_LOI),
        aligned(h_C2F),
        row_weights_C,
        offsets_L.contiguous(),
        tickets(g),
        act,
        math.inf if limit is None else limit,
        alpha,
        up_offset,
        grad_h_C2F,
        a_CF,
        parts,
    )
    no_weights = h_C2F.new_empty(0, dtype=torch.float32)
    return grad_h_C2F, a_CF, no_weights if parts is None else parts.sum(1)


KERNELS: dict[str, list[Kernel]] = {
    "grouped_mm_swiglu": [Kernel("csrc/grouped_mm.cuh", _takes, native_grouped_mm_swiglu)],
    "grouped_mm_swiglu_backward": [
        Kernel("csrc/grouped_mm.cuh", _takes_backward, native_grouped_mm_swiglu_backward)
    ],
}
