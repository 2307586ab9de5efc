"""No exchange and no plan runs twice, whatever is recomputed (case 24)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import moe_ops
from fx_passes.graph import name_of
from moe_ops.nn import MoE
from tests.ranks import run_on_ranks

from .compiled import OFF, Backend, make_layer, ops_of, step

EXCHANGES = (
    "exchange_plan",
    "dispatch",
    "combine",
    "gather_plan",
    "all_to_all",
    "all_gather_rows",
    "reduce_scatter_rows",
)


def _recompute_all(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


def _whole(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def _selective(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, _recompute_all)
    return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


def _budget(layer: MoE, x: torch.Tensor) -> torch.Tensor:
    return layer(x)


WAYS: dict[str, Callable[[MoE, torch.Tensor], torch.Tensor]] = {
    "checkpoint": _whole,
    "selective": _selective,
    "budget": _budget,
}


def _exchanges_on_rank(rank: int, way: str, protect: bool, dispatcher: str) -> list[list[str]]:
    """Names of the exchanges of the forward and of the backward graph."""
    layer = make_layer(group=dist.group.WORLD, dispatcher=dispatcher)
    backend = Backend(**{**OFF, "protect_exchange": protect})
    budget = 0.0 if way == "budget" else 1.0
    with (
        torch._functorch.config.patch(activation_memory_budget=budget),
        torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True),
    ):
        function = backend.compile(functools.partial(WAYS[way], layer))
        found = step(layer, function, 9 + rank)
    expected = step(layer, layer, 9 + rank)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    graphs = [*backend.forward, *backend.backward]
    return [[op for op in ops_of(graph) if op in EXCHANGES] for graph in graphs]


ONCE = {
    "flex": [["exchange_plan", "dispatch", "combine"], ["dispatch", "combine"]],
    "alltoall": [["exchange_plan", *["all_to_all"] * 3], ["all_to_all"] * 3],
    "allgather": [
        ["gather_plan", *["all_gather_rows"] * 3, "reduce_scatter_rows"],
        ["all_gather_rows", *["reduce_scatter_rows"] * 2],
    ],
}


@pytest.mark.dist
@pytest.mark.parametrize("dispatcher", ONCE)
@pytest.mark.parametrize("way", WAYS)
def test_exchanges_run_once(way: str, dispatcher: str) -> None:
    for graphs in run_on_ranks(2, _exchanges_on_rank, way, True, dispatcher):
        assert graphs == ONCE[dispatcher]


@pytest.mark.dist
@pytest.mark.parametrize("way", WAYS)
def test_unprotected_exchanges_run_again(way: str) -> None:
    for _, backward in run_on_ranks(2, _exchanges_on_rank, way, False, "flex"):
        assert backward.count("dispatch") == 2, "one recomputed, one of combine's gradient"


class Ring(torch.nn.Module):
    """Attention from projections, and something to compute again after it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.settings = settings
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x_BTH).unflatten(-1, (6, 4)).transpose(1, 2).chunk(3, dim=1)
        out, _ = moe_ops.cp_attention(q, k, v, group=dist.group.WORLD, **self.settings)
        return out.sin().transpose(1, 2).flatten(2)


def _ring_on_rank(rank: int, way: str, protect: bool, settings: dict[str, Any]) -> list[list[str]]:
    """Names of the exchanges and attentions of the forward and of the backward graph."""
    ring, x = Ring(**settings), torch.randn(1, 8, 8)
    backend = Backend(**{**OFF, "protect_exchange": protect})
    with torch._functorch.config.patch(activation_memory_budget=0.0 if way == "budget" else 1.0):
        compiled = backend.compile(functools.partial(WAYS[way], ring))
        results = []
        for run in (ring, compiled):
            leaf = x.clone().requires_grad_()
            y = run(leaf)
            results.append([y, *torch.autograd.grad(y.sum(), [leaf, *ring.parameters()])])
    torch.testing.assert_close(results[1], results[0])
    graphs = (*backend.forward, *backend.backward)
    calls = [[name_of(n) for n in graph.nodes if n.op == "call_function"] for graph in graphs]
    return [[name for name in ops if "flash" in name or name in OF_RINGS] for ops in calls]


OF_RINGS = ("cp_shift", "cp_unsplit", "cp_unsplit_backward", "all_to_all")
ENDS = torch.tensor([0, 4, 16])
# Exchanges of forward and backward, which has those of keys and values again, but for "heads".
RINGS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "ring": ({}, ["cp_shift"], 2 * ["cp_shift"]),
    "documents": ({"cu_seqlens_N1": ENDS}, ["cp_shift"], 2 * ["cp_shift"]),
    "gathered": (
        {"method": "all_gather", "causal": False},
        ["cp_unsplit"],
        ["cp_unsplit", "cp_unsplit_backward"],
    ),
    "heads": ({"method": "heads"}, 4 * ["all_to_all"], 4 * ["all_to_all"]),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", RINGS)
@pytest.mark.parametrize("way", WAYS)
def test_a_ring_runs_once(way: str, name: str) -> None:
    settings, *expected = RINGS[name]
    for graphs in run_on_ranks(2, _ring_on_rank, way, True, settings):
        assert [[op for op in graph if op in OF_RINGS] for graph in graphs] == expected
        if name != "heads":  # an attention like any other is computed again
            assert all(op.endswith("backward") for op in graphs[1] if "flash" in op)


@pytest.mark.dist
@pytest.mark.parametrize("name", RINGS)
def test_an_unprotected_ring_runs_again(name: str) -> None:
    settings, _, once = RINGS[name]
    for _, backward in run_on_ranks(2, _ring_on_rank, "selective", False, settings):
        assert len([op for op in backward if op in OF_RINGS]) > len(once)
