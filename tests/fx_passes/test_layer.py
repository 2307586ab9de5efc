"""A layer compiled with all passes: its graphs, its numbers, and what it keeps for backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import fx_passes
from moe_ops.nn import MoE, RouterConfig
from moe_ops.testing import assert_close, assert_equal
from tests.nn.layers import capacity_fields, check_alone
from tests.ranks import run_on_ranks

from .compiled import BACKWARD, FORWARD, OFF, Backend, SavedBytes, make_layer, ops_of, step

ROUTE = ["router_linear", "topk_route", "sort_slots", "permute"]
ROUTE_BACKWARD = ["topk_route_backward", "router_linear_backward"]
PADDING = {"padding_mask": torch.arange(11) % 3 > 0}
GATHERED = ["gather_grouped_mm", "grouped_mm", "unpermute"]

# Fields of the layer, the forward's and the backward's operators.
LAYERS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "swiglu": ({}, FORWARD, BACKWARD),
    "geglu": ({"activation": "geglu"}, FORWARD, BACKWARD),
    "clamped": ({"activation": "swiglu_clamped"}, FORWARD, BACKWARD),
    "relu2": ({"activation": "relu2"}, GATHERED, ["gather_grouped_mm", *BACKWARD[1:]]),
    "K1": ({"top_k": 1}, FORWARD, BACKWARD),
    "shared": ({"shared_ffn_hidden_size": 4}, FORWARD, BACKWARD),
    "bias": (
        {"bias": True, "activation": "swiglu_clamped"},
        ["gather_grouped_mm", "grouped_bias", "swiglu", "grouped_mm", "grouped_bias", "unpermute"],
        [
            *("permute", "grouped_bias_backward", "grouped_mm_swiglu_backward"),
            *("grouped_mm_wgrad", "grouped_bias_backward", *BACKWARD[2:]),
        ],
    ),
    "unpermute": (
        {"weights_at": "unpermute"},
        FORWARD,
        ["permute", "row_dot", "grouped_mm_swiglu_backward", "grouped_mm_wgrad", *BACKWARD[2:-1]],
    ),
}
all_layers = pytest.mark.parametrize("name", LAYERS)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in found.items():
        assert_equal(name, value, expected[name])


def assert_near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in found.items():
        assert_close(name, value, expected[name].double())


def compare(layer: MoE, wrapped: Any = None, **inputs: Any) -> Backend:
    """The passes change no bit of the plain graph's results, which are near those of eager."""
    function = wrapped or layer
    backend, plain = Backend(), Backend(**OFF)
    found = step(layer, backend.compile(function), **inputs)
    assert_same(found, step(layer, plain.compile(function), **inputs))
    assert_near(found, step(layer, layer, **inputs))
    assert len(backend.forward) == len(backend.backward) == 1
    return backend


@all_layers
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_layer_keeps_its_bits(name: str, dtype: torch.dtype) -> None:
    fields, forward, backward = LAYERS[name]
    backend = compare(make_layer(dtype, **fields))
    route = ROUTE if fields.get("weights_at") != "unpermute" else ROUTE[:-1]
    assert ops_of(backend.forward[0]) == route + forward
    assert ops_of(backend.backward[0]) == backward + ROUTE_BACKWARD


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_layer_equals_the_oracle(dtype: torch.dtype) -> None:
    layer = make_layer(dtype)
    check_alone(layer, Backend().compile(layer), 11)


def test_layer_keeps_its_bits_with_padding() -> None:
    assert ops_of(compare(make_layer(), **PADDING).forward[0]) == ROUTE + FORWARD


@pytest.mark.parametrize(
    "fields",
    [
        {"size_mode": "capacity", "max_tokens": 16, "row_capacity": 20},
        {"router": RouterConfig(expert_capacity_factor=1.0, pad_to_capacity=True)},
        {"router": RouterConfig(expert_capacity_factor=0.5, drop_policy="position")},
    ],
    ids=["rows", "padded", "dropped"],
)
def test_layer_keeps_its_bits_with_capacities(fields: dict[str, Any]) -> None:
    backend = compare(make_layer(**fields))
    assert "grouped_mm_swiglu" in ops_of(backend.forward[0])
    matmuls = [op for op in ops_of(backend.backward[0]) if "mm" in op]
    assert sorted(matmuls) == sorted(op for op in BACKWARD if "mm" in op)


def test_layer_under_autocast_has_closer_gradients() -> None:
    layer = make_layer(torch.float32)
    backend, plain = Backend(), Backend(**OFF)
    found = step(layer, backend.compile(layer), autocast=True)
    expected = step(layer, plain.compile(layer), autocast=True)
    wide = [name for name in found if name.startswith("experts.w")]
    assert_same({name: found[name] for name in found if name not in wide}, expected)
    for name in wide:
        assert found[name].dtype == torch.float32
        assert not torch.equal(found[name], found[name].bfloat16().float())
        assert_equal(name, found[name].bfloat16().float(), expected[name])
    wgrads = [n for n in backend.backward[0].nodes if "gather_grouped_mm_wgrad" in str(n.target)]
    assert [node.args[-1] for node in wgrads] == [True, True]


@torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True)
def test_layer_under_checkpoint_recomputes_h_alone() -> None:
    layer = make_layer()
    backend = compare(layer, wrapped=lambda x: checkpoint(layer, x, use_reentrant=False))
    assert ops_of(backend.forward[0]) == ROUTE + FORWARD
    recomputed = [*ROUTE, "gather_grouped_mm"]
    assert ops_of(backend.backward[0]) == recomputed + BACKWARD + ROUTE_BACKWARD


def test_layer_without_gradient_writes_no_h() -> None:
    layer = make_layer().eval()
    backend = Backend()
    x = torch.randn(11, 8, dtype=torch.float64)
    with torch.no_grad():
        assert_equal("y", backend.compile(layer)(x), layer(x))
    (graph,) = backend.forward
    assert ops_of(graph) == ROUTE + FORWARD
    (node,) = [node for node in graph.nodes if "grouped_mm_swiglu" in str(node.target)]
    assert node.args[-1] is False
    assert node.meta["val"][0].shape[0] == 0


@pytest.mark.parametrize("frozen", ["w13", "w2"])
def test_layer_with_frozen_weights(frozen: str) -> None:
    layer, plain = make_layer(), make_layer()
    results = []
    for one, backend in ((layer, Backend()), (plain, Backend(**OFF))):
        getattr(one.experts, frozen).requires_grad_(False)
        x = torch.linspace(-1, 1, 88, dtype=torch.float64).reshape(11, 8).requires_grad_()
        backend.compile(one)(x).square().sum().backward()
        trained = {n: p.grad for n, p in one.named_parameters() if p.requires_grad}
        results.append({"x.grad": x.grad, **trained})
    assert_same(*results)


@pytest.mark.parametrize("name", ["swiglu", "relu2", "bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layer_keeps_tokens_and_h_alone(name: str, dtype: torch.dtype) -> None:
    """Beside x, which its caller holds, at most 5 % more than h."""
    num_tokens, top_k, ffn = 64, 4, 512
    fields = {**LAYERS[name][0], "hidden_size": 256, "ffn_hidden_size": ffn, "top_k": top_k}
    layer = make_layer(dtype, **fields)
    x = torch.randn(num_tokens, 256).to(dtype).requires_grad_()
    floor = num_tokens * top_k * (ffn if name == "relu2" else 2 * ffn) * dtype.itemsize
    totals = {}
    for kind, backend in {"passes": Backend(), "plain": Backend(**OFF)}.items():
        function = backend.compile(layer)
        with SavedBytes(x, *layer.parameters()) as saved:
            function(x)
        totals[kind] = saved.total
    assert floor <= totals["passes"] <= 1.05 * floor
    assert totals["plain"] > 1.7 * floor


def test_layer_needs_no_further_graph_for_other_sizes() -> None:
    layer = make_layer(top_k=3)
    for backend in (Backend(), Backend(**OFF)):
        function = backend.compile(layer)
        for num_tokens in (16, 24, 32, 5):
            assert_same(step(layer, function, num_tokens), step(layer, layer, num_tokens))
        assert len(backend.forward) == len(backend.backward) == 2
        assert ops_of(backend.backward[0]) == ops_of(backend.backward[1])


def test_layer_with_dynamic_tokens() -> None:
    layer, backend = make_layer(), Backend()
    function = backend.compile(layer)
    x = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    torch._dynamo.mark_dynamic(x, 0)
    assert_equal("y", function(x), layer(x))
    function(torch.randn(23, 8, dtype=torch.float64, requires_grad=True)).sum().backward()
    assert [ops_of(graph) for graph in backend.forward] == [ROUTE + FORWARD]
    assert [ops_of(graph) for graph in backend.backward] == [BACKWARD + ROUTE_BACKWARD]


def _on_rank(
    rank: int, fields: dict[str, Any], expected: list[list[str]], overrides: dict[str, Any]
) -> None:
    layer, backend = make_layer(group=dist.group.WORLD, **fields), Backend(**overrides)
    function = backend.compile(layer, dynamic=True)
    for num_tokens in (9 + 4 * rank, 16):
        assert_near(step(layer, function, num_tokens), step(layer, layer, num_tokens))
    (forward,), (backward,) = backend.forward, backend.backward
    assert [ops_of(forward), ops_of(backward)] == expected


# Operators of the two graphs: what is exchanged stays as it is, once.
RANKS: dict[str, list[list[str]]] = {
    "flex": [
        [
            *(*ROUTE[:2], "exchange_plan", "dispatch_start", "dispatch_wait", "permute"),
            *(*FORWARD[:-1], "unpermute_in_window"),
            *("combine_start", "combine_wait"),
        ],
        [
            *("dispatch_start", "dispatch_wait", "grouped_mm_swiglu_backward", "grouped_mm"),
            *("unpermute_in_window", "unpermute", "combine_start"),
            *("gather_grouped_mm_wgrad", "gather_grouped_mm_wgrad", "combine_wait"),
            *ROUTE_BACKWARD,
        ],
    ],
    "alltoall": [
        [
            *(*ROUTE[:2], "exchange_plan", "sort_slots", "permute", "permute"),
            *("all_to_all", "sort_chunks", "all_to_all", "sort_chunks"),
            *("grouped_mm_swiglu", "grouped_mm", "sort_chunks", "all_to_all", "unpermute"),
        ],
        [
            *("permute", "all_to_all", "sort_chunks"),
            *("grouped_mm_swiglu_backward", "grouped_mm_wgrad", "grouped_mm", "grouped_mm_wgrad"),
            *("sort_chunks", "all_to_all", "sort_chunks", "all_to_all", "unpermute", "unpermute"),
            *ROUTE_BACKWARD,
        ],
    ],
}


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["exact", "capacity"])
def test_layer_on_two_ranks(mode: str) -> None:
    fields = capacity_fields(16) if mode == "capacity" else {}
    run_on_ranks(2, _on_rank, fields, RANKS["flex"], {}, timeout_s=300)


@pytest.mark.dist
def test_layer_on_two_ranks_that_exchange_rows() -> None:
    """Rows arrive, not tokens, so there is nothing to gather."""
    fields, unfused = {"dispatcher": "alltoall"}, {"fuse_permute_all_to_all": False}
    run_on_ranks(2, _on_rank, fields, RANKS["alltoall"], unfused, timeout_s=300)


def test_layer_compiles_with_inductor() -> None:
    layer = make_layer(torch.float32)
    torch._dynamo.reset()
    function = torch.compile(layer, fullgraph=True, options=fx_passes.options())
    assert_near(step(layer, function), step(layer, layer))
