"""Capacity mode never reads a device tensor: the functions that do so raise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moe_ops
from moe_ops import _library
from moe_ops.kernels.grouped_mm import masked_grouped_mm, masked_wgrad
from moe_ops.testing import make_ids
from tests.ranks import run_on_ranks

from .checks import world
from .samples import OPS, Sizes, samples

FORBIDDEN_METHODS = ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__")
FORBIDDEN_OPS = (
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_dim",
    "_unique2",
)
# What the CUDA device runs, where the CPU's reference reads offsets.
ON_DEVICE = {"grouped_mm": masked_grouped_mm, "grouped_mm_wgrad": masked_wgrad}


@contextlib.contextmanager
def no_reads() -> Iterator[None]:
    """The methods by which Python reads a tensor raise."""

    def forbidden(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor was read")

    with pytest.MonkeyPatch.context() as patch:
        for name in FORBIDDEN_METHODS:
            patch.setattr(torch.Tensor, name, forbidden)
        yield


class NoReads(TorchDispatchMode):
    """Operators that read a tensor, from Python or C++, raise."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        assert name not in FORBIDDEN_OPS, f"{name} reads a tensor"
        masks = [index for index in args[1] if index is not None] if name == "index" else []
        assert all(mask.dtype != torch.bool for mask in masks), "a mask's size is read"
        return func(*args, **(kwargs or {}))


def test_guards_catch_reads() -> None:
    for name in FORBIDDEN_METHODS:
        with no_reads(), pytest.raises(AssertionError, match="was read"):
            getattr(torch.ones(()), name)()
    with no_reads(), pytest.raises(AssertionError, match="was read"):
        bool(torch.ones(()))
    with NoReads(), pytest.raises(AssertionError, match="reads a tensor"):
        torch.ones(2).sum().item()
    with NoReads(), pytest.raises(AssertionError, match="mask"):
        torch.ones(2)[torch.ones(2).bool()]


@pytest.mark.parametrize("op", OPS)
def test_op_reads_nothing_in_capacity_mode(op: str) -> None:
    kernel = ON_DEVICE.get(op, _library.OPS[op].reference)
    for arguments in samples(op, Sizes(capacity=True, requires_grad=False)):
        with no_reads(), NoReads():
            kernel(*arguments)


def _layer(rank: int, group: Any = None) -> None:
    """Forward and backward of a flex layer, and what allgather adds in capacity mode."""
    group = group or world()
    x_TH, weights_TK = torch.ones(5, 4, requires_grad=True), torch.ones(5, 2, requires_grad=True)
    w13, w2 = torch.ones(4, 6, 4, requires_grad=True), torch.ones(4, 4, 3, requires_grad=True)
    ids_TK = make_ids(5, 2, 4)
    with no_reads():
        rows_DH, weights_DK, plan = moe_ops.dispatch(
            x_TH,
            ids_TK,
            weights_TK,
            num_experts=4 * moe_ops.comm.group_size(group),
            group=group,
            max_tokens=8,
            copy_capacity=16,
            row_capacity=32,
        )
        maps = plan.slot_of_row_C, plan.row_of_slot_DK
        h_C2F = moe_ops.grouped_mm(moe_ops.permute(rows_DH, None, *maps), w13, plan.offsets_L)
        a_CF = moe_ops.swiglu(h_C2F, None, plan.offsets_L)
        z_CH = moe_ops.grouped_mm(a_CF, w2, plan.offsets_L)
        copies_DH = moe_ops.unpermute(z_CH, weights_DK, *maps)
        out_TH, _ = moe_ops.combine(copies_DH, plan, group=group)
        out_TH.sum().backward()
        counts_P, ranks_G = moe_ops.gather_plan(x_TH, group=group, max_tokens=8, padded=True)
        total = ranks_G.shape[0]
        x_GH = moe_ops.all_gather_rows(x_TH, counts_P, total, group=group)
        moe_ops.reduce_scatter_rows(x_GH, counts_P, 5, group=group).sum().backward()


@pytest.mark.dist
def test_layer_reads_nothing_in_capacity_mode_on_two_ranks() -> None:
    run_on_ranks(2, _layer)
