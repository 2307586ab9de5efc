"""Losses and assignments that even out the load of experts, in plain PyTorch the compiler fuses.

Letters: T tokens here, K top-k, E experts, B sequences, N tokens but padding, P ranks; -1 = none.

    logits_TE = [[0, 1, 3], [2, 2, 0], [1, 0, 4], [5, 0, 5]]
    ids_TK = [[2, 1], [0, 1], [2, 0], [0, 2]], N = 4, counts_E = [3, 2, 3]
    -> softmax summed over tokens [1.06, .60, 2.34], aux_loss = 3 / (2 * 4^2) * 11.4 = 1.07

Counts are integers and carry no gradient. A loss has the logits' dtype, at least float32; without
any token it is 0, and so is its gradient. Coefficients are the caller's. `mask_T` [T] bool: True =
a real token; None = all are.
"""

from __future__ import annotations

import math

import torch
import torch.distributed._functional_collectives as collectives

from .. import checks, layout
from ..ops.sort_slots import sort_slots

# Steps of `sinkhorn`: a number instead of a tolerance, whose test would wait for the device.
# Fullest expert over the mean, 4096 x 64 logits 3 * (normal + normal per expert), K = 2: plain
# top-k 14.6; 2 steps 1.90, 3 steps 1.26, from 4 to 100 steps 1.12 (CPU, 2026-11).
SINKHORN_STEPS = 8


def aux_loss(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    mask_T: torch.Tensor | None = None,
    *,
    score: str = "softmax",
) -> torch.Tensor:
    """E / (K N^2) * sum_e counts_e * sum_t scores_te; 1 when the load is even.

    counts_e: choices of expert e in `ids_TK`, before any are dropped for capacity; scores:
    `expert_scores`. Switch Transformer, arXiv:2101.03961, eq. 4, there for K = 1.
    """
    return _batch_loss(logits_TE, ids_TK, mask_T, score, 1)


def seq_aux_loss(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    mask_T: torch.Tensor | None = None,
    *,
    num_sequences: int,
    score: str = "softmax",
) -> torch.Tensor:
    """Mean over sequences of `aux_loss` of the sequence alone (arXiv:2412.19437, eqs. 17 to 20).

    Tokens are batch-first, T = B * length. A sequence that is all padding adds 0 and counts in the
    mean; no sequence at all gives 0.
    """
    num_tokens = logits_TE.shape[0]
    if num_tokens == num_sequences == 0:
        num_sequences = 1
    checks.positive("seq_aux_loss", "num_sequences", num_sequences)
    if num_tokens % num_sequences:
        raise ValueError(
            f"seq_aux_loss: num_sequences must divide T = {num_tokens}, got {num_sequences}"
        )
    return _batch_loss(logits_TE, ids_TK, mask_T, score, num_sequences)


def global_aux_loss(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    mask_T: torch.Tensor | None = None,
    *,
    group_name: str,
    score: str = "softmax",
) -> torch.Tensor:
    """This rank's share of `aux_loss` of all ranks' tokens (arXiv:2501.11873).

        P * E / (K N^2) * sum_e counts_e * sum_t scores_te

    with counts and N of all ranks, t of this one. The mean over ranks is the loss of the global
    batch, so averaging gradients over ranks, as DistributedDataParallel does, is exact. One
    all-reduce of E + 2 integers; scores and gradients stay on their rank.
    """
    counts_1E, sums_1E, tokens_1 = _counts_and_sums(logits_TE, ids_TK, mask_T, score, 1)
    if not group_name:
        return _switch_loss(counts_1E, sums_1E, tokens_1, ids_TK.shape[1])[0]
    # P rides along, so that the graph need not know the group.
    local = torch.cat([counts_1E[0], tokens_1, torch.ones_like(tokens_1)])
    reduced = torch.ops._c10d_functional.all_reduce(local, "sum", group_name)
    reduced = collectives.wait_tensor(reduced)
    counts_1E, tokens_1, num_ranks = reduced[None, :-2], reduced[-2:-1], reduced[-1]
    return num_ranks * _switch_loss(counts_1E, sums_1E, tokens_1, ids_TK.shape[1])[0]


def z_loss(logits_TE: torch.Tensor, mask_T: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over tokens of logsumexp(logits)^2 (arXiv:2202.08906, eq. 5): keeps logits small."""
    logits_TE = logits_TE.to(layout.accumulate_dtype(logits_TE.dtype))
    squares_T = logits_TE.logsumexp(1).square()
    if mask_T is None:
        mask_T = torch.ones_like(squares_T, dtype=torch.bool)
    return torch.where(mask_T, squares_T, 0).sum() / mask_T.sum().clamp(min=1)


def sinkhorn(
    logits_TE: torch.Tensor,
    mask_T: torch.Tensor | None = None,
    *,
    num_steps: int = SINKHORN_STEPS,
) -> torch.Tensor:
    """Logarithm of exp(logits) scaled so that rows sum to 1 and columns to N / E.

    Each step scales rows, then columns, in log space, and reads nothing from the device. Padding
    and tokens with a logit that is not finite take no part. No gradient. S-BASE, arXiv:2202.01169,
    section 3.1.
    """
    with torch.no_grad():
        logits_TE = logits_TE.to(layout.accumulate_dtype(logits_TE.dtype))
        if mask_T is None:
            mask_T = torch.ones_like(logits_TE[:, 0], dtype=torch.bool)
        mask_T = mask_T & logits_TE.isfinite().all(1)
        nothing = torch.finfo(logits_TE.dtype).min
        share = mask_T.sum().clamp(min=1).to(logits_TE.dtype).log() - math.log(logits_TE.shape[1])
        row_T = torch.zeros_like(logits_TE[:, 0])
        column_E = logits_TE.new_zeros(logits_TE.shape[1])
        for _ in range(num_steps):
            row_T = -(logits_TE + column_E).logsumexp(1)
            scaled_TE = torch.where(mask_T[:, None], logits_TE + row_T[:, None], nothing)
            column_E = share - scaled_TE.logsumexp(0)
        return logits_TE + row_T[:, None] + column_E


def drop_over_capacity(
    weights_TK: torch.Tensor,
    ids_TK: torch.Tensor,
    num_experts: int,
    *,
    expert_capacity: int,
    policy: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Leave each expert `expert_capacity` choices; the others get weight 0 and id -1.

    `policy`: "position" keeps the first in slot order (arXiv:2101.03961, section 2.2), "probs"
    those with the largest weights, the lowest slot among equals. The weights kept stay as they are.
    Returns weights_TK, ids_TK and the number dropped, int64 [].
    """
    if policy == "position":
        row_of_slot_TK = sort_slots(ids_TK, num_experts, expert_capacity=expert_capacity)[1]
        kept_TK = row_of_slot_TK >= 0
    else:
        order_S = weights_TK.detach().reshape(-1).argsort(descending=True, stable=True)
        ids_S1 = ids_TK.reshape(-1)[order_S][:, None]
        row_of_slot_S1 = sort_slots(ids_S1, num_experts, expert_capacity=expert_capacity)[1]
        kept_S = row_of_slot_S1[:, 0] >= 0
        kept_TK = torch.zeros_like(kept_S).scatter(0, order_S, kept_S).reshape(ids_TK.shape)
    dropped = ((ids_TK >= 0) & ~kept_TK).sum()
    return torch.where(kept_TK, weights_TK, 0), torch.where(kept_TK, ids_TK, -1), dropped


def expert_scores(logits_TE: torch.Tensor, score: str) -> torch.Tensor:
    """Softmax over the experts, or sigmoid or sqrt(softplus) over (their sum + 1e-20)."""
    if score == "softmax":
        return logits_TE.softmax(-1)
    if score == "sigmoid":
        scores_TE = logits_TE.sigmoid()
    else:
        # NOTE: below about -104 a float32 softplus is 0, where sqrt has an infinite slope.
        softplus_TE = torch.nn.functional.softplus(logits_TE)
        positive_TE = softplus_TE > 0
        scores_TE = torch.where(positive_TE, torch.where(positive_TE, softplus_TE, 1).sqrt(), 0)
    return scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)


def _batch_loss(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    mask_T: torch.Tensor | None,
    score: str,
    num_sequences: int,
) -> torch.Tensor:
    sums = _counts_and_sums(logits_TE, ids_TK, mask_T, score, num_sequences)
    return _switch_loss(*sums, ids_TK.shape[1]).mean()


def _switch_loss(
    counts_BE: torch.Tensor, sums_BE: torch.Tensor, tokens_B: torch.Tensor, top_k: int
) -> torch.Tensor:
    """E / (K N^2) * sum_e counts_e * sums_e of each sequence [B]."""
    # N^2 may be large: divide twice.
    tokens_B1 = tokens_B[:, None].clamp(min=1)
    products_BE = (counts_BE.to(sums_BE.dtype) / tokens_B1) * (sums_BE / tokens_B1)
    return products_BE.sum(1) * (counts_BE.shape[1] / top_k)


def _counts_and_sums(
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    mask_T: torch.Tensor | None,
    score: str,
    num_sequences: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each sequence: experts' choices [B, E] i64, sums of their scores [B, E], N [B] i64."""
    num_tokens, num_experts = logits_TE.shape
    scores_TE = expert_scores(logits_TE.to(layout.accumulate_dtype(logits_TE.dtype)), score)
    if mask_T is None:
        mask_T = torch.ones_like(scores_TE[:, 0], dtype=torch.bool)
    length = num_tokens // num_sequences
    sequence_T = torch.arange(num_tokens, device=ids_TK.device) // max(length, 1)
    # Expert e of sequence b is bin b * E + e.
    bins_TK = ids_TK.long() + sequence_T[:, None] * num_experts
    bins_TK = torch.where(mask_T[:, None] & (ids_TK >= 0), bins_TK, -1)
    counts = layout.count(bins_TK, num_sequences * num_experts)
    scores_TE = torch.where(mask_T[:, None], scores_TE, 0)
    return (
        counts.reshape(num_sequences, num_experts),
        scores_TE.reshape(num_sequences, length, num_experts).sum(1),
        mask_T.reshape(num_sequences, length).sum(1),
    )
