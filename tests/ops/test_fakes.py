"""Fake kernels against real ones: shapes, strides, dtypes, devices; any sizes, any input layout."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import moe_ops
from moe_ops.testing import DTYPE_NAMES
from tests.ranks import run_on_ranks

from .checks import check_fake, world
from .samples import COLLECTIVE_OPS, OPS, Sizes, samples

LAYOUTS = ("plain", "transposed", "expanded", "slice")


def laid_out(value: object, layout: str) -> object:
    """The same values in another memory layout, where a dense float input has one."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() < 2:
        return value
    if layout == "transposed":
        return value.detach().mT.contiguous().mT
    if layout == "expanded":
        return value.detach()[:, :1].expand(value.shape) if value.shape[1] else value
    if layout == "slice":
        return torch.stack([value.detach()] * 2, dim=-1)[..., 1]
    return value


@hypothesis.given(
    num_tokens=st.integers(0, 8),
    top_k=st.integers(1, 3),
    num_experts=st.sampled_from([4, 8]),
    hidden_size=st.sampled_from([0, 1, 6]),
    dtype=st.sampled_from(list(DTYPE_NAMES)),
    none_fraction=st.sampled_from([0.0, 0.3, 1.0]),
    capacity=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
)
@hypothesis.settings(max_examples=15)
@pytest.mark.parametrize("op", OPS)
def test_fake_matches_real(op: str, layout: str, **sizes: object) -> None:
    for arguments in samples(op, Sizes(requires_grad=False, **sizes)):
        check_fake(op, tuple(laid_out(argument, layout) for argument in arguments))


def _fakes_match(rank: int, op: str) -> None:
    for capacity in (False, True):
        for num_tokens in (7 - 3 * rank, 5 * rank, 0):
            sizes = Sizes(
                num_tokens=num_tokens,
                capacity=capacity,
                requires_grad=False,
                group_name=world(),
            )
            for arguments in samples(op, sizes):
                check_fake(op, arguments)


@pytest.mark.dist
@pytest.mark.parametrize("op", COLLECTIVE_OPS)
def test_fake_matches_real_on_two_ranks(op: str) -> None:
    run_on_ranks(2, _fakes_match, op)


@pytest.mark.parametrize("bounded", [False, True])
def test_exact_sizes_are_two_unbacked_symbols(bounded: bool) -> None:
    """D and C, each the same symbol in every tensor, bounded through max_tokens."""
    environment = ShapeEnv()
    with FakeTensorMode(shape_env=environment) as mode:
        ids_TK = mode.from_tensor(torch.zeros(5, 2, dtype=torch.int32))
        plan = moe_ops.exchange_plan(ids_TK, 4, group=None, max_tokens=9 if bounded else 0)
    assert isinstance(plan.ids_DK, FakeTensor)
    copies, rows = plan.num_copies.node.expr, plan.slot_of_row_C.shape[0].node.expr
    symbols = {
        size.node.expr
        for tensor in plan.tensors()
        for size in tensor.shape
        if isinstance(size, torch.SymInt) and size.node.expr.free_symbols
    }
    assert symbols - {ids_TK.shape[0]} >= {copies, rows}
    assert len(environment.var_to_range) - len(environment.backed_var_to_val) == 2
    upper = [environment.var_to_range[symbol].upper for symbol in (copies, rows)]
    assert upper == [9, 18] if bounded else all(bound > 2**30 for bound in upper)


def test_capacity_sizes_are_the_callers() -> None:
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        ids_TK = mode.from_tensor(torch.zeros(5, 2, dtype=torch.int32))
        plan = moe_ops.exchange_plan(
            ids_TK, 4, group=None, max_tokens=8, copy_capacity=8, row_capacity=16
        )
    assert (plan.num_copies, plan.slot_of_row_C.shape[0]) == (8, 16)
