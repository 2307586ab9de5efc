"""What calls cost, by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import moe_ops
from fx_passes.cost_model import CostModel, FixedCosts
from fx_passes.devices import Figures
from fx_passes.graph import find_calls, name_of
from moe_ops import _library

from .captured import NUM_TOKENS, capture_layer, fake_ranks, only
from .graphs import EXPERTS, FFN, HIDDEN, OPS, TOKENS, TOP_K, tensors

ROWS = TOKENS * TOP_K
ACT = ("silu", None, 1.0, 0.0)
FIGURES = Figures(
    matmul_flops={"float32": 1e6, "bfloat16": 4e6},
    memory_bytes_per_s=1e5,
    launch_s=7.0,
    exchange_bytes_per_s=1e3,
    exchange_s=100.0,
    plan_s=300.0,
    collective_bytes_per_s=2e3,
    collective_s=200.0,
)
BY_HAND = CostModel(FIGURES)
ATEN = torch.ops.aten


def trace(function: Callable[..., Any], *args: torch.Tensor) -> Graph:
    return make_fx(function, tracing_mode="fake")(*args).graph


FLOPS = {
    "grouped_mm": (lambda t: (t["rows"], t["w13"], t["offsets"]), ROWS * HIDDEN * 2 * FFN),
    "gather_grouped_mm": (
        lambda t: (t["x"], t["slots"], TOP_K, t["w13"], t["offsets"]),
        ROWS * HIDDEN * 2 * FFN,
    ),
    "grouped_mm_swiglu": (
        lambda t: (t["rows"], None, 1, t["w13"], t["row_weights"], t["offsets"], *ACT, True),
        ROWS * HIDDEN * 2 * FFN,
    ),
    "grouped_mm_swiglu, gathered": (
        lambda t: (t["x"], t["slots"], TOP_K, t["w13"], t["row_weights"], t["offsets"], *ACT, True),
        ROWS * HIDDEN * 2 * FFN,
    ),
    "grouped_mm_swiglu_backward": (
        lambda t: (t["rows"], None, 1, t["w2t"], t["h"], t["row_weights"], t["offsets"], *ACT),
        ROWS * HIDDEN * FFN,
    ),
    "grouped_mm_wgrad": (lambda t: (t["h"], t["rows"], t["offsets"]), ROWS * HIDDEN * 2 * FFN),
    "grouped_mm_wgrad_f32": (lambda t: (t["h"], t["a"], t["offsets"]), ROWS * 2 * FFN * FFN),
    "gather_grouped_mm_wgrad": (
        lambda t: (t["x"], t["slots"], t["a"], None, TOP_K, t["offsets"]),
        ROWS * HIDDEN * FFN,
    ),
    "router_linear": (lambda t: (t["x"], t["w13"][:, 0].contiguous()), TOKENS * HIDDEN * EXPERTS),
    "router_linear_backward": (
        lambda t: (torch.rand(TOKENS, EXPERTS), t["x"], t["w13"][:, 0].contiguous()),
        2 * TOKENS * HIDDEN * EXPERTS,
    ),
}


@pytest.mark.parametrize("case", FLOPS)
def test_flops_of_our_matmuls(case: str) -> None:
    arguments, multiplications = FLOPS[case]
    with FlopCounterMode(display=False) as counter:
        getattr(OPS, case.partition(",")[0])(*arguments(tensors()))
    assert counter.get_total_flops() == 2 * multiplications


@pytest.mark.parametrize(
    ("a", "b", "multiplications"),
    [
        ((32, 16), (4, 16, 24), 32 * 16 * 24),
        ((8, 32), (32, 24), 8 * 32 * 24),
        ((4, 8, 16), (16, 32), 8 * 16 * 32),
        ((4, 8, 16), (4, 16, 24), 4 * 8 * 16 * 24),
    ],
    ids=["rows", "wgrad", "columns", "batch"],
)
def test_flops_of_the_stock_grouped_mm(a: Any, b: Any, multiplications: int) -> None:
    offsets = None if len(a) == len(b) == 3 else torch.tensor([8, 8, 16, 32], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        left, right = (torch.zeros(shape, dtype=torch.bfloat16) for shape in (a, b))
        if len(a) == len(b) == 2:  # it wants sums along contiguous columns
            left, right = left.t().contiguous().t(), right
        ATEN._grouped_mm(left, right, offsets)
    assert counter.get_total_flops() == 2 * multiplications


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matmul_takes_the_longer_of_flops_and_bytes(dtype: torch.dtype) -> None:
    named = tensors(dtype)
    small = [named[name] for name in ("rows", "w13", "offsets")]
    node = only(trace(OPS.grouped_mm, *small), OPS.grouped_mm.default)
    size = dtype.itemsize
    num_bytes = size * (ROWS * HIDDEN + EXPERTS * 2 * FFN * HIDDEN + ROWS * 2 * FFN) + 4 * EXPERTS
    assert BY_HAND.num_bytes(node) == size * ROWS * 2 * FFN
    assert BY_HAND.seconds(node) == pytest.approx(7 + num_bytes / 1e5)

    square = torch.zeros(512, 512, dtype=dtype)
    node = only(trace(torch.mm, square, square), ATEN.mm.default)
    flops_a_second = 1e6 if dtype == torch.float32 else 4e6
    assert BY_HAND.seconds(node) == pytest.approx(7 + 2 * 512**3 / flops_a_second)


def test_views_sizes_and_placeholders_cost_nothing() -> None:
    graph = trace(lambda x: (x.t().reshape(2, -1).split(1), x.unsqueeze(0)), torch.zeros(4, 8))
    assert {name_of(node) for node in graph.nodes} >= {"t", "split", "unsqueeze"}
    assert {BY_HAND.seconds(node) for node in graph.nodes if name_of(node) != "clone"} == {0.0}


def test_pointwise_chains_are_one_kernel() -> None:
    def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x * 2 + torch.ones(8)).view(8, 4).sigmoid() @ w).sum(0)

    graph = trace(chain, torch.zeros(4, 8), torch.zeros(4, 4))
    seconds = {name_of(node): BY_HAND.seconds(node) for node in graph.nodes}
    assert seconds["mul"] == pytest.approx(128 / 1e5), "it reads x"
    assert seconds["add"] == seconds["ones"] == 0, "nothing of its own"
    assert seconds["sigmoid"] == pytest.approx(7 + 128 / 1e5), "it writes"
    assert seconds["sum"] == pytest.approx(7 + (128 + 16) / 1e5), "a matmul is no part of it"


def test_lookups_do_not_read_the_whole_table() -> None:
    table, ids = torch.zeros(1000, 8), torch.zeros(3, dtype=torch.int64)
    graph = trace(lambda ids, table: table[ids] * 2, ids, table)
    seconds = BY_HAND.seconds(only(graph, ATEN.index.Tensor))
    assert seconds == pytest.approx(7 + (96 + 24 + 96) / 1e5)


def test_every_operator_that_moves_data_takes_time() -> None:
    plan = moe_ops.exchange_plan(torch.zeros(7, 2, dtype=torch.int32), 4, group=None).tensors()
    free = []
    for name in sorted(_library.OPS | _library.PRIVATE_OPS):
        graph = Graph()
        op = getattr(OPS, name).default

        def tensor(value: torch.Tensor, graph: Graph = graph) -> Node:
            node = graph.placeholder("input")
            node.meta["val"] = value
            return node

        def example(argument: Any, tensor: Any = tensor) -> Any:
            kind = str(argument.type)
            if kind == "List[Tensor]":
                return [tensor(part) for part in plan]
            if "Tensor" in kind:
                return tensor(torch.zeros((8,) * (3 if argument.name.startswith("w") else 2)))
            group = argument.name.startswith("group")
            return {"str": "" if group else "full", "int": 2}.get(kind, argument.default_value)

        node = graph.call_function(op, tuple(example(a) for a in op._schema.arguments))
        outputs = [torch.zeros(8, 8) for _ in op._schema.returns]
        node.meta["val"] = plan if name == "exchange_plan" else tuple(outputs)
        if len(outputs) == 1 and name != "exchange_plan":
            node.meta["val"] = outputs[0]
        if BY_HAND.seconds(node) == 0:
            free.append(name)
    assert free == ["combine_wait", "cp_shift_wait", "dispatch_wait"]


def test_capacity_is_not_multiplied_in_full() -> None:
    """Of C = 64 * 4 * 1 rows 128 are used."""
    with fake_ranks(4) as group:
        graphs = capture_layer(group, size_mode="capacity", max_tokens=NUM_TOKENS)
    model = CostModel(dataclasses.replace(FIGURES, matmul_flops={"float32": 1.0}))
    forward, backward = OPS.grouped_mm_swiglu.default, OPS.gather_grouped_mm_wgrad.default
    seconds = 7 + 2 * 2 * NUM_TOKENS * HIDDEN * 2 * FFN
    assert model.seconds(only(graphs[0], forward)) == pytest.approx(seconds)
    assert max(map(model.seconds, find_calls(graphs[1], backward))) == pytest.approx(seconds)


@pytest.mark.parametrize(("wire", "row_bytes"), [("full", 4 * HIDDEN), ("fp8", HIDDEN + 4)])
def test_exchange_counts_what_leaves(wire: str, row_bytes: int) -> None:
    """Of 64 * 4 * (1 - (3 / 4) ** 2) = 112 copies 84 go to other ranks."""
    with fake_ranks(4) as group:
        forward, backward = capture_layer(group, wire=wire)
        seconds = {name_of(node): BY_HAND.seconds(node) for node in forward.nodes}
        backward_seconds = {name_of(node): BY_HAND.seconds(node) for node in backward.nodes}
        received = BY_HAND.num_bytes(only(forward, OPS.dispatch_wait.default))
    weight_bytes = 2 * 4
    full = 84 * 4 * HIDDEN / 1e3
    assert seconds["exchange_plan"] == 300
    assert seconds["dispatch_start"] == pytest.approx(100 + 84 * (row_bytes + weight_bytes) / 1e3)
    assert seconds["combine_start"] == pytest.approx(100 + full)
    assert seconds["dispatch_wait"] == seconds["combine_wait"] == 0
    assert received == 112 * (4 * HIDDEN + weight_bytes)
    assert backward_seconds["dispatch_start"] == pytest.approx(100 + full)
    assert backward_seconds["combine_start"] == pytest.approx(100 + full + 84 * weight_bytes / 1e3)


def test_exchange_of_one_rank_is_a_copy() -> None:
    def dispatch(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        capacities = {"max_tokens": 7, "copy_capacity": 7, "row_capacity": 14}
        return moe_ops.dispatch(x, ids, None, num_experts=4, group=None, **capacities)[0]

    graph = trace(dispatch, torch.zeros(7, HIDDEN), torch.zeros(7, 2, dtype=torch.int32))
    seconds = BY_HAND.seconds(only(graph, OPS.dispatch.default))
    assert seconds == pytest.approx(7 + 2 * 7 * HIDDEN * 4 / 1e5)


def test_collectives_by_their_traffic() -> None:
    def collectives(x: torch.Tensor) -> list[torch.Tensor]:
        calls = [funcol.all_reduce(x, "sum", group), funcol.all_gather_tensor(x, 0, group)]
        calls.append(funcol.reduce_scatter_tensor(x, "sum", 0, group))
        calls.append(funcol.all_to_all_single(x, None, None, group))
        return [call + 0 for call in calls]

    sent = {"all_reduce": 3072, "all_gather_into_tensor": 6144}
    sent |= {"reduce_scatter_tensor": 1536, "all_to_all_single": 1536}
    with fake_ranks(4) as group:
        graph = trace(collectives, torch.zeros(64, 8))
        seconds = {name_of(node): BY_HAND.seconds(node) for node in graph.nodes}
    assert {name: seconds[name] for name in sent} == pytest.approx(
        {name: 200 + num_bytes / 2e3 for name, num_bytes in sent.items()}
    )
    assert seconds["wait_tensor"] == 0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_shift_sends_its_whole_buffer(num_ranks: int) -> None:
    with fake_ranks(num_ranks) as group:
        graph = trace(lambda x: moe_ops.cp_shift(x, group=group) + 0, torch.zeros(512))
        (seconds,) = (BY_HAND.seconds(n) for n in graph.nodes if name_of(n) == "cp_shift")
    assert seconds == pytest.approx(200 + 2048 / 2e3)


def test_fixed_costs() -> None:
    graph = trace(lambda x: (x @ x).t().exp().sin(), torch.zeros(4, 4))
    costs = FixedCosts({"mm": 3.0}, default=2.0)
    seconds = {name_of(node): costs.seconds(node) for node in graph.nodes}
    assert {op: seconds[op] for op in ("mm", "t", "exp", "sin")} == {
        "mm": 3.0,
        "t": 0.0,
        "exp": 2.0,
        "sin": 2.0,
    }
    assert costs.num_bytes(only(graph, ATEN.mm.default)) == 64
    assert repr(costs) == "FixedCosts({'mm': 3.0}, default=2.0)"
