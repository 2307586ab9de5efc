"""CUDA kernels of router_linear and its backward for bf16: matmuls on tensor cores, where products
of bf16 are exact and sums are float32.

Letters as in `moe_ops.ops.router_linear`.
"""

from __future__ import annotations

import torch

from .kernel import Kernel, capability


def router_linear(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
    """One matmul."""
    return _mm_f32(x_TH, weight_EH.T)


def router_linear_backward(
    grad_TE: torch.Tensor, x_TH: torch.Tensor, weight_EH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matmuls with the gradient in two bf16 parts."""
    num_experts = weight_EH.shape[0]
    parts_T2E = split(grad_TE)
    grad_x_TH = torch.mm(parts_T2E, torch.cat([weight_EH, weight_EH]))
    sums_2EH = _mm_f32(parts_T2E.T, x_TH)
    grad_weight_EH = weight_EH.new_empty(weight_EH.shape)
    torch.add(sums_2EH[:num_experts], sums_2EH[num_experts:], out=grad_weight_EH)
    return grad_x_TH, grad_weight_EH


def split(grad_TE: torch.Tensor) -> torch.Tensor:
    """[T, 2E] bf16: the first half plus the second is `grad_TE` to 2^-16, NaN for infinity."""
    num_tokens, num_experts = grad_TE.shape
    parts_T2E = grad_TE.new_empty(num_tokens, 2 * num_experts, dtype=torch.bfloat16)
    high_TE, low_TE = parts_T2E.split(num_experts, dim=1)
    high_TE.copy_(grad_TE)
    torch.sub(grad_TE, high_TE, out=low_TE)
    return parts_T2E


def _mm_f32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


def _takes(x_TH: torch.Tensor, weight_EH: torch.Tensor) -> bool:
    return (
        x_TH.dtype == weight_EH.dtype == torch.bfloat16
        and x_TH.numel() > 0
        and capability(x_TH.device) >= (8, 0)
    )


def _takes_backward(grad_TE: torch.Tensor, x_TH: torch.Tensor, weight_EH: torch.Tensor) -> bool:
    return _takes(x_TH, weight_EH)


KERNELS = {
    "router_linear": [Kernel("bf16 torch.mm", _takes, router_linear)],
    "router_linear_backward": [Kernel("bf16 torch.mm", _takes_backward, router_linear_backward)],
}
