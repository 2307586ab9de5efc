"""What `tune` runs: whole steps of a copy, on ranks that fail together or not at all."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fx_passes import trials
from fx_passes.compat import graph_backend
from fx_passes.config import PassConfig
from fx_passes.measure import unmeasured
from fx_passes.trials import Dropped, Ranks, first_step, seconds_of
from fx_passes.tune import tune
from moe_ops.comm import in_flight
from moe_ops.nn import RouterConfig
from tests.ranks import run_on_ranks

from .compiled import make_layer
from .test_tune import MODULE, Bar

TWO_CHUNKS = PassConfig(chunk_exchange=2)


def without_code(inductor: Mapping[str, Any]) -> Any:
    """A backend that runs the passes and then the plain graph."""
    return graph_backend(inductor, lambda kind, graph: None)


plain_graphs = mock.patch.object(trials, "inductor_backend", without_code)


@plain_graphs
def test_model_inputs_and_random_numbers_stay_as_they_are() -> None:
    router = RouterConfig(balancing=("aux",), aux_loss_coeff=0.1, jitter_eps=0.1)
    layer = make_layer(torch.float32, router=router)
    x = torch.randn(11, 8, requires_grad=True)
    layer(x).sum().backward()
    state, stats = copy.deepcopy(layer.state_dict()), layer.stats()
    grads = [p.grad.clone() for p in (x, *layer.parameters())]
    value, random = x.detach().clone(), torch.get_rng_state()
    with mock.patch.object(MODULE, "progress_bar", return_value=Bar):
        tuned = tune(layer, x, budget_s=60, candidates={"defer_wgrad": [False]})
    assert [tried["settings"] for tried in tuned.measured["tried"]] == ["defer_wgrad=False"]
    assert tuned.measured["default_ms"] > 0
    assert torch.equal(torch.get_rng_state(), random) and torch.equal(x, value)
    for name, tensor in layer.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    for name, tensor in layer.stats().items():
        assert torch.equal(tensor, stats[name]), name
    for grad, kept in zip((x.grad, *(p.grad for p in layer.parameters())), grads):
        assert torch.equal(grad, kept)


def test_seconds_are_those_of_one_step() -> None:
    ran: list[Any] = []
    with mock.patch.object(trials.time, "perf_counter", side_effect=[100.0, 106.0]):
        assert seconds_of(ran.append, 3, on_gpu=False) == 2.0
    assert ran == [unmeasured] * 4, "one before"


@pytest.mark.gpu
def test_seconds_on_gpu() -> None:
    x = torch.randn(4096, 4096, device="cuda")

    def step(phase: Any) -> None:
        for _ in range(10):
            x @ x

    one, ten = (seconds_of(step, number, on_gpu=True) for number in (1, 10))
    assert 10 * 2 * 4096**3 / 2e15 < one < 1.0
    assert ten == pytest.approx(one, rel=0.5)


class BreaksOn(nn.Module):
    """A model that does not compile on one rank."""

    def __init__(self, layer: nn.Module, here: bool) -> None:
        super().__init__()
        self.layer, self.here = layer, here

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.here:
            torch._dynamo.graph_break()
        return self.layer(x)


def _why_dropped(model: Any, x: torch.Tensor, config: PassConfig = TWO_CHUNKS) -> str:
    with pytest.raises(Dropped) as raised:
        first_step(Ranks(), model, (x,), None, config)
    assert in_flight.num_in_flight() == 0
    return str(raised.value)


def _trials_on_rank(rank: int) -> dict[str, Any]:
    layer = make_layer(torch.float32, group=dist.group.WORLD)
    x = torch.randn(9 + rank, 8, requires_grad=True)
    found: dict[str, Any] = {}

    def breaks_on_one(inductor: Mapping[str, Any]) -> Any:
        def backend(module: Any, inputs: Any) -> Any:
            if rank == 1:
                raise MemoryError("no room\nfor code")
            return without_code(inductor)(module, inputs)

        return backend

    with mock.patch.object(trials, "inductor_backend", breaks_on_one):
        found["compiler"] = _why_dropped(layer, x)
    with plain_graphs:
        found["tracing"] = _why_dropped(BreaksOn(layer, rank == 1), x)
        found["chunks"] = _why_dropped(layer, x[: 2 - rank])
        step, found["chunked"] = first_step(Ranks(), layer, (x,), None, TWO_CHUNKS)
    step(unmeasured)
    found["most"] = Ranks().most(rank, -rank)
    return found


@pytest.mark.dist
def test_ranks_leave_out_what_one_of_them_cannot_run() -> None:
    for found in run_on_ranks(2, _trials_on_rank):
        assert found["compiler"] == "rank 1: MemoryError: no room"
        assert found["tracing"].startswith("rank 1: Unsupported: ")
        assert found["chunks"] == "layers run in chunks on some ranks and not on others"
        assert found["chunked"] == 1
        assert found["most"] == [1, 0]
