"""Work that needs no routed tokens moves into windows."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from fx_passes.cost_model import CostModel
from fx_passes.defer_wgrad import defer_wgrad_pass
from fx_passes.overlap_shared_experts import (
    OverlapSharedExperts,
    find_calls_to_overlap,
    find_sums,
    overlap_shared_experts_pass,
    why_not,
)
from fx_passes.windows import Bounds

from .windowed import check_fills, check_refuses, combine, dispatch, kernels, trace

DEPENDENT = "nothing else is independent of the exchange"


def forward(x, ids, w):
    """A shared expert, mm and mm_1, whose output the combine adds; a loss; the next layer, mm_3."""
    shared = torch.relu(x @ w) @ w
    rows, plan = dispatch(x, ids)
    y = combine(rows @ w, plan, addend=shared)
    loss = (x @ w).mean(0).sum()
    return y @ w, loss


TIMES = {"dispatch_start": 10.0, "combine_start": 10.0, "mm": 3.0, "mm_1": 3.0, "sum_1": 1.0}


def test_overlap_finds_all_but_wgrads() -> None:
    module, _ = trace(forward)
    calls = [node.name for node in find_calls_to_overlap(module.graph)]
    assert [name for name in calls if "mm" in name or "m_" in name] == [
        *("mm", "mm_1", "mm_2", "mm_3", "sum_1")
    ]


BEFORE = "mm mm_1 dispatch_start dispatch_wait mm_2 combine_start mm_3 mean sum_1 combine_wait mm_4"


def test_overlap_moves_the_shared_expert_and_the_loss() -> None:
    """The combine adds the shared expert's output, so that it cannot wait until then. The loss can,
    but the combine's window is a later one.
    """
    expected = (
        "dispatch_start mm mm_1 mm_3 mean sum_1 dispatch_wait mm_2 combine_start combine_wait mm_4"
    )
    assert kernels(trace(forward)[0].graph) == BEFORE
    check_fills(overlap_shared_experts_pass, forward, TIMES, expected, 5)


def test_overlap_moves_as_much_as_is_exposed() -> None:
    """The second matmul fits alone, so the first stays."""
    expected = BEFORE.replace("mm_1 dispatch_start", "dispatch_start mm_1")
    times = {**TIMES, "dispatch_start": 3.0}
    check_fills(overlap_shared_experts_pass, forward, times, expected, 1)


def backward(x, ids, w):
    """mm_1 and mm_2 are the shared expert's, mm_3 the gradient of its weight."""
    g = x @ w
    rows, plan = dispatch(g, ids)
    y = combine(rows * 2, plan)
    middle = torch.relu(g @ w)
    return (y + middle @ w) @ w, middle.T @ g


def test_overlap_then_defer_fill_both_windows() -> None:
    """The shared expert goes to the first window, since a gradient can fill the second instead."""
    times = {"dispatch_start": 6.0, "combine_start": 4.0, "mm_1": 3.0, "mm_2": 3.0, "mm_4": 4.0}
    before = "mm dispatch_start dispatch_wait combine_start mm_1 mm_2 combine_wait mm_3 mm_4"
    between = "mm dispatch_start mm_1 mm_2 dispatch_wait combine_start combine_wait mm_3 mm_4"
    after = "mm dispatch_start mm_1 mm_2 dispatch_wait combine_start mm_4 combine_wait mm_3"
    assert kernels(trace(backward)[0].graph) == before
    check_fills(overlap_shared_experts_pass, backward, times, between, 2)

    def both(graph: Graph, costs: CostModel, bounds: Bounds) -> int:
        first = overlap_shared_experts_pass(graph, costs, bounds)
        return first + defer_wgrad_pass(graph, costs, bounds)

    check_fills(both, backward, times, after, 3)


def test_overlap_leaves_wgrads_alone(caplog: pytest.LogCaptureFixture) -> None:
    times = {"dispatch_start": 6.0, "mm_4": 4.0}
    check_refuses(overlap_shared_experts_pass, backward, times, DEPENDENT, caplog)


def summed(x, ids, w):
    """Of the first sum only the matmul needs no exchange, of the second neither part. Numbers are
    whole: no sum is rounded.
    """
    x, w = x.round(), w.round()
    rows, plan = dispatch(x, ids)
    y = combine(rows * 2, plan)
    y = torch.addmm(y, x, w)
    return torch.addmm(x, y, w), torch.addmm(y, x, w, beta=2)


def test_overlap_takes_the_matmul_of_a_sum() -> None:
    times = {"combine_start": 10.0, "mm_default": 10.0}
    expected = "dispatch_start dispatch_wait combine_start mm_default combine_wait addmm_1 addmm_2"
    check_fills(overlap_shared_experts_pass, summed, times, expected, 1)


def test_overlap_refuses_sums_of_the_model() -> None:
    module, _ = trace(summed)
    match = find_sums(module.graph)[0]
    assert why_not(match) is None
    match.addmm.meta |= {"original_aten": torch.ops.aten.addmm.default, "from_node": ["a sum"]}
    assert why_not(match) == "the sum is rounded once in the model, too"


@pytest.mark.parametrize(
    ("number", "reason"), [(1, "the matmul needs the exchange"), (2, "the sum is weighted")]
)
def test_overlap_refuses_other_sums(number: int, reason: str) -> None:
    module, _ = trace(summed)
    assert why_not(find_sums(module.graph)[number]) == reason


def test_overlap_leaves_sums_whose_exchange_is_hidden() -> None:
    expected = "dispatch_start dispatch_wait combine_start combine_wait addmm addmm_1 addmm_2"
    check_fills(overlap_shared_experts_pass, summed, {"combine_start": 0.0}, expected, 0)


def routed(x, ids, w):
    """The expert reads what the dispatch brings, and the dispatch what mm makes."""
    rows, plan = dispatch(x @ w, ids)
    return combine(torch.relu(rows @ w) @ w, plan)


def test_overlap_refuses_routed_experts(caplog: pytest.LogCaptureFixture) -> None:
    times = {"dispatch_start": 10.0, "mm": 1.0, "mm_1": 3.0, "mm_2": 3.0}
    check_refuses(overlap_shared_experts_pass, routed, times, DEPENDENT, caplog)


def test_overlap_keeps_to_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    def function(x, ids, w):
        wide = torch.cat([x @ w] * 64, 1)
        shared = wide @ wide.T
        rows, plan = dispatch(x, ids)
        return combine(rows * 2, plan) + shared @ x @ w

    times = {"dispatch_start": 10.0, "combine_start": 4.0, "mm_1": 10.0}
    bounds = OverlapSharedExperts(max_bytes=0)
    check_refuses(overlap_shared_experts_pass, function, times, "raise the peak", caplog, bounds)
