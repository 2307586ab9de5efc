"""The order that the passes choose is that of the generated code, with Inductor's own passes on."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.utils import run_and_get_code
from torch.fx import Graph, GraphModule
from torch.testing._internal.distributed.fake_pg import FakeStore

import fx_passes
from fx_passes import pipeline
from fx_passes.pin_order import find_order, pin_order_pass
from moe_ops.comm import in_flight
from moe_ops.nn import MoEConfig
from moe_ops.testing import assert_close, assert_equal
from tests.nn.layers import capacity_fields, make_config, make_layer
from tests.ranks import run_on_ranks

from .compiled import Backend, graph_caches
from .windowed import combine, dispatch, kernels, trace

AUX = {"balancing": ("aux",), "aux_loss_coeff": 0.01}
ORDER_LEFT = {"overlap_shared_experts": False, "defer_wgrad": False}

# The calls of one layer. Exchanges hide the shared expert's matmuls, mm, and weights' gradients.
FORWARD = [
    *("router_linear", "topk_route", "exchange_plan", "dispatch_start", "mm", "mm"),
    *("dispatch_wait", "permute", "grouped_mm_swiglu", "grouped_mm", "unpermute_in_window"),
    *("combine_start", "combine_wait"),
]
BACKWARD = [
    *("dispatch_start", "mm", "mm", "mm", "mm", "dispatch_wait"),
    *("grouped_mm_swiglu_backward", "grouped_mm", "unpermute_in_window", "unpermute"),
    *("combine_start", "gather_grouped_mm_wgrad", "gather_grouped_mm_wgrad", "combine_wait"),
    *("topk_route_backward", "router_linear_backward"),
]


class Stack(nn.Module):
    """Layers with shared experts, one after the other; their losses are added."""

    def __init__(self, num_layers: int, config: MoEConfig, group: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make_layer(config, group, dtype) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + sum(loss for layer in self.layers for loss in layer.losses.values())


def make_stack(
    group: Any,
    num_layers: int = 2,
    router: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Stack:
    config = make_config(router, shared_ffn_hidden_size=4, **fields)
    return Stack(num_layers, config, group, dtype)


@pytest.fixture
def fake_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two ranks, of which only this one exists. As values mean nothing, they are zeros: Inductor's
    own kernels are not compiled.
    """
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *source: lambda *args: None)
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cpu", _zeros)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def _zeros(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype).zero_()


def code_of(run: Callable[[Any], Any], model: nn.Module) -> list[list[str]]:
    """The lines of the generated code of each graph."""
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, options=fx_passes.options())
    with graph_caches(False):
        _, codes = run_and_get_code(run, compiled)
    return [code.split("def call(")[-1].splitlines() for code in codes]


def train(compiled: Any) -> None:
    compiled(torch.randn(11, 8, requires_grad=True)).sum().backward()


def infer(compiled: Any) -> None:
    with torch.no_grad():
        compiled(torch.randn(11, 8))


CALL = re.compile(r"\s*(?:buf\d+ = )?(?:torch\.ops\.moe_ops\.(\w+)\.\w+|extern_kernels\.(\w+))\(")


def calls(lines: list[str]) -> list[str]:
    """Kernels in order, but those that Inductor makes itself."""
    matches = [CALL.match(line) for line in lines]
    return [match[1] or match[2] for match in matches if match]


def check_inputs_live(lines: list[str], op: str) -> int:
    """No input of a start is freed or given to another tensor before its wait; number of starts."""
    starts = [place for place, line in enumerate(lines) if f".{op}_start.default(" in line]
    for start in starts:
        wait = next(n for n in range(start, len(lines)) if f".{op}_wait.default(" in lines[n])
        inputs = re.findall(r"\b(?:buf|primals_|tangents_|getitem_)\d+\b", lines[start])[1:]
        assert inputs
        for line in lines[start:wait]:
            freed = re.findall(r"\bdel (\w+)", line)
            assert not set(freed) & set(inputs), line
    return len(starts)


def test_pin_order_binds_generated_code(fake_group: Any) -> None:
    """Case 26, too."""
    forward, backward = code_of(train, make_stack(fake_group))
    assert calls(forward) == 2 * FORWARD
    assert calls(backward) == 2 * BACKWARD
    for lines in (forward, backward):
        assert check_inputs_live(lines, "dispatch") == check_inputs_live(lines, "combine") == 2


def test_without_pin_order_inductor_prefers_its_own(
    fake_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order needs the pass, though torch 2.14 waits late by itself."""
    monkeypatch.setattr(pipeline, "pin_order_pass", lambda graph: 0)
    (lines,) = code_of(infer, make_stack(fake_group, 1))
    assert sorted(calls(lines)) == sorted(FORWARD)
    waits_late = torch.torch_version.TorchVersion(torch.__version__) >= (2, 14)
    assert (calls(lines) == FORWARD) == waits_late


def hiding(x, ids, w):
    rows, plan = dispatch(x, ids)
    shared = x @ w
    return combine(rows * 2, plan), shared


def test_pin_order_is_idempotent() -> None:
    module, _ = trace(hiding)
    assert kernels(module.graph).count("mm") == 1
    assert len(find_order(module.graph)) == 2
    assert pin_order_pass(module.graph) == 1
    before = str(module.graph)
    assert pin_order_pass(module.graph) == 0
    assert str(module.graph) == before


def test_pin_order_refuses_empty_windows(caplog: pytest.LogCaptureFixture) -> None:
    module, _ = trace(lambda x, ids, w: combine(*dispatch(x @ w, ids)))
    before = str(module.graph)
    with caplog.at_level(logging.DEBUG, logger="fx_passes"):
        assert pin_order_pass(module.graph) == 0
    assert str(module.graph) == before
    assert "nothing is in the window" in caplog.text


def step(
    model: nn.Module, function: Callable[..., Any], num_tokens: int
) -> dict[str, torch.Tensor]:
    """Output and all gradients."""
    generator = torch.Generator().manual_seed(num_tokens)
    dtype = next(model.parameters()).dtype
    x = torch.randn(num_tokens, 8, generator=generator).to(dtype).requires_grad_()
    y = function(x)
    y.sin().sum().backward()
    found = {"y": y.detach(), "x.grad": x.grad}
    for name, parameter in model.named_parameters():
        found[f"{name}.grad"], parameter.grad = parameter.grad, None
    assert in_flight.num_in_flight() == 0
    return found


class TwoOrders(Backend):
    """A model is traced once; what runs is its graph with the order of the passes or, unless
    `moving`, without.
    """

    def __init__(self) -> None:
        self.left, self.moving = Backend(**ORDER_LEFT), True
        super().__init__()

    def _keep(self, graphs: list[Graph]) -> Any:
        compile_moved = super()._keep(graphs)
        left_graphs = self.left.forward if graphs is self.forward else self.left.backward
        compile_left = self.left._keep(left_graphs)

        def compiler(module: GraphModule, inputs: Any) -> Any:
            left = compile_left(copy.deepcopy(module), inputs)
            moved = compile_moved(module, inputs)

            def run(args: list[Any]) -> Any:
                return (moved if self.moving else left)(args)

            run._boxed_call = True
            return run

        return compiler


def _moved_on_rank(rank: int, fields: dict[str, Any]) -> list[list[str]]:
    """The passes change no bit; the kernels of the graphs they leave."""
    model = make_stack(dist.group.WORLD, router=AUX, dtype=torch.float64, **fields)
    orders = TwoOrders()
    compiled, results = orders.compile(model, dynamic=True), []
    for orders.moving in (True, False):
        results.append(step(model, compiled, 9 + 4 * rank))
    for name, value in results[0].items():
        assert_equal(name, value, results[1][name])
    left = orders.left
    graphs = [*orders.forward, *orders.backward, *left.forward, *left.backward]
    return [kernels(graph).split() for graph in graphs]


@pytest.mark.dist
@pytest.mark.parametrize("fields", [{}, capacity_fields(16)], ids=["exact", "capacity"])
def test_moves_change_no_bit_on_ranks(fields: dict[str, Any]) -> None:
    for forward, backward, *left in run_on_ranks(2, _moved_on_rank, fields, timeout_s=300):
        assert [sorted(forward), sorted(backward)] == [sorted(names) for names in left]
        assert _hidden(forward) > _hidden(left[0])
        assert _hidden(backward) > _hidden(left[1])


def _hidden(names: list[str]) -> int:
    """Matmuls between an exchange's halves."""
    windows = re.findall(r"_start (.*?)\w+_wait", " ".join(names))
    return sum(len(re.findall(r"\bmm|_wgrad", window)) for window in windows)


def _compiled_on_rank(rank: int) -> None:
    model = make_stack(dist.group.WORLD)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, options=fx_passes.options())
    # As many tokens on both ranks: kernels are the same, and each is compiled once.
    expected = step(model, model, 11)
    for _ in range(2):
        found = step(model, compiled, 11)
        for name, value in found.items():
            assert_close(name, value, expected[name].double())


@pytest.mark.dist
def test_moves_with_inductor_on_ranks() -> None:
    run_on_ranks(2, _compiled_on_rank, timeout_s=300)
