"""Layers of plain PyTorch end with this library's exchange: what is found, refused, computed."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor.utils import run_and_get_code
from torch.distributed._functional_collectives import wait_tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import fx_passes
from fx_passes.fuse_permute_all_to_all import fuse_permute_all_to_all_pass
from fx_passes.fuse_permute_all_to_all.terms import read
from tests.ranks import run_on_ranks

from .captured import fake_ranks
from .compiled import OFF, Backend, graph_caches, make_layer, ops_of
from .graphs import check_leaves_alone
from .stock_layers import MegatronLayer, Sizes, StockLayer, TitanLayer
from .stock_pieces import SPELLINGS, PieceLayer, Pieces, count, gather, sort, total, unsort
from .test_pipeline import needs_compiler

ON = {**OFF, "fuse_permute_all_to_all": True}
LAYERS = {
    "titan": (TitanLayer, {}),
    "titan-early": (TitanLayer, {"early": True}),
    "megatron": (MegatronLayer, {}),
}
FORWARD = ["exchange_plan", "dispatch", "permute", "unpermute", "combine"]
LATE = [FORWARD, ["dispatch", "permute", "row_dot", "unpermute", "combine"]]
# Operators of both graphs; the weights of "megatron" are rows, too.
GRAPHS = {
    "titan": LATE,
    "titan-early": [FORWARD, ["dispatch", "permute", "unpermute", "row_dot", "combine"]],
    "megatron": [
        ["exchange_plan", "dispatch", "permute", "permute", "unpermute", "combine"],
        ["dispatch", "permute", "unpermute", "unpermute", "combine"],
    ],
}


@pytest.fixture(autouse=True)
def _reads_captured() -> Iterator[None]:
    with reads_captured():
        yield


@contextlib.contextmanager
def reads_captured() -> Iterator[None]:
    """Sizes that a layer reads from the device are part of its graph."""
    with torch._dynamo.config.patch(
        capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True
    ):
        yield


def pieces_layer(
    pieces: Pieces, group: dist.ProcessGroup, dtype: torch.dtype = torch.float32
) -> PieceLayer:
    layer = PieceLayer(Sizes(), group, dtype)
    layer.pieces = pieces
    return layer


def capture(layer: StockLayer) -> GraphModule:
    """The graph that Dynamo makes of a layer."""
    modules: list[GraphModule] = []

    def keep(module: GraphModule, inputs: Any) -> Any:
        modules.append(module)
        outputs = module.graph.output_node().args[0]
        return lambda *args: [torch.zeros(()) for _ in outputs]

    torch._dynamo.reset()
    x = torch.randn(11, layer.sizes.hidden, requires_grad=True).to(layer.gate.dtype)
    torch.compile(layer, backend=keep, fullgraph=True, dynamic=True)(x)
    return modules[0]


def step(layer: StockLayer, function: Any, num_tokens: int, rank: int) -> dict[str, torch.Tensor]:
    """Output and gradients of one step."""
    stream = torch.Generator().manual_seed(rank)
    x, grad = torch.randn(2, num_tokens, layer.sizes.hidden, generator=stream).to(layer.gate.dtype)
    x.requires_grad_()
    y = function(x)
    y.backward(grad)
    found = {"y": y.detach(), "x.grad": x.grad}
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            found[f"{name}.grad"], parameter.grad = parameter.grad, None
    return found


def compare(layer: StockLayer, function: Any, sizes: tuple[int, ...], rank: int) -> None:
    """Output and gradients are those of the layer without passes."""
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if layer.gate.dtype == torch.bfloat16 else {}
    for num_tokens in sizes:
        found = step(layer, function, num_tokens, rank)
        expected = step(layer, layer, num_tokens, rank)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(
                found[key], value, **tolerance, msg=lambda m, key=key: f"{key}: {m}"
            )


def graphs_of(backend: Backend) -> list[list[str]]:
    (forward,), (backward,) = backend.forward, backend.backward
    for node in (*forward.nodes, *backward.nodes):
        assert "all_to_all" not in str(node.target)
    return [ops_of(forward), ops_of(backward)]


def layer_on_rank(rank: int, name: str, dtype: torch.dtype, num_experts: int) -> list[list[str]]:
    kind, options = LAYERS[name]
    layer = kind(Sizes(num_experts=num_experts, **options), dist.group.WORLD, dtype)
    backend = Backend(**ON)
    with reads_captured():
        compare(layer, backend.compile(layer, dynamic=True), (9 + 4 * rank, 16), rank)
    return graphs_of(backend)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "num_ranks", "num_experts"),
    [*((name, 2, 4) for name in LAYERS), ("titan", 4, 4), ("megatron", 4, 4), ("megatron", 4, 8)],
)
def test_layers_on_ranks(name: str, num_ranks: int, num_experts: int) -> None:
    """One expert a rank needs no sort of chunks."""
    args = name, torch.float32, num_experts
    for graphs in run_on_ranks(num_ranks, layer_on_rank, *args, timeout_s=300):
        assert graphs == GRAPHS[name]


@pytest.mark.dist
@pytest.mark.parametrize("name", ["titan-early", "megatron"])
def test_layers_in_bf16(name: str) -> None:
    for graphs in run_on_ranks(2, layer_on_rank, name, torch.bfloat16, 4, timeout_s=300):
        assert graphs == GRAPHS[name]


def spellings_on_rank(rank: int) -> dict[str, list[list[str]]]:
    found = {}
    for name, pieces in SPELLINGS.items():
        layer, backend = pieces_layer(pieces, dist.group.WORLD), Backend(**ON)
        with reads_captured():
            compare(layer, backend.compile(layer, dynamic=True), (6 + 3 * rank,), rank)
        found[name] = graphs_of(backend)
    return found


@pytest.mark.dist
def test_spellings_on_ranks() -> None:
    for found in run_on_ranks(2, spellings_on_rank, timeout_s=400):
        assert found == dict.fromkeys(SPELLINGS, LATE)


def reorder_on_rank(rank: int) -> list[list[str]]:
    def backwards(received_PL: torch.Tensor, ids_C: Any) -> torch.Tensor:
        return torch.arange(received_PL.sum()).flip(0)

    layer = PieceLayer(Sizes(num_experts=2), dist.group.WORLD, torch.float32)
    layer.pieces = Pieces(chunk_order=backwards, unsort=SPELLINGS["labels"].unsort)
    backend = Backend(**ON)
    with reads_captured():
        compare(layer, backend.compile(layer, dynamic=True), (6 + 3 * rank,), rank)
    return graphs_of(backend)


@pytest.mark.dist
def test_only_expert_of_a_rank_reorders_rows() -> None:
    """With one expert a rank what arrives is in order; another order is the experts' affair."""
    for graphs in run_on_ranks(2, reorder_on_rank, timeout_s=300):
        assert graphs == LATE


def dispatcher_on_rank(rank: int, weights_at: str) -> list[list[str]]:
    """The alltoall dispatcher with ids of -1, an expert without rows, a rank without tokens."""
    layer = make_layer(group=dist.group.WORLD, dispatcher="alltoall", weights_at=weights_at)
    ids = torch.tensor([[0, -1], [2, 0], [-1, -1], [0, 2], [2, 2]])[: 5 * rank]
    results = []
    backend = Backend(**ON)
    for function in (layer, backend.compile(layer, dynamic=True)):
        x = torch.linspace(-1, 1, 8 * len(ids)).double().view(-1, 8).requires_grad_()
        y = function(x, router_ids=ids)
        y.square().sum().backward()
        grads = [parameter.grad for parameter in layer.parameters()]
        results.append([y.detach(), x.grad, *(grad.clone() for grad in grads)])
        layer.zero_grad()
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    return graphs_of(backend)


@pytest.mark.dist
@pytest.mark.parametrize("weights_at", ["activation", "unpermute"])
def test_dispatcher_on_ranks(weights_at: str) -> None:
    for forward, backward in run_on_ranks(2, dispatcher_on_rank, weights_at, timeout_s=300):
        assert [op for op in forward if op in ("exchange_plan", "dispatch", "combine")] == [
            *("exchange_plan", "dispatch", "combine")
        ]
        assert backward.count("dispatch") == backward.count("combine") == 1
        assert "sort_slots" not in forward
        assert "sort_chunks" not in [*forward, *backward]


def inductor_on_rank(rank: int, checkpointed: bool, cached: bool) -> tuple[str, int]:
    """Step with all passes; the code of the last graph, and how often the log says it was found.

    With as many tokens on every rank, kernels are the same: each is compiled once.
    """
    layer = TitanLayer(Sizes(), dist.group.WORLD, torch.float32)
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logger = logging.getLogger("fx_passes.fuse_permute_all_to_all")
    function = functools.partial(checkpoint, layer, use_reentrant=False) if checkpointed else layer
    with reads_captured(), graph_caches(cached):
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, options=fx_passes.options())
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        codes: list[str] = []
        try:
            _, codes = run_and_get_code(compare, layer, compiled, (9,), rank)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
    return "".join(codes), log.getvalue().count("rewrote")


@pytest.mark.dist
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpoint"])
@needs_compiler
def test_inductor_on_ranks(checkpointed: bool) -> None:
    for code, num_found in run_on_ranks(2, inductor_on_rank, checkpointed, False, timeout_s=500):
        assert num_found == 1
        assert "all_to_all" not in code
        assert code.count("moe_ops.exchange_plan.default(") == 1
        # Forward and backward: the exchange and its mirror.
        assert code.count("moe_ops.dispatch_start.default(") == 2
        assert code.count("moe_ops.combine_start.default(") == 2


def test_graph_and_second_run() -> None:
    with fake_ranks(2) as group:
        module = capture(pieces_layer(Pieces(), group))
        assert fuse_permute_all_to_all_pass(module.graph) == 1
        module.graph.lint()
        assert ops_of(module.graph) == FORWARD
        targets = {str(node.target) for node in module.graph.nodes}
        assert not any("c10d" in target or "assert" in target for target in targets)
        assert targets.isdisjoint({"argsort", "item", "tolist"})
        before = str(module.graph)
        assert fuse_permute_all_to_all_pass(module.graph) == 0
        assert str(module.graph) == before


class Stack(StockLayer):
    """Layers after one another, the tokens of each being the sums of the one before."""

    def __init__(self, *layers: StockLayer) -> None:
        first = layers[0]
        super().__init__(first.sizes, first.group, first.gate.dtype)
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_every_layer_of_a_graph() -> None:
    with fake_ranks(2) as group:
        names = ("plain", "mod", "adding")
        module = capture(Stack(*(pieces_layer(SPELLINGS[name], group) for name in names)))
        assert fuse_permute_all_to_all_pass(module.graph) == 3
        module.graph.lint()
        assert ops_of(module.graph) == 3 * FORWARD


def _inplace(x_TH: torch.Tensor, order_S: torch.Tensor, top_k: int) -> torch.Tensor:
    twice_TH = x_TH * 2
    rows_SH = gather(twice_TH, order_S, top_k)
    twice_TH.mul_(2)
    return rows_SH


def _pad(received_PL: torch.Tensor, ids_C: Any) -> torch.Tensor:
    return SPELLINGS["plain"].chunk_order((received_PL + 7) // 8 * 8, ids_C)


def _by_remainders(received_PL: torch.Tensor, ids_C: Any) -> torch.Tensor:
    return torch.argsort(wait_tensor(ids_C()) % (received_PL.shape[1] + 1), stable=True)


def _total_again(rows: torch.Tensor, order: torch.Tensor, weights: Any, x: Any) -> torch.Tensor:
    return total(rows * weights.square().flatten()[order][:, None], order, weights, x)


def _total_by_max(rows: torch.Tensor, order: torch.Tensor, weights: Any, x: Any) -> torch.Tensor:
    return rows[order.argsort()].view(*weights.shape, -1).amax(1)


def _total_of_late_weights(rows: Any, order: Any, weights: Any, x: Any) -> torch.Tensor:
    return total(rows, order, weights * rows.mean(), x)


def _total_in_fp32(rows: torch.Tensor, order: Any, weights: Any, x: Any) -> torch.Tensor:
    return total(rows.float(), order, weights, x.float())


NEAR_MISSES = {
    "other K": (Pieces(gather=lambda x, order, k: x[order // (k + 1)]), "top_k must be one number"),
    "scaled": (Pieces(before=lambda rows: rows * 2), "it is no row of a slot sorted by expert"),
    "rounded": (Pieces(before=lambda rows: rows.half().float()), "it rounds to torch.float16"),
    "narrow": (Pieces(before=lambda rows: rows.half()), "it rounds to torch.float16"),
    "descending": (Pieces(sort=lambda ids: sort(-ids)), "its slots are sorted by other ids"),
    "other ids": (Pieces(count=lambda ids, n: count(ids.flip(0), n)), "sorted by other ids"),
    "capacity": (
        Pieces(send_splits=lambda counts, n: counts.clamp(max=9).view(n, -1).sum(1).tolist()),
        "its splits are not counts of slots by rank",
    ),
    "padded": (Pieces(chunk_order=_pad), "is not sorted by expert, or is padded"),
    "unsorted": (
        Pieces(chunk_order=lambda received, ids: torch.arange(received.sum())),
        "what arrives is not sorted by expert",
    ),
    "wrong labels": (Pieces(chunk_order=_by_remainders), "is not sorted by expert"),
    "read before the sort": (
        Pieces(after=lambda y, x, arrived: y + arrived.mean()),
        "reads rows in the order of the exchange",
    ),
    "not unsorted": (Pieces(unsort=lambda rows, order: rows), "by the rank they came from"),
    "weighted twice": (Pieces(total=_total_again), "rows are weighted twice"),
    "maximum": (Pieces(total=_total_by_max), "it is no sum over the slots of a token"),
    "weights of results": (Pieces(total=_total_of_late_weights), "computed after the exchange"),
    "written in place": (Pieces(gather=_inplace), "written in place"),
    "other rows": (
        Pieces(unsort=lambda _, order: unsort(order[:, None].expand(-1, 8).float(), order)),
        "do not follow from what arrives",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_refuses(name: str, caplog: pytest.LogCaptureFixture) -> None:
    pieces, reason = NEAR_MISSES[name]
    with fake_ranks(2) as group:
        module = capture(pieces_layer(pieces, group))
        check_leaves_alone(fuse_permute_all_to_all_pass, module, reason, caplog)


def test_refuses_sums_in_another_dtype(caplog: pytest.LogCaptureFixture) -> None:
    pieces = Pieces(total=_total_in_fp32)
    with fake_ranks(2) as group:
        module = capture(pieces_layer(pieces, group, torch.bfloat16))
        reason = "sums of torch.bfloat16 are kept in torch.float32"
        check_leaves_alone(fuse_permute_all_to_all_pass, module, reason, caplog)


def test_terms_of_two_dtypes_differ() -> None:
    """Also of values that are written in place, and of random ones."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        written = x.clone()
        written.view(-1)[:1] = 3
        dropped = torch.nn.functional.dropout(x), torch.nn.functional.dropout(x)
        return x.half(), x.bfloat16(), x.half() * 1, written, x.clone(), *dropped

    modules: list[GraphModule] = []

    def keep(module: GraphModule, inputs: Any) -> Any:
        modules.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True)(torch.randn(4, 3))
    reading = read(modules[0].graph)
    output = modules[0].graph.output_node()
    half, bfloat, _, written, cloned, *dropped = (
        reading.used[output][node] for node in output.args[0]
    )
    assert [half.dtype, bfloat.dtype] == [torch.float16, torch.bfloat16]
    assert half.args == bfloat.args == (cloned,)
    assert written is not cloned
    assert dropped[0] is not dropped[1]
