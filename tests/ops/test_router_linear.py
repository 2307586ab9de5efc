"""router_linear against a loop, and its CUDA kernels with their float32 sums done on the CPU."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.kernels import router_linear as bf16_kernels
from moe_ops.testing import DTYPE_NAMES, assert_close, assert_equal

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

TOKENS, EXPERTS, HIDDEN = 7, 4, 6
all_weight_dtypes = pytest.mark.parametrize(
    "weight_dtype", DTYPES, ids=lambda dtype: f"weight_{DTYPE_NAMES[dtype]}"
)
BACKWARD = torch.ops.moe_ops.router_linear_backward


def linear_loop(x_TH, weight_EH):
    return torch.stack([torch.stack([(x_H * w_H).sum() for w_H in weight_EH]) for x_H in x_TH])


def arguments(dtype: torch.dtype = torch.float32, weight_dtype: torch.dtype | None = None):
    weight_EH = values(EXPERTS, HIDDEN, dtype=weight_dtype or dtype, seed=1)
    return {"x_TH": values(TOKENS, HIDDEN, dtype=dtype), "weight_EH": weight_EH}


@pytest.fixture
def float32_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the matmul of bf16 that only CUDA has."""
    monkeypatch.setattr(bf16_kernels, "_mm_f32", lambda a, b: a.float() @ b.float())


@all_dtypes
@all_weight_dtypes
def test_router_linear_matches_reference(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """However narrow the inputs are, the logits are as near as those of float32 ones."""
    wide = torch.promote_types(dtype, torch.float32)
    leaves = [value.requires_grad_() for value in arguments(dtype, weight_dtype).values()]
    # A float64 weight of narrower tokens is rounded first.
    exact = [leaf.detach().to(wide).double().requires_grad_() for leaf in leaves]
    logits_TE, expected = moe_ops.router_linear(*leaves), linear_loop(*exact)
    assert logits_TE.dtype == wide and logits_TE.is_contiguous()
    assert_close("logits_TE", logits_TE, expected)
    grad_TE = values(TOKENS, EXPERTS, dtype=wide, seed=2)
    grads = torch.autograd.grad(logits_TE, leaves, grad_TE)
    grads_f64 = torch.autograd.grad(expected, exact, grad_TE.double())
    for leaf, grad, wanted in zip(leaves, grads, grads_f64):
        assert grad.dtype == leaf.dtype
        assert_close("grad", grad.to(wide) if grad.dtype == torch.float64 else grad, wanted)


@all_grad_layouts
def test_router_linear_grad_matches_reference(grad_layout: str) -> None:
    check_against_oracle(moe_ops.router_linear, linear_loop, arguments(), grad_layout)


def test_router_linear_grad_matches_reference_twice() -> None:
    check_double_backward(moe_ops.router_linear, *arguments().values())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_router_linear_compiles_fullgraph(backend: str) -> None:
    leaves = [value.requires_grad_() for value in arguments(torch.bfloat16).values()]
    check_compiled(moe_ops.router_linear, *leaves, backend=backend)


def test_router_linear_worked_example() -> None:
    x_TH = torch.tensor([[1.0, 0], [0, 1], [1, 1], [2, -1]])
    weight_EH = torch.tensor([[1.0, 2], [0, 1], [3, 0]])
    logits_TE = moe_ops.router_linear(x_TH, weight_EH)
    assert logits_TE.tolist() == [[1, 0, 3], [2, 1, 0], [3, 1, 3], [0, -1, 6]]


@pytest.mark.parametrize("shape", [(0, 4, 6), (5, 4, 0), (0, 1, 0)], ids=str)
def test_router_linear_handles_no_tokens_or_features(shape: tuple[int, int, int]) -> None:
    num_tokens, num_experts, hidden = shape
    x_TH = torch.ones(num_tokens, hidden).bfloat16().requires_grad_()
    weight_EH = torch.ones(num_experts, hidden).bfloat16().requires_grad_()
    logits_TE = moe_ops.router_linear(x_TH, weight_EH)
    assert_equal("logits_TE", logits_TE, torch.zeros(num_tokens, num_experts))
    logits_TE.sum().backward()
    assert_equal("grad of x_TH", x_TH.grad, torch.zeros_like(x_TH))
    assert_equal("grad of weight_EH", weight_EH.grad, torch.zeros_like(weight_EH))


def test_router_linear_is_float32_under_autocast() -> None:
    leaves = [value.requires_grad_() for value in arguments().values()]
    expected = moe_ops.router_linear(*leaves)
    with torch.autocast("cpu", torch.bfloat16):
        logits_TE = moe_ops.router_linear(*leaves)
        assert_equal("logits_TE", logits_TE, expected)
        grads = torch.autograd.grad(logits_TE.square().sum(), leaves)
    for grad, wanted in zip(grads, torch.autograd.grad(expected.square().sum(), leaves)):
        assert_equal("grad", grad, wanted)


def test_router_linear_keeps_its_inputs_alone() -> None:
    leaves = [value.requires_grad_() for value in arguments(torch.bfloat16).values()]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor):
        moe_ops.router_linear(*leaves)
    assert {tensor.data_ptr() for tensor in saved} == {leaf.data_ptr() for leaf in leaves}


@pytest.mark.usefixtures("float32_sums")
@all_grad_layouts
def test_bf16_kernels_match_reference(grad_layout: str) -> None:
    x_TH, weight_EH = arguments(torch.bfloat16).values()
    expected = linear_loop(x_TH.double(), weight_EH.double())
    logits_TE = bf16_kernels.router_linear(x_TH, weight_EH)
    assert logits_TE.dtype == torch.float32 and logits_TE.is_contiguous()
    assert_close("logits_TE", logits_TE, expected)

    grad_TE = values(TOKENS, EXPERTS, seed=2)
    if grad_layout == "expanded":
        grad_TE = grad_TE[:, :1].expand(-1, EXPERTS)
    elif grad_layout == "transposed":
        grad_TE = grad_TE.T.contiguous().T
    elif grad_layout == "slice":
        grad_TE = torch.stack([grad_TE, grad_TE], dim=-1)[..., 0]
    found = bf16_kernels.router_linear_backward(grad_TE, x_TH, weight_EH)
    same = BACKWARD(grad_TE, x_TH, weight_EH)
    exact = BACKWARD(grad_TE.double(), x_TH.double(), weight_EH.double())
    for name, grad, reference, wanted in zip(("x_TH", "weight_EH"), found, same, exact):
        assert grad.dtype == torch.bfloat16 and grad.is_contiguous()
        assert_close(f"grad of {name}", grad, wanted, reference)


def test_bf16_kernels_keep_16_bits_of_the_gradient() -> None:
    grad_TE = values(200, 30) * torch.logspace(-30, 30, 30)
    parts_T2E = bf16_kernels.split(grad_TE)
    assert parts_T2E.dtype == torch.bfloat16
    high_TE, low_TE = parts_T2E.double().chunk(2, dim=1)
    assert ((high_TE + low_TE - grad_TE).abs() <= 2**-16 * grad_TE.abs()).all()


@pytest.mark.usefixtures("float32_sums")
def test_bf16_kernels_handle_gradients_that_cancel() -> None:
    """1 + 2^-9 is 1 in bf16, which would leave nothing."""
    grad_TE, ones = torch.tensor([[1 + 2**-9], [-1]]), torch.ones(2, 3).bfloat16()
    _, grad_weight_EH = bf16_kernels.router_linear_backward(grad_TE, ones, ones[:1])
    assert (grad_weight_EH == 2**-9).all()
    grad_x_TH, _ = bf16_kernels.router_linear_backward(grad_TE.T, ones[:1], ones)
    assert (grad_x_TH == 2**-9).all()


GOOD = {"x_TH": torch.ones(5, 3), "weight_EH": torch.ones(4, 3)}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x_TH": torch.ones(5, 3).int()}, TypeError, "x_TH must be .*, got torch.int32"),
        ({"x_TH": torch.ones(5, 1, 3)}, ValueError, "x_TH must have 2 dimensions, got shape"),
        ({"weight_EH": torch.ones(4, 3).long()}, TypeError, "weight_EH must be .*, got torch.int"),
        ({"weight_EH": torch.ones(3)}, ValueError, "weight_EH must have 2 dimensions, got shape"),
        ({"weight_EH": torch.ones(3, 4)}, ValueError, "must share H, got 3 and 4"),
        ({"weight_EH": torch.ones(0, 3)}, ValueError, "number of experts E must be positive"),
        ({"weight_EH": torch.ones(4, 3, device="meta")}, ValueError, "be on cpu .* got meta"),
    ],
)
def test_router_linear_rejects_bad_input(changes, error, message) -> None:
    check_rejects("router_linear", moe_ops.router_linear, GOOD, changes, error, message)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"grad_TE": torch.ones(5, 4).half()}, TypeError, "grad_TE must be torch.float32, got"),
        ({"grad_TE": torch.ones(5)}, ValueError, "grad_TE must have 2 dimensions, got shape"),
        ({"grad_TE": torch.ones(4, 4)}, ValueError, "must share T, got 4 and 5"),
        ({"grad_TE": torch.ones(5, 5)}, ValueError, "must share E, got 5 and 4"),
        ({"x_TH": torch.ones(5, 2)}, ValueError, "x_TH and weight_EH must share H, got 2 and 3"),
    ],
)
def test_router_linear_backward_rejects_bad_input(changes, error, message) -> None:
    good = {"grad_TE": torch.ones(5, 4), **GOOD}
    check_rejects("router_linear_backward", BACKWARD, good, changes, error, message)
