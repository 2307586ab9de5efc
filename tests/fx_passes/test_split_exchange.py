"""Exchanges in two halves, as far apart as the graph allows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import fx_passes
import moe_ops
from fx_passes.graph import name_of
from fx_passes.split_exchange import find_exchanges
from fx_passes.split_exchange import split_exchange_pass as split
from moe_ops import comm
from moe_ops.comm import in_flight
from moe_ops.nn import MoE, MoEConfig
from moe_ops.testing import assert_close, assert_equal, make_ids
from tests.ranks import run_on_ranks

from .compiled import OFF, SIZES, Backend, ops_of
from .graphs import check_leaves_alone, check_values

CAPACITY = {"num_experts": 4, "max_tokens": 7, "copy_capacity": 7, "row_capacity": 14}
MATMUL = torch.ops.aten.mm.default


def exchange(x, ids, weights, w):
    """What does not need the exchange comes before it and after it."""
    before = x @ w
    rows, copy_weights, plan = moe_ops.dispatch(x, ids, weights, group=None, **CAPACITY)
    between = before @ w
    rows = rows * 2
    back, _ = moe_ops.combine(rows, plan, group=None, weights_DK=copy_weights, addend_TH=x)
    return back + between @ w


def unread(x, ids, weights, w):
    moe_ops.dispatch(x, ids, weights, group=None, **CAPACITY)
    return x @ w


def trace(function: Callable[..., Any]) -> tuple[GraphModule, list[torch.Tensor]]:
    torch.manual_seed(0)
    ids = make_ids(7, 2, 4, none_fraction=0.2)
    args = [torch.randn(7, 8), ids, torch.rand(7, 2), torch.randn(8, 8)]
    return make_fx(function, tracing_mode="fake")(*args), args


def names(module: GraphModule) -> list[str]:
    return [
        "mm" if node.target is MATMUL else str(node.target).split(".")[1]
        for node in module.graph.nodes
        if node.target is MATMUL or str(node.target).startswith("moe_ops.")
    ]


def test_split_starts_early_and_waits_late() -> None:
    module, args = trace(exchange)
    expected = module(*args)
    assert len(find_exchanges(module.graph)) == 2
    assert split(module.graph) == 2
    module.graph.lint()
    module.recompile()
    assert names(module) == [
        *("mm", "exchange_plan", "dispatch_start", "mm", "dispatch_wait"),
        *("combine_start", "mm", "combine_wait"),
    ]
    check_values(module.graph)
    assert_equal("result", module(*args), expected)
    assert in_flight.num_in_flight() == 0
    assert split(module.graph) == 0


def test_split_refuses_what_nothing_reads(caplog: pytest.LogCaptureFixture) -> None:
    module, _ = trace(unread)
    check_leaves_alone(split, module, "nothing reads its outputs", caplog)


def layer(group: Any) -> MoE:
    torch.manual_seed(0)
    return MoE(MoEConfig(dispatcher="flex", shared_ffn_hidden_size=4, **SIZES), group)


def _layer_on_ranks(rank: int, backend: str) -> tuple[list[str], list[torch.Tensor]]:
    group = torch.distributed.group.WORLD
    moe, x = layer(group), torch.randn(5 + rank, 8)
    results = []
    kept = Backend(**{**OFF, "split_exchange": True})
    compiled = {
        "graphs": lambda: kept.compile(moe),
        "inductor": lambda: torch.compile(moe, options=fx_passes.options()),
    }[backend]()
    for step in (moe, compiled):
        leaf = x.clone().requires_grad_()
        y = step(leaf)
        y.sin().sum().backward()
        results.append([y.detach(), leaf.grad, *(p.grad.clone() for p in moe.parameters())])
        moe.zero_grad()
    for number, (plain, found) in enumerate(zip(*results)):
        assert_close(f"result {number}", found, plain)
    assert in_flight.num_in_flight() == 0
    assert comm.engine(group) == "gloo"
    graphs = [*kept.forward, *kept.backward]
    return [op for graph in graphs for op in ops_of(graph)], pytree.tree_leaves(results[0])


@pytest.mark.dist
@pytest.mark.parametrize("backend", ["graphs", "inductor"])
def test_split_layer_on_ranks(backend: str) -> None:
    for ops, _ in run_on_ranks(2, _layer_on_ranks, backend):
        if backend == "graphs":
            assert "dispatch" not in ops and "combine" not in ops
            for op in ("dispatch_start", "dispatch_wait", "combine_start", "combine_wait"):
                assert ops.count(op) == 2, "one forward, one backward"


def ring(q, k, v):
    out, _ = moe_ops.cp_attention(q, k, v, group=torch.distributed.group.WORLD)
    return out.sin()


def _ring_on_ranks(rank: int, options: dict[str, bool] | None) -> list[list[str]]:
    """Shifts and attentions of forward and backward, in order; with `options`, of the graphs."""
    torch.manual_seed(rank)
    tensors, results = torch.randn(3, 1, 2, 8, 8), []
    kept = Backend(**options or {})
    compiled = kept.compile(ring) if options else torch.compile(ring, options=fx_passes.options())
    for step in (ring, compiled):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = step(*leaves)
        out.sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for number, (plain, found) in enumerate(zip(*results)):
        assert_close(f"result {number}", found, plain)
    assert in_flight.num_in_flight() == 0
    return [
        [name_of(n) for n in graph.nodes if "shift" in name_of(n) or "flash" in name_of(n)]
        for graph in (*kept.forward, *kept.backward)
    ]


@pytest.mark.dist
@pytest.mark.parametrize("all_passes", [False, True])
def test_keys_of_the_next_step_come_during_attention(all_passes: bool) -> None:
    flash = "_scaled_dot_product_flash_attention_for_cpu"
    options = {} if all_passes else OFF
    for forward, backward in run_on_ranks(4, _ring_on_ranks, {**options, "split_exchange": True}):
        assert forward == 3 * ["cp_shift_start", flash, "cp_shift_wait"] + [flash]
        # Keys ahead of the gradients that were computed from those of the step before.
        assert backward.count("cp_shift_start") == backward.count("cp_shift_wait") == 3 + 3
        assert backward[:3] == ["cp_shift_start", f"{flash}_backward", "cp_shift_wait"]
        steps = [place for place, name in enumerate(backward) if name.startswith(flash)]
        for first, last in itertools.pairwise(steps):
            assert "cp_shift_start" in backward[first:last], "beside the later step"


@pytest.mark.dist
def test_ring_compiles_with_inductor_on_ranks() -> None:
    run_on_ranks(2, _ring_on_ranks, None)
