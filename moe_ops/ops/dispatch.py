"""Send each token once to every rank that owns one of its experts, and sum what comes back: an
adjoint pair.

    dispatch: rows[d] = x[t] of the rank and token (s, t) that copy d comes from; weights where the
        expert is here
    combine:  x[t] = sum over ranks q, in order, of rank q's rows[copy_of_token[t, q]], plus
        addend[t]

Letters: T tokens here, K top-k, P ranks, D copies held here, H hidden. `exchange_plan` makes the
plan.

    P = 1, 4 tokens, K = 2, E = 3, ids_TK = [[2, 0], [0, 1], [2, -1], [0, 2]],
    x_TH = [[1], [2], [3], [4]]
    dispatch -> rows_DH = x_TH, weights_DK = weights_TK with 0 at the -1; combine of those rows ->
    x_TH (over P ranks each token comes back times the number of ranks it reached)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import _library, checks, comm, layout
from ..comm import nvlink
from ..comm import wire as wire_formats
from ..comm.collectives import all_to_all_rows, check_pairs
from .exchange_plan import exchange_plan, read_splits


def dispatch(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor | None = None,
    *,
    num_experts: int,
    group: dist.ProcessGroup | str | None,
    max_tokens: int = 0,
    copy_capacity: int | None = None,
    row_capacity: int | None = None,
    wire: str = "full",
) -> tuple[torch.Tensor, torch.Tensor, layout.Plan]:
    """`exchange_plan`, then the exchange: rows_DH, weights_DK, plan. Collective over `group`.

    T tokens here, K choices a token, D copies held here, H hidden.

    Args:
        x_TH: [T, H] float32, float64, bfloat16 or float16; H and dtype equal on all ranks.
        ids_TK: [T, K] int32 or int64; other planning arguments as in `exchange_plan`.
        weights_TK: [T, K] float32 (with float64 x also float64), or None.
        wire: format on the wire, "full", "fp8" (e4m3, a scale per 128 values) or "fp8_pow2" (with
            powers of two as scales); rows come back in x's dtype, gradients always travel in full.
            With FP8 a value x arrives within max(|x| / 16, m / 2^18), with "fp8_pow2" within
            max(|x| / 16, m / 2^17); m is the largest finite magnitude of its 128. This holds where
            x is normal in its dtype and m below 31/32 of the dtype's largest. What is not finite
            arrives as NaN.

    Returns:
        rows_DH [D, H] in x's dtype, weights_DK [D, K] (0 where the expert is on another rank; [0]
        without weights).

    Raises:
        TypeError, ValueError: on every rank; see `exchange_plan`. A value of the wrong Python type,
            or another group, is an error on that rank alone; the others wait for the group's
            timeout.

    Gradients: `combine` on the same plan.
    """
    plan = exchange_plan(
        ids_TK,
        num_experts,
        group=group,
        max_tokens=max_tokens,
        copy_capacity=copy_capacity,
        row_capacity=row_capacity,
    )
    rows_DH, weights_DK = _dispatch(
        x_TH, weights_TK, plan.tensors(), comm.group_name_of(group), wire
    )
    return rows_DH, weights_DK, plan


def combine(
    rows_DH: torch.Tensor,
    plan: layout.Plan,
    *,
    group: dist.ProcessGroup | str | None,
    weights_DK: torch.Tensor | None = None,
    addend_TH: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x_TH [T, H] in the rows' dtype and weights_TK [T, K] ([0] without weights). Collective over
    `group`.

    Sums are taken in at least float32, in rank order, the addend last, with one cast at the end.
    T tokens here, K choices a token, D copies held here, H hidden.

    Args:
        rows_DH: [D, H] float32, float64, bfloat16 or float16, one row a copy; rows past the valid
            copies are not read.
        plan: of the dispatch.
        weights_DK: [D, K] float32 (with float64 rows also float64), weights to send back to their
            tokens, or None.
        addend_TH: [T, H] in the rows' dtype, or None.

    Raises:
        TypeError, ValueError: on every rank, if one of them gave a wrong dtype, rank, size or
            device. A value of the wrong Python type, or another group, is an error on that rank
            alone; the others wait for the group's timeout.

    Gradients: `dispatch` on the same plan; of the addend the incoming one.
    """
    x_TH, weights_TK = _combine(
        rows_DH, weights_DK, addend_TH, plan.tensors(), comm.group_name_of(group)
    )
    return x_TH, weights_TK


_PLAN_DIMS = {
    "plan.copy_of_token_TP": 2,
    "plan.source_of_copy_D2": 2,
    "plan.ids_DK": 2,
    "plan.slot_of_row_C": 1,
    "plan.row_of_slot_DK": 2,
    "plan.offsets_L": 1,
    "plan.counts_PL": 2,
}


def _check_plan(
    op: str, tensors: list[torch.Tensor], group_name: str, like: torch.Tensor
) -> layout.Plan:
    if len(tensors) != 9:
        raise ValueError(f"{op}: plan must have 9 tensors, got {len(tensors)}")
    plan = layout.Plan(*tensors)
    for (name, dim), value in zip(_PLAN_DIMS.items(), tensors):
        checks.tensor(op, name, value, dim, checks.INDICES, like=like)
    for name in ("ids_DK", "row_of_slot_DK"):
        rule = f"plan.{name} must have the plan's D rows"
        checks.same_size(op, rule, getattr(plan, name).shape[0], plan.num_copies)
    checks.tensor(op, "plan.splits_4P", plan.splits_4P, 2, (torch.int64,))
    if nvlink.workspace(group_name) is None:
        checks.on_cpu(op, "plan.splits_4P", plan.splits_4P)
    checks.same_size(op, "plan.splits_4P must have 4 rows", plan.splits_4P.shape[0], 4)
    checks.same_size(
        op,
        "plan must be made for the group's number of ranks",
        plan.num_ranks,
        comm.group_size(group_name),
    )
    return plan


def _check_dispatch(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    tensors: list[torch.Tensor],
    group_name: str,
    wire: str,
) -> tuple[object, ...]:
    op = "dispatch"
    checks.tensor(op, "x_TH", x_TH, 2, checks.FLOATS)
    checks.one_of(op, "wire", wire, wire_formats.FORMATS)
    plan = _check_plan(op, tensors, group_name, x_TH)
    num_tokens = plan.copy_of_token_TP.shape[0]
    checks.same_size(op, "x_TH must have the plan's T rows", x_TH.shape[0], num_tokens)
    weighted = None
    if weights_TK is not None:
        shape = (num_tokens, plan.ids_DK.shape[1])
        checks.weights(op, "weights_TK", weights_TK, shape, like=x_TH)
        weighted = weights_TK.dtype
    return x_TH.shape[1], x_TH.dtype, weighted, wire


def _check_combine(
    rows_DH: torch.Tensor,
    weights_DK: torch.Tensor | None,
    addend_TH: torch.Tensor | None,
    tensors: list[torch.Tensor],
    group_name: str,
) -> tuple[object, ...]:
    op = "combine"
    checks.tensor(op, "rows_DH", rows_DH, 2, checks.FLOATS)
    plan = _check_plan(op, tensors, group_name, rows_DH)
    checks.same_size(op, "rows_DH must have the plan's D rows", rows_DH.shape[0], plan.num_copies)
    weighted = None
    if weights_DK is not None:
        checks.weights(op, "weights_DK", weights_DK, plan.ids_DK.shape, like=rows_DH)
        weighted = weights_DK.dtype
    if addend_TH is not None:
        checks.tensor(op, "addend_TH", addend_TH, 2, (rows_DH.dtype,), like=rows_DH)
        num_tokens = plan.copy_of_token_TP.shape[0]
        checks.same_size(
            op, "addend_TH must have the plan's T rows", addend_TH.shape[0], num_tokens
        )
        checks.same_size(
            op, "addend_TH and rows_DH must share H", addend_TH.shape[1], rows_DH.shape[1]
        )
    return rows_DH.shape[1], rows_DH.dtype, weighted


def _dispatch_reference(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    tensors: list[torch.Tensor],
    group_name: str,
    wire: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = layout.Plan(*tensors)
    send, receive, *_ = read_splits(plan, group_name)
    check_pairs("dispatch", send, receive, group_name)
    place_D = layout.places_received(plan.source_of_copy_D2[:, 0], receive)
    # The buffer to send holds (token, rank) pairs rank by rank; pair // P is the token.
    pair = layout.invert(layout.places_to_send(plan.copy_of_token_TP >= 0, send), sum(send))
    token = torch.where(pair >= 0, pair // plan.num_ranks, -1)

    def exchange(values: torch.Tensor) -> torch.Tensor:
        return all_to_all_rows(values, send, receive, group_name)

    if wire == "full":
        received = exchange(layout.take(x_TH, token))
    else:
        codes, scales = wire_formats.quantize(x_TH, wire == "fp8_pow2")
        received = wire_formats.dequantize(
            exchange(layout.take(codes, token)), exchange(layout.take(scales, token)), x_TH.dtype
        )
    rows_DH = layout.take(received, place_D)
    if weights_TK is None:
        return rows_DH, x_TH.new_empty(0, dtype=layout.accumulate_dtype(x_TH.dtype))
    weights_DK = layout.take(exchange(layout.take(weights_TK, token)), place_D)
    return rows_DH, torch.where(plan.ids_DK >= 0, weights_DK, 0)


def _combine_reference(
    rows_DH: torch.Tensor,
    weights_DK: torch.Tensor | None,
    addend_TH: torch.Tensor | None,
    tensors: list[torch.Tensor],
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = layout.Plan(*tensors)
    send, receive, *_ = read_splits(plan, group_name)
    check_pairs("combine", receive, send, group_name)
    copy = layout.invert(
        layout.places_received(plan.source_of_copy_D2[:, 0], receive), sum(receive)
    )
    place_TP = layout.places_to_send(plan.copy_of_token_TP >= 0, send)

    def sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
        returned = all_to_all_rows(layout.take(values, copy), receive, send, group_name)
        sum_dtype = layout.accumulate_dtype(values.dtype)
        total = returned.new_zeros(place_TP.shape[0], values.shape[1], dtype=sum_dtype)
        for place_T in place_TP.unbind(1):
            total = total + layout.take(returned, place_T).to(sum_dtype)
        return total

    x_TH = sum_over_ranks(rows_DH)
    if addend_TH is not None:
        x_TH = x_TH + addend_TH
    x_TH = x_TH.to(rows_DH.dtype)
    if weights_DK is None:
        return x_TH, rows_DH.new_empty(0, dtype=layout.accumulate_dtype(rows_DH.dtype))
    return x_TH, sum_over_ranks(torch.where(plan.ids_DK >= 0, weights_DK, 0)).to(weights_DK.dtype)


def _exchanged_weights(
    like: torch.Tensor, weights: torch.Tensor | None, length: int, top_k: int
) -> torch.Tensor:
    if weights is None:
        return like.new_empty(0, dtype=layout.accumulate_dtype(like.dtype))
    return weights.new_empty(length, top_k)


def _dispatch_fake(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    tensors: list[torch.Tensor],
    group_name: str,
    wire: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_copies, top_k = layout.Plan(*tensors).ids_DK.shape
    rows_DH = x_TH.new_empty(num_copies, x_TH.shape[1])
    return rows_DH, _exchanged_weights(x_TH, weights_TK, num_copies, top_k)


def _combine_fake(
    rows_DH: torch.Tensor,
    weights_DK: torch.Tensor | None,
    addend_TH: torch.Tensor | None,
    tensors: list[torch.Tensor],
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = layout.Plan(*tensors)
    num_tokens, top_k = plan.copy_of_token_TP.shape[0], plan.ids_DK.shape[1]
    x_TH = rows_DH.new_empty(num_tokens, rows_DH.shape[1])
    return x_TH, _exchanged_weights(rows_DH, weights_DK, num_tokens, top_k)


def _save_plan(ctx: Any, tensors: list[torch.Tensor], group_name: str, weighted: bool) -> None:
    ctx.save_for_backward(*tensors)
    ctx.group_name = group_name
    ctx.weighted = weighted


def _setup_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _save_plan(ctx, inputs[2], inputs[3], inputs[1] is not None)


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _save_plan(ctx, inputs[3], inputs[4], inputs[1] is not None)
    ctx.added = inputs[2] is not None


def _dispatch_backward(
    ctx: Any, grad_rows_DH: torch.Tensor, grad_weights_DK: torch.Tensor
) -> tuple[Any, ...]:
    plan = list(ctx.saved_tensors)
    grad_weights = grad_weights_DK if ctx.weighted else None
    grad_x_TH, grad_weights_TK = _combine(grad_rows_DH, grad_weights, None, plan, ctx.group_name)
    return grad_x_TH, grad_weights_TK if ctx.weighted else None, [None] * len(plan), None, None


def _combine_backward(
    ctx: Any, grad_x_TH: torch.Tensor, grad_weights_TK: torch.Tensor
) -> tuple[Any, ...]:
    plan = list(ctx.saved_tensors)
    grad_weights = grad_weights_TK if ctx.weighted else None
    grad_rows_DH, grad_weights_DK = _dispatch(grad_x_TH, grad_weights, plan, ctx.group_name, "full")
    grad_addend_TH = grad_x_TH if ctx.added else None
    weights = grad_weights_DK if ctx.weighted else None
    return grad_rows_DH, weights, grad_addend_TH, [None] * len(plan), None


_dispatch = _library.define(
    "dispatch(Tensor x_TH, Tensor? weights_TK, Tensor[] plan, str group_name, str wire)"
    " -> (Tensor rows_DH, Tensor weights_DK)",
    check=_check_dispatch,
    reference=_dispatch_reference,
    fake=_dispatch_fake,
    setup_context=_setup_dispatch,
    backward=_dispatch_backward,
)
_combine = _library.define(
    "combine(Tensor rows_DH, Tensor? weights_DK, Tensor? addend_TH, Tensor[] plan, str group_name)"
    " -> (Tensor x_TH, Tensor weights_TK)",
    check=_check_combine,
    reference=_combine_reference,
    fake=_combine_fake,
    setup_context=_setup_combine,
    backward=_combine_backward,
)
