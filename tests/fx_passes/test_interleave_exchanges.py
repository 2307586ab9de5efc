"""Exchanges that need not wait for each other take turns."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import moe_ops
from fx_passes.graph import is_call
from fx_passes.interleave_exchanges import find_turns, interleave_exchanges_pass
from fx_passes.windows import STARTS
from moe_ops.comm import in_flight
from moe_ops.testing import assert_close, assert_equal
from tests.nn.layers import capacity_fields
from tests.ranks import run_on_ranks

from .compiled import Backend
from .test_pin_order import AUX, Stack, make_stack, step
from .windowed import combine, dispatch, kernels, trace


def batch(x, ids, w):
    """Two layers: a matmul, experts, a matmul."""
    for _ in range(2):
        rows, plan = dispatch(x @ w, ids)
        x = combine(rows @ w, plan)
    return x


def two_batches(x, ids, w):
    return batch(x, ids, w), batch(x * 2, ids, w)


def test_batches_take_turns() -> None:
    """Every wait but the first has the other batch's matmul before it, since its start."""
    module, args = trace(two_batches)
    results = module(*args)
    assert interleave_exchanges_pass(module.graph) == 1
    module.graph.lint()
    module.recompile()
    layer = [
        *("mm dispatch_start", "mm dispatch_start"),
        *("dispatch_wait mm combine_start", "dispatch_wait mm combine_start"),
    ]
    later = [f"combine_wait {layer[0]}", f"combine_wait {layer[1]}", *layer[2:]]
    expected = " ".join((*layer, *later, "combine_wait combine_wait"))
    assert kernels_without_numbers(module.graph) == expected
    for number, (found, wanted) in enumerate(zip(module(*args), results, strict=True)):
        assert_equal(f"result {number}", found, wanted)
    assert in_flight.num_in_flight() == 0
    before = str(copy.deepcopy(module.graph))
    assert interleave_exchanges_pass(module.graph) == 0
    assert str(module.graph) == before


def kernels_without_numbers(graph: torch.fx.Graph, plans: bool = False) -> str:
    names = kernels(graph, plans).split()
    return " ".join("mm" if name.startswith("mm") else name for name in names)


def attending(x, ids, w, dropout):
    """Two layers behind an attention each."""
    for _ in range(2):
        q = (x @ w)[None, None]
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=dropout)[0, 0]
        rows, plan = dispatch(y, ids)
        x = combine(rows, plan)
    return x


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, "dDcCdDcC"), (0.1, "dcdDcCDC")])
def test_batches_with_attention(dropout: float, expected: str) -> None:
    """Draws of the first batch come before those of the second, whose letters are great."""

    def function(x, ids, w):
        return attending(x, ids, w, dropout), attending(x * 2, ids, w, dropout)

    module, args = trace(function)
    starts = [node for node in module.graph.nodes if is_call(node, *STARTS)]
    letters = dict(zip(starts, "dcdcDCDC", strict=True))
    torch.manual_seed(1)
    results = module(*args)
    assert interleave_exchanges_pass(module.graph) == 1
    assert "".join(letters[node] for node in module.graph.nodes if node in letters) == expected
    module.recompile()
    torch.manual_seed(1)
    for number, (found, wanted) in enumerate(zip(module(*args), results, strict=True)):
        assert_equal(f"result {number}", found, wanted)


def layer(x, scores):
    rows, plan = dispatch(x, scores[:, :4].topk(2)[1].int())
    return combine(rows * 2, plan)


def test_plans_of_chunks_come_before_the_first_exchange() -> None:
    """One matmul gives the scores of all tokens."""

    def function(x, ids, w):
        return [layer(*part) for part in zip(x.split([4, 3]), (x @ w).split([4, 3]))]

    assert_order(
        function,
        "mm exchange_plan exchange_plan dispatch_start dispatch_start dispatch_wait combine_start "
        "dispatch_wait combine_start combine_wait combine_wait",
    )


def test_plans_come_first_where_exchanges_are_in_turn() -> None:
    def function(x, ids, w):
        rows, plan = dispatch(x, ids)
        others, other_plan = dispatch(x * 2, ids)
        return combine(rows, plan), combine(others, other_plan)

    assert_order(
        function,
        "exchange_plan exchange_plan dispatch_start dispatch_start dispatch_wait combine_start "
        "dispatch_wait combine_start combine_wait combine_wait",
    )


def test_plans_of_batches_come_behind_their_matmul() -> None:
    def function(x, ids, w):
        return [layer(part, part @ w) for part in x.split([4, 3])]

    assert_order(
        function,
        "mm exchange_plan dispatch_start mm exchange_plan dispatch_start dispatch_wait "
        "combine_start dispatch_wait combine_start combine_wait combine_wait",
    )


def assert_order(function: Callable[..., Any], expected: str) -> None:
    """Of all kernels, once the exchanges of `function` have taken turns; its results stay."""
    module, args = trace(function)
    results = module(*args)
    assert interleave_exchanges_pass(module.graph) == 1
    module.graph.lint()
    module.recompile()
    assert kernels_without_numbers(module.graph, plans=True) == expected
    for number, (found, wanted) in enumerate(zip(module(*args), results, strict=True)):
        assert_equal(f"result {number}", found, wanted)
    assert interleave_exchanges_pass(module.graph) == 0


def with_a_gradient(x, ids, w):
    """The matmul `mm`, which no exchange needs, comes after the first exchange, and stays there."""
    rows, plan = dispatch(x, ids)
    gradient = rows.t() @ rows
    y = combine(rows * 2, plan)
    rows, plan = dispatch(x * 2, ids)
    return y, combine(rows * 3, plan), gradient


def test_the_rest_stays_behind_the_exchange_it_followed() -> None:
    module, _ = trace(with_a_gradient)
    assert interleave_exchanges_pass(module.graph) == 1
    assert kernels_without_numbers(module.graph) == (
        "dispatch_start dispatch_start dispatch_wait combine_start mm dispatch_wait combine_start "
        "combine_wait combine_wait"
    )


def test_what_is_written_or_drawn_keeps_its_order() -> None:
    def function(x, ids, w):
        counter = w.clone()
        results = []
        for number in range(2):
            rows, plan = dispatch(torch.rand_like(x), ids)
            changed = counter.add_(number + rows.sum())
            results += [combine(rows * counter.sum(), plan), torch.rand_like(x), changed * 2]
        return results

    module, args = trace(function)
    torch.manual_seed(1)
    results = module(*args)
    assert interleave_exchanges_pass(module.graph) == 1
    module.recompile()
    torch.manual_seed(1)
    for number, (found, wanted) in enumerate(zip(module(*args), results, strict=True)):
        assert_equal(f"result {number}", found, wanted)


def test_those_who_read_what_is_written_later_need_not_wait_for_each_other() -> None:
    def function(x, ids, w):
        scale = w.sum() + torch.zeros(())
        results = []
        for _ in range(2):
            rows, plan = dispatch(x * scale, ids)
            results.append(combine(rows * scale, plan))
        return *results, scale.add_(1)

    module, args = trace(function)
    results = module(*args)
    assert interleave_exchanges_pass(module.graph) == 1
    module.recompile()
    for number, (found, wanted) in enumerate(zip(module(*args), results, strict=True)):
        assert_equal(f"result {number}", found, wanted)


def test_refuses_exchanges_in_turn(caplog: pytest.LogCaptureFixture) -> None:
    def function(x, ids, w):
        y = layer(x, x @ w)
        return layer(y, y @ w)

    module, _ = trace(function)
    before = str(module.graph)
    with caplog.at_level(logging.DEBUG, logger="fx_passes"):
        assert interleave_exchanges_pass(module.graph) == 0
    assert str(module.graph) == before
    assert "left 4 exchanges alone: the exchanges are in turn" in caplog.text


def test_a_plan_that_no_exchange_needs_moves_nothing() -> None:
    def function(x, ids, w):
        rows, plan = dispatch(x, ids)
        y = combine(rows, plan)
        other = moe_ops.exchange_plan(ids, 4, group=None)
        return y, other.offsets_L

    module, _ = trace(function)
    before = str(module.graph)
    assert interleave_exchanges_pass(module.graph) == 0
    assert str(module.graph) == before


def test_finds_nothing_without_exchanges() -> None:
    module, _ = trace(lambda x, ids, w: x @ w)
    assert find_turns(module.graph) == []


class MicroBatches(nn.Module):
    """Two halves of the tokens, one after the other."""

    def __init__(self, model: Stack) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.model(half) for half in x.chunk(2)])


def _on_rank(rank: int, fields: dict[str, Any]) -> list[str]:
    model = MicroBatches(make_stack(dist.group.WORLD, 1, AUX, torch.float64, **fields))
    backend, num_tokens = Backend(), 12 + 4 * rank
    found = step(model, backend.compile(model, dynamic=False), num_tokens)
    for name, value in step(model, model, num_tokens).items():
        assert_close(name, found[name], value)
    return [kernels(graph) for graph in (*backend.forward, *backend.backward)]


@pytest.mark.dist
@pytest.mark.parametrize("fields", [{}, capacity_fields(16)], ids=["exact", "capacity"])
def test_micro_batches_on_ranks(fields: dict[str, Any]) -> None:
    for names in run_on_ranks(2, _on_rank, fields, timeout_s=300):
        for kernels_of_graph in names:
            exchanges = [name for name in kernels_of_graph.split() if name.endswith("_start")]
            assert exchanges == [*2 * ["dispatch_start"], *2 * ["combine_start"]]
