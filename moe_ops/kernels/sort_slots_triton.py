"""Triton kernels of sort_slots. They first count, then place: two launches, no global atomics, no
host sync.

Slots are cut into chunks, one a program. The first kernel counts the experts of each chunk. In the
second every program adds up all counts, so it knows where its own slots of each expert start, and
sorts its chunk block by block on keys (expert, place in the block), which are distinct.

Letters as in `moe_ops.ops.sort_slots`: T tokens, K top-k, E experts, C rows, B slots of a block;
slot = token * K + k; -1 = none.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from .blocks import ceil_div, power_of_two_from
from .kernel import Kernel
from .sort_slots import MAX_EXPERTS, new_outputs

# Slots sorted at a time: the first of these sizes that cuts all slots into `_max_chunks` blocks,
# else the last.
_BLOCKS = (512, 2048)
# Bins of the smallest histogram: one for each thread of a warp.
_MIN_BINS = 32
# Counts that one program of the second kernel loads at once, and in all.
_COUNTS_AT_ONCE = 8192
_MAX_COUNTS = 65536


@functools.cache
def _padded(num_experts: int) -> int:
    return max(power_of_two_from(num_experts), _MIN_BINS)


def _max_chunks(num_experts: int) -> int:
    """About one a multiprocessor; fewer where every program would read too many counts."""
    return min(128, _MAX_COUNTS // _padded(num_experts))


@triton.jit
def _expert_of_slot(ids_ptr, first, end, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Experts of BLOCK slots from `first`, NUM_EXPERTS where there is none."""
    slot_B = first + tl.arange(0, BLOCK)
    id_B = tl.load(ids_ptr + slot_B, mask=slot_B < end, other=-1)
    return tl.where((id_B >= 0) & (id_B < NUM_EXPERTS), id_B, NUM_EXPERTS).to(tl.int32)


@triton.jit
def _histogram(expert_B, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr):
    held_B = expert_B < NUM_EXPERTS
    return tl.histogram(tl.where(held_B, expert_B, 0), EXPERTS, mask=held_B)


@triton.jit(do_not_specialize=["num_slots", "blocks_per_chunk"])
def sort_slots_count_kernel(
    ids_ptr,
    counts_ptr,
    num_slots,
    blocks_per_chunk,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the experts of each chunk."""
    chunk = tl.program_id(0)
    first = chunk * blocks_per_chunk * BLOCK
    end = tl.minimum(first + blocks_per_chunk * BLOCK, num_slots)
    count_E = tl.zeros([EXPERTS], tl.int32)
    while first < end:
        expert_B = _expert_of_slot(ids_ptr, first, end, NUM_EXPERTS, BLOCK)
        count_E += _histogram(expert_B, NUM_EXPERTS, EXPERTS)
        first += BLOCK
    tl.store(counts_ptr + chunk * EXPERTS + tl.arange(0, EXPERTS), count_E)


@triton.jit
def _add_up(counts_ptr, chunk, num_chunks, EXPERTS: tl.constexpr, CHUNKS: tl.constexpr):
    """Slots of each expert in the chunks before this one, and in all of them."""
    before_E = tl.zeros([EXPERTS], tl.int32)
    total_E = tl.zeros([EXPERTS], tl.int32)
    first = 0
    while first < num_chunks:
        other = first + tl.arange(0, CHUNKS)[:, None]
        place = other * EXPERTS + tl.arange(0, EXPERTS)[None, :]
        count = tl.load(counts_ptr + place, mask=other < num_chunks, other=0)
        total_E += tl.sum(count, 0)
        before_E += tl.sum(tl.where(other < chunk, count, 0), 0)
        first += CHUNKS
    return before_E, total_E


@triton.jit
def _clear_unused_rows(
    slot_of_row_ptr,
    total_E,
    num_rows,
    expert_capacity,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Slot -1 for this program's share of the rows that get none."""
    used = tl.sum(total_E) if expert_capacity is None else 0
    first = used + tl.program_id(0) * BLOCK
    while first < num_rows:
        row_B = first + tl.arange(0, BLOCK)
        unused_B = row_B < num_rows
        if expert_capacity is not None:
            expert_B = tl.minimum(row_B // expert_capacity, EXPERTS - 1)
            used_B = tl.gather(total_E, expert_B, 0)
            unused_B &= row_B - expert_B * expert_capacity >= used_B
        tl.store(slot_of_row_ptr + row_B, -1, mask=unused_B)
        first += tl.num_programs(0) * BLOCK


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_chunks", "blocks_per_chunk"])
def sort_slots_place_kernel(
    ids_ptr,
    counts_ptr,
    slot_of_row_ptr,
    row_of_slot_ptr,
    offsets_ptr,
    num_slots,
    num_rows,
    num_chunks,
    blocks_per_chunk,
    expert_capacity,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Give every slot of a chunk its row."""
    chunk = tl.program_id(0)
    place_B = tl.arange(0, BLOCK)
    expert_E = tl.arange(0, EXPERTS)
    before_E, total_E = _add_up(counts_ptr, chunk, num_chunks, EXPERTS, CHUNKS)
    if expert_capacity is None:
        ends_E = tl.cumsum(total_E, 0)
        next_row_E = ends_E - total_E + before_E
        offsets_E = tl.minimum(ends_E, num_rows)
    else:
        next_row_E = expert_E * expert_capacity + before_E
        offsets_E = (expert_E + 1) * expert_capacity
    if chunk == 0:
        tl.store(offsets_ptr + expert_E, offsets_E, mask=expert_E < NUM_EXPERTS)
    _clear_unused_rows(slot_of_row_ptr, total_E, num_rows, expert_capacity, EXPERTS, BLOCK)
    first = chunk * blocks_per_chunk * BLOCK
    end = tl.minimum(first + blocks_per_chunk * BLOCK, num_slots)
    while first < end:
        expert_B = _expert_of_slot(ids_ptr, first, end, NUM_EXPERTS, BLOCK)
        count_E = _histogram(expert_B, NUM_EXPERTS, EXPERTS)
        # From here on slots are in the order of experts.
        key_B = tl.sort(expert_B * BLOCK + place_B)
        expert_B = key_B // BLOCK
        slot_B = first + key_B % BLOCK
        shift_E = next_row_E - (tl.cumsum(count_E, 0) - count_E)
        row_B = place_B + tl.gather(shift_E, tl.minimum(expert_B, EXPERTS - 1), 0)
        end_B = num_rows if expert_capacity is None else (expert_B + 1) * expert_capacity
        fits_B = (expert_B < NUM_EXPERTS) & (row_B < end_B)
        row_B = tl.where(fits_B, row_B, -1)
        tl.store(row_of_slot_ptr + slot_B, row_B, mask=slot_B < end)
        tl.store(slot_of_row_ptr + row_B, slot_B, mask=fits_B)
        next_row_E += count_E
        first += BLOCK


def launch(
    ids_TK: torch.Tensor,
    num_experts: int,
    row_capacity: int | None,
    expert_capacity: int | None,
    block: int,
    max_chunks: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator `sort_slots`, sorting `block` slots at a time, a power of two, on at most
    `max_chunks` programs.
    """
    outputs = new_outputs(ids_TK, num_experts, row_capacity, expert_capacity)
    num_slots, num_rows = ids_TK.numel(), outputs[0].shape[0]
    ids_TK = ids_TK.contiguous()

    num_blocks = max(ceil_div(num_slots, block), 1)
    blocks_per_chunk = ceil_div(num_blocks, max_chunks)
    num_chunks = ceil_div(num_blocks, blocks_per_chunk)
    experts = _padded(num_experts)
    sizes = {"NUM_EXPERTS": num_experts, "EXPERTS": experts, "BLOCK": block}
    num_warps = 8 if block > 1024 else 4
    counts = ids_TK.new_empty(num_chunks * experts, dtype=torch.int32)
    sort_slots_count_kernel[(num_chunks,)](
        ids_TK, counts, num_slots, blocks_per_chunk, **sizes, num_warps=num_warps
    )
    # Programs without a chunk help with the rows that get no slot.
    num_programs = max(num_chunks, min(ceil_div(num_rows, block), max_chunks))
    sort_slots_place_kernel[(num_programs,)](
        ids_TK,
        counts,
        *outputs,
        num_slots,
        num_rows,
        num_chunks,
        blocks_per_chunk,
        expert_capacity,
        **sizes,
        CHUNKS=min(_COUNTS_AT_ONCE // experts, 128),
        num_warps=num_warps,
    )
    return outputs


def sort_slots(
    ids_TK: torch.Tensor,
    num_experts: int,
    row_capacity: int | None = None,
    expert_capacity: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator `sort_slots`."""
    max_chunks = _max_chunks(num_experts)
    fitting = [block for block in _BLOCKS if ids_TK.numel() <= block * max_chunks]
    block = (*fitting, _BLOCKS[-1])[0]
    return launch(ids_TK, num_experts, row_capacity, expert_capacity, block, max_chunks)


def _takes(ids_TK: torch.Tensor, num_experts: int, *capacities: Any) -> bool:
    return num_experts <= MAX_EXPERTS


KERNELS: dict[str, list[Kernel]] = {"sort_slots": [Kernel("triton", _takes, sort_slots)]}
