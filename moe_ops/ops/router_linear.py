"""Logits of a router: tokens times the gate's weight, at least in float32.

    logits = x @ weight.T

Letters: T tokens, E experts, H hidden.

    4 tokens, E = 3, H = 2: x_TH = [[1, 0], [0, 1], [1, 1], [2, -1]] and
    weight_EH = [[1, 2], [0, 1], [3, 0]]
    -> logits_TE = [[1, 0, 3], [2, 1, 0], [3, 1, 3], [0, -1, 6]]
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _library, checks, layout


def router_linear(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
    """logits_TE [T, E] float32, float64 if `x_TH` is; autocast changes nothing.

    The matmul is as exact as one of inputs that were cast to the dtype of the logits, but where
    both are bf16 tensor cores run it on CUDA, and no cast copy is kept for backward anywhere.

    Args:
        x_TH: [T, H], any floating dtype.
        weight_EH: [E, H], any floating dtype.

    Raises:
        TypeError, ValueError: wrong dtype, rank, size or device.

    Gradients: `router_linear_backward`, in the dtypes of the inputs. float32 on CUDA follows
    `torch.backends.cuda.matmul`'s precision.
    """
    return _router_linear(x_TH, weight_EH)


def _check(op: str, x_TH: torch.Tensor, weight_EH: torch.Tensor) -> None:
    checks.tensor(op, "x_TH", x_TH, 2, checks.FLOATS)
    checks.tensor(op, "weight_EH", weight_EH, 2, checks.FLOATS, like=x_TH)
    checks.same_size(op, "x_TH and weight_EH must share H", x_TH.shape[1], weight_EH.shape[1])
    checks.positive(op, "number of experts E", weight_EH.shape[0])


def _check_forward(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> None:
    _check("router_linear", x_TH, weight_EH)


def _check_backward(grad_TE: torch.Tensor, x_TH: torch.Tensor, weight_EH: torch.Tensor) -> None:
    op = "router_linear_backward"
    _check(op, x_TH, weight_EH)
    dtype = layout.accumulate_dtype(x_TH.dtype)
    checks.tensor(op, "grad_TE", grad_TE, 2, (dtype,), like=x_TH)
    checks.same_size(op, "grad_TE and x_TH must share T", grad_TE.shape[0], x_TH.shape[0])
    checks.same_size(op, "grad_TE and weight_EH must share E", grad_TE.shape[1], weight_EH.shape[0])


def _reference(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
    dtype = layout.accumulate_dtype(x_TH.dtype)
    return x_TH.to(dtype) @ weight_EH.to(dtype).T


def _backward_reference(
    grad_TE: torch.Tensor, x_TH: torch.Tensor, weight_EH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    grad_x_TH = grad_TE @ weight_EH.to(grad_TE.dtype)
    grad_weight_EH = grad_TE.T @ x_TH.to(grad_TE.dtype)
    return grad_x_TH.to(x_TH.dtype), grad_weight_EH.to(weight_EH.dtype)


def _fake(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
    dtype = layout.accumulate_dtype(x_TH.dtype)
    return x_TH.new_empty(x_TH.shape[0], weight_EH.shape[0], dtype=dtype)


def _backward_fake(
    grad_TE: torch.Tensor, x_TH: torch.Tensor, weight_EH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return x_TH.new_empty(x_TH.shape), weight_EH.new_empty(weight_EH.shape)


def _setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _router_linear_backward(grad_TE, *ctx.saved_tensors)


def _backward_of_backward(
    ctx: Any, x_grad_TH: torch.Tensor, weight_grad_EH: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Both outputs are bilinear in the gradient and one input."""
    grad_TE, x_TH, weight_EH = ctx.saved_tensors
    second_TE = None
    if ctx.needs_input_grad[0]:
        second_TE = _router_linear(x_grad_TH, weight_EH) + _router_linear(x_TH, weight_grad_EH)
    return second_TE, *_router_linear_backward(grad_TE, x_grad_TH, weight_grad_EH)


# CUDA kernels: moe_ops/kernels/router_linear.py.
_router_linear = _library.define(
    "router_linear(Tensor x_TH, Tensor weight_EH) -> Tensor logits_TE",
    check=_check_forward,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
_router_linear_backward = _library.define(
    "router_linear_backward(Tensor grad_TE, Tensor x_TH, Tensor weight_EH) "
    "-> (Tensor grad_x_TH, Tensor grad_weight_EH)",
    check=_check_backward,
    reference=_backward_reference,
    fake=_backward_fake,
    setup_context=_setup_context,
    backward=_backward_of_backward,
)
