"""sort_slots against a loop, both kinds of capacity."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import moe_ops
from moe_ops.testing import SKEWS, assert_equal, make_ids

from .checks import check_compiled, check_rejects


def sort_slots_loop(ids_TK, num_experts, row_capacity=None, expert_capacity=None):
    """One slot after another into its expert's list, then the lists one after another."""
    slots_of_expert = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(ids_TK.flatten().tolist()):
        if 0 <= expert < num_experts:
            slots_of_expert[expert].append(slot)
    if expert_capacity is None:
        order = [slot for slots in slots_of_expert for slot in slots]
        capacity = ids_TK.numel() if row_capacity is None else row_capacity
        offsets, end = [], 0
        for slots in slots_of_expert:
            end += len(slots)
            offsets.append(min(end, capacity))
        order = (order + [-1] * capacity)[:capacity]
    else:
        padded = [(slots + [-1] * expert_capacity)[:expert_capacity] for slots in slots_of_expert]
        order = [slot for slots in padded for slot in slots]
        offsets = [(expert + 1) * expert_capacity for expert in range(num_experts)]
    row_of_slot = [-1] * ids_TK.numel()
    for row, slot in enumerate(order):
        if slot >= 0:
            row_of_slot[slot] = row
    maps = (order, row_of_slot, offsets)
    slots, rows, ends = (torch.tensor(numbers, dtype=torch.int32) for numbers in maps)
    return slots, rows.reshape(ids_TK.shape), ends


def check(ids_TK, num_experts, **capacities):
    found = moe_ops.sort_slots(ids_TK, num_experts, **capacities)
    wanted = sort_slots_loop(ids_TK, num_experts, **capacities)
    names = ("slot_of_row_C", "row_of_slot_TK", "offsets_E")
    for name, actual, expected in zip(names, found, wanted):
        assert_equal(name, actual, expected)


@hypothesis.given(
    num_tokens=st.integers(0, 40),
    top_k=st.integers(1, 5),
    num_experts=st.integers(5, 12),
    skew=st.sampled_from(SKEWS),
    none_fraction=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    capacity=st.none() | st.integers(0, 120),
    per_expert=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sort_slots_matches_reference(
    num_tokens, top_k, num_experts, skew, none_fraction, dtype, capacity, per_expert, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids_TK = make_ids(num_tokens, top_k, num_experts, skew, none_fraction, generator, dtype=dtype)
    name = "expert_capacity" if per_expert else "row_capacity"
    check(ids_TK, num_experts, **{name: capacity})


@pytest.mark.parametrize("capacity", [{}, {"row_capacity": 5}, {"expert_capacity": 2}], ids=str)
def test_sort_slots_compiles_fullgraph(capacity) -> None:
    check_compiled(lambda ids: moe_ops.sort_slots(ids, 4, **capacity), make_ids(7, 2, 4))


def test_sort_slots_worked_example() -> None:
    ids_TK = torch.tensor([[2, 0], [0, 1], [2, -1], [0, 2]])
    slot_of_row_C, row_of_slot_TK, offsets_E = moe_ops.sort_slots(ids_TK, 3)
    assert slot_of_row_C.tolist() == [1, 2, 6, 3, 0, 4, 7, -1]
    assert row_of_slot_TK.tolist() == [[4, 0], [1, 3], [5, -1], [2, 6]]
    assert offsets_E.tolist() == [3, 4, 7]


@pytest.mark.parametrize("capacity", [6, 7, 8, 0], ids=["one_over", "full", "spare", "none"])
def test_sort_slots_handles_capacity(capacity: int) -> None:
    check(torch.tensor([[2, 0], [0, 1], [2, -1], [0, 2]]), 3, row_capacity=capacity)


@pytest.mark.parametrize("capacity", [2, 3, 4, 0], ids=["one_over", "full", "spare", "none"])
def test_sort_slots_handles_expert_capacity(capacity: int) -> None:
    check(torch.tensor([[2, 0], [0, 1], [2, -1], [0, 2]]), 3, expert_capacity=capacity)


@pytest.mark.parametrize("counts", [[0, 17, 0, 5], [1, 127, 128, 129], [1, 3, 200, 0]], ids=str)
def test_sort_slots_handles_counts(counts: list[int]) -> None:
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    check(ids[torch.randperm(len(ids))][:, None], len(counts))


def test_sort_slots_handles_4096_tokens_of_one_expert() -> None:
    ids_TK = torch.full((4096, 1), 2, dtype=torch.int32)
    slot_of_row_C, _, offsets_E = moe_ops.sort_slots(ids_TK, 4)
    assert_equal("slot_of_row_C", slot_of_row_C, torch.arange(4096, dtype=torch.int32))
    assert offsets_E.tolist() == [0, 0, 4096, 4096]


def test_sort_slots_handles_repeated_and_foreign_ids() -> None:
    check(torch.tensor([[3, 3], [-7, 4], [100, 3]]), 4)


def test_sort_slots_handles_strided_ids() -> None:
    check(make_ids(9, 2, 4).T.contiguous().T, 4)
    check(torch.tensor([[1, 0, 2]]).expand(5, 3), 4)


GOOD = {"ids_TK": torch.zeros(3, 2, dtype=torch.int32), "num_experts": 4}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ids_TK": torch.zeros(3, 2)}, TypeError, "ids_TK must be .*, got torch.float32"),
        ({"ids_TK": torch.zeros(3).int()}, ValueError, "ids_TK must have 2 dimensions, got shape"),
        ({"num_experts": 0}, ValueError, "num_experts must be positive, got 0"),
        ({"row_capacity": -1}, ValueError, "row_capacity must not be negative, got -1"),
        ({"expert_capacity": -2}, ValueError, "expert_capacity must not be negative, got -2"),
        ({"row_capacity": 1, "expert_capacity": 2}, ValueError, "only one of .*, got 1 and 2"),
    ],
)
def test_sort_slots_rejects_bad_input(changes, error, message) -> None:
    check_rejects("sort_slots", moe_ops.sort_slots, GOOD, changes, error, message)
