"""Sizes that nobody knows before the device does."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.fx import Graph
from torch.utils import _pytree as pytree

from fx_passes.expected_sizes import expected_copies, expected_sizes, plan_of
from tests.nn.layers import capacity_fields

from .captured import NUM_TOKENS, capture, capture_layer, fake_ranks, only
from .compiled import make_layer
from .graphs import HIDDEN, OPS


def unknown_sizes(graph: Graph) -> dict[str, tuple[bool, int]]:
    """Of all sizes that are no numbers: whether the graph tells, and what is expected."""
    sizes = expected_sizes(graph)
    leaves = pytree.tree_leaves([node.meta.get("val") for node in graph.nodes])
    shapes = [size for leaf in leaves if isinstance(leaf, torch.Tensor) for size in leaf.shape]
    return {
        str(size): (sizes.knows(size), sizes.number(size))
        for size in shapes
        if isinstance(size, torch.SymInt) and not size.node.has_hint()
    }


COPIES = {2: 96, 4: 112}  # 64 * P * (1 - (1 - 1 / P) ** 2)


@pytest.mark.parametrize("dispatcher", ["flex", "alltoall", "allgather"])
@pytest.mark.parametrize("num_ranks", COPIES)
def test_unknown_sizes_of_a_layer(num_ranks: int, dispatcher: str) -> None:
    copies, rows, gathered = COPIES[num_ranks], 2 * NUM_TOKENS, num_ranks * NUM_TOKENS
    forward, backward = {
        "flex": ({copies, 2 * copies, rows}, {copies, 2 * copies, rows}),
        "alltoall": ({copies, rows}, {rows}),
        "allgather": ({gathered, 2 * gathered},) * 2,
    }[dispatcher]
    with fake_ranks(num_ranks) as group:
        layer = make_layer(torch.float32, group=group, dispatcher=dispatcher)
        x = torch.randn(NUM_TOKENS, HIDDEN, requires_grad=True)
        graphs = capture(layer, x, fuse_permute_all_to_all=False)
    for graph, expected in zip(graphs, (forward, backward), strict=True):
        known, numbers = zip(*unknown_sizes(graph).values())
        assert all(known)
        assert set(numbers) == expected


def test_unknown_sizes_of_the_stock_all_to_all() -> None:
    """Splits are shares of what is sent, rows as many; forward and backward."""

    def exchange(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        send, receive = counts.tolist()
        return all_to_all_single_autograd(x, receive, send, group).exp()

    with fake_ranks(4) as group, torch._dynamo.config.patch(capture_scalar_outputs=True):
        x, counts = torch.randn(NUM_TOKENS, 8, requires_grad=True), torch.full((2, 4), 16)
        for graph in capture(exchange, x, counts):
            known, numbers = zip(*unknown_sizes(graph).values())
            assert all(known) and set(numbers) == {NUM_TOKENS}


def test_size_that_nothing_tells_is_not_zero() -> None:
    def select(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].exp()

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        forward, _ = capture(select, torch.randn(8, requires_grad=True))
    ((known, number),) = set(unknown_sizes(forward).values())
    assert not known and number > 0


@pytest.mark.parametrize("mode", ["exact", "capacity"])
def test_rows_that_were_told(mode: str) -> None:
    fields = capacity_fields(NUM_TOKENS) if mode == "capacity" else {}
    with fake_ranks(2) as group:
        graphs = capture_layer(group, **fields)
    for graph in graphs:
        (told, *_), (found, *_) = (
            [expected_sizes(graph, rows).rows(plan) for plan in map(plan_of, graph.nodes) if plan]
            for rows in (40, None)
        )
        assert (told, found) == (40, 2 * NUM_TOKENS)
        sizes = expected_sizes(graph, 40)
        if mode == "capacity":
            (share,) = set(sizes.shares.values())
            assert share == 40 / (2 * 2 * NUM_TOKENS)
        else:
            assert 40 in sizes.numbers.values()


def test_expected_copies() -> None:
    assert expected_copies(4, 2, 2) == 6, "the docstring's"
    assert expected_copies(4, 2, 1) == 4
    chosen = torch.randint(4, (4096, 4))  # any rank for any choice
    reached = torch.zeros(4096, 4).scatter(1, chosen, 1).sum().item()
    assert reached == pytest.approx(expected_copies(4096, 4, 4), rel=0.02)


def test_sizes_follow_the_graph_and_do_not_keep_it() -> None:
    with fake_ranks(2) as group:
        graph, backward = capture_layer(group)
    sizes = expected_sizes(graph)
    assert expected_sizes(graph) is sizes
    with graph.inserting_before(only(graph, OPS.grouped_mm.default)):
        graph.call_function(torch.add, (1, 1))
    assert expected_sizes(graph) is not sizes
    assert expected_sizes(graph).numbers == sizes.numbers
    kept = weakref.ref(graph)
    del graph, backward
    gc.collect()
    assert kept() is None
