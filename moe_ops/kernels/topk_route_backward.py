"""Triton kernel of topk_route_backward: a program is one warp with a few tokens.

Letters as in `moe_ops.ops.topk_route`: T tokens, K top-k, E experts; -1 = none; R
a `Routing`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .kernel import Kernel
from .topk_route import (
    load_choices,
    programs_of,
    routing_of,
    rows,
    scores_of_choices,
    serves,
    slots,
    softmax_terms,
    warps_of,
)


@triton.jit
def _grad_of_choices(grad_TK, logits_TK, scores_TK, held_TK, R: tl.constexpr):
    """Gradients of the chosen logits but for what `over_all` adds without `normalize`: -score *
    the second result, for every expert.
    """
    if R.normalize:
        total_T = tl.sum(scores_TK, 1) + 1e-20
        mean_T = tl.sum(grad_TK * scores_TK, 1) / total_T
        grad_TK = (grad_TK - mean_T[:, None]) / total_T[:, None]
    mean_T = tl.sum(grad_TK * scores_TK, 1)
    if R.over_all and not R.normalize:
        grad_TK = scores_TK * grad_TK
    elif R.score == "softmax":
        grad_TK = scores_TK * (grad_TK - mean_T[:, None])
    elif R.score == "sigmoid":
        sigmoid_TK = tl.sigmoid(logits_TK)
        grad_TK = grad_TK * (sigmoid_TK * (1 - sigmoid_TK))
    else:
        # d sqrt(softplus(z)) = sigmoid(z) / (2 sqrt(softplus(z))), 0 where both underflow.
        slope_TK = tl.where(scores_TK > 0, tl.sigmoid(logits_TK) / (2 * scores_TK), 0)
        grad_TK = grad_TK * slope_TK
    return tl.where(held_TK, grad_TK, 0), mean_T


@triton.jit
def _add_up(first_TK, ids_TK, grad_TK, R: tl.constexpr):
    """first_TK + the gradients of all choices of the same expert, in the order of k."""
    UNROLL: tl.constexpr = R.unroll
    k_1K = tl.arange(0, R.choices)[None, :]
    total_TK = first_TK
    for first in range(0, R.top_k, UNROLL):
        for step in tl.static_range(UNROLL):
            id_T = tl.sum(tl.where(k_1K == first + step, ids_TK, 0), 1)
            term_T = tl.sum(tl.where(k_1K == first + step, grad_TK, 0), 1)
            total_TK = tl.where(ids_TK == id_T[:, None], total_TK + term_T[:, None], total_TK)
    return total_TK


@triton.jit(do_not_specialize=["num_tokens"])
def topk_route_bwd_kernel(
    grad_ptr,
    logits_ptr,
    ids_ptr,
    grad_logits_ptr,
    num_tokens,
    scale,
    R: tl.constexpr,
):
    """Write rows as if nothing were chosen, then the gradients of the choices over them."""
    token_T, slot_TK, real_TK = slots(num_tokens, R)
    # NOTE: rows are loaded before choices. Operations on both take the layout of the last load; in
    # that of rows every choice would be with 16 threads (Triton 3.6: 2.3 times the instructions).
    offset_TE, inside_TE = rows(token_T, num_tokens, R)
    logits_TE = None
    if R.over_all:
        logits_TE = tl.load(logits_ptr + offset_TE, mask=inside_TE, other=-float("inf"))
        logits_TE = logits_TE.to(tl.float32)
    ids_TK = tl.load(ids_ptr + slot_TK, mask=real_TK, other=-1)
    grad_TK = tl.load(grad_ptr + slot_TK, mask=real_TK, other=0).to(tl.float32) * scale
    logits_TK, held_TK = load_choices(logits_ptr, token_T, ids_TK, R)
    grad_TK = tl.where(held_TK, grad_TK, 0)
    scores_TK = scores_of_choices(logits_TK, held_TK, logits_TE, R)
    grad_TK, mean_T = _grad_of_choices(grad_TK, logits_TK, scores_TK, held_TK, R)
    rest_TE = tl.full([R.tokens, R.places], 0.0, tl.float32)
    rest_TK = tl.full([R.tokens, R.choices], 0.0, tl.float32)
    if R.over_all and not R.normalize:
        _largest, exponentials_TE, total_T = softmax_terms(logits_TE)
        routed_T = tl.max(ids_TK, 1) >= 0
        rest_TE = tl.where(
            routed_T[:, None], -(exponentials_TE / total_T[:, None]) * mean_T[:, None], 0
        )
        rest_TK = -scores_TK * mean_T[:, None]
    grad_TK = _add_up(rest_TK, ids_TK, grad_TK, R)
    dtype = grad_logits_ptr.dtype.element_ty
    tl.store(grad_logits_ptr + offset_TE, rest_TE.to(dtype), mask=inside_TE)
    # Equal ids have equal sums, so it does not matter which of them is written last.
    tl.debug_barrier()
    target_TK = grad_logits_ptr + token_T[:, None] * R.num_experts + ids_TK
    tl.store(target_TK, grad_TK.to(dtype), mask=held_TK)


def topk_route_backward(
    grad_TK: torch.Tensor,
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    score: str,
    score_first: bool,
    normalize: bool,
    scale: float,
) -> torch.Tensor:
    """The operator `topk_route_backward`."""
    grad_logits_TE = logits_TE.new_empty(logits_TE.shape)
    num_tokens, top_k = ids_TK.shape
    if num_tokens == 0:
        return grad_logits_TE
    routing = routing_of(logits_TE.shape[1], top_k, score, score_first, normalize)
    topk_route_bwd_kernel[programs_of(num_tokens, routing)](
        grad_TK.contiguous(),
        logits_TE.contiguous(),
        ids_TK.contiguous(),
        grad_logits_TE,
        num_tokens,
        scale,
        R=routing,
        num_warps=warps_of(routing),
    )
    return grad_logits_TE


def _takes(
    grad_TK: torch.Tensor, logits_TE: torch.Tensor, ids_TK: torch.Tensor, *options: object
) -> bool:
    return serves(logits_TE, ids_TK.shape[1])


KERNELS: dict[str, list[Kernel]] = {
    "topk_route_backward": [Kernel("triton", _takes, topk_route_backward)]
}
