"""The halves of dispatch and combine: together they are the whole, each ticket serves once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import moe_ops
from moe_ops import comm
from moe_ops.comm import in_flight, nvlink
from moe_ops.testing import assert_equal
from tests.ranks import expect_error_on_ranks, run_on_ranks

from .checks import world
from .test_dispatch import EXACT, MODES, all_modes, inputs_of

OPS = torch.ops.moe_ops


def _halves(rank: int, tokens: tuple[int, ...], mode: str, weighted: bool = True) -> None:
    group = world() if len(tokens) > 1 else None
    name = comm.group_name_of(group)
    x_TH, ids_TK, weights_TK = inputs_of(rank, tokens[rank])
    sent = weights_TK if weighted else None
    settings = MODES[mode].kwargs()
    rows_DH, weights_DK, plan = moe_ops.dispatch(x_TH, ids_TK, sent, group=group, **settings)
    tensors = plan.tensors()
    other_TH = x_TH + 1
    first = OPS.dispatch_start(x_TH, sent, tensors, name, "full", 0)
    second = OPS.dispatch_start(other_TH, sent, tensors, name, "fp8", 0)
    assert in_flight.num_in_flight() == 2
    assert not in_flight.runs_beside(x_TH.device)  # on the CPU it is over
    assert first.dtype == torch.int64 and first.shape == (1,)
    expected = moe_ops.ops.dispatch._dispatch(other_TH, sent, tensors, name, "fp8")
    found = OPS.dispatch_wait(second, other_TH, sent, tensors)
    for actual, whole in zip(found, expected):
        assert_equal("second dispatch", actual, whole)
    for actual, whole in zip(OPS.dispatch_wait(first, x_TH, sent, tensors), (rows_DH, weights_DK)):
        assert_equal("first dispatch", actual, whole)
    back = weights_DK if weighted else None
    ticket = OPS.combine_start(rows_DH, back, x_TH, tensors, name, 0)
    whole = moe_ops.combine(rows_DH, plan, group=group, weights_DK=back, addend_TH=x_TH)
    for actual, expected in zip(OPS.combine_wait(ticket, rows_DH, back, x_TH, tensors), whole):
        assert_equal("combine", actual, expected)
    assert in_flight.num_in_flight() == 0


@all_modes
@pytest.mark.parametrize("weighted", [True, False])
def test_halves_are_the_whole(mode: str, weighted: bool) -> None:
    _halves(0, (7,), mode, weighted)


@pytest.mark.dist
@all_modes
def test_halves_are_the_whole_on_ranks(mode: str) -> None:
    run_on_ranks(2, _halves, (7, 0), mode)


def arguments() -> tuple[torch.Tensor, list[torch.Tensor]]:
    x_TH, ids_TK, _ = inputs_of(0, 7)
    plan = moe_ops.exchange_plan(ids_TK, EXACT.kwargs()["num_experts"], group=None)
    return x_TH, plan.tensors()


def test_a_ticket_serves_once() -> None:
    x_TH, plan = arguments()
    ticket = OPS.dispatch_start(x_TH, None, plan, "", "full", 0)
    OPS.dispatch_wait(ticket, x_TH, None, plan)
    text = "dispatch_wait: ticket must come from dispatch_start and be used once"
    with pytest.raises(RuntimeError, match=text):
        OPS.dispatch_wait(ticket, x_TH, None, plan)
    with pytest.raises(RuntimeError, match="combine_wait: ticket must come from combine_start"):
        OPS.combine_wait(torch.zeros(1, dtype=torch.int64), x_TH, None, None, plan)


def test_halves_reject_bad_input() -> None:
    x_TH, plan = arguments()
    with pytest.raises(ValueError, match="x_TH must have the plan's T rows"):
        OPS.dispatch_start(x_TH[:3], None, plan, "", "full", 0)
    with pytest.raises(ValueError, match="combine_start: num_sms must be from 0 to 64, got 65"):
        OPS.combine_start(x_TH, None, None, plan, "", 65)
    with pytest.raises(TypeError, match="dispatch_wait: ticket_1 must"):
        OPS.dispatch_wait(x_TH[0], x_TH, None, plan)
    assert in_flight.num_in_flight() == 0


def _start_with_other_width(rank: int) -> None:
    x_TH, ids_TK, _ = inputs_of(rank, 7)
    plan = moe_ops.exchange_plan(ids_TK, 8, group=world())
    x_TH = x_TH[:, : 5 - rank]
    OPS.dispatch_start(x_TH, None, plan.tensors(), comm.group_name_of(world()), "full", 0)


def _start_on_other_sms(rank: int) -> None:
    x_TH, ids_TK, _ = inputs_of(rank, 7)
    plan = moe_ops.exchange_plan(ids_TK, 8, group=world())
    OPS.dispatch_start(x_TH, None, plan.tensors(), comm.group_name_of(world()), "full", rank)


@pytest.mark.dist
@pytest.mark.parametrize("start", [_start_with_other_width, _start_on_other_sms])
def test_start_rejects_what_differs_by_rank(start: Callable[[int], None]) -> None:
    for kind, text in expect_error_on_ranks(2, start):
        assert kind == "ValueError" and "same settings" in text


def test_start_runs_on_as_many_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    world = torch.arange(10)
    workspaces = {"": mock.Mock(world=world, max_tokens=64)}
    seen: list[list[int]] = []
    in_flight_start = in_flight.start

    def start(run: Callable[[], Any], like: torch.Tensor) -> torch.Tensor:
        seen.append(world.tolist())
        return in_flight_start(run, like)

    monkeypatch.setattr(nvlink, "workspace", workspaces.get)
    monkeypatch.setattr(in_flight, "start", start)
    x_TH, plan = arguments()
    for num_sms in (0, 8):
        ticket = OPS.dispatch_start(x_TH, None, plan, "", "full", num_sms)
        OPS.dispatch_wait(ticket, x_TH, None, plan)
    assert seen == [[*range(10)], [0, 1, 2, 3, 8, 5, 6, 7, 8, 9]], "World::num_sms is the fifth"
    assert world.tolist() == [*range(10)]
