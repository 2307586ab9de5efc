"""Matmul of each expert's rows with its weight, and the gradient of the weights.

    grouped_mm:       c[r] = w[e] @ a[r] for the expert e that owns row r
    grouped_mm_wgrad: w[e] = sum over rows r of e of outer(g[r], a[r])

Letters: L experts here, C rows, I and O in and out features, offsets_L inclusive ends of the
experts' rows.

    4 tokens, K = 2, E = 3 give offsets_L = [3, 4, 7] (see sort_slots); I = O = 1,
    w_LOI = [[[1]], [[10]], [[100]]], a_CI = [[1], [2], [4], [2], [1], [3], [4], [9]]
    -> c_CO = [[1], [2], [4], [20], [100], [300], [400], [0]]
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .. import _library, checks, layout


def grouped_mm(a_CI: torch.Tensor, w_LOI: torch.Tensor, offsets_L: torch.Tensor) -> torch.Tensor:
    """c_CO [C, O]: rows of expert e times w[e].T, zero past the last offset.

    Under autocast `a_CI` and `w_LOI` are cast to its dtype first, as nn.Linear's are; float64 is
    left alone.

    Args:
        a_CI: [C, I]; rows past offsets_L[-1] are not read.
        w_LOI: [L, O, I], nn.Linear's orientation, same dtype as `a_CI`; may be a transposed view.
        offsets_L: [L] int32, not decreasing, inclusive ends, at most C.

    Raises:
        TypeError, ValueError: wrong dtype, rank, size or device.

    Gradients: `grouped_mm(g, w.mT)` and `grouped_mm_wgrad(g, a)`. float32 on CUDA follows
    `torch.backends.cuda.matmul`'s precision.
    """
    dtype = layout.autocast_dtype(a_CI)
    if dtype is not None:
        a_CI, w_LOI = a_CI.to(dtype), w_LOI.to(dtype)
    return _grouped_mm(a_CI, w_LOI, offsets_L)


def grouped_mm_wgrad(
    g_CO: torch.Tensor, a_CI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    """w_LOI [L, O, I], contiguous, in g's dtype; zero for an expert without rows.

    Args:
        g_CO: [C, O], any floating dtype; a_CI: [C, I], the same. Rows past offsets_L[-1] are not
            read.
        offsets_L: [L] int32, not decreasing, inclusive ends, at most C.

    Raises:
        TypeError, ValueError: wrong dtype, rank, size or device.

    Gradients: `grouped_mm` twice.
    """
    return _grouped_mm_wgrad(g_CO, a_CI, offsets_L)


def _check_grouped_mm(a_CI: torch.Tensor, w_LOI: torch.Tensor, offsets_L: torch.Tensor) -> None:
    op = "grouped_mm"
    checks.tensor(op, "a_CI", a_CI, 2, checks.FLOATS)
    checks.tensor(op, "w_LOI", w_LOI, 3, (a_CI.dtype,), like=a_CI)
    checks.tensor(op, "offsets_L", offsets_L, 1, checks.INDICES, like=a_CI)
    checks.same_size(op, "a_CI and w_LOI must share I", a_CI.shape[1], w_LOI.shape[2])
    checks.same_size(op, "w_LOI and offsets_L must share L", w_LOI.shape[0], offsets_L.shape[0])
    checks.positive(op, "number of experts L", offsets_L.shape[0])


def _check_wgrad(
    op: str,
    dtypes: Sequence[torch.dtype],
    g_CO: torch.Tensor,
    a_CI: torch.Tensor,
    offsets_L: torch.Tensor,
) -> None:
    checks.tensor(op, "g_CO", g_CO, 2, dtypes)
    checks.tensor(op, "a_CI", a_CI, 2, (g_CO.dtype,), like=g_CO)
    checks.tensor(op, "offsets_L", offsets_L, 1, checks.INDICES, like=g_CO)
    checks.same_size(op, "g_CO and a_CI must share C", g_CO.shape[0], a_CI.shape[0])
    checks.positive(op, "number of experts L", offsets_L.shape[0])


def _segments(rows: torch.Tensor, offsets_L: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Each expert's rows, then the tail."""
    return rows.tensor_split(offsets_L.cpu().long())


def _grouped_mm_reference(
    a_CI: torch.Tensor, w_LOI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    *groups, tail = _segments(a_CI, offsets_L)
    products = [group @ w_OI.mT for group, w_OI in zip(groups, w_LOI.unbind(0), strict=True)]
    return torch.cat([*products, a_CI.new_zeros(tail.shape[0], w_LOI.shape[1])])


def _grouped_mm_wgrad_reference(
    g_CO: torch.Tensor, a_CI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    groups_g, groups_a = _segments(g_CO, offsets_L), _segments(a_CI, offsets_L)
    pairs = zip(groups_g[:-1], groups_a[:-1], strict=True)
    return torch.stack([group_g.mT @ group_a for group_g, group_a in pairs])


def _grouped_mm_fake(
    a_CI: torch.Tensor, w_LOI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    return a_CI.new_empty(a_CI.shape[0], w_LOI.shape[1])


def _grouped_mm_wgrad_fake(
    g_CO: torch.Tensor, a_CI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    return g_CO.new_empty(offsets_L.shape[0], g_CO.shape[1], a_CI.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    first, second, offsets_L = inputs
    needs_first, needs_second, *_ = ctx.needs_input_grad
    ctx.save_for_backward(
        first if needs_second else None, second if needs_first else None, offsets_L
    )


def _grouped_mm_backward(ctx: Any, grad_CO: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    a_CI, w_LOI, offsets_L = ctx.saved_tensors
    grad_a_CI = grad_w_LOI = None
    if ctx.needs_input_grad[0]:
        grad_a_CI = _grouped_mm(grad_CO, w_LOI.mT, offsets_L)
    if ctx.needs_input_grad[1]:
        grad_w_LOI = _grouped_mm_wgrad(grad_CO, a_CI, offsets_L)
    return grad_a_CI, grad_w_LOI, None


def _grouped_mm_wgrad_backward(ctx: Any, grad_LOI: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    g_CO, a_CI, offsets_L = ctx.saved_tensors
    grad_g_CO = grad_a_CI = None
    if ctx.needs_input_grad[0]:
        grad_g_CO = _grouped_mm(a_CI, grad_LOI, offsets_L)
    if ctx.needs_input_grad[1]:
        grad_a_CI = _grouped_mm(g_CO, grad_LOI.mT, offsets_L)
    return grad_g_CO, grad_a_CI, None


_grouped_mm = _library.define(
    "grouped_mm(Tensor a_CI, Tensor w_LOI, Tensor offsets_L) -> Tensor c_CO",
    check=_check_grouped_mm,
    reference=_grouped_mm_reference,
    fake=_grouped_mm_fake,
    setup_context=_setup_context,
    backward=_grouped_mm_backward,
)
_grouped_mm_wgrad = _library.define(
    "grouped_mm_wgrad(Tensor g_CO, Tensor a_CI, Tensor offsets_L) -> Tensor w_LOI",
    check=functools.partial(_check_wgrad, "grouped_mm_wgrad", checks.FLOATS),
    reference=_grouped_mm_wgrad_reference,
    fake=_grouped_mm_wgrad_fake,
    setup_context=_setup_context,
    backward=_grouped_mm_wgrad_backward,
)
# Private: grouped_mm_wgrad of 16-bit operands with its float32 sums unrounded.
_library.define(
    "grouped_mm_wgrad_f32(Tensor g_CO, Tensor a_CI, Tensor offsets_L) -> Tensor w_LOI",
    check=functools.partial(_check_wgrad, "grouped_mm_wgrad_f32", checks.FLOATS[:3]),
    reference=lambda g, a, offsets: _grouped_mm_wgrad_reference(g.float(), a.float(), offsets),
    fake=lambda g, a, offsets: _grouped_mm_wgrad_fake(g, a, offsets).float(),
    private=True,
)
