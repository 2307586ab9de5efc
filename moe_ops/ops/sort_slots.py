"""Sort slots by expert: the stable counting sort that lays rows out for grouped matmuls.

Letters: T tokens, K top-k, E experts, C rows; slot = token * K + k; -1 = none.

    ids_TK = [[2, 0], [0, 1], [2, -1], [0, 2]], E = 3
    slot_of_row_C  = [1, 2, 6, 3, 0, 4, 7, -1]             experts 0 0 0 1 2 2 2, one row unused
    row_of_slot_TK = [[4, 0], [1, 3], [5, -1], [2, 6]]
    offsets_E      = [3, 4, 7]
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _library, checks, layout


def sort_slots(
    ids_TK: torch.Tensor,
    num_experts: int,
    *,
    row_capacity: int | None = None,
    expert_capacity: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give every slot with an expert a row; within an expert rows keep slot order. Never reads the
    device.

    Args:
        ids_TK: [T, K] int32 or int64 experts; values outside 0 .. E-1 get no row.
        row_capacity: C; slots past it get no row. Default T * K.
        expert_capacity: rows of each expert: expert e owns rows [e * c, (e + 1) * c) and C = E * c.
            Slots past an expert's capacity get no row, unused rows have slot -1.

    Returns:
        slot_of_row_C [C], row_of_slot_TK [T, K], offsets_E [E] (inclusive ends of each expert's
        rows), int32.

    Raises:
        TypeError, ValueError: wrong dtype or rank, num_experts < 1, a negative capacity, or both
            capacities.
    """
    return _sort_slots(ids_TK, num_experts, row_capacity, expert_capacity)


def _check(
    ids_TK: torch.Tensor,
    num_experts: int,
    row_capacity: int | None = None,
    expert_capacity: int | None = None,
) -> None:
    op = "sort_slots"
    checks.tensor(op, "ids_TK", ids_TK, 2, checks.IDS)
    checks.positive(op, "num_experts", num_experts)
    checks.capacity(op, "row_capacity", row_capacity)
    checks.capacity(op, "expert_capacity", expert_capacity)
    if row_capacity is not None and expert_capacity is not None:
        raise ValueError(
            f"{op}: only one of row_capacity and expert_capacity may be given, "
            f"got {row_capacity} and {expert_capacity}"
        )


def _reference(
    ids_TK: torch.Tensor,
    num_experts: int,
    row_capacity: int | None = None,
    expert_capacity: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_slots = ids_TK.numel()
    if expert_capacity is None:
        capacity = num_slots if row_capacity is None else row_capacity
        return layout.counting_sort(ids_TK, num_experts, capacity)
    _, row_of_slot_TK, offsets_E = layout.counting_sort(ids_TK, num_experts, num_slots)
    ids = ids_TK.long().clamp(0, num_experts - 1)
    starts_E = torch.cat([offsets_E.new_zeros(1), offsets_E])[:-1]
    place_TK = row_of_slot_TK - starts_E[ids]
    fits_TK = (row_of_slot_TK >= 0) & (place_TK < expert_capacity)
    row_of_slot_TK = torch.where(fits_TK, ids * expert_capacity + place_TK, -1).int()
    ends_E = torch.arange(1, num_experts + 1, device=ids.device) * expert_capacity
    slot_of_row_C = layout.invert(row_of_slot_TK, num_experts * expert_capacity)
    return slot_of_row_C.int(), row_of_slot_TK, ends_E.int()


def _fake(
    ids_TK: torch.Tensor,
    num_experts: int,
    row_capacity: int | None = None,
    expert_capacity: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_rows: Any = ids_TK.numel() if row_capacity is None else row_capacity
    if expert_capacity is not None:
        num_rows = num_experts * expert_capacity
    return (
        ids_TK.new_empty(num_rows, dtype=torch.int32),
        ids_TK.new_empty(ids_TK.shape, dtype=torch.int32),
        ids_TK.new_empty(num_experts, dtype=torch.int32),
    )


_sort_slots = _library.define(
    "sort_slots(Tensor ids_TK, int num_experts, SymInt? row_capacity=None, "
    "SymInt? expert_capacity=None)"
    " -> (Tensor slot_of_row_C, Tensor row_of_slot_TK, Tensor offsets_E)",
    check=_check,
    reference=_reference,
    fake=_fake,
)
