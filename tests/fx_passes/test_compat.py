"""Private functions of PyTorch do the same in every version that is supported."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache, run_and_get_code
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fx_passes.compat import (
    graph_backend,
    inductor_backend,
    is_sum_by_inductor,
    is_wait_with_backward,
    open_fakes,
    pin,
    storage_of,
    unpin,
)
from fx_passes.graph import find_calls

from .captured import fake_ranks
from .compiled import graph_caches

MATMUL = torch.ops.aten.mm.default


def products(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of several outputs `sort` makes two, of which the second is read."""
    order = torch.sort(x)[1]
    return x @ w, w @ w, order * 2


def trace() -> tuple[GraphModule, list[torch.Tensor]]:
    args = [torch.randn(8, 8), torch.randn(8, 8)]
    return make_fx(products, tracing_mode="fake")(*args), args


def pin_first_last(graph: Graph) -> None:
    """The first matmul comes after the second, which comes after the sort."""
    first, second = find_calls(graph, MATMUL)
    (sort,) = find_calls(graph, torch.ops.aten.sort.default)
    second.append(first)
    pin(graph, {first: [second], second: [sort]})
    graph.lint()


def test_pinned_graph_is_unpinned() -> None:
    module, args = trace()
    expected = module(*args)
    pin_first_last(module.graph)
    assert not find_calls(module.graph, MATMUL)
    unpin(module.graph)
    module.graph.lint()
    module.recompile()
    names = [node.name for node in module.graph.nodes if node.op == "call_function"]
    assert [name for name in names if "getitem" not in name] == ["sort", "mm_1", "mm", "mul"]
    for found, wanted in zip(module(*args), expected, strict=True):
        assert torch.equal(found, wanted)


def test_pin_without_anything_changes_nothing() -> None:
    module, _ = trace()
    before = str(module.graph)
    pin(module.graph, {})
    unpin(module.graph)
    assert str(module.graph) == before


CALL = re.compile(r".*(torch\.ops\.aten\.sort\.\w+\(|extern_kernels\.mm\().*")


def calls_in_code(run: Any) -> list[str]:
    """The sort and the matmuls, in the order of the generated code."""
    torch._dynamo.reset()
    args = trace()[1]
    with graph_caches(False):
        compiled = torch.compile(products, options={"post_grad_custom_post_pass": run})
        found, (code,) = run_and_get_code(compiled, *args)
    for value, wanted in zip(found, products(*args), strict=True):
        torch.testing.assert_close(value, wanted)
    return [line for line in code.splitlines() if CALL.match(line)]


@pytest.mark.parametrize("run", [pin_first_last, lambda graph: None], ids=["pinned", "free"])
def test_pinned_order_is_that_of_the_code(run: Any) -> None:
    calls = calls_in_code(run)
    squares = [line.count("arg1_1") == 2 for line in calls]
    assert squares == ([False, True, False] if run is pin_first_last else [False, False, True])
    assert "sort" in calls[0]


def test_sums_by_inductor_are_told_from_the_models() -> None:
    found: list[bool] = []

    def look(graph: Graph) -> None:
        sums = find_calls(graph, torch.ops.aten.addmm.default)
        found.extend(is_sum_by_inductor(node) for node in sums)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x.sin() + x @ w)[:3] @ torch.addmm(x.cos(), x, w)

    torch._dynamo.reset()
    with graph_caches(False):
        torch.compile(function, options={"post_grad_custom_post_pass": look})(*trace()[1])
    assert sorted(found) == [False, True]


@pytest.mark.parametrize("index", [0, 1])
def test_pin_waits_for_a_call_with_several_outputs(index: int) -> None:
    """torch 2.11 waits for none of them unless it is told which."""
    module, _ = trace()
    (sort,) = find_calls(module.graph, torch.ops.aten.sort.default)
    matmul = find_calls(module.graph, MATMUL)[index]
    pin(module.graph, {matmul: [sort]})
    (pinned,) = [node for node in module.graph.nodes if node.name == matmul.name]
    (waited_for,) = pinned.args[0]
    assert isinstance(waited_for.meta["val"], torch.Tensor)
    assert waited_for.args[0] is sort


def sines_become_tangents(graph: Graph) -> None:
    for node in find_calls(graph, torch.ops.aten.sin.default):
        node.target = torch.ops.aten.tan.default


def test_graph_backend_keeps_what_inductor_would_compile() -> None:
    """Options hold in backward, too, and no cache comes between; the plain graph runs."""
    x = torch.randn(4, requires_grad=True)
    options = {"post_grad_custom_post_pass": sines_become_tangents}
    for _ in range(2):
        kept: dict[str, Graph] = {}
        torch._dynamo.reset()
        backend = graph_backend(options, kept.__setitem__)
        step = torch.compile(lambda x: x.cos().sin(), backend=backend)
        y = step(x)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert torch.equal(y, x.cos().sin())
        torch.testing.assert_close(grad, -x.cos().cos() * x.sin())
        assert list(kept) == ["forward", "backward"]
        for graph in kept.values():
            assert find_calls(graph, torch.ops.aten.tan.default)
            assert not find_calls(graph, torch.ops.aten.sin.default)


class Counts(CustomGraphPass):
    """A pass that changes nothing. Its calls are the class's: what an instance holds is a part of
    the caches' keys.
    """

    calls = 0

    def __call__(self, graph: Graph) -> None:
        Counts.calls += 1

    def uuid(self) -> str:
        return "counts"


def test_inductor_backend_compiles_both_graphs_at_once_and_runs_every_pass() -> None:
    """Those before autograd, too, when all is in the caches, which are kept."""
    before = Counts.calls
    options = {"pre_grad_custom_pass": Counts()}
    x = torch.randn(4, requires_grad=True)
    with fresh_cache():
        for number in (1, 2):
            torch._dynamo.reset()
            counters.clear()
            step = torch.compile(lambda x: x.cos().sin(), backend=inductor_backend(options))
            y = step(x)
            assert Counts.calls - before == number
            found = counters["inductor"]
            compiled = found["fxgraph_cache_miss"], found["fxgraph_cache_hit"]
            assert compiled == ((2, 0) if number == 1 else (0, 2)), "forward and backward"
            (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
            torch.testing.assert_close(grad, -x.cos().cos() * x.sin())


def test_open_fakes_have_numbers() -> None:
    with open_fakes():
        mask = torch.zeros(8, dtype=torch.int64)
        assert isinstance(mask.sum().item(), torch.SymInt)
        assert isinstance(mask.nonzero().shape[0], torch.SymInt)


def test_storage_of_views() -> None:
    x = torch.zeros(4)
    assert storage_of(x) == storage_of(x[1:]) != storage_of(x.clone())


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_only_waits_are_waits_with_backward() -> None:
    """Whichever form this version has, no other function with a backward passes for a wait."""
    found: list[tuple[bool, bool]] = []

    def keep(module: GraphModule, inputs: Any) -> Any:
        functions = [n for n in module.graph.nodes if "autograd_function" in str(n.target)]
        found.append((len(functions) > 1, is_wait_with_backward(functions[0])))
        assert not is_wait_with_backward(functions[-1])
        return module.forward

    with fake_ranks(2) as group:

        def exchange(x: torch.Tensor) -> torch.Tensor:
            return Twice.apply(all_to_all_single_autograd(x, [2, 2], [2, 2], group))

        compiled = torch.compile(exchange, backend=keep, fullgraph=True)
        compiled(torch.randn(4, 3, requires_grad=True))
    ((with_backward, is_wait),) = found
    assert with_backward == is_wait
