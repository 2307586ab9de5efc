"""row_dot against a loop; its gradients are permute and unpermute."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.testing import assert_equal, make_case

from .checks import (
    all_dtypes,
    all_grad_layouts,
    check_against_oracle,
    check_compiled,
    check_double_backward,
    check_rejects,
    values,
)


def row_dot_loop(rows_CH, x_TH, row_of_slot_TK):
    return torch.stack(
        [
            torch.stack(
                [
                    (rows_CH[row] * x_TH[token]).sum() if row >= 0 else x_TH[token].sum() * 0
                    for row in rows
                ]
            )
            for token, rows in enumerate(row_of_slot_TK.tolist())
        ]
    )


def arguments(case, tail: int = 3):
    rows = case.num_tokens * case.top_k + tail
    *maps, _ = moe_ops.sort_slots(case.make().ids_TK, case.num_experts, row_capacity=rows)
    rows_CH = values(rows, case.hidden_size, dtype=case.dtype)
    return rows_CH, values(case.num_tokens, case.hidden_size, dtype=case.dtype, seed=1), maps


@all_grad_layouts
@all_dtypes
def test_row_dot_matches_reference(dtype: torch.dtype, grad_layout: str) -> None:
    case = make_case(9, 3, 5, hidden_size=16, dtype=dtype, none_fraction=0.3)
    rows_CH, x_TH, maps = arguments(case)
    check_against_oracle(
        lambda rows, x: moe_ops.row_dot(rows, x, *maps),
        lambda rows, x: row_dot_loop(rows, x, maps[1]),
        {"rows_CH": rows_CH, "x_TH": x_TH},
        grad_layout,
    )


def test_row_dot_grad_matches_reference_twice() -> None:
    rows_CH, x_TH, maps = arguments(make_case(4, 2, 3, hidden_size=2, none_fraction=0.3))
    check_double_backward(lambda rows, x: moe_ops.row_dot(rows, x, *maps), rows_CH, x_TH)


def test_row_dot_compiles_fullgraph() -> None:
    rows_CH, x_TH, maps = arguments(make_case(none_fraction=0.3))
    leaves = rows_CH.requires_grad_(), x_TH.requires_grad_()
    check_compiled(lambda rows, x: moe_ops.row_dot(rows, x, *maps), *leaves)


def test_row_dot_worked_example() -> None:
    x_TH = torch.tensor([[1.0], [2], [3], [4]])
    rows_CH = torch.tensor([[1.0], [2], [4], [2], [1], [3], [4], [0]])
    row_of_slot_TK = torch.tensor([[4, 0], [1, 3], [5, -1], [2, 6]], dtype=torch.int32)
    slot_of_row_C = torch.tensor([1, 2, 6, 3, 0, 4, 7, -1], dtype=torch.int32)
    weights_TK = moe_ops.row_dot(rows_CH, x_TH, slot_of_row_C, row_of_slot_TK)
    assert weights_TK.tolist() == [[1, 1], [4, 4], [9, 0], [16, 16]]


@pytest.mark.parametrize("case", [make_case(0), make_case(5, none_fraction=1.0)], ids=str)
def test_row_dot_handles_nothing_routed(case) -> None:
    rows_CH, x_TH, maps = arguments(case)
    weights_TK = moe_ops.row_dot(rows_CH, x_TH.fill_(torch.inf), *maps)
    assert_equal("weights_TK", weights_TK, torch.zeros(case.num_tokens, case.top_k))


def test_row_dot_handles_tail_of_nan() -> None:
    rows_CH, x_TH, maps = arguments(make_case(none_fraction=0.3), tail=5)
    clean = moe_ops.row_dot(rows_CH, x_TH, *maps)
    rows_CH[maps[0] < 0] = torch.nan
    leaves = rows_CH.requires_grad_(), x_TH.requires_grad_()
    weights_TK = moe_ops.row_dot(*leaves, *maps)
    assert_equal("weights_TK", weights_TK, clean)
    weights_TK.sum().backward()
    assert all(leaf.grad.isfinite().all() for leaf in leaves)


def test_row_dot_keeps_float32_weights_of_bf16_rows() -> None:
    maps = torch.tensor([0], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
    ones = torch.ones(1, 257, dtype=torch.bfloat16)
    weights_TK = moe_ops.row_dot(ones, ones, *maps)
    assert weights_TK.dtype == torch.float32
    assert weights_TK.item() == 257  # no bf16 number


GOOD = {
    "rows_CH": torch.ones(4, 3),
    "x_TH": torch.ones(2, 3),
    "slot_of_row_C": torch.zeros(4, dtype=torch.int32),
    "row_of_slot_TK": torch.zeros(2, 2, dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows_CH": torch.ones(4, 3).int()}, TypeError, "rows_CH must be .*, got torch.int32"),
        ({"rows_CH": torch.ones(4)}, ValueError, "rows_CH must have 2 dimensions, got shape"),
        ({"x_TH": torch.ones(2, 3).half()}, TypeError, "x_TH must be torch.float32, got .*16"),
        ({"x_TH": torch.ones(2, 4)}, ValueError, "must be equally wide, got 3 and 4"),
        ({"x_TH": torch.ones(3, 3)}, ValueError, "must be equally long, got 3 and 2"),
        ({"rows_CH": torch.ones(5, 3)}, ValueError, "must be equally long, got 5 and 4"),
        ({"row_of_slot_TK": torch.zeros(2, 2)}, TypeError, "row_of_slot_TK must be torch.int32"),
    ],
)
def test_row_dot_rejects_bad_input(changes, error, message) -> None:
    check_rejects("row_dot", moe_ops.row_dot, GOOD, changes, error, message)
