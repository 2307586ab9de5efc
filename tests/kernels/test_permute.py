"""Triton's permute and unpermute against the references, bit for bit where rounding allows it."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.testing import DTYPE_NAMES, assert_equal, make_ids
from tests.ops.checks import GRAD_LAYOUTS, make_grad, values

pytest.importorskip("triton", reason="optional package triton is not installed")

from moe_ops.kernels import permute as kernels

from . import DEVICE, check_kernel, on_device

RUN = {"permute": kernels.permute, "unpermute": kernels.unpermute}
both_ops = pytest.mark.parametrize("op", RUN)
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=DTYPE_NAMES.get)
# T, K, H: narrow rows are gathered; K = 11 takes two rounds of choices; 2200 takes two blocks.
SIZES = pytest.mark.parametrize(
    "sizes",
    [(7, 2, 6), (37, 1, 1), (5, 3, 200), (3, 11, 160), (2, 2, 2200), (9, 4, 64), (1, 1, 256)],
    ids=str,
)
# The interpreter cuts float32 to bfloat16 instead of rounding it.
ROUNDS = DEVICE == "cuda"


def maps(num_tokens: int, top_k: int, **capacity: int):
    """slot_of_row_C and row_of_slot_TK for 5 experts."""
    ids_TK = make_ids(num_tokens, top_k, max(5, top_k), "zipf", 0.2)
    return moe_ops.sort_slots(ids_TK, max(5, top_k), **capacity)[:2]


def arguments(op: str, sizes, weighted: bool, dtype=torch.float32, **capacity: int):
    num_tokens, top_k, width = sizes
    slots, rows_of = maps(num_tokens, top_k, **capacity or {"row_capacity": num_tokens * top_k + 3})
    length = num_tokens if op == "permute" else slots.shape[0]
    x = values(length, width, dtype=dtype)
    if op == "unpermute":
        x[slots < 0] = torch.nan
    weights_TK = values(num_tokens, top_k, seed=1) if weighted else None
    return x, weights_TK, slots, rows_of


@both_ops
@WEIGHTED
@SIZES
def test_permute_kernel_matches_reference(op, sizes, weighted) -> None:
    check_kernel(op, RUN[op], *arguments(op, sizes, weighted), exact=True)


@both_ops
@WEIGHTED
@HALVES
@pytest.mark.parametrize("sizes", [(7, 2, 6), (5, 3, 200)], ids=str)
def test_permute_kernel_handles_half_precision(op, sizes, dtype, weighted) -> None:
    exact = ROUNDS or dtype == torch.float16
    check_kernel(op, RUN[op], *arguments(op, sizes, weighted, dtype), exact=exact)


@both_ops
@WEIGHTED
@pytest.mark.parametrize("sizes", [(7, 2, 6), (7, 2, 200)], ids=str)
def test_permute_kernel_handles_rows_without_slot_in_between(op, sizes, weighted) -> None:
    inputs = arguments(op, sizes, weighted, expert_capacity=4)
    free = inputs[2] < 0
    assert (free[:-1] & ~free[1:]).any(), "a row of a slot follows one of none"
    check_kernel(op, RUN[op], *inputs, exact=True)


@both_ops
@WEIGHTED
@pytest.mark.parametrize("width", [3, 130])
def test_permute_kernel_handles_same_expert_twice(op, width, weighted) -> None:
    slots, rows_of, _ = moe_ops.sort_slots(torch.tensor([[3, 3], [1, 3]]), 4)
    x = values(2 if op == "permute" else 4, width)
    weights_TK = values(2, 2, seed=1) if weighted else None
    check_kernel(op, RUN[op], x, weights_TK, slots, rows_of, exact=True)


@both_ops
@WEIGHTED
@pytest.mark.parametrize("width", [0, 130])
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_rows"), [(0, 2, 0), (0, 2, 5), (3, 2, 0), (3, 0, 5), (3, 2, 5)]
)
def test_permute_kernel_handles_nothing_routed(
    op, num_tokens, top_k, num_rows, width, weighted
) -> None:
    slots = torch.full((num_rows,), -1, dtype=torch.int32)
    rows_of = torch.full((num_tokens, top_k), -1, dtype=torch.int32)
    x = torch.full((num_tokens if op == "permute" else num_rows, width), torch.nan)
    weights_TK = torch.full((num_tokens, top_k), torch.nan) if weighted else None
    check_kernel(op, RUN[op], x, weights_TK, slots, rows_of, exact=True)


@both_ops
@pytest.mark.parametrize("width", [6, 130])
@pytest.mark.parametrize("layout", GRAD_LAYOUTS[1:])
def test_permute_kernel_handles_layouts(op, layout, width) -> None:
    _, weights_TK, slots, rows_of = arguments(op, (7, 2, width), True)
    if op == "unpermute":
        slots, rows_of = slots[:7], torch.where(rows_of < 7, rows_of, -1)
    x = make_grad(torch.empty(7, width), layout)
    weights_TK = weights_TK.T.contiguous().T
    rows_of = torch.stack([rows_of, rows_of], -1)[..., 0]
    check_kernel(op, RUN[op], x, weights_TK, slots, rows_of, exact=True)


def test_unpermute_kernel_handles_nan_in_a_dropped_slot_weight() -> None:
    slots, rows_of, weights_TK = on_device(
        (
            torch.tensor([0], dtype=torch.int32),
            torch.tensor([[0, -1]], dtype=torch.int32),
            torch.tensor([[2.0, torch.nan]]),
        )
    )
    assert kernels.unpermute(torch.ones(1, 1).to(DEVICE), weights_TK, slots, rows_of).item() == 2


@WEIGHTED
@pytest.mark.parametrize("width", [1, 130])
def test_permute_kernel_handles_values_that_are_not_finite(width, weighted) -> None:
    """They stay in their token."""
    x, weights_TK, slots, rows_of = arguments("permute", (7, 2, width), weighted)
    x[2], x[4] = torch.nan, torch.inf
    check_kernel("permute", kernels.permute, x, weights_TK, slots, rows_of, exact=True)


def test_permute_kernels_undo_each_other() -> None:
    slots, rows_of = on_device(maps(8, 1, row_capacity=8))
    x_TH = values(8, 130, dtype=torch.bfloat16).to(DEVICE)
    rows_CH = kernels.permute(x_TH, None, slots, rows_of)
    back_TH = kernels.unpermute(rows_CH, None, slots, rows_of)
    held_T1 = rows_of >= 0
    assert_equal("x_TH", back_TH, torch.where(held_T1, x_TH, 0))
