"""CUDA kernels of sort_slots: csrc/sort_slots.cu, on compute capability 9.0.

Letters as in `moe_ops.ops.sort_slots`: T tokens, K top-k, E experts, C rows.
"""

from __future__ import annotations

from typing import Any

import torch

from . import native
from .kernel import Kernel, capability

MAX_EXPERTS = 1024
_MOST_SLOTS = 1 << 30
# Chunks of csrc/sort_slots.cu, each of one CTA, of which an H200 runs 132 at a time.
_NATIVE_CHUNKS = 128


def new_outputs(
    ids_TK: torch.Tensor,
    num_experts: int,
    row_capacity: int | None,
    expert_capacity: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """slot_of_row_C, row_of_slot_TK and offsets_E, not filled."""
    num_rows = ids_TK.numel() if row_capacity is None else row_capacity
    if expert_capacity is not None:
        num_rows = num_experts * expert_capacity
    return (
        ids_TK.new_empty(num_rows, dtype=torch.int32),
        ids_TK.new_empty(ids_TK.shape, dtype=torch.int32),
        ids_TK.new_empty(num_experts, dtype=torch.int32),
    )


def launch_native(
    ids_TK: torch.Tensor,
    num_experts: int,
    row_capacity: int | None,
    expert_capacity: int | None,
    max_chunks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator `sort_slots` by csrc/sort_slots.cu on at most `max_chunks` CTAs."""
    outputs = new_outputs(ids_TK, num_experts, row_capacity, expert_capacity)
    counts = ids_TK.new_empty(max_chunks * num_experts, dtype=torch.int32)
    torch.ops.moe_ops_native.sort_slots(
        ids_TK.contiguous(),
        num_experts,
        -1 if expert_capacity is None else expert_capacity,
        *outputs,
        counts,
    )
    return outputs


def native_sort_slots(
    ids_TK: torch.Tensor,
    num_experts: int,
    row_capacity: int | None = None,
    expert_capacity: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """csrc/sort_slots.cu."""
    return launch_native(ids_TK, num_experts, row_capacity, expert_capacity, _NATIVE_CHUNKS)


def _native_takes(ids_TK: torch.Tensor, num_experts: int, *capacities: Any) -> bool:
    most = max([ids_TK.numel(), *(capacity or 0 for capacity in capacities)])
    fits = num_experts <= MAX_EXPERTS and most <= _MOST_SLOTS
    return fits and native.available() and capability(ids_TK.device) == (9, 0)


KERNELS: dict[str, list[Kernel]] = {
    "sort_slots": [Kernel("csrc/sort_slots.cu", _native_takes, native_sort_slots)],
}
