"""Copy tokens into expert-sorted rows and sum them back: permute is a gather, unpermute its adjoint
gather-sum.

    permute:   rows[r] = x[slot_of_row[r] // K] * weight of that slot
    unpermute: x[t] = sum over k, in order, of rows[row_of_slot[t, k]] * weights[t, k]

Letters: T tokens, K top-k, C rows, H hidden; slot = token * K + k; -1 = none, its row is zero.

    x_TH = [[1], [2], [3], [4]], and from sort_slots of [[2, 0], [0, 1], [2, -1], [0, 2]] (E = 3):
    slot_of_row_C = [1, 2, 6, 3, 0, 4, 7, -1]
    permute   -> [[1], [2], [4], [2], [1], [3], [4], [0]]
    unpermute of those rows -> [[2], [4], [3], [8]]        each token times its number of experts
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _library, checks, layout


def permute(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> torch.Tensor:
    """rows_CH [C, H], in x's dtype: row r is the token of slot r, times its weight if weights are
    given.

    Args:
        x_TH: [T, H], any floating dtype.
        weights_TK: [T, K] float32 (float64 with float64 x), or None.
        slot_of_row_C, row_of_slot_TK: int32, from `sort_slots` or a plan.

    Raises:
        TypeError, ValueError: wrong dtype, rank, size or device.

    Gradients: of x `unpermute` with the same weights, of the weights `row_dot`.
    """
    return _permute(x_TH, weights_TK, slot_of_row_C, row_of_slot_TK)


def unpermute(
    rows_CH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> torch.Tensor:
    """x_TH [T, H], in the rows' dtype: the sum of each token's rows in the order of k, taken in at
    least float32.

    Args:
        rows_CH: [C, H], any floating dtype; rows of no slot are not read.
        weights_TK: [T, K] float32 (float64 with float64 rows), or None.
        slot_of_row_C, row_of_slot_TK: int32, from `sort_slots` or a plan.

    Raises:
        TypeError, ValueError: wrong dtype, rank, size or device.

    Gradients: of the rows `permute` with the same weights, of the weights `row_dot`.
    """
    return _unpermute(rows_CH, weights_TK, slot_of_row_C, row_of_slot_TK)


def _check(
    op: str,
    values: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> None:
    name = "x_TH" if op == "permute" else "rows_CH"
    checks.tensor(op, name, values, 2, checks.FLOATS)
    checks.tensor(op, "slot_of_row_C", slot_of_row_C, 1, checks.INDICES, like=values)
    checks.tensor(op, "row_of_slot_TK", row_of_slot_TK, 2, checks.INDICES, like=values)
    owner = row_of_slot_TK if op == "permute" else slot_of_row_C
    what = f"{name} and {'row_of_slot_TK' if op == 'permute' else 'slot_of_row_C'}"
    checks.same_size(op, f"{what} must be equally long", values.shape[0], owner.shape[0])
    if weights_TK is not None:
        checks.weights(op, "weights_TK", weights_TK, row_of_slot_TK.shape, like=values)


def _permute_reference(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> torch.Tensor:
    top_k = max(row_of_slot_TK.shape[1], 1)
    token_C = torch.where(slot_of_row_C >= 0, slot_of_row_C // top_k, -1)
    rows_CH = layout.take(x_TH, token_C)
    if weights_TK is None:
        return rows_CH
    weights_C1 = layout.take(weights_TK.reshape(-1), slot_of_row_C)[:, None]
    return (rows_CH.to(layout.accumulate_dtype(x_TH.dtype)) * weights_C1).to(x_TH.dtype)


def _unpermute_reference(
    rows_CH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> torch.Tensor:
    sum_dtype = layout.accumulate_dtype(rows_CH.dtype)
    x_TH = rows_CH.new_zeros(row_of_slot_TK.shape[0], rows_CH.shape[1], dtype=sum_dtype)
    for k in range(row_of_slot_TK.shape[1]):
        term_TH = layout.take(rows_CH, row_of_slot_TK[:, k]).to(sum_dtype)
        if weights_TK is not None:
            held = row_of_slot_TK[:, k] >= 0
            term_TH = term_TH * torch.where(held, weights_TK[:, k], 0)[:, None]
        x_TH = x_TH + term_TH
    return x_TH.to(rows_CH.dtype)


def _permute_fake(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> torch.Tensor:
    return x_TH.new_empty(slot_of_row_C.shape[0], x_TH.shape[1])


def _unpermute_fake(
    rows_CH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
) -> torch.Tensor:
    return rows_CH.new_empty(row_of_slot_TK.shape[0], rows_CH.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    values, weights_TK, slot_of_row_C, row_of_slot_TK = inputs
    ctx.weighted = weights_TK is not None
    needs_values = ctx.weighted and ctx.needs_input_grad[1]
    ctx.save_for_backward(
        values if needs_values else None, weights_TK, slot_of_row_C, row_of_slot_TK
    )


def _permute_backward(ctx: Any, grad_CH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x_TH, weights_TK, slot_of_row_C, row_of_slot_TK = ctx.saved_tensors
    grad_x_TH = grad_weights_TK = None
    if ctx.needs_input_grad[0]:
        grad_x_TH = _unpermute(grad_CH, weights_TK, slot_of_row_C, row_of_slot_TK)
    if x_TH is not None:
        dots_TK = torch.ops.moe_ops.row_dot(grad_CH, x_TH, slot_of_row_C, row_of_slot_TK)
        grad_weights_TK = dots_TK.to(weights_TK.dtype)
    return grad_x_TH, grad_weights_TK, None, None


def _unpermute_backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    rows_CH, weights_TK, slot_of_row_C, row_of_slot_TK = ctx.saved_tensors
    grad_rows_CH = grad_weights_TK = None
    if ctx.needs_input_grad[0]:
        grad_rows_CH = _permute(grad_TH, weights_TK, slot_of_row_C, row_of_slot_TK)
    if rows_CH is not None:
        dots_TK = torch.ops.moe_ops.row_dot(rows_CH, grad_TH, slot_of_row_C, row_of_slot_TK)
        grad_weights_TK = dots_TK.to(weights_TK.dtype)
    return grad_rows_CH, grad_weights_TK, None, None


_permute = _library.define(
    "permute(Tensor x_TH, Tensor? weights_TK, Tensor slot_of_row_C, Tensor row_of_slot_TK)"
    " -> Tensor",
    check=functools.partial(_check, "permute"),
    reference=_permute_reference,
    fake=_permute_fake,
    setup_context=_setup_context,
    backward=_permute_backward,
)
_unpermute = _library.define(
    "unpermute(Tensor rows_CH, Tensor? weights_TK, Tensor slot_of_row_C, Tensor row_of_slot_TK)"
    " -> Tensor",
    check=functools.partial(_check, "unpermute"),
    reference=_unpermute_reference,
    fake=_unpermute_fake,
    setup_context=_setup_context,
    backward=_unpermute_backward,
)
