"""swiglu, GeGLU and the clamped form against a loop."""

from __future__ import annotations

import math

import pytest
import torch

import moe_ops
from moe_ops.testing import activate, assert_close, assert_equal

from .checks import (
    all_dtypes,
    all_grad_layouts,
    check_against_oracle,
    check_compiled,
    check_double_backward_raises,
    check_rejects,
    values,
)

FORMS = {
    "swiglu": {},
    "geglu": {"act": "gelu"},
    "swiglu_clamped": {"act": "silu", "limit": 7.0, "alpha": 1.702, "up_offset": 1.0},
}
all_forms = pytest.mark.parametrize("form", FORMS)
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
ROWS, VALID = 9, 6


def swiglu_loop(h_C2F, row_weights_C, offsets_L, form):
    rows = []
    for row, h_2F in enumerate(h_C2F):
        weight = 1 if row_weights_C is None else row_weights_C[row]
        inside = row < offsets_L[-1]
        rows.append(activate(h_2F, form) * weight if inside else h_2F[::2] * 0)
    return torch.stack(rows)


def arguments(weighted: bool, dtype: torch.dtype = torch.float32, width: int = 16):
    """Values wide enough for the clamp to act."""
    floats = {"h_C2F": values(ROWS, width, dtype=dtype) * 5}
    if weighted:
        gate_dtype = torch.promote_types(dtype, torch.float32)
        floats["row_weights_C"] = values(ROWS, dtype=gate_dtype, seed=2)
    return floats, torch.tensor([2, 2, VALID], dtype=torch.int32)


def op(form: str, offsets_L: torch.Tensor):
    return lambda h, weights=None: moe_ops.swiglu(h, weights, offsets_L, **FORMS[form])


def loop(form: str, offsets_L: torch.Tensor):
    return lambda h, weights=None: swiglu_loop(h, weights, offsets_L, form)


@all_forms
@WEIGHTED
@all_dtypes
def test_swiglu_matches_reference(form: str, weighted: bool, dtype: torch.dtype) -> None:
    floats, offsets_L = arguments(weighted, dtype)
    check_against_oracle(op(form, offsets_L), loop(form, offsets_L), floats)


@all_forms
@all_grad_layouts
def test_swiglu_grad_matches_reference(form: str, grad_layout: str) -> None:
    floats, offsets_L = arguments(True)
    check_against_oracle(op(form, offsets_L), loop(form, offsets_L), floats, grad_layout)


@all_forms
def test_swiglu_grad_matches_reference_once(form: str) -> None:
    floats, offsets_L = arguments(True, width=4)
    check_double_backward_raises("swiglu", op(form, offsets_L), *floats.values())


@all_forms
def test_swiglu_compiles_fullgraph(form: str) -> None:
    floats, offsets_L = arguments(True)
    leaves = [value.requires_grad_() for value in floats.values()]
    check_compiled(op(form, offsets_L), *leaves)


def test_swiglu_worked_example() -> None:
    offsets_L = torch.tensor([3, 4, 7], dtype=torch.int32)
    h_C2F = torch.tensor([2.0, 3.0]).repeat(8, 1)
    a_CF = moe_ops.swiglu(h_C2F, torch.full((8,), 0.5), offsets_L)
    assert_close("a_CF", a_CF[:7], torch.full((7, 1), 2.6424).double(), scale=10)
    assert a_CF[7].item() == 0


@all_forms
@WEIGHTED
def test_swiglu_handles_tail_of_nan(form: str, weighted: bool) -> None:
    floats, offsets_L = arguments(weighted)
    for value in floats.values():
        value[VALID:] = torch.nan
    leaves = [value.requires_grad_() for value in floats.values()]
    a_CF = op(form, offsets_L)(*leaves)
    assert_equal("tail", a_CF[VALID:], torch.zeros(ROWS - VALID, 8))
    grad = torch.full_like(a_CF, torch.nan)
    grad[:VALID] = 1
    for value in (a_CF, *torch.autograd.grad(a_CF, leaves, grad)):
        assert value.isfinite().all()


@all_forms
def test_swiglu_handles_no_rows(form: str) -> None:
    h_C2F, weights_C = torch.zeros(0, 4, requires_grad=True), torch.zeros(0, requires_grad=True)
    a_CF = op(form, torch.zeros(3, dtype=torch.int32))(h_C2F, weights_C)
    assert a_CF.shape == (0, 2)
    a_CF.sum().backward()
    assert h_C2F.grad.shape == (0, 4)
    assert weights_C.grad.shape == (0,)


@all_forms
def test_swiglu_handles_large_gates(form: str) -> None:
    """No overflow of an exponential: silu(-1000) is 0 and its slope, too."""
    h_C2F = torch.tensor([[-1000.0, 2.0], [1000.0, 2.0]], requires_grad=True)
    a_CF = op(form, torch.tensor([2], dtype=torch.int32))(h_C2F)
    a_CF.sum().backward()
    assert a_CF.isfinite().all()
    assert h_C2F.grad.isfinite().all()
    assert a_CF[0].item() == 0


def test_swiglu_handles_gate_at_the_limit() -> None:
    """The clamp passes the gradient at the limit, as torch.clamp does, and none beyond."""
    h_C2F = torch.tensor([[7.0, 1.0], [7.5, 8.0]], requires_grad=True)
    op("swiglu_clamped", torch.tensor([2], dtype=torch.int32))(h_C2F).sum().backward()
    assert (h_C2F.grad != 0).tolist() == [[True, True], [False, False]]


OFFSETS = torch.tensor([2, 4], dtype=torch.int32)
GOOD = {"h_C2F": torch.ones(5, 4), "row_weights_C": torch.ones(5), "offsets_L": OFFSETS}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"h_C2F": torch.ones(5, 4).int()}, TypeError, "h_C2F must be .*, got torch.int32"),
        ({"h_C2F": torch.ones(5)}, ValueError, "h_C2F must have 2 dimensions, got shape"),
        ({"h_C2F": torch.ones(5, 3)}, ValueError, "h_C2F must have an even width, got 3"),
        ({"row_weights_C": torch.ones(5).half()}, TypeError, "row_weights_C .*, got torch.float16"),
        ({"row_weights_C": torch.ones(4)}, ValueError, "one weight a row, got 4 and 5"),
        ({"offsets_L": OFFSETS.long()}, TypeError, "offsets_L must be torch.int32, got"),
        ({"offsets_L": OFFSETS[:0]}, ValueError, "number of experts L must be positive, got 0"),
        ({"act": "relu"}, ValueError, r"act must be one of \['silu', 'gelu'\], got 'relu'"),
        ({"limit": 0.0}, ValueError, "limit must be positive and finite, or None, got 0.0"),
        ({"limit": math.inf}, ValueError, "limit must be positive and finite, or None, got inf"),
        ({"act": "gelu", "alpha": 2.0}, ValueError, "alpha must be 1 with act='gelu', got 2.0"),
    ],
)
def test_swiglu_rejects_bad_input(changes, error, message) -> None:
    check_rejects("swiglu", moe_ops.swiglu, GOOD, changes, error, message)
