"""The layer as the compiler sees it: graphs, recompiles, syncs, export, checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from moe_ops.nn import MoE, MoEConfig
from moe_ops.testing import assert_close
from tests.nn.layers import capacity_fields, inputs_of_rank, make_config, make_layer
from tests.ranks import run_on_ranks

DISPATCHERS = ("flex", "alltoall", "allgather")
MODES = {"exact": {}, "capacity": capacity_fields(64)}
BALANCED = {"balancing": ("aux", "global_aux"), "aux_loss_coeff": 1e-2, "z_loss_coeff": 1e-3}


class Graphs:
    """A backend that keeps the operators of each forward and backward graph."""

    def __init__(self) -> None:
        self.forward: list[list[str]] = []
        self.backward: list[list[str]] = []
        self.backend = aot_autograd(
            fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward)
        )

    def _keep(self, graphs: list[list[str]]) -> Any:
        def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
            graphs.append([t.split(".")[1] for t in targets if t.startswith("moe_ops.")])
            return make_boxed_func(graph.forward)

        return compiler


def _step(layer: Any, moe: MoE, x: torch.Tensor, grad: torch.Tensor, ids: Any = None) -> Any:
    x = x.detach().requires_grad_()
    y = layer(x, router_ids=ids)
    torch.autograd.backward([y, *moe.losses.values()], [grad, *[None] * len(moe.losses)])
    grads = [p.grad.clone() for p in moe.parameters()]
    moe.zero_grad()
    return [y.detach(), x.grad, *grads]


def _graphs_over_batches(rank: int, config: MoEConfig, backend: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    moe = make_layer(config, dist.group.WORLD, torch.float32)
    eager = make_layer(config, dist.group.WORLD, torch.float32)
    compiled = torch.compile(moe, fullgraph=True, backend=backend)
    for num_tokens in (16, 24, 32):
        x, grad, _ = inputs_of_rank(rank, num_tokens, config, torch.float32)
        actual = _step(compiled, moe, x, grad)
        expected = _step(eager, eager, x, grad)
        for index, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert_close(f"{num_tokens} tokens, tensor {index}", a, e.double(), e)
    assert counters["stats"]["unique_graphs"] <= 2, counters["stats"]
    before = counters["stats"]["unique_graphs"]
    for seed in range(5):
        x, grad, _ = inputs_of_rank(rank + 10 * seed, 32, config, torch.float32)
        _step(compiled, moe, x, grad)
    assert counters["stats"]["unique_graphs"] == before


@pytest.mark.dist
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_moe_needs_two_graphs_at_most(dispatcher: str, mode: str) -> None:
    config = make_config(BALANCED, dispatcher=dispatcher, shared_ffn_hidden_size=4, **MODES[mode])
    run_on_ranks(2, _graphs_over_batches, config, "aot_eager")


@pytest.mark.dist
def test_moe_needs_two_graphs_at_most_with_inductor() -> None:
    config = make_config(BALANCED, shared_ffn_hidden_size=4)
    run_on_ranks(2, _graphs_over_batches, config, "inductor", timeout_s=300)


def _breaks(rank: int) -> None:
    torch._dynamo.reset()
    counters.clear()
    config = make_config()
    moe = make_layer(config, dist.group.WORLD, torch.float32)
    compiled = torch.compile(moe, backend="aot_eager")
    for num_tokens in (16, 24):
        x, grad, _ = inputs_of_rank(rank, num_tokens, config, torch.float32)
        _step(compiled, moe, x, grad)
    assert not counters["graph_break"], counters["graph_break"]


@pytest.mark.dist
def test_moe_breaks_no_graph_without_fullgraph() -> None:
    run_on_ranks(2, _breaks)


def _backward_graph(rank: int, config: MoEConfig) -> None:
    torch._dynamo.reset()
    graphs = Graphs()
    moe = make_layer(config, dist.group.WORLD, torch.float32)
    compiled = torch.compile(moe, fullgraph=True, backend=graphs.backend, dynamic=True)
    x, grad, _ = inputs_of_rank(rank, 16, config, torch.float32)
    _step(compiled, moe, x, grad)
    assert len(graphs.forward) == len(graphs.backward) == 1
    plain = ["dispatch", "permute", "grouped_mm", "grouped_mm_wgrad", "swiglu_backward"]
    plain += ["grouped_mm", "grouped_mm_wgrad", "unpermute", "unpermute", "combine"]
    router = ["topk_route_backward", "router_linear_backward"]
    assert sorted(graphs.backward[0]) == sorted(plain + router), graphs.backward
    exchanges = [op for op in graphs.backward[0] if op in ("dispatch", "combine")]
    assert exchanges == ["dispatch", "combine"]


@pytest.mark.dist
def test_moe_backward_graph_is_the_plain_one() -> None:
    run_on_ranks(2, _backward_graph, make_config())


def _sizes_read(rank: int, config: MoEConfig) -> int:
    """How often forward and backward read a number from a tensor."""
    moe = make_layer(config, dist.group.WORLD, torch.float32)
    x, grad, _ = inputs_of_rank(rank, 16, config, torch.float32)
    reads = []
    saved = {
        name: getattr(torch.Tensor, name) for name in ("item", "tolist", "nonzero", "__bool__")
    }

    def recording(name: str) -> Any:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            reads.append(name)
            return saved[name](self, *args, **kwargs)

        return method

    for name in saved:
        setattr(torch.Tensor, name, recording(name))
    try:
        _step(moe, moe, x, grad)
    finally:
        for name, method in saved.items():
            setattr(torch.Tensor, name, method)
    return len(reads)


@pytest.mark.dist
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_moe_reads_sizes_once_in_exact_mode_and_never_in_capacity_mode(dispatcher: str) -> None:
    exact = make_config(BALANCED, dispatcher=dispatcher)
    assert run_on_ranks(2, _sizes_read, exact) == [1, 1]
    capacity = make_config(BALANCED, dispatcher=dispatcher, **MODES["capacity"])
    assert run_on_ranks(2, _sizes_read, capacity) == [0, 0]
    padded = {**BALANCED, "expert_capacity_factor": 1.0, "pad_to_capacity": True}
    limited = make_config(padded, dispatcher=dispatcher, **MODES["capacity"])
    assert run_on_ranks(2, _sizes_read, limited) == [0, 0]


def _export(rank: int, config: MoEConfig, strict: bool) -> None:
    group = dist.group.WORLD
    moe = make_layer(config, group, torch.float32).eval()
    x, _, _ = inputs_of_rank(rank, 16, config, torch.float32)
    tokens = torch.export.Dim("T", min=2, max=64)
    program = torch.export.export(moe, (x,), dynamic_shapes={"x": {0: tokens}}, strict=strict)
    for num_tokens in (16, 24, 5):
        x, _, _ = inputs_of_rank(rank, num_tokens, config, torch.float32)
        assert torch.equal(program.module()(x), moe(x))


@pytest.mark.dist
@pytest.mark.parametrize("strict", [True, False], ids=("strict", "non-strict"))
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_moe_exports(dispatcher: str, mode: str, strict: bool) -> None:
    run_on_ranks(2, _export, make_config(dispatcher=dispatcher, **MODES[mode]), strict)


def _checkpointed(rank: int, config: MoEConfig, backend: str | None) -> None:
    torch._dynamo.reset()
    plain = make_layer(config, dist.group.WORLD, torch.float32)
    saving = make_layer(config, dist.group.WORLD, torch.float32)
    x, grad, _ = inputs_of_rank(rank, 16, config, torch.float32)

    def layer(x: torch.Tensor, router_ids: Any = None) -> torch.Tensor:
        return checkpoint(saving, x, router_ids=router_ids, use_reentrant=False)

    step: Any = layer
    if backend:
        torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = True
        step = torch.compile(layer, fullgraph=True, backend=backend)
    expected = _step(plain, plain, x, grad)
    for index, (a, e) in enumerate(zip(_step(step, saving, x, grad), expected, strict=True)):
        assert_close(f"tensor {index}", a, e.double(), e)
    assert torch.equal(saving.router.tokens_per_expert, plain.router.tokens_per_expert)


@pytest.mark.dist
@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=["eager", "compiled"])
def test_moe_recomputes_under_checkpoint_with_equal_counts(backend: str | None) -> None:
    run_on_ranks(2, _checkpointed, make_config(BALANCED), backend)


def _same_bits(rank: int, config: MoEConfig) -> None:
    moe = make_layer(config, dist.group.WORLD, torch.bfloat16)
    x, grad, _ = inputs_of_rank(rank, 33, config, torch.bfloat16)
    first, second = (_step(moe, moe, x, grad) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_moe_gives_the_same_bits_twice(dispatcher: str) -> None:
    run_on_ranks(2, _same_bits, make_config(BALANCED, dispatcher=dispatcher))


def test_moe_graph_leaves_autocast_alone_where_it_is_off() -> None:
    """AOTAutograd's cache takes no other."""
    found = EagerAndRecordGraphs()
    torch._dynamo.reset()
    layer = make_layer(make_config(), None, torch.float32)
    torch.compile(layer, fullgraph=True, backend=found)(torch.randn(5, 8))
    (module,) = found.graphs
    assert not [node for node in module.graph.nodes if "autocast" in str(node.target)]


class Block(torch.nn.Module):
    """Two layers, with kernels of Inductor's own around them, and their loss."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.linear, self.norm = torch.nn.Linear(size, size), torch.nn.RMSNorm(size)
        self.layers = torch.nn.ModuleList(
            make_layer(config, dist.group.WORLD, torch.float32) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of all tokens."""
        for layer in self.layers:
            x = x + layer(self.norm(self.linear(x)))
        return x.square().sum() + sum(sum(layer.losses.values()) for layer in self.layers)


def _no_tokens_on_one_rank(rank: int, config: MoEConfig, num_tokens: list[int]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = Block(config)
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    x = torch.randn(num_tokens[rank], config.hidden_size, requires_grad=True)
    for train in (True, False):
        found, expected = compiled.train(train)(x), block.train(train)(x)
        pairs = [(found, expected)]
        if train:
            leaves = [*block.parameters(), x]
            pairs += zip(*(torch.autograd.grad(loss, leaves) for loss in pairs[0]))
        for number, (value, eager) in enumerate(pairs):
            assert_close(str(number), value, eager, scale=1.0)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("router", "num_tokens"), [({}, [5, 0]), (BALANCED, [5, 0]), (BALANCED, [0, 0])], ids=str
)
def test_moe_compiles_where_a_rank_has_no_tokens(
    router: dict[str, Any], num_tokens: list[int]
) -> None:
    """Its graph has the exchanges of the others, in their order."""
    run_on_ranks(2, _no_tokens_on_one_rank, make_config(router), num_tokens)
