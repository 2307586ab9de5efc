"""Gated activation between the two matmuls of an expert, times the row's gate weight.

    gate, up = h[:, :F], h[:, F:], limited first: gate <= limit, |up| <= limit
    silu: a = gate * sigmoid(alpha * gate) * (up + up_offset) * row_weight

SwiGLU and, with act="gelu" (gate * Phi(gate), exact), GeGLU: arXiv:2002.05202. gpt-oss: limit=7,
alpha=1.702, up_offset=1 (arXiv:2508.10925).

Letters: C rows, F ffn, offsets_L inclusive ends of the experts' rows; rows past the last one are
zero.

    4 tokens, K = 2, E = 3 give offsets_L = [3, 4, 7] (see sort_slots), C = 8; with F = 1 and row
    weights of 0.5, each of the first 7 rows h = [2, 3] gives 2 * sigmoid(2) * 3 * 0.5 = 2.6424, the
    last row 0.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _library, checks, layout


def swiglu(
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    *,
    act: str = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> torch.Tensor:
    """a_CF [C, F] in h's dtype, computed in at least float32.

    Args:
        h_C2F: [C, 2F], gate first.
        row_weights_C: [C] float32 (float64 with float64 h), or None.
        offsets_L: [L] int32, inclusive ends.
        act: "silu" or "gelu"; alpha scales the sigmoid's argument and belongs to "silu".
        limit: clamps the gate from above and the up half on both sides; no gradient passes where it
            does.

    Raises:
        TypeError, ValueError: wrong dtype, rank, size or device, an unknown act, limit <= 0, or
            alpha with "gelu".

    Gradients: `swiglu_backward`.
    """
    return _swiglu(h_C2F, row_weights_C, offsets_L, act, limit, alpha, up_offset)


def _check(
    op: str,
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    act: str = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> None:
    checks.tensor(op, "h_C2F", h_C2F, 2, checks.FLOATS)
    checks.tensor(op, "offsets_L", offsets_L, 1, checks.INDICES, like=h_C2F)
    checks.positive(op, "number of experts L", offsets_L.shape[0])
    checks.row_weights(op, row_weights_C, h_C2F)
    width = h_C2F.shape[1]
    checks.holds(op, width % 2 == 0, lambda: f"h_C2F must have an even width, got {width}")
    checks.activation(op, act, limit, alpha)


def _check_backward(op: str, grad_CF: torch.Tensor, h_C2F: torch.Tensor, *args: Any) -> None:
    _check(op, h_C2F, *args)
    checks.tensor(op, "grad_CF", grad_CF, 2, (h_C2F.dtype,), like=h_C2F)
    checks.same_size(op, "grad_CF and h_C2F must be equally long", grad_CF.shape[0], h_C2F.shape[0])
    checks.same_size(
        op, "h_C2F must be twice as wide as grad_CF", h_C2F.shape[1], 2 * grad_CF.shape[1]
    )


def _gate_and_slope(
    gate: torch.Tensor, act: str, alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The activation of `gate` and its derivative."""
    if act == "silu":
        sigmoid = torch.sigmoid(alpha * gate)
        return gate * sigmoid, sigmoid * (1 + alpha * gate * (1 - sigmoid))
    phi = 0.5 * (1 + torch.erf(gate * 0.5**0.5))
    density = torch.exp(-0.5 * gate * gate) * (2 * torch.pi) ** -0.5
    return gate * phi, phi + gate * density


def _halves(
    h_C2F: torch.Tensor, offsets_L: torch.Tensor, limit: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """gate and up in the accumulate dtype, zero in the tail, and where `limit` leaves each of them
    alone.
    """
    inside_C1 = layout.held_rows(offsets_L, h_C2F.shape[0])[:, None]
    h_C2F = torch.where(inside_C1, h_C2F.to(layout.accumulate_dtype(h_C2F.dtype)), 0)
    gate, up = h_C2F.chunk(2, dim=1)
    if limit is None:
        return gate, up, inside_C1, inside_C1
    free_gate, free_up = gate <= limit, up.abs() <= limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate, up, inside_C1 & free_gate, inside_C1 & free_up


def _reference(
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    act: str = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> torch.Tensor:
    gate, up, _, _ = _halves(h_C2F, offsets_L, limit)
    a_CF = _gate_and_slope(gate, act, alpha)[0] * (up + up_offset)
    if row_weights_C is not None:
        inside_C = layout.held_rows(offsets_L, h_C2F.shape[0])
        a_CF = a_CF * torch.where(inside_C, row_weights_C, 0)[:, None]
    return a_CF.to(h_C2F.dtype).contiguous()


def _fake(
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    *options: Any,
) -> torch.Tensor:
    return h_C2F.new_empty(h_C2F.shape[0], h_C2F.shape[1] // 2)


def _backward_reference(
    grad_CF: torch.Tensor,
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    act: str = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up, free_gate, free_up = _halves(h_C2F, offsets_L, limit)
    inside_C1 = layout.held_rows(offsets_L, h_C2F.shape[0])[:, None]
    grad_CF = torch.where(inside_C1, grad_CF.to(gate.dtype), 0)
    activated, slope = _gate_and_slope(gate, act, alpha)
    grad_row_weights_C = grad_CF.new_zeros(0)
    if row_weights_C is not None:
        grad_row_weights_C = (grad_CF * activated * (up + up_offset)).sum(1)
        grad_row_weights_C = grad_row_weights_C.to(row_weights_C.dtype)
        grad_CF = torch.where(inside_C1, grad_CF * row_weights_C[:, None], 0)
    grad_gate = torch.where(free_gate, grad_CF * slope * (up + up_offset), 0)
    grad_up = torch.where(free_up, grad_CF * activated, 0)
    return torch.cat([grad_gate, grad_up], 1).to(h_C2F.dtype), grad_row_weights_C


def _backward_fake(
    grad_CF: torch.Tensor,
    h_C2F: torch.Tensor,
    row_weights_C: torch.Tensor | None,
    offsets_L: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    if row_weights_C is None:
        dtype = layout.accumulate_dtype(h_C2F.dtype)
        return h_C2F.new_empty(h_C2F.shape), h_C2F.new_empty(0, dtype=dtype)
    return h_C2F.new_empty(h_C2F.shape), row_weights_C.new_empty(row_weights_C.shape)


def _with_output_reference(
    grad_CF: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_h_C2F, grad_row_weights_C = _backward_reference(grad_CF, *args)
    return grad_h_C2F, _reference(*args), grad_row_weights_C


def _with_output_fake(
    grad_CF: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    grad_h_C2F, grad_row_weights_C = _backward_fake(grad_CF, *args)
    return grad_h_C2F, _fake(*args), grad_row_weights_C


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.options = inputs[3:]


def _backward(ctx: Any, grad_CF: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    h_C2F, row_weights_C, offsets_L = ctx.saved_tensors
    grad_h_C2F, grad_row_weights_C = _swiglu_backward(
        grad_CF, h_C2F, row_weights_C, offsets_L, *ctx.options
    )
    weighted = row_weights_C is not None
    return grad_h_C2F, grad_row_weights_C if weighted else None, None, None, None, None, None


_OPTIONS = 'str act="silu", float? limit=None, float alpha=1.0, float up_offset=0.0'
_swiglu = _library.define(
    f"swiglu(Tensor h_C2F, Tensor? row_weights_C, Tensor offsets_L, {_OPTIONS}) -> Tensor a_CF",
    check=functools.partial(_check, "swiglu"),
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
_swiglu_backward = _library.define(
    "swiglu_backward(Tensor grad_CF, Tensor h_C2F, Tensor? row_weights_C, Tensor offsets_L, "
    f"{_OPTIONS}) -> (Tensor grad_h_C2F, Tensor grad_row_weights_C)",
    check=functools.partial(_check_backward, "swiglu_backward"),
    reference=_backward_reference,
    fake=_backward_fake,
)
_library.define(
    "swiglu_backward_with_output(Tensor grad_CF, Tensor h_C2F, Tensor? row_weights_C, "
    f"Tensor offsets_L, {_OPTIONS}) -> (Tensor grad_h_C2F, Tensor a_CF, Tensor grad_row_weights_C)",
    check=functools.partial(_check_backward, "swiglu_backward_with_output"),
    reference=_with_output_reference,
    fake=_with_output_fake,
    private=True,
)
