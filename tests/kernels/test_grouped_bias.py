"""Triton's grouped_bias and grouped_bias_backward against the references."""

from __future__ import annotations

import pytest
import torch

from moe_ops.testing import DTYPE_NAMES
from tests.ops.checks import GRAD_LAYOUTS, make_grad, values

pytest.importorskip("triton", reason="optional package triton is not installed")

from moe_ops.kernels import grouped_bias as kernels

from . import check_kernel

# Experts that share a chunk of 64 rows, span several, begin and end at its edges, have no rows.
COUNTS = [[2, 0, 3, 1], [0, 17, 0, 5], [0, 0], [1], [1, 3, 150, 0, 70], [64, 64, 0, 61], [1] * 9]
all_counts = pytest.mark.parametrize("counts", COUNTS, ids=str)
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=DTYPE_NAMES.get)
TAIL = 3


def arguments(counts, width: int, weighted: bool, dtype: torch.dtype = torch.float32):
    """Rows, bias, row weights, offsets; NaN in the tail."""
    num_rows = sum(counts) + TAIL
    rows_CO = values(num_rows, width, dtype=dtype)
    row_weights_C = values(num_rows, seed=2) if weighted else None
    for tensor in (rows_CO, row_weights_C):
        if tensor is not None:
            tensor[sum(counts) :] = torch.nan
    bias_LO = values(len(counts), width, dtype=dtype, seed=1)
    return rows_CO, bias_LO, row_weights_C, torch.tensor(counts).cumsum(0).int()


def check_both(*inputs) -> None:
    check_kernel("grouped_bias", kernels.grouped_bias, *inputs)
    check_kernel("grouped_bias_backward", kernels.grouped_bias_backward, *inputs)


@all_counts
@WEIGHTED
def test_grouped_bias_kernels_match_reference(counts, weighted) -> None:
    check_both(*arguments(counts, 12, weighted))


@WEIGHTED
@HALVES
def test_grouped_bias_kernels_handle_half_precision(dtype, weighted) -> None:
    check_both(*arguments([3, 0, 66, 1], 12, weighted, dtype))


@WEIGHTED
@pytest.mark.parametrize("width", [1, 130])
def test_grouped_bias_kernels_handle_widths(width: int, weighted: bool) -> None:
    check_both(*arguments([3, 0, 6, 1], width, weighted))


@WEIGHTED
@pytest.mark.parametrize("layout", GRAD_LAYOUTS[1:])
def test_grouped_bias_kernels_handle_layouts(layout: str, weighted: bool) -> None:
    rows_CO, bias_LO, _, offsets_L = arguments([2, 0, 3, 1], 5, weighted)
    check_both(
        make_grad(rows_CO, layout),
        make_grad(bias_LO, layout),
        torch.ones(()).expand(rows_CO.shape[0]) if weighted else None,
        torch.stack([offsets_L, offsets_L], -1)[..., 0],
    )


@WEIGHTED
@pytest.mark.parametrize(("num_rows", "width"), [(0, 4), (3, 0), (0, 0), (5, 4)])
def test_grouped_bias_kernels_handle_no_expert_with_rows(num_rows, width, weighted) -> None:
    rows_CO = torch.full((num_rows, width), torch.nan)
    weights_C = torch.full((num_rows,), torch.nan) if weighted else None
    check_both(rows_CO, torch.ones(2, width), weights_C, torch.zeros(2, dtype=torch.int32))


@WEIGHTED
def test_grouped_bias_kernels_handle_longer_chunks(monkeypatch, weighted: bool) -> None:
    """As with very many rows: the number of chunks is bounded, not their length."""
    monkeypatch.setattr(kernels, "_MOST_CHUNKS", 2)
    check_both(*arguments([100, 3, 200, 0], 5, weighted))


@pytest.mark.parametrize("num_intervals", [1, 2, 3, 4, 7, 8, 100])
def test_interval_search_takes_enough_steps(num_intervals: int) -> None:
    """Experts of one row each, so that every end is found."""
    rows_CO = torch.zeros(num_intervals + 1, 1)
    bias_LO = torch.arange(1.0, num_intervals + 1)[:, None]
    offsets_L = torch.arange(1, num_intervals + 1, dtype=torch.int32)
    check_kernel(
        "grouped_bias", kernels.grouped_bias, rows_CO, bias_LO, None, offsets_L, exact=True
    )
