"""Both matmuls that touch an expert's activation, each in one operator with it. Private:
`fx_passes.fuse_swiglu` makes them of grouped_mm, swiglu and swiglu_backward.

    grouped_mm_swiglu:          h = grouped_mm(a, w13), then swiglu(h)
    grouped_mm_swiglu_backward: swiglu_backward(grouped_mm(g, w), h), swiglu(h)

With `slot_of_row_C` the rows of the first operand, then [T, .], are gathered as in
gather_grouped_mm. The options from `act` on are those of `swiglu`.

Letters: C rows, L experts here, I and O in and out features, F ffn, offsets_L inclusive ends of the
experts' rows.

    x_TI = [[2], [3]], slot_of_row_C = [1, 0, -1], K = 1, w13_L2FI = [[[1], [0.5]]], offsets_L = [2]
    grouped_mm_swiglu -> h_C2F = [[3, 1.5], [2, 1], [0, 0]], a_CF = [[4.2866], [1.7616], [0]]
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _library, checks


def _check_matmul(
    op: str,
    rows: torch.Tensor,
    slot_of_row_C: torch.Tensor | None,
    top_k: int,
    w_LOI: torch.Tensor,
    offsets_L: torch.Tensor,
) -> None:
    checks.tensor(op, "first operand", rows, 2, checks.FLOATS)
    checks.tensor(op, "weight", w_LOI, 3, (rows.dtype,), like=rows)
    checks.tensor(op, "offsets_L", offsets_L, 1, checks.INDICES, like=rows)
    checks.same_size(op, "first operand and weight must share I", rows.shape[1], w_LOI.shape[2])
    checks.same_size(op, "weight and offsets_L must share L", w_LOI.shape[0], offsets_L.shape[0])
    checks.positive(op, "number of experts L", offsets_L.shape[0])
    checks.positive(op, "top_k", top_k)
    if slot_of_row_C is not None:
        checks.tensor(op, "slot_of_row_C", slot_of_row_C, 1, checks.INDICES, like=rows)


def _check(
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
) -> None:
    op = "grouped_mm_swiglu"
    _check_matmul(op, a, slot_of_row_C, top_k, w13_L2FI, offsets_L)
    width = w13_L2FI.shape[1]
    checks.holds(op, width % 2 == 0, lambda: f"w13_L2FI must have even 2F, got {width}")
    _check_row_weights(op, row_weights_C, a, slot_of_row_C)
    checks.activation(op, act, limit, alpha)


def _check_row_weights(
    op: str,
    row_weights_C: torch.Tensor | None,
    rows: torch.Tensor,
    slot_of_row_C: torch.Tensor | None,
) -> None:
    if row_weights_C is not None:
        num_rows = (rows if slot_of_row_C is None else slot_of_row_C).shape[0]
        checks.weights(op, "row_weights_C", row_weights_C, (num_rows,), like=rows)


def _check_backward(
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
) -> None:
    op = "grouped_mm_swiglu_backward"
    _check_matmul(op, g, slot_of_row_C, top_k, w_LOI, offsets_L)
    num_rows = (g if slot_of_row_C is None else slot_of_row_C).shape[0]
    checks.tensor(op, "h_C2F", h_C2F, 2, (g.dtype,), like=g)
    checks.same_size(op, "g, gathered, and h_C2F must share C", num_rows, h_C2F.shape[0])
    checks.same_size(op, "h_C2F must be twice O wide", h_C2F.shape[1], 2 * w_LOI.shape[1])
    checks.row_weights(op, row_weights_C, h_C2F)
    checks.activation(op, act, limit, alpha)


def _matmul(
    rows: torch.Tensor,
    slot_of_row_C: torch.Tensor | None,
    top_k: int,
    w_LOI: torch.Tensor,
    offsets_L: torch.Tensor,
) -> torch.Tensor:
    if slot_of_row_C is None:
        return torch.ops.moe_ops.grouped_mm(rows, w_LOI, offsets_L)
    return torch.ops.moe_ops.gather_grouped_mm(rows, slot_of_row_C, top_k, w_LOI, offsets_L)


def _reference(
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
    h_C2F = _matmul(a, slot_of_row_C, top_k, w13_L2FI, offsets_L)
    a_CF = torch.ops.moe_ops.swiglu(h_C2F, row_weights_C, offsets_L, act, limit, alpha, up_offset)
    return h_C2F if keep_h else h_C2F.new_empty(0, h_C2F.shape[1]), a_CF


def _backward_reference(
    g: torch.Tensor,
    slot_of_row_C: torch.Tensor | None,
    top_k: int,
    w_LOI: torch.Tensor,
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_CF = _matmul(g, slot_of_row_C, top_k, w_LOI, offsets_L)
    return torch.ops.moe_ops.swiglu_backward_with_output(
        grad_CF, h_C2F, row_weights_C, offsets_L, *options
    )


def _fake(
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
    num_rows = (a if slot_of_row_C is None else slot_of_row_C).shape[0]
    width = w13_L2FI.shape[1]
    return a.new_empty(num_rows if keep_h else 0, width), a.new_empty(num_rows, width // 2)


def _backward_fake(
    g: torch.Tensor,
    slot_of_row_C: torch.Tensor | None,
    top_k: int,
    w_LOI: torch.Tensor,
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    a_CF = h_C2F.new_empty(h_C2F.shape[0], w_LOI.shape[1])
    return h_C2F.new_empty(h_C2F.shape), a_CF, _grad_row_weights(h_C2F, row_weights_C)


def _grad_row_weights(h_C2F: torch.Tensor, row_weights_C: torch.Tensor | None) -> torch.Tensor:
    if row_weights_C is not None:
        return row_weights_C.new_empty(row_weights_C.shape)
    return h_C2F.new_empty(0, dtype=torch.promote_types(h_C2F.dtype, torch.float32))


_OPTIONS = "Tensor? row_weights_C, Tensor offsets_L, str act, float? limit, float alpha, "
_OPTIONS += "float up_offset"
_library.define(
    "grouped_mm_swiglu(Tensor a, Tensor? slot_of_row_C, int top_k, Tensor w13_L2FI, "
    f"{_OPTIONS}, bool keep_h=True) -> (Tensor h_C2F, Tensor a_CF)",
    check=_check,
    reference=_reference,
    fake=_fake,
    private=True,
)
_library.define(
    "grouped_mm_swiglu_backward(Tensor g, Tensor? slot_of_row_C, int top_k, Tensor w_LOI, "
    f"Tensor h_C2F, {_OPTIONS})"
    " -> (Tensor grad_h_C2F, Tensor a_CF, Tensor grad_row_weights_C)",
    check=_check_backward,
    reference=_backward_reference,
    fake=_backward_fake,
    private=True,
)
