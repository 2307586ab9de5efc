"""Triton's sort_slots against the reference; small blocks, so that few slots make many."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from moe_ops import _library
from moe_ops.testing import SKEWS, assert_equal, make_ids
from tests.kernels import DEVICE

pytest.importorskip("triton", reason="optional package triton is not installed")

from moe_ops.kernels import sort_slots_triton as kernels

NAMES = ("slot_of_row_C", "row_of_slot_TK", "offsets_E")


def check(
    ids_TK: torch.Tensor,
    num_experts: int,
    row_capacity: int | None = None,
    expert_capacity: int | None = None,
    block: int = 8,
    max_chunks: int = 3,
) -> None:
    ids_TK = ids_TK.to(DEVICE)
    capacities = row_capacity, expert_capacity
    found = kernels.launch(ids_TK, num_experts, *capacities, block, max_chunks)
    wanted = _library.OPS["sort_slots"].reference(ids_TK, num_experts, *capacities)
    for name, actual, expected in zip(NAMES, found, wanted):
        assert actual.is_contiguous()
        assert_equal(name, actual, expected)


@hypothesis.settings(max_examples=15)
@hypothesis.given(
    num_tokens=st.integers(0, 20),
    top_k=st.integers(1, 4),
    num_experts=st.sampled_from([4, 7, 60]),
    skew=st.sampled_from(SKEWS),
    none_fraction=st.sampled_from([0.0, 0.3, 1.0]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    capacity=st.none() | st.integers(0, 100),
    per_expert=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_sort_slots_matches_reference(
    num_tokens, top_k, num_experts, skew, none_fraction, dtype, capacity, per_expert, seed
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids_TK = make_ids(num_tokens, top_k, num_experts, skew, none_fraction, generator, dtype=dtype)
    if per_expert and capacity is not None:
        check(ids_TK, num_experts, expert_capacity=capacity // 10)
    else:
        check(ids_TK, num_experts, row_capacity=capacity)


@pytest.mark.parametrize("num_experts", [1, 7, 60, 128, 1000, 1024])
def test_sort_slots_handles_number_of_experts(num_experts: int) -> None:
    ids_TK = torch.randint(-1, num_experts + 1, (7, 3), dtype=torch.int32)
    check(ids_TK, num_experts)
    check(ids_TK, num_experts, expert_capacity=2)


@pytest.mark.parametrize(("block", "max_chunks"), [(8, 1), (8, 5), (16, 2), (64, 3)])
def test_sort_slots_handles_blocks(block: int, max_chunks: int) -> None:
    """One program with many blocks, one block a program, more slots in a block than there are."""
    check(make_ids(19, 2, 5), 5, block=block, max_chunks=max_chunks)


@pytest.mark.parametrize("num_slots", [8, 9, 25])
@pytest.mark.parametrize("expert", [0, 3, -1, 4])
def test_sort_slots_handles_one_expert(num_slots: int, expert: int) -> None:
    """All slots to the first or last expert, or to none, in blocks that are full or not."""
    check(torch.full((num_slots, 1), expert), 4, row_capacity=num_slots + 9)


@pytest.mark.parametrize("capacity", [6, 7, 8, 0, 90], ids=str)
def test_sort_slots_handles_capacity(capacity: int) -> None:
    check(torch.tensor([[2, 0], [0, 1], [2, -1], [0, 2]]), 3, row_capacity=capacity)


@pytest.mark.parametrize("capacity", [2, 3, 4, 0, 1, 30], ids=str)
def test_sort_slots_handles_expert_capacity(capacity: int) -> None:
    check(torch.tensor([[2, 0], [0, 1], [2, -1], [0, 2]]), 3, expert_capacity=capacity)


@pytest.mark.parametrize("top_k", [0, 1, 32])
@pytest.mark.parametrize("num_tokens", [0, 1])
def test_sort_slots_handles_no_or_one_token(num_tokens: int, top_k: int) -> None:
    check(make_ids(num_tokens, top_k, 40), 40, row_capacity=50)


def test_sort_slots_handles_foreign_and_wide_ids() -> None:
    check(torch.tensor([[3, 3], [-7, 4], [2**33 + 1, 3], [-(2**40), 2**31]]), 4)


def test_sort_slots_handles_strided_ids() -> None:
    check(make_ids(9, 2, 4).T.contiguous().T, 4)
    check(torch.tensor([[1, 0, 2]]).expand(5, 3), 4)


def test_sort_slots_chooses_blocks() -> None:
    """The public sizes too; few slots, since sorting is slow without a GPU."""
    found = kernels.sort_slots(torch.tensor([[2, 0], [0, 1]], device=DEVICE), 3)
    assert [t.tolist() for t in found] == [[1, 2, 3, 0], [[3, 0], [1, 2]], [2, 3, 4]]
