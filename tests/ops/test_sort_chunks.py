"""sort_chunks against a loop."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import moe_ops
from moe_ops.testing import assert_equal

from .checks import (
    all_dtypes,
    all_grad_layouts,
    check_against_oracle,
    check_compiled,
    check_double_backward,
    check_rejects,
    values,
)

COUNTS_AB = torch.tensor([[1, 0, 2], [1, 1, 0]], dtype=torch.int32)


def sort_chunks_loop(rows, counts_AB):
    chunks, start = {}, 0
    for a, counts in enumerate(counts_AB.tolist()):
        for b, count in enumerate(counts):
            chunks[b, a] = rows[start : start + count]
            start += count
    ordered = [chunks[key] for key in sorted(chunks)]
    return torch.cat([*ordered, torch.zeros_like(rows[start:])])


@hypothesis.given(
    counts=st.lists(st.lists(st.integers(0, 6), min_size=3, max_size=3), max_size=5),
    tail=st.integers(0, 4),
    shape=st.sampled_from([(), (1,), (4,), (2, 3), (0,)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool]),
)
def test_sort_chunks_matches_reference(counts, tail, shape, dtype) -> None:
    counts_AB = torch.tensor(counts, dtype=torch.int32).reshape(-1, 3)
    rows = (values(int(counts_AB.sum()) + tail, *shape) * 9).to(dtype)
    assert_equal("rows", moe_ops.sort_chunks(rows, counts_AB), sort_chunks_loop(rows, counts_AB))


@all_grad_layouts
@all_dtypes
def test_sort_chunks_grad_matches_reference(dtype: torch.dtype, grad_layout: str) -> None:
    check_against_oracle(
        lambda rows: moe_ops.sort_chunks(rows, COUNTS_AB),
        lambda rows: sort_chunks_loop(rows, COUNTS_AB),
        {"rows": values(8, 4, dtype=dtype)},
        grad_layout,
    )


def test_sort_chunks_grad_matches_reference_twice() -> None:
    check_double_backward(lambda rows: moe_ops.sort_chunks(rows, COUNTS_AB), values(7, 2))


def test_sort_chunks_compiles_fullgraph() -> None:
    rows = values(7, 3).requires_grad_()
    check_compiled(lambda rows: moe_ops.sort_chunks(rows, COUNTS_AB), rows)


def test_sort_chunks_worked_example() -> None:
    a, b, c, d, e = 1, 2, 3, 4, 5
    rows = moe_ops.sort_chunks(torch.tensor([a, b, c, d, e, 0]), COUNTS_AB)
    assert rows.tolist() == [a, d, e, b, c, 0]


def test_sort_chunks_is_undone_by_transposed_counts() -> None:
    rows = values(5, 3)
    there = moe_ops.sort_chunks(rows, COUNTS_AB)
    assert_equal("rows", moe_ops.sort_chunks(there, COUNTS_AB.T), rows)


def test_sort_chunks_handles_tail_of_nan() -> None:
    rows = torch.full((512, 2), torch.nan)
    rows[:5] = values(5, 2)
    rows.requires_grad_()
    result = moe_ops.sort_chunks(rows, COUNTS_AB)
    grad = torch.full_like(result, torch.nan)
    grad[:5] = 1
    result.backward(grad)
    assert result.isfinite().all()
    assert rows.grad.isfinite().all()
    assert not result[5:].count_nonzero()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)], ids=str)
def test_sort_chunks_handles_no_chunks(shape: tuple[int, int]) -> None:
    counts_AB = torch.zeros(shape, dtype=torch.int32)
    assert_equal("rows", moe_ops.sort_chunks(values(4, 2), counts_AB), torch.zeros(4, 2))
    assert moe_ops.sort_chunks(values(0, 2), counts_AB).shape == (0, 2)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows": torch.tensor(1.0)}, ValueError, r"rows must have at least 1 dimension, got \(\)"),
        ({"counts_AB": COUNTS_AB.long()}, TypeError, "counts_AB must be torch.int32, got"),
        ({"counts_AB": COUNTS_AB[0]}, ValueError, "counts_AB must have 2 dimensions, got shape"),
        ({"counts_AB": COUNTS_AB.to("meta")}, ValueError, "counts_AB must be on cpu .* got meta"),
    ],
)
def test_sort_chunks_rejects_bad_input(changes, error, message) -> None:
    good = {"rows": values(5, 2), "counts_AB": COUNTS_AB}
    check_rejects("sort_chunks", moe_ops.sort_chunks, good, changes, error, message)
