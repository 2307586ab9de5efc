"""Grouped matmuls that read an operand through the slots of its rows, so that expanded rows are
never written. Private: `fx_passes` makes them of permute, grouped_mm and grouped_mm_wgrad.

    gather_grouped_mm(x, slots, K, w) = grouped_mm(rows, w), rows[r] = x[slots[r] // K]
    gather_grouped_mm_wgrad: the same for either operand of grouped_mm_wgrad, or both

Letters: T tokens, K top-k, L experts here, C rows, I and O in and out features, offsets_L inclusive
ends of the experts' rows; slot = token * K + k; -1 = none, its row is zero.

    x_TI = [[1], [2], [3], [4]], slot_of_row_C = [1, 2, 6, 3, 0, 4, 7, -1], offsets_L = [3, 4, 7]
    (K = 2, E = 3, see sort_slots); w_LOI = [[[1]], [[10]], [[100]]]
    gather_grouped_mm -> [[1], [2], [4], [20], [100], [300], [400], [0]]
    gather_grouped_mm_wgrad, g = x gathered, a of ones -> [[[7]], [[2]], [[8]]]
"""

from __future__ import annotations

import torch

from .. import _library, checks, layout

_SUMMED_IN_FLOAT32 = (torch.float32, torch.bfloat16, torch.float16)


def _check_slots(op: str, name: str, slots_C: torch.Tensor, top_k: int, x: torch.Tensor) -> None:
    checks.tensor(op, name, slots_C, 1, checks.INDICES, like=x)
    checks.positive(op, "top_k", top_k)


def _check_gather(
    x_TI: torch.Tensor,
    slot_of_row_C: torch.Tensor,
    top_k: int,
    w_LOI: torch.Tensor,
    offsets_L: torch.Tensor,
) -> None:
    op = "gather_grouped_mm"
    checks.tensor(op, "x_TI", x_TI, 2, checks.FLOATS)
    _check_slots(op, "slot_of_row_C", slot_of_row_C, top_k, x_TI)
    checks.tensor(op, "w_LOI", w_LOI, 3, (x_TI.dtype,), like=x_TI)
    checks.tensor(op, "offsets_L", offsets_L, 1, checks.INDICES, like=x_TI)
    checks.same_size(op, "x_TI and w_LOI must share I", x_TI.shape[1], w_LOI.shape[2])
    checks.same_size(op, "w_LOI and offsets_L must share L", w_LOI.shape[0], offsets_L.shape[0])
    checks.positive(op, "number of experts L", offsets_L.shape[0])


def _num_rows(rows: torch.Tensor, slots_C: torch.Tensor | None) -> int | torch.SymInt:
    return (rows if slots_C is None else slots_C).shape[0]


def _check_gather_wgrad(
    g: torch.Tensor,
    g_slots_C: torch.Tensor | None,
    a: torch.Tensor,
    a_slots_C: torch.Tensor | None,
    top_k: int,
    offsets_L: torch.Tensor,
    f32: bool = False,
) -> None:
    op = "gather_grouped_mm_wgrad"
    checks.tensor(op, "g", g, 2, _SUMMED_IN_FLOAT32 if f32 else checks.FLOATS)
    checks.tensor(op, "a", a, 2, (g.dtype,), like=g)
    checks.tensor(op, "offsets_L", offsets_L, 1, checks.INDICES, like=g)
    checks.positive(op, "number of experts L", offsets_L.shape[0])
    for name, slots_C in (("g_slots_C", g_slots_C), ("a_slots_C", a_slots_C)):
        if slots_C is not None:
            _check_slots(op, name, slots_C, top_k, g)
    if g_slots_C is None and a_slots_C is None:
        raise ValueError(
            f"{op}: g_slots_C or a_slots_C must be given, got neither; use grouped_mm_wgrad"
        )
    rows = _num_rows(g, g_slots_C), _num_rows(a, a_slots_C)
    checks.same_size(op, "g and a, gathered, must share C", *rows)


def _gather(x: torch.Tensor, slots_C: torch.Tensor | None, top_k: int) -> torch.Tensor:
    """The rows, by `permute`."""
    if slots_C is None:
        return x
    num_tokens = x.shape[0]
    row_of_slot_TK = layout.invert(slots_C, num_tokens * top_k).reshape(num_tokens, top_k).int()
    return torch.ops.moe_ops.permute(x, None, slots_C, row_of_slot_TK)


def _gather_reference(
    x_TI: torch.Tensor,
    slot_of_row_C: torch.Tensor,
    top_k: int,
    w_LOI: torch.Tensor,
    offsets_L: torch.Tensor,
) -> torch.Tensor:
    rows_CI = _gather(x_TI, slot_of_row_C, top_k)
    return torch.ops.moe_ops.grouped_mm(rows_CI, w_LOI, offsets_L)


def _gather_wgrad_reference(
    g: torch.Tensor,
    g_slots_C: torch.Tensor | None,
    a: torch.Tensor,
    a_slots_C: torch.Tensor | None,
    top_k: int,
    offsets_L: torch.Tensor,
    f32: bool = False,
) -> torch.Tensor:
    g_CO, a_CI = _gather(g, g_slots_C, top_k), _gather(a, a_slots_C, top_k)
    wgrad = torch.ops.moe_ops.grouped_mm_wgrad_f32 if f32 else torch.ops.moe_ops.grouped_mm_wgrad
    return wgrad(g_CO, a_CI, offsets_L)


def _gather_fake(
    x_TI: torch.Tensor,
    slot_of_row_C: torch.Tensor,
    top_k: int,
    w_LOI: torch.Tensor,
    offsets_L: torch.Tensor,
) -> torch.Tensor:
    return x_TI.new_empty(slot_of_row_C.shape[0], w_LOI.shape[1])


def _gather_wgrad_fake(
    g: torch.Tensor,
    g_slots_C: torch.Tensor | None,
    a: torch.Tensor,
    a_slots_C: torch.Tensor | None,
    top_k: int,
    offsets_L: torch.Tensor,
    f32: bool = False,
) -> torch.Tensor:
    dtype = torch.float32 if f32 else g.dtype
    return g.new_empty(offsets_L.shape[0], g.shape[1], a.shape[1], dtype=dtype)


_library.define(
    "gather_grouped_mm(Tensor x_TI, Tensor slot_of_row_C, int top_k, Tensor w_LOI, "
    "Tensor offsets_L) -> Tensor c_CO",
    check=_check_gather,
    reference=_gather_reference,
    fake=_gather_fake,
    private=True,
)
_library.define(
    "gather_grouped_mm_wgrad(Tensor g, Tensor? g_slots_C, Tensor a, Tensor? a_slots_C, int top_k, "
    "Tensor offsets_L, bool f32=False) -> Tensor w_LOI",
    check=_check_gather_wgrad,
    reference=_gather_wgrad_reference,
    fake=_gather_wgrad_fake,
    private=True,
)
