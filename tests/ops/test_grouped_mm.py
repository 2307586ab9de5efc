"""grouped_mm and grouped_mm_wgrad against loops, and the CUDA kernels that run on a CPU too."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.kernels.grouped_mm import masked_grouped_mm, masked_wgrad
from moe_ops.testing import assert_close, assert_equal

from .checks import (
    all_dtypes,
    all_grad_layouts,
    check_against_oracle,
    check_compiled,
    check_double_backward,
    check_rejects,
    values,
)

COUNTS = [[2, 0, 3, 1], [0, 17, 0, 5], [0, 0, 0], [1], [1, 3, 200, 0], [1, 127, 128, 129]]
ROUTINGS = pytest.mark.parametrize("counts", COUNTS, ids=str)
TAIL = 3


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int()


def expert_of_rows(offsets_L, num_rows):
    """One expert a row, None in the tail."""
    ends = offsets_L.tolist()
    return [
        next((expert for expert, end in enumerate(ends) if row < end), None)
        for row in range(num_rows)
    ]


def grouped_mm_loop(a_CI, w_LOI, offsets_L):
    experts = expert_of_rows(offsets_L, a_CI.shape[0])
    rows = [
        a_CI.new_zeros(w_LOI.shape[1]) if expert is None else w_LOI[expert] @ a_I
        for a_I, expert in zip(a_CI, experts)
    ]
    return torch.stack(rows)


def wgrad_loop(g_CO, a_CI, offsets_L):
    experts = expert_of_rows(offsets_L, a_CI.shape[0])
    total = list(a_CI.new_zeros(offsets_L.shape[0], g_CO.shape[1], a_CI.shape[1]))
    for g_O, a_I, expert in zip(g_CO, a_CI, experts):
        if expert is not None:
            total[expert] = total[expert] + g_O[:, None] * a_I
    return torch.stack(total)


def tensors(counts: list[int], dtype: torch.dtype = torch.float32, width: int = 8):
    """a_CI, w_LOI, g_CO, offsets_L; a tail behind the valid rows."""
    rows, experts = sum(counts) + TAIL, len(counts)
    a_CI, g_CO = values(rows, width, dtype=dtype), values(rows, 6, dtype=dtype, seed=1)
    return a_CI, values(experts, 6, width, dtype=dtype, seed=2), g_CO, offsets_of(counts)


@ROUTINGS
@all_dtypes
def test_grouped_mm_matches_reference(counts: list[int], dtype: torch.dtype) -> None:
    a_CI, w_LOI, _, offsets_L = tensors(counts, dtype)
    check_against_oracle(
        lambda a, w: moe_ops.grouped_mm(a, w, offsets_L),
        lambda a, w: grouped_mm_loop(a, w, offsets_L),
        {"a_CI": a_CI, "w_LOI": w_LOI},
    )


@ROUTINGS
@all_dtypes
def test_grouped_mm_wgrad_matches_reference(counts: list[int], dtype: torch.dtype) -> None:
    a_CI, _, g_CO, offsets_L = tensors(counts, dtype)
    check_against_oracle(
        lambda g, a: moe_ops.grouped_mm_wgrad(g, a, offsets_L),
        lambda g, a: wgrad_loop(g, a, offsets_L),
        {"g_CO": g_CO, "a_CI": a_CI},
    )


@all_grad_layouts
@pytest.mark.parametrize("op", ["grouped_mm", "grouped_mm_wgrad"])
def test_grouped_mm_grad_matches_reference(op: str, grad_layout: str) -> None:
    a_CI, w_LOI, g_CO, offsets_L = tensors([2, 0, 3, 1])
    first, second = (a_CI, w_LOI) if op == "grouped_mm" else (g_CO, a_CI)
    loop = grouped_mm_loop if op == "grouped_mm" else wgrad_loop
    check_against_oracle(
        lambda x, y: getattr(moe_ops, op)(x, y, offsets_L),
        lambda x, y: loop(x, y, offsets_L),
        {"first": first, "second": second},
        grad_layout,
    )


@pytest.mark.parametrize("op", ["grouped_mm", "grouped_mm_wgrad"])
def test_grouped_mm_grad_matches_reference_twice(op: str) -> None:
    a_CI, w_LOI, g_CO, offsets_L = tensors([2, 0, 1], width=2)
    first, second = (a_CI, w_LOI) if op == "grouped_mm" else (g_CO, a_CI)
    check_double_backward(lambda x, y: getattr(moe_ops, op)(x, y, offsets_L), first, second)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_grouped_mm_compiles_fullgraph(backend: str) -> None:
    a_CI, w_LOI, _, offsets_L = tensors([2, 0, 3, 1])
    leaves = a_CI.requires_grad_(), w_LOI.requires_grad_()
    check_compiled(lambda a, w: moe_ops.grouped_mm(a, w, offsets_L), *leaves, backend=backend)


def test_grouped_mm_worked_example() -> None:
    a_CI = torch.tensor([[1.0], [2], [4], [2], [1], [3], [4], [9]])
    w_LOI = torch.tensor([[[1.0]], [[10]], [[100]]])
    offsets_L = torch.tensor([3, 4, 7], dtype=torch.int32)
    c_CO = moe_ops.grouped_mm(a_CI, w_LOI, offsets_L)
    assert c_CO.flatten().tolist() == [1, 2, 4, 20, 100, 300, 400, 0]


def test_grouped_mm_handles_transposed_weight() -> None:
    a_CI, w_LOI, _, offsets_L = tensors([2, 0, 3, 1])
    view = w_LOI.mT.contiguous().mT
    plain = moe_ops.grouped_mm(a_CI, w_LOI, offsets_L)
    assert_close("c_CO", moe_ops.grouped_mm(a_CI, view, offsets_L), plain.double())
    wgrad = torch.autograd.grad(
        moe_ops.grouped_mm(a_CI, view.requires_grad_(), offsets_L).sum(), view
    )
    assert wgrad[0].is_contiguous()


def test_grouped_mm_handles_empty_expert() -> None:
    """The gradient of an expert without rows is zero and not left as it was in memory."""
    a_CI, w_LOI, _, offsets_L = tensors([0, 17, 0, 5])
    w_LOI.requires_grad_()
    moe_ops.grouped_mm(a_CI, w_LOI, offsets_L).sum().backward()
    assert_equal("grad of empty experts", w_LOI.grad[[0, 2]], torch.zeros(2, 6, 8))
    assert w_LOI.grad.is_contiguous()


def test_grouped_mm_handles_no_rows() -> None:
    w_LOI = values(3, 6, 8).requires_grad_()
    a_CI = torch.zeros(0, 8, requires_grad=True)
    c_CO = moe_ops.grouped_mm(a_CI, w_LOI, torch.zeros(3, dtype=torch.int32))
    assert c_CO.shape == (0, 6)
    c_CO.sum().backward()
    assert_equal("grad of w", w_LOI.grad, torch.zeros(3, 6, 8))


@pytest.mark.parametrize("features", [(0, 6), (8, 0)], ids=str)
def test_grouped_mm_handles_no_features(features: tuple[int, int]) -> None:
    a_CI = torch.ones(5, features[0])
    w_LOI = torch.ones(2, features[1], features[0])
    c_CO = moe_ops.grouped_mm(a_CI, w_LOI, torch.tensor([2, 4], dtype=torch.int32))
    assert_equal("c_CO", c_CO, torch.zeros(5, features[1]))


def test_grouped_mm_handles_4096_rows_of_one_expert() -> None:
    a_CI, w_LOI = values(4096, 4), values(4, 3, 4)
    c_CO = moe_ops.grouped_mm(a_CI, w_LOI, torch.tensor([0, 0, 4096, 4096], dtype=torch.int32))
    assert_close("c_CO", c_CO, a_CI.double() @ w_LOI[2].double().T)


def test_grouped_mm_handles_tail_of_nan() -> None:
    """Capacity 512 with 300 rows and NaN behind them: outputs and gradients as in exact mode."""
    counts = [100, 0, 150, 50]
    a_CI, w_LOI, _, offsets_L = tensors(counts)
    exact, tailed = a_CI[:300].clone(), torch.full((512, 8), torch.nan)
    tailed[:300] = exact
    results = []
    for rows in (exact, tailed):
        leaves = rows.clone().requires_grad_(), w_LOI.clone().requires_grad_()
        c_CO = moe_ops.grouped_mm(*leaves, offsets_L)
        grad_CO = torch.full_like(c_CO, torch.nan)
        grad_CO[:300] = 1
        results.append((c_CO, *torch.autograd.grad(c_CO, leaves, grad_CO)))
    for name, wanted, found in zip(("c_CO", "grad a_CI", "grad w_LOI"), *results):
        assert_equal(name, found[: len(wanted)], wanted)
        assert not found[len(wanted) :].count_nonzero()


@ROUTINGS
@all_dtypes
def test_masked_kernels_match_reference(counts: list[int], dtype: torch.dtype) -> None:
    a_CI, w_LOI, g_CO, offsets_L = tensors(counts, dtype)
    a_CI[sum(counts) :], g_CO[sum(counts) :] = torch.nan, torch.nan
    c_CO = masked_grouped_mm(a_CI, w_LOI, offsets_L)
    assert_close("c_CO", c_CO, grouped_mm_loop(a_CI.double(), w_LOI.double(), offsets_L))
    wgrad = masked_wgrad(g_CO, a_CI, offsets_L)
    assert_close("w_LOI", wgrad, wgrad_loop(g_CO.double(), a_CI.double(), offsets_L))


def test_grouped_mm_casts_under_autocast() -> None:
    a_CI, w_LOI, _, offsets_L = tensors([2, 0, 3, 1])
    leaves = a_CI.requires_grad_(), w_LOI.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        c_CO = moe_ops.grouped_mm(*leaves, offsets_L)
    assert c_CO.dtype == torch.bfloat16
    c_CO.sum().backward()
    assert all(leaf.grad.dtype == torch.float32 for leaf in leaves)
    low = [leaf.detach().bfloat16() for leaf in leaves]
    assert_equal("c_CO", c_CO, moe_ops.grouped_mm(*low, offsets_L))


OFFSETS = torch.tensor([2, 4], dtype=torch.int32)
GOOD = {"a_CI": torch.ones(5, 3), "w_LOI": torch.ones(2, 4, 3), "offsets_L": OFFSETS}
NO_EXPERTS = {"w_LOI": torch.ones(0, 4, 3), "offsets_L": OFFSETS[:0]}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"a_CI": torch.ones(5, 3).int()}, TypeError, "a_CI must be .*, got torch.int32"),
        ({"a_CI": torch.ones(5)}, ValueError, "a_CI must have 2 dimensions, got shape"),
        ({"w_LOI": torch.ones(2, 4, 3).half()}, TypeError, "w_LOI must be torch.float32, got"),
        ({"w_LOI": torch.ones(2, 3, 4)}, ValueError, "a_CI and w_LOI must share I, got 3 and 4"),
        ({"w_LOI": torch.ones(3, 4, 3)}, ValueError, "must share L, got 3 and 2"),
        ({"w_LOI": torch.ones(2, 4, 3, device="meta")}, ValueError, "must be on cpu .* got meta"),
        ({"offsets_L": OFFSETS.long()}, TypeError, "offsets_L must be torch.int32, got"),
        (NO_EXPERTS, ValueError, "number of experts L must be positive, got 0"),
    ],
)
def test_grouped_mm_rejects_bad_input(changes, error, message) -> None:
    check_rejects("grouped_mm", moe_ops.grouped_mm, GOOD, changes, error, message)


def test_grouped_mm_wgrad_rejects_bad_input() -> None:
    with pytest.raises(ValueError, match="grouped_mm_wgrad: g_CO and a_CI must share C, got 5"):
        moe_ops.grouped_mm_wgrad(torch.ones(5, 2), torch.ones(4, 3), OFFSETS)
    with pytest.raises(TypeError, match="grouped_mm_wgrad: a_CI must be"):
        moe_ops.grouped_mm_wgrad(torch.ones(5, 2), torch.ones(5, 3).half(), OFFSETS)
