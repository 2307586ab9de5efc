"""dispatch and combine for groups on the engine `deep_ep`: calls of DeepEP's intranode kernels.

DeepEP sends by a handle that only a dispatch of its own makes. The plan says who sends what, and
how many copies arrive, so a short one will do: of the weights, as rows (DeepEP sends weights by
expert, and no plan knows the experts of its own rank's tokens), or of nothing. The host waits for
none of this, unless no copy can arrive. Copies lie as in the plan: by source rank, then by token.

What is DeepEP's own: combine sums in float32 in rank order with one cast to bf16, as ours does, but
starts with the addend, which ours ends with, so that the last bit may differ. Rows it does not take
(not bf16, no multiple of 32 bytes, longer than 16 KB or than `setup` was told) go over NCCL.

Letters as in `moe_ops.ops.dispatch`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from .. import layout
from ..comm import deep_ep
from ..comm import wire as wire_formats
from .kernel import Kernel, aligned

MAX_TOP_K = 32
_ROW_STEP = 32  # bytes: a row is copied in halves of whole 16 bytes
_MAX_ROW_BYTES = 2 * (8192 - 16)  # a half and a barrier must fit into a warp's shared memory

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # alone, or FP8 codes and their scales


def dispatch(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    tensors: list[torch.Tensor],
    group_name: str,
    wire: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator `dispatch`."""
    space, plan = _workspace(group_name), layout.Plan(*tensors)
    sent: Rows = aligned(x_TH)
    if wire != "full":
        codes_TH, scales = wire_formats.quantize(x_TH, wire == "fp8_pow2")
        sent = codes_TH.view(torch.float8_e4m3fn), scales
    weights_DK = x_TH.new_empty(0, dtype=torch.float32)
    if weights_TK is None:
        received, _ = _send(space, plan, sent)
    else:
        top_k = weights_TK.shape[1]
        padded = aligned(torch.nn.functional.pad(weights_TK, (0, -top_k % (_ROW_STEP // 4))))
        weights, handle = _send(space, plan, padded.view(deep_ep.DTYPE))
        weights_DK = torch.where(plan.ids_DK >= 0, weights.view(torch.float32)[:, :top_k], 0)
        with _unfilled():
            received = space.buffer.dispatch(sent, handle, config=space.dispatch_config)[0]
    if wire != "full":
        codes_DH, scales = received
        received = wire_formats.dequantize(codes_DH, scales, x_TH.dtype)
    return received.masked_fill_(plan.source_of_copy_D2[:, :1] < 0, 0), weights_DK


def combine(
    rows_DH: torch.Tensor,
    weights_DK: torch.Tensor | None,
    addend_TH: torch.Tensor | None,
    tensors: list[torch.Tensor],
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator `combine`."""
    space, plan = _workspace(group_name), layout.Plan(*tensors)
    nothing = rows_DH.new_zeros(plan.copy_of_token_TP.shape[0], _ROW_STEP // 2)
    _, handle = _send(space, plan, nothing)
    if weights_DK is not None:
        weights_DK = aligned(torch.where(plan.ids_DK >= 0, weights_DK, 0))
    with _unfilled():
        x_TH, weights_TK, _ = space.buffer.combine(
            aligned(rows_DH),
            handle,
            topk_weights=weights_DK,
            bias=aligned(addend_TH),
            config=space.combine_config,
        )
    if weights_DK is None:
        weights_TK = rows_DH.new_empty(0, dtype=torch.float32)
    return x_TH, weights_TK


def _send(space: deep_ep.Workspace, plan: layout.Plan, rows: Rows) -> tuple[Any, Any]:
    """What arrives of `rows`, D rows, those past the valid copies not written; and the handle."""
    sent_TP = (plan.copy_of_token_TP >= 0).contiguous()
    counts_P = sent_TP.sum(0, dtype=torch.int32)
    # A single choice, of no expert: DeepEP asks for some where it does not tell the host its sizes.
    ids_T1 = counts_P.new_full((len(sent_TP), 1), -1, dtype=space.ids_dtype)
    with _unfilled():
        received, _, _, _, handle, _ = space.buffer.dispatch(
            rows,
            num_tokens_per_rank=counts_P,
            is_token_in_rank=sent_TP,
            num_tokens_per_expert=counts_P,
            topk_idx=ids_T1,
            topk_weights=torch.zeros_like(ids_T1, dtype=torch.float32),
            num_worst_tokens=plan.num_copies,
            config=space.dispatch_config,
        )
    return received, handle


@contextlib.contextmanager
def _unfilled() -> Iterator[None]:
    """PyTorch's deterministic mode does not fill fresh tensors.

    NOTE: DeepEP allocates its outputs when its stream no longer waits for the current one, on which
    PyTorch would fill them: while they are written.
    """
    settings: Any = torch.utils.deterministic
    before = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = before


def _workspace(group_name: str) -> deep_ep.Workspace:
    found = deep_ep.workspace(group_name)
    assert found is not None
    return found


def _takes_dispatch(x_TH: torch.Tensor, *args: Any) -> bool:
    _, tensors, group_name, wire = args
    return _takes_rows(x_TH, tensors, group_name, 2 if wire == "full" else 1)


def _takes_combine(rows_DH: torch.Tensor, *args: Any) -> bool:
    *_, tensors, group_name = args
    return _takes_rows(rows_DH, tensors, group_name, 2)


def _takes_rows(
    rows: torch.Tensor, tensors: list[torch.Tensor], group_name: str, value_bytes: int
) -> bool:
    space = deep_ep.workspace(group_name)
    if space is None or rows.dtype != deep_ep.DTYPE:
        return False
    row_bytes = rows.shape[1] * value_bytes
    fits = 0 < row_bytes <= min(space.row_bytes, _MAX_ROW_BYTES) and row_bytes % _ROW_STEP == 0
    return fits and 0 < tensors[2].shape[1] <= MAX_TOP_K  # ids_DK


KERNELS: dict[str, list[Kernel]] = {
    "dispatch": [Kernel("deep_ep", _takes_dispatch, dispatch)],
    "combine": [Kernel("deep_ep", _takes_combine, combine)],
}
