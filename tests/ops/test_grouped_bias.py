"""grouped_bias against a loop."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.testing import assert_equal

from .checks import (
    all_dtypes,
    all_grad_layouts,
    check_against_oracle,
    check_compiled,
    check_double_backward_raises,
    check_rejects,
    values,
)

COUNTS = [[2, 0, 3, 1], [0, 17, 0, 5], [0, 0], [1], [1, 3, 40, 0]]
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def grouped_bias_loop(rows_CO, bias_LO, row_weights_C, offsets_L):
    ends = offsets_L.tolist()
    results = []
    for row, row_O in enumerate(rows_CO):
        expert = next((e for e, end in enumerate(ends) if row < end), None)
        weight = 1 if row_weights_C is None else row_weights_C[row]
        results.append(row_O * 0 if expert is None else row_O + bias_LO[expert] * weight)
    return torch.stack(results)


def arguments(counts, weighted: bool, dtype: torch.dtype = torch.float32, width: int = 8):
    """Float inputs by name and the offsets; 3 rows of tail."""
    rows = sum(counts) + 3
    gate_dtype = torch.promote_types(dtype, torch.float32)
    floats = {
        "rows_CO": values(rows, width, dtype=dtype),
        "bias_LO": values(len(counts), width, dtype=dtype, seed=1),
    }
    if weighted:
        floats["row_weights_C"] = values(rows, dtype=gate_dtype, seed=2)
    return floats, torch.tensor(counts).cumsum(0).int()


def bind(function, offsets_L):
    return lambda rows, bias, weights=None: function(rows, bias, weights, offsets_L)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@WEIGHTED
@all_dtypes
def test_grouped_bias_matches_reference(counts, weighted, dtype) -> None:
    floats, offsets_L = arguments(counts, weighted, dtype)
    check_against_oracle(
        bind(moe_ops.grouped_bias, offsets_L), bind(grouped_bias_loop, offsets_L), floats
    )


@WEIGHTED
@all_grad_layouts
def test_grouped_bias_grad_matches_reference(weighted: bool, grad_layout: str) -> None:
    floats, offsets_L = arguments([2, 0, 3, 1], weighted)
    check_against_oracle(
        bind(moe_ops.grouped_bias, offsets_L),
        bind(grouped_bias_loop, offsets_L),
        floats,
        grad_layout,
    )


def test_grouped_bias_grad_matches_reference_once() -> None:
    """gradcheck; a second derivative, of the product with the weights, is an error."""
    floats, offsets_L = arguments([2, 0, 1], True, width=2)
    check_double_backward_raises(
        "grouped_bias", bind(moe_ops.grouped_bias, offsets_L), *floats.values()
    )


@WEIGHTED
def test_grouped_bias_compiles_fullgraph(weighted: bool) -> None:
    floats, offsets_L = arguments([2, 0, 3, 1], weighted)
    leaves = [value.requires_grad_() for value in floats.values()]
    check_compiled(bind(moe_ops.grouped_bias, offsets_L), *leaves)


def test_grouped_bias_worked_example() -> None:
    weights_C = torch.tensor([1, 1, 1, 1, 1, 1, 0.5, 0])
    bias_LO = torch.tensor([[1.0], [2], [3]])
    offsets_L = torch.tensor([3, 4, 7], dtype=torch.int32)
    out = moe_ops.grouped_bias(torch.zeros(8, 1), bias_LO, weights_C, offsets_L)
    assert out.flatten().tolist() == [1, 1, 1, 2, 3, 3, 1.5, 0]


def test_grouped_bias_handles_no_rows() -> None:
    bias_LO = values(2, 3).requires_grad_()
    weights_C = torch.zeros(0, requires_grad=True)
    offsets_L = torch.zeros(2, dtype=torch.int32)
    out = moe_ops.grouped_bias(torch.zeros(0, 3), bias_LO, weights_C, offsets_L)
    assert out.shape == (0, 3)
    out.sum().backward()
    assert_equal("grad of bias", bias_LO.grad, torch.zeros(2, 3))
    assert weights_C.grad.shape == (0,)


@WEIGHTED
def test_grouped_bias_handles_tail_of_nan(weighted: bool) -> None:
    floats, offsets_L = arguments([2, 0, 3, 1], weighted)
    for name in set(floats) - {"bias_LO"}:
        floats[name][6:] = torch.nan
    leaves = [value.requires_grad_() for value in floats.values()]
    out = bind(moe_ops.grouped_bias, offsets_L)(*leaves)
    grad = torch.full_like(out, torch.nan)
    grad[:6] = 1
    assert_equal("tail", out[6:], torch.zeros(3, 8))
    for value in (out, *torch.autograd.grad(out, leaves, grad)):
        assert value.isfinite().all()


def test_grouped_bias_keeps_dtype_under_autocast() -> None:
    floats, offsets_L = arguments([2, 0, 3, 1], True, torch.bfloat16)
    floats["bias_LO"] = floats["bias_LO"].float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = bind(moe_ops.grouped_bias, offsets_L)(*floats.values())
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert floats["bias_LO"].grad.dtype == torch.float32


def test_grouped_bias_handles_bias_of_one() -> None:
    """Zero weights, bias 1: a token's output is the sum of its gate weights."""
    ids_TK, weights_TK = torch.tensor([[0, 1], [1, -1]]), torch.tensor([[0.25, 0.5], [0.75, 9]])
    slots, rows_of, offsets_E = moe_ops.sort_slots(ids_TK, 2)
    row_weights_C = moe_ops.permute(
        weights_TK.reshape(-1, 1), None, slots, rows_of.reshape(-1, 1)
    ).flatten()
    rows_CH = moe_ops.grouped_bias(torch.zeros(4, 3), torch.ones(2, 3), row_weights_C, offsets_E)
    x_TH = moe_ops.unpermute(rows_CH, None, slots, rows_of)
    assert x_TH.tolist() == [[0.75] * 3, [0.75] * 3]


OFFSETS = torch.tensor([2, 4], dtype=torch.int32)
GOOD = {
    "rows_CO": torch.ones(5, 3),
    "bias_LO": torch.ones(2, 3),
    "row_weights_C": torch.ones(5),
    "offsets_L": OFFSETS,
}
NO_EXPERTS = {"bias_LO": torch.ones(0, 3), "offsets_L": OFFSETS[:0]}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows_CO": torch.ones(5, 3).int()}, TypeError, "rows_CO must be .*, got torch.int32"),
        ({"rows_CO": torch.ones(5)}, ValueError, "rows_CO must have 2 dimensions, got shape"),
        ({"bias_LO": torch.ones(2, 3).half()}, TypeError, "bias_LO must be torch.float32, got"),
        ({"bias_LO": torch.ones(2, 4)}, ValueError, "must share O, got 3 and 4"),
        ({"bias_LO": torch.ones(3, 3)}, ValueError, "must share L, got 3 and 2"),
        ({"row_weights_C": torch.ones(5).half()}, TypeError, "row_weights_C .*, got torch.float16"),
        ({"row_weights_C": torch.ones(5).double()}, TypeError, "may be torch.float64 only if"),
        ({"row_weights_C": torch.ones(4)}, ValueError, "one weight a row, got 4 and 5"),
        ({"offsets_L": OFFSETS.long()}, TypeError, "offsets_L must be torch.int32, got"),
        (NO_EXPERTS, ValueError, "number of experts L must be positive, got 0"),
    ],
)
def test_grouped_bias_rejects_bad_input(changes, error, message) -> None:
    check_rejects("grouped_bias", moe_ops.grouped_bias, GOOD, changes, error, message)
