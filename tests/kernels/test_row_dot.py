"""Triton's row_dot against the reference."""

from __future__ import annotations

import pytest
import torch

from moe_ops.testing import DTYPE_NAMES
from tests.ops.checks import GRAD_LAYOUTS, make_grad, values

pytest.importorskip("triton", reason="optional package triton is not installed")

from moe_ops.kernels.row_dot import row_dot

from . import DEVICE, check_kernel
from .test_permute import maps

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=DTYPE_NAMES.get
)


def arguments(num_tokens: int, top_k: int, width: int, dtype: torch.dtype = torch.float32):
    """NaN in rows of no slot, and in tokens without rows."""
    slots, rows_of = maps(num_tokens, top_k, row_capacity=num_tokens * top_k + 3)
    rows, x = values(slots.shape[0], width, dtype=dtype), values(num_tokens, width, dtype=dtype)
    rows[slots < 0] = torch.nan
    x[(rows_of < 0).all(1)] = torch.nan
    return rows, x, slots, rows_of


@pytest.mark.parametrize(
    "sizes", [(7, 2, 6), (9, 1, 1), (5, 3, 200), (3, 11, 160), (2, 8, 1300)], ids=str
)
@DTYPES
def test_row_dot_kernel_matches_reference(sizes, dtype: torch.dtype) -> None:
    check_kernel("row_dot", row_dot, *arguments(*sizes, dtype))


@pytest.mark.parametrize("layout", GRAD_LAYOUTS[1:])
def test_row_dot_kernel_handles_layouts(layout: str) -> None:
    rows, x, slots, rows_of = arguments(7, 2, 20)
    rows_of = rows_of.T.contiguous().T
    check_kernel("row_dot", row_dot, rows, make_grad(x, layout), slots, rows_of)
    rows_of = torch.where(rows_of < 7, rows_of, -1)
    rows = make_grad(rows[:7], layout)
    check_kernel("row_dot", row_dot, rows, torch.nan_to_num(x), slots[:7], rows_of)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "width"), [(0, 2, 4), (3, 0, 4), (3, 2, 0), (3, 2, 130)]
)
def test_row_dot_kernel_handles_nothing_routed(num_tokens: int, top_k: int, width: int) -> None:
    rows_of = torch.full((num_tokens, top_k), -1, dtype=torch.int32)
    nothing = torch.zeros(0, width), torch.full((num_tokens, width), torch.nan)
    check_kernel("row_dot", row_dot, *nothing, torch.zeros(0, dtype=torch.int32), rows_of)


def test_row_dot_kernel_handles_rows_that_are_not_finite() -> None:
    """They stay in their slot."""
    slots, rows_of = maps(7, 2, row_capacity=14)
    rows, x = values(14, 6), values(7, 6)
    rows[3] = torch.nan
    found = row_dot(*(t.to(DEVICE) for t in (rows, x, slots, rows_of)))
    assert found.isnan().sum() == (rows_of == 3).sum() == 1
