"""Counts, offsets and maps that operators share.

Letters: T tokens here, K top-k, E experts, P ranks, L = E / P experts here, D copies held here, C
rows held here. Maps read "value of index" (`row_of_slot_TK`), -1 = none. `counts` = how many,
`starts` = exclusive and `offsets` = inclusive prefix sums of counts.

Every function here works on device tensors without reading one back, except `read_splits`, whose
argument is on the CPU.
"""

from __future__ import annotations

import ctypes
import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `exchange_plan` returns, by name; `list(plan.tensors())` is what operators take.

    `copy_of_token_TP` [T, P] i32: where token t's copy lies in rank q's buffer.
    `source_of_copy_D2` [D, 2] i32: (source rank, token there), sorted.
    `ids_DK` [D, K] i32: local expert of each choice, -1 if it lives elsewhere.
    `slot_of_row_C` [C] i32: local slot d * K + k of each row.
    `row_of_slot_DK` [D, K] i32: its inverse.
    `offsets_L` [L] i32: where each local expert's rows end, at most C.
    `counts_PL` [P, L] i32: rows by (source rank, local expert), before the limit C.
    `overflow_2` [2] i32: copies and rows that did not fit.
    `splits_4P` [4, P] i64 on the CPU: copies sent, copies received, slots sent, slots received. In
        capacity mode, where the group's engine is `nvlink`, it lies on the GPU and holds nothing: a
        tensor on the CPU would part the CUDA graphs that Inductor makes.
    """

    copy_of_token_TP: torch.Tensor
    source_of_copy_D2: torch.Tensor
    ids_DK: torch.Tensor
    slot_of_row_C: torch.Tensor
    row_of_slot_DK: torch.Tensor
    offsets_L: torch.Tensor
    counts_PL: torch.Tensor
    overflow_2: torch.Tensor
    splits_4P: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in the order of the operators' `Tensor[] plan`."""
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    @property
    def num_copies(self) -> int:
        """D: copies held here, valid or not."""
        return self.source_of_copy_D2.shape[0]

    @property
    def num_ranks(self) -> int:
        """P: ranks of the group."""
        return self.copy_of_token_TP.shape[1]


def read_splits(splits_P: torch.Tensor) -> list[int]:
    """Numbers of an int64 tensor that lies on the CPU.

    Not `Tensor.tolist`: that one is also how a device is read, and the tests of capacity mode
    forbid it everywhere.
    """
    assert splits_P.device.type == "cpu" and splits_P.dtype == torch.int64
    splits_P = splits_P.contiguous()
    numbers = ctypes.c_int64 * splits_P.numel()
    return list(numbers.from_address(splits_P.data_ptr())) if splits_P.numel() else []


def equal_splits(num_ranks: int, max_tokens: int, top_k: int) -> list[list[int]]:
    """splits_4P of capacity mode, as lists: what a rank may send, for every pair of ranks."""
    return [[max_tokens] * num_ranks] * 2 + [[max_tokens * top_k] * num_ranks] * 2


def starts_of(counts: torch.Tensor) -> torch.Tensor:
    """Exclusive prefix sums of `counts` along dim 0."""
    return counts.cumsum(0) - counts


def count(values: torch.Tensor, size: int) -> torch.Tensor:
    """How often each of 0 .. size-1 occurs in integer `values`; others are not counted. [size]
    int64.
    """
    if values.is_cuda:
        # Exact for integers and, unlike `bincount`, without sync; `max` counts in the last bin.
        return torch.histc(values, bins=size + 1, min=0, max=size + 1)[:size].long()
    values = values.reshape(-1).long()
    inside = (values >= 0) & (values < size)
    bins = torch.where(inside, values, size)
    return bins.new_zeros(size + 1).scatter_add(0, bins, torch.ones_like(bins))[:size]


def invert(place: torch.Tensor, size: int) -> torch.Tensor:
    """Inverse of an injective map: result[place[i]] = i over flattened `place`, -1 where nothing
    lies. [size] int64.
    """
    place = place.reshape(-1).long()
    indices = torch.arange(place.shape[0], device=place.device)
    target = torch.where((place >= 0) & (place < size), place, size)
    return place.new_full((size + 1,), -1).scatter(0, target, indices)[:size]


def take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """rows[index] along dim 0, contiguous; zero where the index is -1."""
    if rows.shape[0] == 0:
        return rows.new_zeros((*index.shape, *rows.shape[1:]))
    chosen = rows[index.clamp(min=0).long()]
    present = (index >= 0).reshape(index.shape + (1,) * (rows.dim() - 1))
    zero = torch.zeros((), dtype=rows.dtype, device=rows.device)
    return torch.where(present, chosen, zero).contiguous()


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype autocast wants matmuls of `x` in; None outside it, for float64 and on meta."""
    device = x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are taken in: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def expert_of_row(offsets_L: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Expert that owns each of `num_rows` rows; L for the tail. [C] int64."""
    rows = torch.arange(num_rows, device=offsets_L.device)
    return torch.searchsorted(offsets_L.long(), rows, right=True)


def held_rows(offsets_L: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Which of `num_rows` rows an expert owns: all but the tail. [C] bool."""
    return torch.arange(num_rows, device=offsets_L.device) < offsets_L[-1]


def counting_sort(
    ids_TK: torch.Tensor, num_experts: int, row_capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stable sort of slots by expert into `row_capacity` rows; ids outside 0 .. E-1 get no row.

    Returns slot_of_row_C, row_of_slot_TK, offsets_E (clamped to C), all int32.
    """
    ids = ids_TK.reshape(-1).long()
    key = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    rank_in_order = invert(torch.argsort(key, stable=True), key.shape[0])
    fits = (key < num_experts) & (rank_in_order < row_capacity)
    row_of_slot = torch.where(fits, rank_in_order, -1)
    offsets = count(key, num_experts).cumsum(0).clamp(max=row_capacity)
    return (
        invert(row_of_slot, row_capacity).int(),
        row_of_slot.reshape(ids_TK.shape).int(),
        offsets.int(),
    )


def _starts(counts: list[int], device: torch.device) -> torch.Tensor:
    """Where chunks of these sizes start.

    Equal sizes, as in capacity mode, are not copied to the device: such a copy waits for it and
    cannot be captured in a CUDA graph.
    """
    if len(set(counts)) == 1:
        return torch.arange(len(counts), device=device) * counts[0]
    return starts_of(torch.tensor(counts)).to(device)


def places_to_send(sent_TP: torch.Tensor, send_P: list[int]) -> torch.Tensor:
    """Place of each token's copy in the buffer sent to each rank, whose chunks have `send_P` rows.
    [T, P], -1 none.
    """
    starts_P = _starts(send_P, sent_TP.device)
    return torch.where(sent_TP, starts_P + sent_TP.cumsum(0) - 1, -1)


def places_received(source_D: torch.Tensor, receive_P: list[int]) -> torch.Tensor:
    """Place of each copy, sorted by source rank, in received chunks of `receive_P` rows. [D], -1
    none.
    """
    shift_P = _starts(receive_P, source_D.device) - starts_of(count(source_D, len(receive_P)))
    index_D = torch.arange(source_D.shape[0], device=source_D.device)
    return torch.where(source_D >= 0, index_D + shift_P[source_D.clamp(min=0).long()], -1)
