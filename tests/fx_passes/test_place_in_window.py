"""Sums that a combine sends on are written where peers can read them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from fx_passes.place_in_window import place_in_window_pass as place
from moe_ops.testing import assert_equal, make_ids

from .compiled import ops_of
from .graphs import check_leaves_alone, check_values, install_kernels

CAPACITY = {"num_experts": 4, "max_tokens": 7, "copy_capacity": 7, "row_capacity": 14}


def _sums(x, ids, weights):
    copies, _, plan = moe_ops.dispatch(x, ids, weights, group=None, **CAPACITY)
    maps = (plan.slot_of_row_C, plan.row_of_slot_DK)
    rows = moe_ops.permute(copies, None, *maps)
    return moe_ops.unpermute(rows.sin(), None, *maps), plan


def placed(x, ids, weights):
    sums, plan = _sums(x, ids, weights)
    return moe_ops.combine(sums, plan, group=None, addend_TH=x)[0]


def read_twice(x, ids, weights):
    sums, plan = _sums(x, ids, weights)
    return moe_ops.combine(sums, plan, group=None)[0], sums


def computed_between(x, ids, weights):
    sums, plan = _sums(x, ids, weights)
    return moe_ops.combine(sums * 2, plan, group=None)[0]


def trace(function: Callable[..., object]) -> tuple[GraphModule, list[torch.Tensor]]:
    torch.manual_seed(0)
    args = [torch.randn(7, 8), make_ids(7, 2, 4, none_fraction=0.2), torch.rand(7, 2)]
    return make_fx(function, tracing_mode="fake")(*args), args


def test_sums_are_placed() -> None:
    module, args = trace(placed)
    expected = module(*args)
    assert place(module.graph) == 1
    module.graph.lint()
    module.recompile()
    assert ops_of(module.graph)[-2:] == ["unpermute_in_window", "combine"]
    check_values(module.graph)
    assert_equal("result", module(*args), expected)
    assert place(module.graph) == 0


def test_sums_that_something_else_reads_are_not(caplog: pytest.LogCaptureFixture) -> None:
    check_leaves_alone(place, trace(read_twice)[0], "something else reads the sums", caplog)


def test_rows_that_are_no_sums_are_not_found() -> None:
    module, _ = trace(computed_between)
    assert place(module.graph) == 0


def test_on_cuda_a_kernel_must_place_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_kernels(monkeypatch)
    monkeypatch.setattr("fx_passes.place_in_window.fuses", lambda *args: False)
    reason = "no kernel places sums in a window"
    check_leaves_alone(place, trace(placed)[0], reason, caplog)
