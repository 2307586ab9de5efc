"""Choose each token's top-k experts and their gate weights.

    scores  = softmax over experts, sigmoid, or sqrt(softplus) of the logits
    ids     = top-k of scores + bias, of the experts in the best groups; without a bias of the
              logits themselves, which order alike and do not underflow; with a softmax over the
              chosen (score_first=False) of logits + bias. Ties: lowest index.
    weights = scale * score of the choice, divided by (their sum + 1e-20) if normalize and K > 1

Letters: T tokens, K top-k, E experts; -1 = none, its weight is 0.

    logits_TE = [[0, 1, 3], [2, 2, 0], [1, 0, 4], [5, 0, 5]], K = 2, softmax, normalize
    -> ids_TK [[2, 1], [0, 1], [2, 0], [0, 2]], weights_TK [[.881, .119], [.5, .5], [.953, .047],
    [.5, .5]]

Gradients reach the chosen experts only, except with score_first and without the division by their
sum (not normalize, or K = 1), where the softmax gives every expert one. With one choice and a
softmax over it (score_first=False, K = 1) the weight is 1 and the gradient 0: use score_first=True.
Group-limited routing and the bias for selection: arXiv:2412.19437, section 2.1.2.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _library, checks, layout

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")


def topk_route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None = None,
    ids_TK: torch.Tensor | None = None,
    mask_T: torch.Tensor | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    score_first: bool = True,
    normalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score_top: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate weights [T, K] float32 (float64 if the logits are) and experts [T, K] int32.

    Args:
        logits_TE: [T, E], any floating dtype.
        bias_E: [E] floating, added to the scores (the logits if score_first=False with "softmax")
            for selection and group scores only.
        ids_TK: [T, K] int32 or int64: replay this choice (-1 = none) instead of selecting.
        mask_T: [T] bool; False gives ids -1 and weights 0.
        score: "softmax", "sigmoid" or "sqrtsoftplus"; `score_first`: softmax over all experts, not
            over the chosen.
        num_groups, top_groups: experts form `num_groups` equal runs; only the `top_groups` best are
            eligible.
        group_score_top: a group's score is the sum of this many best scores; 0 = max(top_k //
            top_groups, 1).

    Raises:
        TypeError, ValueError: wrong dtype, rank, size or device, K > E, unknown score, impossible
            groups.
    """
    return _topk_route(
        logits_TE,
        bias_E,
        ids_TK,
        mask_T,
        top_k,
        score,
        score_first,
        normalize,
        scale,
        num_groups,
        top_groups,
        group_score_top,
    )


def _check(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    ids_TK: torch.Tensor | None,
    mask_T: torch.Tensor | None,
    top_k: int,
    score: str = "softmax",
    score_first: bool = True,
    normalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score_top: int = 0,
) -> None:
    op = "topk_route"
    checks.tensor(op, "logits_TE", logits_TE, 2, checks.FLOATS)
    num_tokens, num_experts = logits_TE.shape
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"{op}: top_k must be in 1 .. E = {num_experts}, got {top_k}")
    checks.one_of(op, "score", score, SCORES)
    if bias_E is not None:
        checks.tensor(op, "bias_E", bias_E, 1, checks.FLOATS, like=logits_TE)
        checks.same_size(op, "bias_E must have one value an expert", bias_E.shape[0], num_experts)
    if ids_TK is not None:
        checks.tensor(op, "ids_TK", ids_TK, 2, checks.IDS, like=logits_TE)
        checks.same_size(op, "ids_TK must have T rows", ids_TK.shape[0], num_tokens)
        checks.same_size(op, "ids_TK must have top_k columns", ids_TK.shape[1], top_k)
    if mask_T is not None:
        checks.tensor(op, "mask_T", mask_T, 1, (torch.bool,), like=logits_TE)
        checks.same_size(op, "mask_T must have T values", mask_T.shape[0], num_tokens)
    checks.positive(op, "num_groups", num_groups)
    if num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"{op}: num_groups must divide E = {num_experts} and top_groups be in 1 .. num_groups, "
            f"got num_groups {num_groups} and top_groups {top_groups}"
        )
    group_size = num_experts // num_groups
    if top_k > top_groups * group_size:
        raise ValueError(
            f"{op}: top_k must fit into the {top_groups * group_size} experts of "
            f"top_groups, got {top_k}"
        )
    if not 0 <= group_score_top <= group_size:
        raise ValueError(
            f"{op}: group_score_top must be in 0 .. {group_size}, got {group_score_top}"
        )


def _scores(logits: torch.Tensor, score: str) -> torch.Tensor:
    if score == "softmax":
        return logits.softmax(-1)
    if score == "sigmoid":
        return logits.sigmoid()
    return torch.nn.functional.softplus(logits).sqrt()


def _first_of_largest(values: torch.Tensor, number: int) -> torch.Tensor:
    """Indices of the `number` largest along the last dimension, the lowest index first among
    equals.
    """
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :number]


def _select(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    top_k: int,
    score: str,
    score_first: bool,
    num_groups: int,
    top_groups: int,
    group_score_top: int,
) -> torch.Tensor:
    ranks_logits = score == "softmax" and not score_first
    keys_TE = logits_TE if ranks_logits else _scores(logits_TE, score)
    if bias_E is not None:
        keys_TE = keys_TE + bias_E.to(logits_TE.dtype)
    order_TE = logits_TE if bias_E is None else keys_TE
    if top_groups < num_groups:
        best = min(group_score_top or max(top_k // top_groups, 1), keys_TE.shape[1] // num_groups)
        grouped = keys_TE.unflatten(1, (num_groups, keys_TE.shape[1] // num_groups))
        group_scores = grouped.sort(dim=-1, descending=True).values[..., :best].sum(-1)
        chosen = _first_of_largest(group_scores, top_groups)
        eligible = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, chosen, True)
        eligible_TE = eligible.repeat_interleave(grouped.shape[-1], dim=1)
        # NOTE: -inf alone would tie with a logit of -inf inside an eligible group.
        first = _first_of_largest(torch.where(eligible_TE, order_TE, -torch.inf), order_TE.shape[1])
        kept = eligible_TE.gather(1, first)
        place = torch.argsort((~kept).to(torch.uint8), dim=1, stable=True)
        return first.gather(1, place)[:, :top_k]
    return _first_of_largest(order_TE, top_k)


def _chosen_scores(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor, score: str, score_first: bool
) -> torch.Tensor:
    """Score of each choice before normalize and scale, 0 where there is none."""
    held_TK = ids_TK >= 0
    index_TK = ids_TK.clamp(min=0).long()
    if score == "softmax" and not score_first:
        chosen = torch.where(held_TK, logits_TE.gather(1, index_TK), -torch.inf)
        largest = chosen.amax(1, keepdim=True).clamp(min=torch.finfo(chosen.dtype).min)
        exponentials = (chosen - largest).exp()
        return exponentials / exponentials.sum(1, keepdim=True).clamp(min=1e-20)
    chosen = _scores(logits_TE, score).gather(1, index_TK)
    return torch.where(held_TK, chosen, 0)


def _reference(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    ids_TK: torch.Tensor | None,
    mask_T: torch.Tensor | None,
    top_k: int,
    score: str = "softmax",
    score_first: bool = True,
    normalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score_top: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_experts = logits_TE.shape[1]
    logits_TE = logits_TE.to(layout.accumulate_dtype(logits_TE.dtype))
    if ids_TK is None:
        ids_TK = _select(
            logits_TE, bias_E, top_k, score, score_first, num_groups, top_groups, group_score_top
        )
    else:
        checks.ids_in_range("topk_route", "ids_TK", ids_TK, num_experts)
    if mask_T is not None:
        ids_TK = torch.where(mask_T[:, None], ids_TK, -1)
    weights_TK = _chosen_scores(logits_TE, ids_TK, score, score_first)
    if normalize and top_k > 1:
        weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
    return (weights_TK * scale).contiguous(), ids_TK.to(torch.int32, copy=True).contiguous()


def _fake(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    ids_TK: torch.Tensor | None,
    mask_T: torch.Tensor | None,
    top_k: int,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (logits_TE.shape[0], top_k)
    dtype = layout.accumulate_dtype(logits_TE.dtype)
    return logits_TE.new_empty(shape, dtype=dtype), logits_TE.new_empty(shape, dtype=torch.int32)


def _check_backward(
    grad_TK: torch.Tensor, logits_TE: torch.Tensor, ids_TK: torch.Tensor, *options: Any
) -> None:
    op = "topk_route_backward"
    checks.tensor(op, "logits_TE", logits_TE, 2, checks.FLOATS)
    checks.tensor(op, "grad_TK", grad_TK, 2, checks.GATES, like=logits_TE)
    checks.tensor(op, "ids_TK", ids_TK, 2, checks.INDICES, like=logits_TE)
    for name, value in (("grad_TK", grad_TK), ("ids_TK", ids_TK)):
        checks.same_size(op, f"{name} must have T rows", value.shape[0], logits_TE.shape[0])
    checks.same_size(op, "grad_TK and ids_TK must share K", grad_TK.shape[1], ids_TK.shape[1])


def _backward_reference(
    grad_TK: torch.Tensor,
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    score: str,
    score_first: bool,
    normalize: bool,
    scale: float,
) -> torch.Tensor:
    logits = logits_TE.to(layout.accumulate_dtype(logits_TE.dtype))
    held_TK = ids_TK >= 0
    index_TK = ids_TK.clamp(min=0).long()
    scores_TK = _chosen_scores(logits, ids_TK, score, score_first)
    normalized = normalize and ids_TK.shape[1] > 1
    grad_scores_TK = torch.where(held_TK, grad_TK.to(logits.dtype) * scale, 0)
    if normalized:
        total = scores_TK.sum(1, keepdim=True) + 1e-20
        mean = (grad_scores_TK * scores_TK).sum(1, keepdim=True) / total
        grad_scores_TK = (grad_scores_TK - mean) / total
    if score == "softmax":
        mean = (grad_scores_TK * scores_TK).sum(1, keepdim=True)
        grad_chosen_TK = scores_TK * (grad_scores_TK - mean)
    else:
        chosen = logits.gather(1, index_TK)
        sigmoid = chosen.sigmoid()
        if score == "sigmoid":
            slope = sigmoid * (1 - sigmoid)
        else:
            # d sqrt(softplus(z)) = sigmoid(z) / (2 sqrt(softplus(z))), 0 where both underflow.
            slope = torch.where(scores_TK > 0, sigmoid / (2 * scores_TK), 0)
        grad_chosen_TK = grad_scores_TK * slope
    grad_chosen_TK = torch.where(held_TK, grad_chosen_TK, 0)
    grad_TE = torch.zeros_like(logits)
    if score == "softmax" and score_first and not normalized:
        # NOTE: a token without any choice gets 0 even where its logits are NaN.
        held_T1 = held_TK.any(1, keepdim=True)
        grad_TE = torch.where(held_T1, -logits.softmax(-1) * mean, 0)
        grad_chosen_TK = torch.where(held_TK, scores_TK * grad_scores_TK, 0)
    # One choice at a time: a repeated id adds up in the order of k, without atomics.
    for k in range(ids_TK.shape[1]):
        grad_TE = grad_TE.scatter_add(1, index_TK[:, k : k + 1], grad_chosen_TK[:, k : k + 1])
    return grad_TE.to(logits_TE.dtype)


def _backward_fake(
    grad_TK: torch.Tensor, logits_TE: torch.Tensor, ids_TK: torch.Tensor, *options: Any
) -> torch.Tensor:
    return logits_TE.new_empty(logits_TE.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], output[1])
    ctx.options = inputs[5:9]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad_TK: torch.Tensor, _: Any) -> tuple[torch.Tensor | None, ...]:
    logits_TE, ids_TK = ctx.saved_tensors
    grad_TE = _topk_route_backward(grad_TK, logits_TE, ids_TK, *ctx.options)
    return grad_TE, *(None,) * 11


_topk_route = _library.define(
    "topk_route(Tensor logits_TE, Tensor? bias_E, Tensor? ids_TK, Tensor? mask_T, int top_k, "
    'str score="softmax", bool score_first=True, bool normalize=True, float scale=1.0, '
    "int num_groups=1, int top_groups=1, int group_score_top=0)"
    " -> (Tensor weights_TK, Tensor ids_TK)",
    check=_check,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
_topk_route_backward = _library.define(
    "topk_route_backward(Tensor grad_TK, Tensor logits_TE, Tensor ids_TK, str score, "
    "bool score_first, bool normalize, float scale) -> Tensor grad_logits_TE",
    check=_check_backward,
    reference=_backward_reference,
    fake=_backward_fake,
)
