"""Dot product of each slot's row with its token: the gradient of the weights of permute and
unpermute.

    weights[t, k] = <rows[row_of_slot[t, k]], x[t]>, 0 where the slot has no row

Letters: T tokens, K top-k, C rows, H hidden; -1 = none.

    x_TH = [[1], [2], [3], [4]], rows_CH = [[1], [2], [4], [2], [1], [3], [4], [0]],
    row_of_slot_TK = [[4, 0], [1, 3], [5, -1], [2, 6]] (K = 2, E = 3, see sort_slots)
    -> [[1, 1], [4, 4], [9, 0], [16, 16]]
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _library, checks, layout


def row_dot(
    rows_CH: torch.Tensor,
    x_TH: torch.Tensor,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> torch.Tensor:
    """weights_TK [T, K], float32 (float64 if the rows are): <row of the slot, x of the token>.

    Args:
        rows_CH: [C, H], any floating dtype; x_TH: [T, H], the same.
        slot_of_row_C, row_of_slot_TK: int32, from `sort_slots` or a plan.

    Raises:
        TypeError, ValueError: wrong dtype, rank, size or device.

    Gradients: bilinear, so `permute` and `unpermute` weighted with the incoming gradient.
    """
    return _row_dot(rows_CH, x_TH, slot_of_row_C, row_of_slot_TK)


def _check(
    rows_CH: torch.Tensor,
    x_TH: torch.Tensor,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> None:
    op = "row_dot"
    checks.tensor(op, "rows_CH", rows_CH, 2, checks.FLOATS)
    checks.tensor(op, "x_TH", x_TH, 2, (rows_CH.dtype,), like=rows_CH)
    checks.tensor(op, "slot_of_row_C", slot_of_row_C, 1, checks.INDICES, like=rows_CH)
    checks.tensor(op, "row_of_slot_TK", row_of_slot_TK, 2, checks.INDICES, like=rows_CH)
    checks.same_size(
        op,
        "rows_CH and slot_of_row_C must be equally long",
        rows_CH.shape[0],
        slot_of_row_C.shape[0],
    )
    checks.same_size(
        op, "x_TH and row_of_slot_TK must be equally long", x_TH.shape[0], row_of_slot_TK.shape[0]
    )
    checks.same_size(op, "rows_CH and x_TH must be equally wide", rows_CH.shape[1], x_TH.shape[1])


def _reference(
    rows_CH: torch.Tensor,
    x_TH: torch.Tensor,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> torch.Tensor:
    sum_dtype = layout.accumulate_dtype(rows_CH.dtype)
    x_TH = x_TH.to(sum_dtype)
    dots = [
        (layout.take(rows_CH, row_T).to(sum_dtype) * x_TH).sum(1)
        for row_T in row_of_slot_TK.unbind(1)
    ]
    if not dots:
        return x_TH.new_zeros(row_of_slot_TK.shape)
    # NOTE: a slot without a row is 0 even where x is not finite.
    return torch.where(row_of_slot_TK >= 0, torch.stack(dots, 1), 0)


def _fake(
    rows_CH: torch.Tensor,
    x_TH: torch.Tensor,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> torch.Tensor:
    dtype = layout.accumulate_dtype(rows_CH.dtype)
    return rows_CH.new_empty(row_of_slot_TK.shape, dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_TK: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows_CH, x_TH, *maps = ctx.saved_tensors
    grad_rows_CH = grad_x_TH = None
    if ctx.needs_input_grad[0]:
        grad_rows_CH = torch.ops.moe_ops.permute(x_TH, grad_TK, *maps)
    if ctx.needs_input_grad[1]:
        grad_x_TH = torch.ops.moe_ops.unpermute(rows_CH, grad_TK, *maps)
    return grad_rows_CH, grad_x_TH, None, None


_row_dot = _library.define(
    "row_dot(Tensor rows_CH, Tensor x_TH, Tensor slot_of_row_C, Tensor row_of_slot_TK) -> Tensor",
    check=_check,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
