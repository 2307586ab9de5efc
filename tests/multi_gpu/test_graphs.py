"""Exchanges within CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch

import fx_passes
import moe_ops
from moe_ops.nn import MoE
from moe_ops.testing import assert_close, assert_equal, make_ids
from tests.gpu import captured
from tests.nn.layers import capacity_fields, inputs_of_rank, make_config, make_layer

from . import Case, needs_two_gpus
from .ranks import groups, run_on_gpus

pytestmark = needs_two_gpus


def test_layer_replays_in_a_cuda_graph() -> None:
    run_on_gpus(_replay)


def _layer_and_inputs(rank: int) -> tuple[MoE, list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """A layer, its leaves (the tokens first), the gradient of its output, and ids."""
    config = make_config(  # weights that sum to 1 would leave the router noise where one is chosen
        {"normalize": False},
        dispatcher="flex",
        hidden_size=64,
        ffn_hidden_size=32,
        **capacity_fields(32),
    )
    layer = make_layer(config, groups().nvlink, torch.bfloat16, "cuda")
    x, grad, ids_TK = (t.cuda() for t in inputs_of_rank(rank, 32, config, torch.bfloat16))
    return layer, [x.requires_grad_(), *layer.parameters()], grad, ids_TK


def _replay(rank: int) -> None:
    layer, leaves, grad, ids_TK = _layer_and_inputs(rank)

    def step() -> list[torch.Tensor]:
        y = layer(leaves[0], router_ids=ids_TK)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    outputs, replay = captured(step)
    for name, ids in _routings(rank, ids_TK.shape, layer.config.num_experts).items():
        ids_TK.copy_(ids)
        for _ in range(2):
            replay()
        found = [output.clone() for output in outputs]
        for number, (value, wanted) in enumerate(zip(found, step(), strict=True)):
            assert_equal(f"{name}: result {number}", value, wanted)
    layer.check_overflow()


def _routings(rank: int, shape: torch.Size, num_experts: int) -> dict[str, torch.Tensor]:
    none, stream = torch.full(shape, -1), torch.Generator().manual_seed(rank)
    random_ids = make_ids(*shape, num_experts, none_fraction=0.2, generator=stream)
    one_hot = none.clone()
    one_hot[:, 0] = num_experts - 1
    return {"random": random_ids, "one-hot": one_hot, "none": none, "random again": random_ids}


def test_compiled_layer_trains_in_cuda_graphs() -> None:
    run_on_gpus(_compiled)


def _compiled(rank: int) -> None:
    layer, leaves, grad, ids_TK = _layer_and_inputs(rank)
    options = {**fx_passes.options(), "triton.cudagraphs": True}
    compiled = torch.compile(layer, options=options, fullgraph=True)

    def step(run: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.compiler.cudagraph_mark_step_begin()
        y = run(leaves[0], router_ids=ids_TK)
        return [value.clone() for value in [y.detach(), *torch.autograd.grad(y, leaves, grad)]]

    for name, ids in _routings(rank, ids_TK.shape, layer.config.num_experts).items():
        ids_TK.copy_(ids)
        for number, (value, wanted) in enumerate(zip(step(compiled), step(layer), strict=True)):
            assert_close(f"{name}: result {number}", value, wanted)
        torch.compiler.cudagraph_mark_step_begin()
        compiled(leaves[0], router_ids=ids_TK)  # its backward never runs
    layer.check_overflow()


def test_graphs_are_captured_on_several_streams() -> None:
    run_on_gpus(_several_captures)


def _several_captures(rank: int) -> None:
    case = Case(mode="capacity")
    given = case.inputs(rank)

    def step() -> torch.Tensor:
        rows_DH, _, plan = moe_ops.dispatch(
            given.x_TH, given.ids_TK, given.weights_TK, group=groups().nvlink, **case.settings()
        )
        return moe_ops.combine(rows_DH, plan, group=groups().nvlink)[0]

    expected = step()
    graphs, outputs = [], []
    for _ in range(3):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=torch.cuda.Stream()):
            outputs.append(step())
    for _ in range(3):
        for number, (graph, output) in enumerate(zip(graphs, outputs)):
            output.fill_(7)
            graph.replay()
            assert_equal(f"graph {number}", output, expected)
