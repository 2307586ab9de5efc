"""permute and unpermute against loops; each is the other's gradient."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.testing import Case, assert_close, assert_equal, make_case, make_ids

from .checks import (
    DTYPES,
    all_dtypes,
    all_grad_layouts,
    check_against_oracle,
    check_compiled,
    check_double_backward,
    check_rejects,
    values,
)

CASES = [
    make_case(),
    make_case(7, 2, 4, hidden_size=64, dtype=torch.bfloat16),
    make_case(17, 3, 5, none_fraction=0.3, dtype=torch.float16),
    make_case(9, 1, 3, skew="one expert"),
    make_case(13, 4, 8, skew="zipf", none_fraction=0.5, dtype=torch.float64),
    make_case(1, 1, 1),
]
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


def permute_loop(x_TH, weights_TK, slot_of_row_C, row_of_slot_TK):
    top_k = row_of_slot_TK.shape[1]
    rows = []
    for slot in slot_of_row_C.tolist():
        token, k = divmod(slot, top_k)
        row = x_TH[token] if slot >= 0 else x_TH.new_zeros(x_TH.shape[1])
        if weights_TK is not None and slot >= 0:
            row = row * weights_TK[token, k]
        rows.append(row)
    return torch.stack(rows)


def unpermute_loop(rows_CH, weights_TK, slot_of_row_C, row_of_slot_TK):
    tokens = []
    for token, rows in enumerate(row_of_slot_TK.tolist()):
        total = rows_CH.new_zeros(rows_CH.shape[1])
        for k, row in enumerate(rows):
            if row >= 0:
                weight = 1 if weights_TK is None else weights_TK[token, k]
                total = total + rows_CH[row] * weight
        tokens.append(total)
    return torch.stack(tokens)


OPS = {
    "permute": (moe_ops.permute, permute_loop, 0),
    "unpermute": (moe_ops.unpermute, unpermute_loop, 1),
}
both_ops = pytest.mark.parametrize("op", OPS)


def arguments(op: str, case: Case, weighted: bool, tail: int = 3):
    """Values, weights or none, and the maps."""
    inputs = case.make()
    rows = case.num_tokens * case.top_k + tail
    *maps, _ = moe_ops.sort_slots(inputs.ids_TK, case.num_experts, row_capacity=rows)
    length = case.num_tokens if op == "permute" else rows
    floats = {"values": values(length, case.hidden_size, dtype=case.dtype)}
    if weighted:
        floats["weights"] = inputs.weights_TK
    return floats, maps


def bind(function, maps):
    return lambda v, w=None: function(v, w, *maps)


@both_ops
@WEIGHTED
@pytest.mark.parametrize("case", CASES, ids=str)
def test_permute_matches_reference(op: str, case: Case, weighted: bool) -> None:
    function, loop, _ = OPS[op]
    floats, maps = arguments(op, case, weighted)
    check_against_oracle(bind(function, maps), bind(loop, maps), floats)


@both_ops
@WEIGHTED
@all_grad_layouts
@all_dtypes
def test_permute_grad_matches_reference(
    op: str, weighted: bool, grad_layout: str, dtype: torch.dtype
) -> None:
    function, loop, _ = OPS[op]
    floats, maps = arguments(op, make_case(none_fraction=0.3, dtype=dtype), weighted)
    check_against_oracle(bind(function, maps), bind(loop, maps), floats, grad_layout)


@both_ops
@WEIGHTED
def test_permute_grad_matches_reference_twice(op: str, weighted: bool) -> None:
    floats, maps = arguments(op, make_case(4, 2, 3, hidden_size=2, none_fraction=0.3), weighted)
    check_double_backward(bind(OPS[op][0], maps), *floats.values())


@both_ops
@WEIGHTED
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_permute_compiles_fullgraph(op: str, weighted: bool, backend: str) -> None:
    floats, maps = arguments(op, make_case(none_fraction=0.3), weighted)
    leaves = [v.requires_grad_() for v in floats.values()]
    check_compiled(bind(OPS[op][0], maps), *leaves, backend=backend)


def test_permute_worked_example() -> None:
    x_TH = torch.tensor([[1.0], [2], [3], [4]])
    ids_TK = torch.tensor([[2, 0], [0, 1], [2, -1], [0, 2]])
    slot_of_row_C, row_of_slot_TK, _ = moe_ops.sort_slots(ids_TK, 3)
    assert slot_of_row_C.tolist() == [1, 2, 6, 3, 0, 4, 7, -1]
    rows_CH = moe_ops.permute(x_TH, None, slot_of_row_C, row_of_slot_TK)
    assert rows_CH.flatten().tolist() == [1, 2, 4, 2, 1, 3, 4, 0]
    sums_TH = moe_ops.unpermute(rows_CH, None, slot_of_row_C, row_of_slot_TK)
    assert sums_TH.flatten().tolist() == [2, 4, 3, 8]


@WEIGHTED
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permute_is_adjoint_of_unpermute(dtype: torch.dtype, weighted: bool) -> None:
    case = make_case(9, 3, 4, none_fraction=0.2, dtype=torch.float64)
    floats, maps = arguments("permute", case, weighted)
    x, weights = floats["values"], floats.get("weights")
    rows = values(maps[0].shape[0], case.hidden_size, dtype=torch.float64, seed=5)
    left = (moe_ops.permute(x, weights, *maps) * rows).sum()
    right = (x * moe_ops.unpermute(rows, weights, *maps)).sum()
    assert_close("<Px, y> - <x, Uy>", left, right)


@both_ops
@WEIGHTED
@pytest.mark.parametrize("case", [make_case(0), make_case(5, 2, 4, none_fraction=1.0)], ids=str)
def test_permute_handles_nothing_routed(op: str, case: Case, weighted: bool) -> None:
    floats, maps = arguments(op, case, weighted)
    leaves = [value.requires_grad_() for value in floats.values()]
    result = OPS[op][0](leaves[0], leaves[1] if weighted else None, *maps)
    assert result.shape[0] == maps[OPS[op][2]].shape[0]
    assert_equal("result", result, torch.zeros_like(result))
    result.sum().backward()
    for leaf in leaves:
        assert_equal("gradient", leaf.grad, torch.zeros_like(leaf))


@both_ops
@WEIGHTED
def test_permute_handles_no_rows_at_all(op: str, weighted: bool) -> None:
    """C = 0 with tokens: a token without a row gets zeros, and gradients of zero."""
    maps = torch.zeros(0, dtype=torch.int32), torch.full((3, 2), -1, dtype=torch.int32)
    v = values(3 if op == "permute" else 0, 4).requires_grad_()
    w = torch.ones(3, 2, requires_grad=True) if weighted else None
    result = OPS[op][0](v, w, *maps)
    assert result.shape == ((0, 4) if op == "permute" else (3, 4))
    assert not result.count_nonzero()
    result.sum().backward()
    assert not v.grad.count_nonzero()
    assert w is None or not w.grad.count_nonzero()


@WEIGHTED
def test_unpermute_handles_tail_of_nan(weighted: bool) -> None:
    """512 rows, the last ones NaN: nothing of them reaches outputs or gradients."""
    ids_TK = make_ids(150, 2, 4)
    weights_TK = torch.rand(150, 2, requires_grad=True) if weighted else None
    slots, rows_of, _ = moe_ops.sort_slots(ids_TK, 4, row_capacity=512)
    rows_CH = values(512, 8)
    rows_CH[300:] = torch.nan
    rows_CH.requires_grad_()
    x_TH = moe_ops.unpermute(rows_CH, weights_TK, slots, rows_of)
    exact = moe_ops.unpermute(rows_CH[:300], weights_TK, slots[:300], rows_of)
    assert_equal("x_TH", x_TH, exact)
    x_TH.square().sum().backward()
    assert_equal("grad tail", rows_CH.grad[300:], torch.zeros(212, 8))
    for grad in (rows_CH.grad, weights_TK.grad if weighted else rows_CH.grad):
        assert grad.isfinite().all()


def test_unpermute_handles_nan_in_a_dropped_slot_weight() -> None:
    """A slot without a row adds nothing even if its weight is not finite."""
    maps = torch.tensor([0], dtype=torch.int32), torch.tensor([[0, -1]], dtype=torch.int32)
    weights_TK = torch.tensor([[2.0, torch.nan]])
    assert moe_ops.unpermute(torch.ones(1, 1), weights_TK, *maps).item() == 2


def test_permute_handles_same_expert_twice() -> None:
    ids_TK = torch.tensor([[3, 3]])
    weights_TK = torch.tensor([[0.4, 0.6]])
    slots, rows_of, offsets = moe_ops.sort_slots(ids_TK, 4)
    assert offsets.tolist() == [0, 0, 0, 2]
    rows_CH = moe_ops.permute(torch.ones(1, 2), None, slots, rows_of)
    x_TH = moe_ops.unpermute(rows_CH, weights_TK, slots, rows_of)
    assert_close("x_TH", x_TH, torch.ones(1, 2).double())


def test_unpermute_handles_weights_of_one_third() -> None:
    """Gate weights stay float32 beside bf16 rows: the sum of three thirds of 1 is 1."""
    slots, rows_of, _ = moe_ops.sort_slots(torch.tensor([[0, 1, 2]]), 3)
    rows_CH = torch.ones(3, 1, dtype=torch.bfloat16, requires_grad=True)
    weights_TK = torch.full((1, 3), 1 / 3, requires_grad=True)
    x_TH = moe_ops.unpermute(rows_CH, weights_TK, slots, rows_of)
    assert x_TH.item() == 1
    x_TH.sum().backward()
    assert weights_TK.grad.dtype == torch.float32
    assert weights_TK.grad.tolist() == [[1, 1, 1]]


def test_permute_handles_plan_used_twice() -> None:
    floats, maps = arguments("permute", make_case(none_fraction=0.3), True)
    before = [index.clone() for index in maps]
    first, second = (moe_ops.permute(*floats.values(), *maps) for _ in range(2))
    assert_equal("second", second, first)
    for index, (now, then) in enumerate(zip(maps, before)):
        assert_equal(f"map {index}", now, then)


SLOTS, ROWS = torch.zeros(4, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
GOOD = {
    "x_TH": torch.ones(2, 3),
    "weights_TK": torch.ones(2, 2),
    "slot_of_row_C": SLOTS,
    "row_of_slot_TK": ROWS,
}
ONE_WEIGHT_A_SLOT = "weights_TK must have one weight a slot, got 3 and 2"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x_TH": torch.ones(2, 3).int()}, TypeError, "x_TH must be .*, got torch.int32"),
        ({"x_TH": torch.ones(2)}, ValueError, r"x_TH must have 2 dimensions, got shape \(2,\)"),
        ({"x_TH": torch.ones(3, 3)}, ValueError, "must be equally long, got 3 and 2"),
        ({"slot_of_row_C": SLOTS.long()}, TypeError, "slot_of_row_C must be .*, got torch.int64"),
        ({"slot_of_row_C": ROWS}, ValueError, "slot_of_row_C must have 1 dimensions, got shape"),
        ({"row_of_slot_TK": SLOTS}, ValueError, "row_of_slot_TK must have 2 dimensions, got shape"),
        ({"row_of_slot_TK": ROWS.to("meta")}, ValueError, "row_of_slot_TK must be on cpu .* meta"),
        ({"weights_TK": torch.ones(2, 2).half()}, TypeError, "weights_TK .*, got torch.float16"),
        ({"weights_TK": torch.ones(2, 2).double()}, TypeError, "weights_TK may be torch.float64"),
        ({"weights_TK": torch.ones(2, 3)}, ValueError, ONE_WEIGHT_A_SLOT),
    ],
)
def test_permute_rejects_bad_input(changes, error, message) -> None:
    check_rejects("permute", moe_ops.permute, GOOD, changes, error, message)


def test_unpermute_rejects_wrong_length() -> None:
    with pytest.raises(ValueError, match="unpermute: rows_CH and slot_of_row_C must be equally"):
        moe_ops.unpermute(torch.ones(3, 3), None, SLOTS, ROWS)


def test_permute_rejects_bad_input_under_compile() -> None:
    with pytest.raises(Exception, match="slot_of_row_C must be"):
        torch.compile(moe_ops.permute, backend="eager", fullgraph=True)(
            torch.ones(2, 3), None, SLOTS.long(), ROWS
        )
