"""What the cost model leaves exposed, and which window gets what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph

from fx_passes.cost_model import CostModel
from fx_passes.graph import name_of
from fx_passes.timeline import EXPOSED, seconds_of, timeline
from fx_passes.windows import Bounds, Schedule, fill_windows, fillings, runs_alone

from .windowed import Times, check_fills, combine, dispatch, label, trace


def fill(graph: Graph, costs: CostModel, bounds: Bounds) -> int:
    """With whatever is a kernel."""
    calls = [node for node in graph.nodes if runs_alone(node)]
    return fill_windows("fill", graph, calls, costs, bounds)


def two_plans(x, ids, w):
    """The second plan stands in the first dispatch's window, behind mm; mm_1 could go there."""
    rows, plan = dispatch(x, ids)
    others, other_plan = dispatch(x @ w, ids)
    return combine(rows, plan), combine(others, other_plan), (x * 2) @ w


PLANS = {"exchange_plan": 1.0, "dispatch_start": 10.0, "combine_start": 2.0, "mm": 3.0}


def test_plans_wait_for_the_exchanges_before_them() -> None:
    module, _ = trace(two_plans)
    schedule = Schedule(module.graph, Times(PLANS))
    exposed = {name: 1e6 * s for name, s in by_name(schedule.exposed(schedule.order))}
    assert exposed == pytest.approx(
        {
            "exchange_plan 0": 1.0,
            "exchange_plan 1": 8.0,  # 7 until the first dispatch is over
            "dispatch_wait 0": 0.0,
            "dispatch_wait 1": 10.0,
            "combine_wait 0": 2.0,
            "combine_wait 1": 2.0,
        }
    )


def by_name(exposed: dict[Any, float]) -> list[tuple[str, float]]:
    names: list[str] = []
    for node in exposed:
        names.append(f"{name_of(node)} {sum(name_of(node) in name for name in names)}")
    return list(zip(names, exposed.values()))


@pytest.mark.parametrize("split", [True, False])
def test_timelines_say_the_same(split: bool) -> None:
    times = {**PLANS, "dispatch": 10.0, "combine": 2.0}
    module, _ = trace(two_plans, split)
    schedule, costs = Schedule(module.graph, Times(times)), Times(times)
    found = sum(schedule.exposed(schedule.order).values())
    assert found == pytest.approx(seconds_of(timeline(module.graph, costs), EXPOSED))


def test_no_call_goes_behind_a_plan_that_has_waited() -> None:
    module, _ = trace(two_plans)
    assert fill(module.graph, Times({**PLANS, "mm_1": 7.0}), Bounds()) == 1
    first, second, *_ = [filling for _, filling in fillings(module.graph)]
    assert (first.moved, first.exposed_before) == ((), 0.0)
    assert (second.moved, second.exposed) == (("mm",), pytest.approx(3e-6))


def expert_before(x, ids, w):
    """mm and mm_1, which needs mm, before both windows."""
    shared = torch.relu(x @ w) @ w
    rows, plan = dispatch(x, ids)
    return combine(rows * 2, plan) + 1, shared


def expert_after(x, ids, w):
    """The same after both."""
    rows, plan = dispatch(x, ids)
    return combine(rows * 2, plan) + 1, torch.relu(x @ w) @ w


@pytest.mark.parametrize("function", [expert_before, expert_after])
def test_first_what_fits_into_any_window(function: Callable[..., Any]) -> None:
    """Of the dispatch 9 us stay exposed, for which the combine need not give mm_1."""
    times = {"dispatch_start": 135.0, "combine_start": 264.0, "mm": 126.0, "mm_1": 63.0}
    expected = "dispatch_start mm dispatch_wait combine_start mm_1 combine_wait"
    graph = check_fills(fill, function, times, expected, 2)
    assert [str(filling) for _, filling in fillings(graph)] == [
        "dispatch: got mm; 9.0 of 135.0 us stay exposed",
        "combine: got mm; 201.0 of 264.0 us stay exposed",
    ]


@pytest.mark.parametrize("function", [expert_before, expert_after])
def test_then_what_is_longer(function: Callable[..., Any]) -> None:
    """mm_1 is longer than what the dispatch has left, and than the combine."""
    times = {"dispatch_start": 135.0, "combine_start": 5.0, "mm": 126.0, "mm_1": 63.0}
    expected = "dispatch_start mm mm_1 dispatch_wait combine_start combine_wait"
    check_fills(fill, function, times, expected, 2)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_stays_if_it_draws(dropout: float) -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    def function(x, ids, w):
        q = (x @ w)[None, None]
        return combine(*dispatch(x, ids)), op(q, q, q, dropout)[0]

    module, _ = trace(function)
    (attention,) = module.graph.find_nodes(op="call_function", target=op)
    (matmul,) = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
    staying = Schedule(module.graph, Times({})).staying
    assert (attention in staying) == (dropout > 0)
    assert matmul not in staying


def two_exchanges(x, ids, w):
    rows, plan = dispatch(x, ids)
    return combine(rows * 2, plan), x @ w, (x * 3) @ w


def test_a_window_that_loses_its_call_gets_another() -> None:
    """mm, placed in the dispatch's window, is all that hides the combine; mm_1 then hides what it
    can of the dispatch, whose report tells of the rest.
    """
    module, _ = trace(two_exchanges)
    nodes = {label(node): node for node in module.graph.nodes}
    nodes["dispatch_wait"].prepend(nodes["mm"])
    times = {"dispatch_start": 10.0, "combine_start": 100.0, "mm": 110.0, "mm_1": 9.0}
    fill(module.graph, Times(times), Bounds())
    (_, first), (_, second) = fillings(module.graph)
    assert (first.moved, second.moved) == (("mm",), ("mm",))
    assert 1e6 * first.exposed == pytest.approx(1.0)
    assert first.exposed_before == pytest.approx(0.0)
    assert second.exposed == pytest.approx(0.0)
