"""Small graphs for the tests of single passes: traced, rewritten, run before and after."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from moe_ops import kernels
from moe_ops.kernels.kernel import Kernel
from moe_ops.testing import assert_equal, make_ids
from tests.fx_passes.compiled import ops_of

OPS = torch.ops.moe_ops
Pass = Callable[[Graph], int]

TOKENS, TOP_K, EXPERTS, HIDDEN, FFN = 7, 2, 4, 8, 6


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Arguments of the functions that tests trace, by name."""
    ids = make_ids(TOKENS, TOP_K, EXPERTS, none_fraction=0.2)
    slots, row_of_slot, offsets = OPS.sort_slots(ids, EXPERTS, None, None)
    num_rows = slots.shape[0]
    shapes = {
        "x": (TOKENS, HIDDEN),
        "g": (TOKENS, HIDDEN),
        "rows": (num_rows, HIDDEN),
        "h": (num_rows, 2 * FFN),
        "grad_h": (num_rows, 2 * FFN),
        "a": (num_rows, FFN),
        "w13": (EXPERTS, 2 * FFN, HIDDEN),
        "w2t": (EXPERTS, FFN, HIDDEN),
    }
    floats = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    weights = {"row_weights": torch.rand(num_rows), "weights": torch.rand(TOKENS, TOP_K)}
    maps = {"slots": slots, "row_of_slot": row_of_slot, "offsets": offsets}
    return floats | weights | maps


def parameters_of(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


def trace(function: Callable[..., Any], dtype: torch.dtype = torch.float32, mode: str = "fake"):
    """The graph of `function`, whose parameters are names of `tensors`, and its arguments."""
    torch.manual_seed(0)
    named = tensors(dtype)
    args = [named[name] for name in parameters_of(function)]
    return make_fx(function, tracing_mode=mode)(*args), args


def check_rewrites(
    run: Pass,
    function: Callable[..., Any],
    expected_ops: list[str],
    count: int = 1,
    dtype: torch.dtype = torch.float32,
    mode: str = "fake",
) -> GraphModule:
    """`run` rewrites `count` matches of the traced function to `expected_ops`, leaves every result
    the same and nothing to do for a second run.
    """
    module, args = trace(function, dtype, mode)
    expected = pytree.tree_leaves(module(*args))
    assert run(module.graph) == count
    assert ops_of(module.graph) == expected_ops
    module.graph.lint()
    module.recompile()
    for index, (found, wanted) in enumerate(
        zip(pytree.tree_leaves(module(*args)), expected, strict=True)
    ):
        assert_equal(f"result {index}", found, wanted)
    check_values(module.graph)
    before = copy.deepcopy(module.graph)
    assert run(module.graph) == 0
    assert str(module.graph) == str(before)
    return module


def check_values(graph: Graph) -> None:
    """meta["val"] of each of our nodes is what its fake kernel says."""
    for node in graph.nodes:
        if not str(node.target).startswith("moe_ops."):
            continue
        args = map_arg(node.args, lambda arg: arg.meta["val"])
        kwargs = map_arg(node.kwargs, lambda arg: arg.meta["val"])
        values, wanted = pytree.tree_leaves(node.meta["val"]), node.target(*args, **kwargs)
        for value, fake in zip(values, pytree.tree_leaves(wanted), strict=True):
            found = value.shape, value.stride(), value.dtype, value.device
            assert found == (fake.shape, fake.stride(), fake.dtype, fake.device), node.format_node()


def check_refuses(
    run: Pass,
    function: Callable[..., Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
    **how: Any,
) -> None:
    """`run` leaves the traced function alone and logs why."""
    module, _ = trace(function, **how)
    check_leaves_alone(run, module, reason, caplog)


def check_leaves_alone(
    run: Pass, module: GraphModule, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = str(module.graph)
    with caplog.at_level(logging.DEBUG, logger="fx_passes"):
        assert run(module.graph) == 0
    assert str(module.graph) == before
    assert reason in caplog.text


def trace_on_cuda(function: Callable[..., Any], dtype: torch.dtype = torch.float32) -> GraphModule:
    """The graph of `function` on a GPU that need not be there."""
    named = tensors(dtype)
    chosen = [named[name] for name in parameters_of(function)]
    with FakeTensorMode():
        args = [torch.empty(t.shape, dtype=t.dtype, device="cuda") for t in chosen]
        return make_fx(function)(*args)


def install_kernels(monkeypatch: pytest.MonkeyPatch, *ops: str) -> None:
    """As if these operators, and no others, had a kernel on CUDA."""

    def run(*args: Any) -> Any:
        raise AssertionError("passes run no kernel")

    table = {op: [Kernel("made up", lambda *args: True, run)] for op in ops}
    monkeypatch.setattr(kernels, "_kernels", lambda: table)
