"""Add each expert's bias to its rows, optionally times the row's gate weight.

    out[r] = rows[r] + bias[e] * row_weights[r] for the expert e that owns row r, zero past the last
    offset

Letters: L experts here, C rows, O features, offsets_L inclusive ends of the experts' rows.

    4 tokens, K = 2, E = 3 give offsets_L = [3, 4, 7] (see sort_slots); zero rows,
    bias_LO = [[1], [2], [3]],
    row_weights_C = [1, 1, 1, 1, 1, 1, 0.5, 0] -> [[1], [1], [1], [2], [3], [3], [1.5], [0]]
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _library, checks, layout


def grouped_bias(
    rows_CO: torch.Tensor,
    bias_LO: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
) -> torch.Tensor:
    """[C, O] in the rows' dtype: rows plus their expert's bias (times their weight), taken in at
    least float32.

    Under autocast a float `bias_LO` is cast to the rows' dtype first.

    Args:
        rows_CO: [C, O], any floating dtype; bias_LO: [L, O], the same.
        row_weights_C: [C] float32 (float64 with float64 rows), or None.
        offsets_L: [L] int32, inclusive ends.

    Raises:
        TypeError, ValueError: wrong dtype, rank, size or device.

    Gradients: the incoming one for the rows, `grouped_bias_backward` for bias and weights.
    """
    if layout.autocast_dtype(rows_CO) is not None:
        bias_LO = bias_LO.to(rows_CO.dtype)
    return _grouped_bias(rows_CO, bias_LO, row_weights_C, offsets_L)


def _check(
    op: str,
    rows_CO: torch.Tensor,
    bias_LO: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
) -> None:
    checks.tensor(op, "rows_CO", rows_CO, 2, checks.FLOATS)
    checks.tensor(op, "bias_LO", bias_LO, 2, (rows_CO.dtype,), like=rows_CO)
    checks.tensor(op, "offsets_L", offsets_L, 1, checks.INDICES, like=rows_CO)
    checks.positive(op, "number of experts L", offsets_L.shape[0])
    checks.same_size(op, "rows_CO and bias_LO must share O", rows_CO.shape[1], bias_LO.shape[1])
    checks.same_size(op, "bias_LO and offsets_L must share L", bias_LO.shape[0], offsets_L.shape[0])
    checks.row_weights(op, row_weights_C, rows_CO)


def _reference(
    rows_CO: torch.Tensor,
    bias_LO: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
) -> torch.Tensor:
    sum_dtype = layout.accumulate_dtype(rows_CO.dtype)
    expert_C = layout.expert_of_row(offsets_L, rows_CO.shape[0])
    inside_C1 = (expert_C < offsets_L.shape[0])[:, None]
    bias_CO = bias_LO.to(sum_dtype)[expert_C.clamp(max=offsets_L.shape[0] - 1)]
    if row_weights_C is not None:
        bias_CO = bias_CO * row_weights_C[:, None]
    return torch.where(inside_C1, rows_CO.to(sum_dtype) + bias_CO, 0).to(rows_CO.dtype).contiguous()


def _fake(
    rows_CO: torch.Tensor,
    bias_LO: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
) -> torch.Tensor:
    return rows_CO.new_empty(rows_CO.shape)


def _backward_reference(
    grad_CO: torch.Tensor,
    bias_LO: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    sum_dtype = layout.accumulate_dtype(grad_CO.dtype)
    expert_C = layout.expert_of_row(offsets_L, grad_CO.shape[0])
    inside_C1 = (expert_C < offsets_L.shape[0])[:, None]
    grad_CO = torch.where(inside_C1, grad_CO.to(sum_dtype), 0)
    weighted_CO = grad_CO
    grad_row_weights_C = grad_CO.new_zeros(0)
    if row_weights_C is not None:
        weighted_CO = torch.where(inside_C1, grad_CO * row_weights_C[:, None], 0)
        bias_CO = bias_LO.to(sum_dtype)[expert_C.clamp(max=offsets_L.shape[0] - 1)]
        grad_row_weights_C = torch.where(inside_C1, grad_CO * bias_CO, 0).sum(1)
        grad_row_weights_C = grad_row_weights_C.to(row_weights_C.dtype)
    sums = [
        torch.where((expert_C == expert)[:, None], weighted_CO, 0).sum(0)
        for expert in range(offsets_L.shape[0])
    ]
    return torch.stack(sums).to(bias_LO.dtype), grad_row_weights_C


def _backward_fake(
    grad_CO: torch.Tensor,
    bias_LO: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    if row_weights_C is None:
        dtype = layout.accumulate_dtype(grad_CO.dtype)
        return bias_LO.new_empty(bias_LO.shape), grad_CO.new_empty(0, dtype=dtype)
    return bias_LO.new_empty(bias_LO.shape), row_weights_C.new_empty(row_weights_C.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, grad_CO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    bias_LO, row_weights_C, offsets_L = ctx.saved_tensors
    grad_rows_CO = grad_bias_LO = grad_row_weights_C = None
    if ctx.needs_input_grad[0]:
        inside_C = layout.held_rows(offsets_L, grad_CO.shape[0])
        grad_rows_CO = torch.where(inside_C[:, None], grad_CO, 0)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        grad_bias_LO, grad_row_weights_C = _grouped_bias_backward(
            grad_CO, bias_LO, row_weights_C, offsets_L
        )
    weighted = row_weights_C is not None
    return grad_rows_CO, grad_bias_LO, grad_row_weights_C if weighted else None, None


_grouped_bias = _library.define(
    "grouped_bias(Tensor rows_CO, Tensor bias_LO, Tensor? row_weights_C, Tensor offsets_L)"
    " -> Tensor",
    check=functools.partial(_check, "grouped_bias"),
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
_grouped_bias_backward = _library.define(
    "grouped_bias_backward(Tensor grad_CO, Tensor bias_LO, Tensor? row_weights_C, Tensor offsets_L)"
    " -> (Tensor grad_bias_LO, Tensor grad_row_weights_C)",
    check=functools.partial(_check, "grouped_bias_backward"),
    reference=_backward_reference,
    fake=_backward_fake,
)
