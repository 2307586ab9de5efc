"""Small graphs with windows in them, and the order of their kernels before and after a pass."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from fx_passes.cost_model import CostModel
from fx_passes.devices import figures_of
from fx_passes.graph import name_of
from fx_passes.split_exchange import split_exchange_pass
from fx_passes.windows import Bounds, fillings, runs_alone
from moe_ops.comm import in_flight
from moe_ops.testing import assert_equal, make_ids

CAPACITY = {"num_experts": 4, "max_tokens": 7, "copy_capacity": 7, "row_capacity": 14}
Fill = Callable[[Graph, CostModel, Bounds], int]


def dispatch(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    rows, _, plan = moe_ops.dispatch(x, ids, group=None, **CAPACITY)
    return rows, plan


def combine(rows: torch.Tensor, plan: Any, addend: torch.Tensor | None = None) -> torch.Tensor:
    return moe_ops.combine(rows, plan, group=None, addend_TH=addend)[0]


def label(node: Node) -> str:
    """Of our operators the name, of other calls the node's: mm, mm_1, ..."""
    return name_of(node) if str(node.target).startswith("moe_ops.") else node.name


class Times(CostModel):
    """Microseconds by what `label` says."""

    def __init__(self, times: Mapping[str, float]) -> None:
        super().__init__(figures_of("cpu"))
        self.times = times

    def seconds(self, node: Node) -> float:
        return 1e-6 * self.times.get(label(node), 0.0)


def trace(
    function: Callable[..., Any], split: bool = True
) -> tuple[GraphModule, list[torch.Tensor]]:
    """The graph of `function(x, ids, w)`, with its exchanges in two halves if `split`."""
    torch.manual_seed(0)
    args = [torch.randn(7, 8), make_ids(7, 2, 4, none_fraction=0.2), torch.randn(8, 8)]
    module = make_fx(function, tracing_mode="fake")(*args)
    if split:
        split_exchange_pass(module.graph)
    module.recompile()
    return module, args


def kernels(graph: Graph, plans: bool = False) -> str:
    """Labels of kernels in order, of plans only if asked for."""
    labels = [label(node) for node in graph.nodes if runs_alone(node)]
    return " ".join(name for name in labels if plans or name != "exchange_plan")


def check_fills(
    fill: Fill,
    function: Callable[..., Any],
    times: Mapping[str, float],
    expected: str,
    count: int,
    bounds: Bounds = Bounds(),  # noqa: B008 - frozen
) -> Graph:
    """`fill` moves `count` kernels, leaves `expected`, the results' bits and nothing to do."""
    module, args = trace(function)
    results = module(*args)
    assert fill(module.graph, Times(times), bounds) == count
    assert kernels(module.graph) == expected
    module.graph.lint()
    module.recompile()
    for number, (found, wanted) in enumerate(zip(module(*args), results, strict=True)):
        assert_equal(f"result {number}", found, wanted)
    assert in_flight.num_in_flight() == 0
    before = str(copy.deepcopy(module.graph))
    assert fill(module.graph, Times(times), bounds) == 0
    assert str(module.graph) == before
    return module.graph


def check_refuses(
    fill: Fill,
    function: Callable[..., Any],
    times: Mapping[str, float],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    bounds: Bounds = Bounds(),  # noqa: B008 - frozen
) -> None:
    """`fill` leaves the order alone, and says why."""
    module, _ = trace(function)
    before = str(module.graph)
    with caplog.at_level(logging.DEBUG, logger="fx_passes"):
        assert fill(module.graph, Times(times), bounds) == 0
    assert str(module.graph) == before
    assert reason in caplog.text
    assert any(reason in filling.reason for _, filling in fillings(module.graph))
