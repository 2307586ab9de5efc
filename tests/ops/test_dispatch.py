"""dispatch and combine: reference, laws, gradients, wires, bad input. test_chains.py has layers."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moe_ops
from moe_ops.layout import Plan
from moe_ops.testing import assert_close, assert_equal, make_ids
from tests.ranks import expect_error_on_ranks, run_on_ranks

from .checks import (
    GRAD_LAYOUTS,
    all_dtypes,
    check_compiled,
    check_rejects,
    make_grad,
    values,
    world,
)
from .plan_loop import Settings, plan_loop

TOP_K, HIDDEN, EXPERTS = 3, 5, 8
EXACT = Settings()
CAPACITY = Settings(max_tokens=20, copy_capacity=50, row_capacity=99)
OVERFLOW = Settings(max_tokens=20, copy_capacity=6, row_capacity=9)
MODES = {"exact": EXACT, "capacity": CAPACITY, "overflow": OVERFLOW}
all_modes = pytest.mark.parametrize("mode", MODES)


def inputs_of(rank: int, tokens: int, dtype: torch.dtype = torch.float32, num_ranks: int = 2):
    """x_TH of whole numbers, so that sums are exact in every dtype; ids and weights."""
    generator = torch.Generator().manual_seed(rank)
    x_TH = torch.randint(-9, 9, (tokens, HIDDEN), generator=generator).to(dtype)
    ids_TK = make_ids(tokens, TOP_K, EXPERTS, "zipf", 0.3, generator, num_ranks)
    gate_dtype = torch.promote_types(dtype, torch.float32)
    weights_TK = torch.randint(1, 9, (tokens, TOP_K), generator=generator).to(gate_dtype)
    return x_TH, ids_TK, weights_TK


def _round_trip(rank: int, tokens: tuple[int, ...], dtype: torch.dtype, mode: str):
    group = world() if len(tokens) > 1 else None
    x_TH, ids_TK, weights_TK = inputs_of(rank, tokens[rank], dtype)
    rows_DH, weights_DK, plan = moe_ops.dispatch(
        x_TH, ids_TK, weights_TK, group=group, **MODES[mode].kwargs()
    )
    before = [tensor.clone() for tensor in plan.tensors()]
    addend_TH = torch.ones_like(x_TH)
    back = moe_ops.combine(rows_DH, plan, group=group, weights_DK=weights_DK, addend_TH=addend_TH)
    again = moe_ops.combine(rows_DH, plan, group=group, weights_DK=weights_DK, addend_TH=addend_TH)
    for first, second in zip([*back, *before], [*again, *plan.tensors()]):
        assert_equal("second use of the plan", second, first)
    return rows_DH, weights_DK, *back, plan


def round_trips(tokens: tuple[int, ...], dtype: torch.dtype, mode: str):
    if len(tokens) == 1:
        return [_round_trip(0, tokens, dtype, mode)]
    return run_on_ranks(len(tokens), _round_trip, tokens, dtype, mode)


@pytest.mark.dist
@all_modes
@all_dtypes
@pytest.mark.parametrize("tokens", [(9,), (7, 4), (6, 0, 3, 12), (0, 0)], ids=str)
def test_dispatch_matches_reference(tokens, dtype: torch.dtype, mode: str) -> None:
    """Rows, weights and the way back, bit for bit, copy by copy; overflow drops whole copies."""
    inputs = [inputs_of(rank, number, dtype) for rank, number in enumerate(tokens)]
    ids_of_rank = [ids_TK for _, ids_TK, _ in inputs]
    for rank, (rows_DH, weights_DK, x_TH, weights_TK, _) in enumerate(
        round_trips(tokens, dtype, mode)
    ):
        plan = plan_loop(ids_of_rank, rank, MODES[mode])
        expected_DH, expected_DK = torch.zeros_like(rows_DH), torch.zeros_like(weights_DK)
        for copy, (source, token) in enumerate(plan.source_of_copy_D2.tolist()):
            if source >= 0:
                expected_DH[copy] = inputs[source][0][token]
                here = plan.ids_DK[copy] >= 0
                expected_DK[copy][here] = inputs[source][2][token][here]
        assert_equal("rows_DH", rows_DH, expected_DH)
        assert_equal("weights_DK", weights_DK, expected_DK)
        own_x, own_ids, own_weights = inputs[rank]
        reached_TP = plan.copy_of_token_TP >= 0
        assert_equal("x_TH", x_TH, own_x * reached_TP.sum(1, keepdim=True).to(dtype) + 1)
        rank_TK = (own_ids.long() // (EXPERTS // len(tokens))).clamp(min=0)
        kept_TK = reached_TP.gather(1, rank_TK) & (own_ids >= 0)
        assert_equal("weights_TK", weights_TK, own_weights * kept_TK)


def _adjoint(rank: int, mode: str):
    x_TH, ids_TK, weights_TK = inputs_of(rank, 7 - 3 * rank, torch.float64)
    rows_DH, weights_DK, plan = moe_ops.dispatch(
        x_TH, ids_TK, weights_TK, group=world(), **MODES[mode].kwargs()
    )
    y_DH, v_DK = values(*rows_DH.shape, dtype=torch.float64), torch.ones_like(weights_DK)
    back_TH, back_TK = moe_ops.combine(y_DH, plan, group=world(), weights_DK=v_DK)
    return (
        (rows_DH * y_DH).sum() + (weights_DK * v_DK).sum(),
        (x_TH * back_TH).sum() + (weights_TK * back_TK).sum(),
    )


@pytest.mark.dist
@all_modes
def test_dispatch_is_adjoint_of_combine(mode: str) -> None:
    left, right = map(sum, zip(*run_on_ranks(2, _adjoint, mode)))
    assert_close("<Dx, y> - <x, Cy>", left, right)


def _grads(rank: int, mode: str, layout: str, dtype: torch.dtype):
    x_TH, ids_TK, weights_TK = inputs_of(rank, 7 - 3 * rank, dtype)
    x_TH.requires_grad_()
    weights_TK.requires_grad_()
    rows_DH, weights_DK, plan = moe_ops.dispatch(
        x_TH, ids_TK, weights_TK, group=world(), **MODES[mode].kwargs()
    )
    incoming = make_grad(rows_DH, layout), make_grad(weights_DK, layout)
    grads = torch.autograd.grad((rows_DH, weights_DK), (x_TH, weights_TK), incoming)
    mirror = moe_ops.combine(
        incoming[0].contiguous(), plan, group=world(), weights_DK=incoming[1].contiguous()
    )
    y_DH, addend_TH = rows_DH.detach().requires_grad_(), x_TH.detach().requires_grad_()
    v_DK = weights_DK.detach().requires_grad_()
    out_TH, out_TK = moe_ops.combine(
        y_DH, plan, group=world(), weights_DK=v_DK, addend_TH=addend_TH
    )
    incoming = make_grad(out_TH, layout), make_grad(out_TK, layout)
    grads += torch.autograd.grad((out_TH, out_TK), (y_DH, v_DK, addend_TH), incoming)
    plain = [grad.contiguous() for grad in incoming]
    mirror += torch.ops.moe_ops.dispatch(*plain, plan.tensors(), world(), "full")
    for found, wanted in zip(grads, (*mirror, plain[0]), strict=True):
        assert_equal("gradient", found, wanted)


@pytest.mark.dist
@all_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", GRAD_LAYOUTS)
def test_dispatch_grad_matches_reference(mode: str, layout: str, dtype: torch.dtype) -> None:
    """The gradient of each is the other one on the same plan, bit for bit."""
    run_on_ranks(2, _grads, mode, layout, dtype)


def test_dispatch_grad_matches_reference_twice() -> None:
    ids_TK = torch.tensor([[2, 0], [1, -1], [-1, -1]])
    plan = moe_ops.exchange_plan(ids_TK, 3, group=None)
    x_TH, weights_TK = (t.double().requires_grad_() for t in (values(3, 2), values(3, 2)))
    y_DH, v_DK = (t.double().requires_grad_() for t in (values(2, 2), values(2, 2)))

    def dispatch(x, weights):
        return torch.ops.moe_ops.dispatch(x, weights, plan.tensors(), "", "full")

    def combine(y, weights, addend):
        return moe_ops.combine(y, plan, group=None, weights_DK=weights, addend_TH=addend)

    for function, leaves in ((dispatch, (x_TH, weights_TK)), (combine, (y_DH, v_DK, x_TH))):
        assert torch.autograd.gradcheck(function, leaves)
        assert torch.autograd.gradgradcheck(function, leaves)


def _twice_differentiable(rank: int) -> None:
    """gradgradcheck perturbs one rank at a time; on two ranks compare with the linear algebra."""
    x_TH, ids_TK, _ = inputs_of(rank, 4, torch.float64)
    x_TH.requires_grad_()
    rows_DH, _, plan = moe_ops.dispatch(x_TH, ids_TK, num_experts=EXPERTS, group=world())
    (grad,) = torch.autograd.grad((rows_DH**3).sum(), x_TH, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x_TH)
    reached = (plan.copy_of_token_TP >= 0).sum(1, keepdim=True)
    assert_close("second gradient", second, 6 * x_TH * reached)


@pytest.mark.dist
def test_dispatch_grad_matches_reference_twice_on_two_ranks() -> None:
    run_on_ranks(2, _twice_differentiable)


def _bitwise_law(rank: int, dtype: torch.dtype, tokens: tuple[int, ...]) -> None:
    ids_TK = inputs_of(rank, tokens[rank])[1]
    x_TH = values(tokens[rank], HIDDEN, dtype=dtype, seed=rank)
    rows_DH, _, plan = moe_ops.dispatch(x_TH, ids_TK, num_experts=EXPERTS, group=world())
    fused = moe_ops.permute(rows_DH, None, plan.slot_of_row_C, plan.row_of_slot_DK)
    *maps, _ = moe_ops.sort_slots(ids_TK, EXPERTS)
    rows = moe_ops.permute(x_TH, None, *maps)
    send, receive = plan.splits_4P[2:]
    received = moe_ops.all_to_all(rows, send, receive, fused.shape[0], group=world())
    assert_equal("rows", moe_ops.sort_chunks(received, plan.counts_PL), fused)


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [(7, 4), (17, 0), (7, 0, 13, 64)], ids=str)
def test_dispatch_equals_all_to_all_of_permuted_rows(tokens, dtype: torch.dtype) -> None:
    """The law that lets a pass replace one by the other."""
    run_on_ranks(len(tokens), _bitwise_law, dtype, tokens)


def _identity_experts(rank: int) -> None:
    x_TH = values(13, HIDDEN, dtype=torch.float64, seed=rank)
    ids_TK = make_ids(13, TOP_K, EXPERTS)
    weights_TK = torch.rand(13, TOP_K, dtype=torch.float64)
    weights_TK /= weights_TK.sum(1, keepdim=True)
    rows_DH, weights_DK, plan = moe_ops.dispatch(
        x_TH, ids_TK, weights_TK, num_experts=EXPERTS, group=world()
    )
    maps = plan.slot_of_row_C, plan.row_of_slot_DK
    copies_DH = moe_ops.unpermute(moe_ops.permute(rows_DH, None, *maps), weights_DK, *maps)
    assert_close("x_TH", moe_ops.combine(copies_DH, plan, group=world())[0], x_TH)


@pytest.mark.dist
def test_dispatch_with_identity_experts_gives_x() -> None:
    run_on_ranks(2, _identity_experts)


def test_dispatch_worked_example() -> None:
    ids_TK = torch.tensor([[2, 0], [0, 1], [2, -1], [0, 2]])
    x_TH, weights_TK = torch.tensor([[1.0], [2], [3], [4]]), torch.full((4, 2), 0.5)
    rows_DH, weights_DK, plan = moe_ops.dispatch(
        x_TH, ids_TK, weights_TK, num_experts=3, group=None
    )
    assert_equal("rows_DH", rows_DH, x_TH)
    assert weights_DK.tolist() == [[0.5, 0.5], [0.5, 0.5], [0.5, 0], [0.5, 0.5]]
    assert_equal("x_TH", moe_ops.combine(rows_DH, plan, group=None)[0], x_TH)


def test_dispatch_handles_tail_of_nan() -> None:
    """Capacity mode: NaN in the rows past the valid copies reaches neither sums nor gradients."""
    x_TH, ids_TK, weights_TK = inputs_of(0, 9)
    x_TH.requires_grad_()
    rows_DH, _, plan = moe_ops.dispatch(x_TH, ids_TK, weights_TK, group=None, **CAPACITY.kwargs())
    valid = int((plan.source_of_copy_D2[:, 0] >= 0).sum())
    mask_D1 = torch.arange(50)[:, None] < valid
    poisoned_DH = torch.where(mask_D1, rows_DH, torch.nan)
    v_DK = torch.where(mask_D1, torch.ones(50, TOP_K), torch.nan)
    back_TH, back_TK = moe_ops.combine(poisoned_DH, plan, group=None, weights_DK=v_DK)
    assert back_TH.isfinite().all()
    assert back_TK.isfinite().all()
    grad_DH = torch.where(mask_D1, 1.0, torch.nan).expand(50, HIDDEN)
    (grad,) = torch.autograd.grad(rows_DH, x_TH, grad_DH)
    assert grad.isfinite().all()


@all_modes
def test_dispatch_touches_no_memory_around_its_inputs(mode: str) -> None:
    guarded = torch.full((9 + 8, HIDDEN), 77.0)
    guarded[4:13] = inputs_of(0, 9)[0]
    before = guarded.clone()
    _, ids_TK, weights_TK = inputs_of(0, 9)
    rows_DH, _, plan = moe_ops.dispatch(
        guarded[4:13], ids_TK, weights_TK, group=None, **MODES[mode].kwargs()
    )
    assert not (rows_DH == 77).any()
    moe_ops.combine(rows_DH, plan, group=None, addend_TH=guarded[4:13])
    assert_equal("buffer around x_TH", guarded, before)


@pytest.mark.parametrize("mode", ["exact", "capacity"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dispatch_compiles_fullgraph(mode: str, backend: str) -> None:
    x_TH, ids_TK, weights_TK = inputs_of(0, 9)

    def there_and_back(x, weights):
        rows, weights, plan = moe_ops.dispatch(
            x, ids_TK, weights, group=None, **MODES[mode].kwargs()
        )
        return moe_ops.combine(rows * 2, plan, group=None, weights_DK=weights, addend_TH=x)

    leaves = x_TH.requires_grad_(), weights_TK.requires_grad_()
    check_compiled(there_and_back, *leaves, backend=backend)


def _compiled_on_rank(rank: int, mode: str) -> None:
    x_TH, ids_TK, weights_TK = inputs_of(rank, 7 - 3 * rank)

    def there_and_back(x, weights):
        rows, weights, plan = moe_ops.dispatch(
            x, ids_TK, weights, group=world(), **MODES[mode].kwargs()
        )
        return moe_ops.combine(rows * 2, plan, group=world(), weights_DK=weights, addend_TH=x)

    check_compiled(there_and_back, x_TH.requires_grad_(), weights_TK.requires_grad_())


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["exact", "capacity"])
def test_dispatch_compiles_fullgraph_on_two_ranks(mode: str) -> None:
    run_on_ranks(2, _compiled_on_rank, mode)


def _wire(rank: int, wire: str):
    x_TH = values(9, 300, seed=rank).requires_grad_()
    ids_TK = make_ids(9, TOP_K, EXPERTS)
    results = []
    for name in ("full", wire):
        rows_DH, _, _ = moe_ops.dispatch(
            x_TH, ids_TK, num_experts=EXPERTS, group=world(), wire=name
        )
        (grad,) = torch.autograd.grad(rows_DH.sum(), x_TH)
        results.append((rows_DH.detach(), grad))
    return results


def _wire_without_tokens(rank: int, wire: str):
    x_TH = values(3 * rank, 300)
    ids_TK = torch.zeros(3 * rank, TOP_K, dtype=torch.int32)
    return moe_ops.dispatch(x_TH, ids_TK, num_experts=EXPERTS, group=world(), wire=wire)[0]


@pytest.mark.dist
@pytest.mark.parametrize("wire", ["fp8", "fp8_pow2"])
def test_dispatch_handles_fp8_wire_without_tokens(wire: str) -> None:
    shapes = [tuple(rows.shape) for rows in run_on_ranks(2, _wire_without_tokens, wire)]
    assert shapes == [(3, 300), (0, 300)]


@pytest.mark.dist
@pytest.mark.parametrize("wire", ["fp8", "fp8_pow2"])
def test_dispatch_handles_fp8_wire(wire: str) -> None:
    """Rows within e4m3's half step of 1/16 (with a power of two as scale, too); full gradients."""
    for (rows, grad), (rough, rough_grad) in run_on_ranks(2, _wire, wire):
        assert rough.dtype == rows.dtype
        assert ((rough - rows).abs() <= rows.abs() / 16 + 0.02).all()
        assert not torch.equal(rough, rows)
        assert_equal("gradient", rough_grad, grad)


PLAN = Plan(*torch.ops.moe_ops.exchange_plan(torch.tensor([[0, 1], [2, 3]]), 4, ""))
CHANGED = {**dataclasses.asdict(PLAN), "splits_4P": PLAN.splits_4P.int()}
GOOD = {
    "x_TH": torch.ones(2, 3),
    "weights_TK": torch.ones(2, 2),
    "plan": PLAN.tensors(),
    "group_name": "",
    "wire": "full",
}
REJECTED = [
    ({"x_TH": torch.ones(2, 3).int()}, TypeError, "x_TH must be .*, got torch.int32"),
    ({"x_TH": torch.ones(2)}, ValueError, "x_TH must have 2 dimensions, got shape"),
    ({"x_TH": torch.ones(3, 3)}, ValueError, "x_TH must have the plan's T rows, got 3 and 2"),
    ({"weights_TK": torch.ones(2, 3)}, ValueError, "one weight a slot, got 3 and 2"),
    ({"weights_TK": torch.ones(2, 2).half()}, TypeError, "weights_TK must be .*torch.float16"),
    ({"plan": PLAN.tensors()[:8]}, ValueError, "plan must have 9 tensors, got 8"),
    ({"plan": list(CHANGED.values())}, TypeError, "splits_4P must be torch.int64, got .*int32"),
    ({"wire": "fp4"}, ValueError, "wire must be one of .*, got 'fp4'"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REJECTED)
def test_dispatch_rejects_bad_input(changes, error, message) -> None:
    dispatch = torch.ops.moe_ops.dispatch
    check_rejects("dispatch", dispatch, GOOD, changes, error, message)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rows_DH": torch.ones(2, 3).int()}, TypeError, "rows_DH must be .*, got torch.int32"),
        ({"rows_DH": torch.ones(3, 3)}, ValueError, "must have the plan's D rows, got 3 and 2"),
        ({"weights_DK": torch.ones(2, 1)}, ValueError, "one weight a slot, got 1 and 2"),
        ({"addend_TH": torch.ones(2, 4)}, ValueError, "must share H, got 4 and 3"),
        ({"addend_TH": torch.ones(1, 3)}, ValueError, "must have the plan's T rows, got 1 and 2"),
        ({"addend_TH": torch.ones(2, 3).half()}, TypeError, "addend_TH must be torch.float32, got"),
    ],
)
def test_combine_rejects_bad_input(changes, error, message) -> None:
    good = {"rows_DH": torch.ones(2, 3), "plan": PLAN, "group": None}
    check_rejects("combine", moe_ops.combine, good, changes, error, message)


def _one_rank_is_wrong(rank: int, changes: dict) -> None:
    plan = moe_ops.exchange_plan(torch.tensor([[0, 1], [2, 3]]), 4, group=world())
    arguments = {**GOOD, "plan": plan.tensors(), "group_name": world()}
    torch.ops.moe_ops.dispatch(**{**arguments, **(changes if rank == 1 else {})})


@pytest.mark.dist
@pytest.mark.parametrize(
    "changes",
    [
        *(changes for changes, _, _ in REJECTED),
        {"plan": PLAN.tensors()},
        {"x_TH": torch.ones(2, 4)},
        {"x_TH": torch.ones(2, 3).half()},
        {"weights_TK": None},
        {"wire": "fp8"},
    ],
)
def test_dispatch_rejects_bad_input_on_every_rank(changes) -> None:
    for name, text in expect_error_on_ranks(2, _one_rank_is_wrong, changes):
        assert name in ("TypeError", "ValueError")
        assert "dispatch: " in text
        assert "got" in text
