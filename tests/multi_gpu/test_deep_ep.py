"""The engine `deep_ep`, an installed DeepEP, gives what NCCL gives."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_ops
from moe_ops import comm, kernels
from moe_ops.comm import in_flight
from moe_ops.testing import assert_close, assert_equal
from tests.gpu import never_waiting
from tests.nn.layers import (
    capacity_fields,
    check_never_syncs,
    inputs_of_rank,
    make_config,
    make_layer,
)

from . import OPS, Case, needs_two_gpus, plan_of
from .ranks import MAX_HIDDEN, MAX_TOKENS, NUM_RANKS, groups, run_on_gpus
from .test_exchange import CASES

pytestmark = [
    *needs_two_gpus,
    pytest.mark.skipif(
        importlib.util.find_spec("deep_ep") is None,
        reason="optional package deep_ep is not installed",
    ),
]

CAPACITY = Case(mode="capacity", hidden_size=512, tokens=(128, 96))
LAYER = {"dispatcher": "flex", "hidden_size": 64, "ffn_hidden_size": 32}
SIZE_MODES = {"exact": {}, "capacity": capacity_fields(64)}


@functools.cache
def _group() -> dist.ProcessGroup:
    """Of this process. Collective at its first call."""
    groups()
    group = dist.new_group(list(range(NUM_RANKS)))
    name = comm.setup(
        group,
        engine="deep_ep",
        max_tokens=MAX_TOKENS,
        hidden_size=MAX_HIDDEN,
        dtype=torch.bfloat16,
    )
    assert name == comm.engine(group) == "deep_ep"
    return group


def _results(case: Case, rank: int, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """What dispatch and combine give over `group`, by name, each twice to the same bits."""
    given, name, plan = case.inputs(rank), comm.group_name_of(group), plan_of(case, rank, group)
    y_DH, v_DK = case.outputs(plan, rank)
    tensors = plan.tensors()
    calls: dict[str, tuple[Any, ...]] = {
        "dispatch": (given.x_TH, given.weights_TK, tensors, name, "full"),
        "dispatch without weights": (given.x_TH, None, tensors, name, "full"),
        "dispatch in FP8": (given.x_TH, given.weights_TK, tensors, name, "fp8"),
        "combine": (y_DH, v_DK, None, tensors, name),
        "combine of rows alone": (y_DH, None, None, tensors, name),
        "combine with an addend": (y_DH, None, given.addend_TH, tensors, name),
    }
    takes = comm.engine(group) == "deep_ep" and case.dtype == torch.bfloat16
    results = {}
    for what, args in calls.items():
        op, row_bytes = what.split()[0], case.hidden_size * (1 if "FP8" in what else 2)
        kernel = "deep_ep" if takes and row_bytes % 32 == 0 else "reference"
        assert kernels.name_of(op, *args) == kernel, f"{case}: {what}"
        outputs = zip(getattr(OPS, op)(*args), getattr(OPS, op)(*args))
        for number, (first, second) in enumerate(outputs):
            assert_equal(f"{what}, output {number}, again", second, first)
            results[f"{what}, output {number}"] = first
    return results


def _engines_agree(rank: int, case: Case) -> None:
    found, expected = (_results(case, rank, group) for group in (_group(), groups().nccl))
    for what, value in found.items():
        # DeepEP starts its sums with the addend, NCCL's end with it.
        same = assert_close if "addend" in what and value.numel() else assert_equal
        same(f"{case}: {what}", value, expected[what])


@pytest.mark.parametrize("mode", ["exact", "capacity", "half"])
@pytest.mark.parametrize("name", CASES)
def test_engines_agree(name: str, mode: str) -> None:
    run_on_gpus(_engines_agree, dataclasses.replace(CASES[name], mode=mode))


def test_rows_that_deep_ep_does_not_take_go_over_nccl() -> None:
    run_on_gpus(_engines_agree, Case(dtype=torch.float32))


def _layer(rank: int, mode: str) -> None:
    """Output and every gradient of the same layer over both groups."""
    config = make_config(**LAYER, **SIZE_MODES[mode])
    for tokens in ((33, 64), (5, 0), (0, 0)):
        x, grad, _ = inputs_of_rank(rank, tokens[rank], config, torch.bfloat16)
        results = []
        for group in (_group(), groups().nccl):
            layer, leaf = make_layer(config, group, torch.bfloat16, "cuda"), x.cuda()
            leaves = [leaf.requires_grad_(), *layer.parameters()]
            y = layer(leaf)
            results.append([y.detach(), *torch.autograd.grad(y, leaves, grad.cuda())])
        for number, (found, expected) in enumerate(zip(*results, strict=True)):
            assert_close(f"{tokens}: result {number}", found, expected)


@pytest.mark.parametrize("mode", SIZE_MODES)
def test_layer_matches_nccl(mode: str) -> None:
    run_on_gpus(_layer, mode)


def _never_syncs(rank: int) -> None:
    config = make_config(**LAYER, **SIZE_MODES["capacity"])
    check_never_syncs(make_layer(config, _group(), torch.bfloat16, "cuda"), rank)


def test_capacity_mode_never_syncs() -> None:
    run_on_gpus(_never_syncs)


def _beside_nvlink(rank: int) -> None:
    """Exchanges of two engines in flight at once."""
    given, both = CAPACITY.inputs(rank), (_group(), groups().nvlink)
    plans = [plan_of(CAPACITY, rank, group) for group in both]
    names = [comm.group_name_of(group) for group in both]
    expected = _results(CAPACITY, rank, groups().nccl)
    for _ in range(20):
        starts = [(given.x_TH, given.weights_TK, plan.tensors()) for plan in plans]
        tickets = [OPS.dispatch_start(*args, n, "full", 0) for args, n in zip(starts, names)]
        assert in_flight.num_in_flight() == len(both)
        for ticket, args in zip(tickets, starts):
            for number, value in enumerate(OPS.dispatch_wait(ticket, *args)):
                assert_equal(f"output {number}", value, expected[f"dispatch, output {number}"])


def test_exchanges_in_flight_beside_those_of_nvlink() -> None:
    run_on_gpus(_beside_nvlink)


def _replay(rank: int) -> None:
    given, group = CAPACITY.inputs(rank), _group()
    plan = plan_of(CAPACITY, rank, group)
    reached_T1 = (plan.copy_of_token_TP >= 0).sum(1, keepdim=True)

    def step() -> torch.Tensor:
        name = comm.group_name_of(group)
        rows_DH, _ = OPS.dispatch(given.x_TH, given.weights_TK, plan.tensors(), name, "full")
        return moe_ops.combine(rows_DH, plan, group=group)[0]

    step()
    with never_waiting():
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's thread asks for more
        out_TH = step()
    for factor in (1, 2, 3):
        given.x_TH.fill_(factor)
        graph.replay()
        assert_equal(f"replay {factor}", out_TH, (given.x_TH * reached_T1).to(out_TH.dtype))


def test_exchange_replays_in_a_cuda_graph() -> None:
    run_on_gpus(_replay)
