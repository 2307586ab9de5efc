"""Fusing the activation with the matmuls beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from fx_passes.fuse_swiglu import find_backward, find_forward, recompute_activation_pass
from fx_passes.fuse_swiglu import fuse_swiglu_pass as fuse

from .graphs import (
    OPS,
    check_leaves_alone,
    check_refuses,
    check_rewrites,
    install_kernels,
    trace,
    trace_on_cuda,
)

FORWARD, BACKWARD = "grouped_mm_swiglu", "grouped_mm_swiglu_backward"
WITH_OUTPUT = "swiglu_backward_with_output"
CLAMPED = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}


def forward(rows, w13, row_weights, offsets):
    h = OPS.grouped_mm(rows, w13, offsets)
    return h, OPS.swiglu(h, row_weights, offsets)


def clamped(rows, w13, offsets):
    h = OPS.grouped_mm(rows, w13, offsets)
    return h, OPS.swiglu(h, None, offsets, **CLAMPED)


def late_row_weights(rows, w13, row_weights, offsets):
    """What stands between h and swiglu may move."""
    h = OPS.grouped_mm(rows, w13, offsets)
    other = h.relu()
    return OPS.swiglu(h, row_weights * 2, offsets, "gelu"), other


def backward(rows, w2t, h, row_weights, offsets):
    grad = OPS.grouped_mm(rows, w2t, offsets)
    a = OPS.swiglu(h, row_weights, offsets)
    return *OPS.swiglu_backward(grad, h, row_weights, offsets), a


def backward_without_row_weights(rows, w2t, h, offsets):
    """a is read before the gradient is known."""
    a = OPS.swiglu(h, None, offsets, **CLAMPED)
    wgrad = OPS.grouped_mm_wgrad(rows, a, offsets)
    grad = OPS.grouped_mm(rows, w2t, offsets)
    grad_h, _ = OPS.swiglu_backward(grad, h, None, offsets, "silu", 7.0, 1.702, 1.0)
    return wgrad, grad_h


def checkpointed(rows, w13, w2t, offsets):
    """The forward is recomputed in the backward's graph."""
    h = OPS.grouped_mm(rows, w13, offsets)
    a = OPS.swiglu(h, None, offsets)
    grad = OPS.grouped_mm(rows, w2t, offsets)
    return *OPS.swiglu_backward(grad, h, None, offsets), OPS.grouped_mm_wgrad(rows, a, offsets)


def backward_of_shared_gradient(rows, w2t, h, offsets):
    grad = OPS.grouped_mm(rows, w2t, offsets)
    a = OPS.swiglu(h, None, offsets)
    return *OPS.swiglu_backward(grad, h, None, offsets), a, grad.sum()


def backward_of_other_gradient(a, h, row_weights, offsets):
    grad_h, grad_row_weights = OPS.swiglu_backward(a, h, row_weights, offsets)
    return grad_h, grad_row_weights, OPS.swiglu(h, row_weights, offsets)


REWRITES: dict[Any, list[str]] = {
    forward: [FORWARD],
    clamped: [FORWARD],
    late_row_weights: [FORWARD],
    backward: [BACKWARD],
    backward_without_row_weights: [BACKWARD, "grouped_mm_wgrad"],
    checkpointed: ["grouped_mm", BACKWARD, "grouped_mm_wgrad"],
    backward_of_shared_gradient: ["grouped_mm", WITH_OUTPUT],
    backward_of_other_gradient: [WITH_OUTPUT],
}


@pytest.mark.parametrize("function", REWRITES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_fuse_swiglu_rewrites(function: Any, dtype: torch.dtype, mode: str) -> None:
    check_rewrites(fuse, function, REWRITES[function], dtype=dtype, mode=mode)


def test_fuse_swiglu_finds() -> None:
    graph = trace(checkpointed)[0].graph
    assert len(find_forward(graph)) == 1
    (match,) = find_backward(graph, with_matmul=True)
    assert match.matmul is not None and match.swiglu is not None
    assert find_backward(graph, with_matmul=False)[0].matmul is None


def test_fuse_swiglu_keeps_h_only_for_its_readers() -> None:
    def without_h(rows, w13, offsets):
        return OPS.swiglu(OPS.grouped_mm(rows, w13, offsets), None, offsets)

    for function, keep_h in ((without_h, False), (forward, True)):
        graph = check_rewrites(fuse, function, [FORWARD]).graph
        (node,) = graph.find_nodes(op="call_function", target=OPS.grouped_mm_swiglu.default)
        assert node.args[-1] is keep_h


def biased(rows, w13, offsets, h):
    bias = h[:4, :]
    h = OPS.grouped_bias(OPS.grouped_mm(rows, w13, offsets), bias, None, offsets)
    return OPS.swiglu(h, None, offsets)


def other_offsets(rows, w13, offsets):
    h = OPS.grouped_mm(rows, w13, offsets)
    return OPS.swiglu(h, None, offsets.clone())


def two_activations(rows, w13, row_weights, offsets):
    h = OPS.grouped_mm(rows, w13, offsets)
    return OPS.swiglu(h, None, offsets), OPS.swiglu(h, row_weights, offsets)


def row_weights_of_h(rows, w13, offsets):
    h = OPS.grouped_mm(rows, w13, offsets)
    return OPS.swiglu(h, h.sum(1), offsets)


def other_row_weights(a, h, row_weights, offsets):
    grads = OPS.swiglu_backward(a, h, row_weights, offsets)
    return *grads, OPS.swiglu(h, None, offsets)


def other_options(a, h, offsets):
    return *OPS.swiglu_backward(a, h, None, offsets), OPS.swiglu(h, None, offsets, "gelu")


def no_activation(rows, w2t, h, offsets):
    return OPS.swiglu_backward(OPS.grouped_mm(rows, w2t, offsets), h, None, offsets)


def gradient_of_activation(h, offsets):
    a = OPS.swiglu(h, None, offsets)
    return OPS.swiglu_backward(a * 2, h, None, offsets)


REFUSALS = {
    biased: "h comes from grouped_bias",
    other_offsets: "the offsets differ",
    two_activations: "h has two activations",
    row_weights_of_h: "the row weights depend on h",
    other_row_weights: "row weights, offsets or options differ",
    other_options: "row weights, offsets or options differ",
    no_activation: "the activation is not computed again here",
    gradient_of_activation: "the gradient depends on the activation",
}


@pytest.mark.parametrize("function", REFUSALS, ids=lambda function: function.__name__)
def test_fuse_swiglu_refuses(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    check_refuses(fuse, function, REFUSALS[function], caplog)


def dgrad_by_other_offsets(rows, w2t, h, offsets):
    grad = OPS.grouped_mm(rows, w2t, offsets.clone())
    return *OPS.swiglu_backward(grad, h, None, offsets), OPS.swiglu(h, None, offsets)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (backward_of_shared_gradient, "the gradient has another user"),
        (backward_of_other_gradient, "the gradient comes from a_1"),
        (dgrad_by_other_offsets, "the offsets differ"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fuse_swiglu_refuses_a_matmul(
    function: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The other two still fuse."""
    caplog.set_level("DEBUG", logger="fx_passes")
    assert fuse(trace(function)[0].graph) == 1
    assert reason in caplog.text


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (forward, "no kernel fuses grouped_mm and swiglu"),
        (backward, "no kernel of grouped_mm_swiglu_backward"),
        (backward, "no kernel of swiglu_backward_with_output"),
    ],
)
def test_fuse_swiglu_refuses_on_cuda_without_kernels(
    function: Any,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    install_kernels(monkeypatch)
    check_leaves_alone(fuse, trace_on_cuda(function), reason, caplog)


@pytest.mark.parametrize("op", [BACKWARD, WITH_OUTPUT])
def test_fuse_swiglu_takes_the_kernel_that_there_is(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_kernels(monkeypatch, op)
    graph = trace_on_cuda(backward).graph
    assert fuse(graph) == 1
    assert any(str(node.target) == f"moe_ops.{op}.default" for node in graph.nodes)


def step(rows, w13, w2t, a, h, offsets):
    """Forward and backward, as in the joint graph."""
    h = OPS.grouped_mm(rows, w13, offsets)
    a = OPS.swiglu(h, None, offsets)
    z = OPS.grouped_mm(a, w2t.mT, offsets)
    grad = OPS.grouped_mm(z, w2t, offsets)
    return OPS.grouped_mm_wgrad(z, a, offsets), *OPS.swiglu_backward(grad, h, None, offsets)


def frozen_fc1(h, w2t, offsets, rows):
    """Only a is needed: it is smaller than h."""
    a = OPS.swiglu(h, None, offsets)
    return OPS.grouped_mm(a, w2t.mT, offsets), OPS.grouped_mm_wgrad(rows, a, offsets)


def returned(rows, w13, offsets, grad_h, h):
    h = OPS.grouped_mm(rows, w13, offsets)
    a = OPS.swiglu(h, None, offsets)
    return a, OPS.grouped_mm_wgrad(grad_h, a, offsets), OPS.swiglu_backward(a, h, None, offsets)


def squared_relu(h, w2t, offsets, rows, a, row_weights):
    h = OPS.grouped_mm(rows, w2t, offsets)
    a = (h.relu().square() * row_weights[:, None]).to(h.dtype)
    return OPS.grouped_mm(a, w2t.mT, offsets), OPS.grouped_mm_wgrad(rows, a, offsets)


def product(h, w2t, offsets, rows, a):
    """Another large tensor goes into a."""
    a = OPS.grouped_mm(rows, w2t, offsets) * a
    return OPS.grouped_mm(a, w2t.mT, offsets), OPS.grouped_mm_wgrad(rows, a, offsets)


@pytest.mark.parametrize(
    ("function", "count"),
    [(step, 1), (frozen_fc1, 0), (returned, 0), (squared_relu, 1), (product, 0)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_recompute_activation_marks(function: Any, count: int) -> None:
    graph = trace(function)[0].graph
    assert recompute_activation_pass(graph) == count
    marked = [n for n in graph.nodes if n.meta.get("recompute") == CheckpointPolicy.MUST_RECOMPUTE]
    assert len(marked) == count
    assert recompute_activation_pass(graph) == 0


def test_recompute_activation_leaves_the_users_policy() -> None:
    graph = trace(step)[0].graph
    (a,) = graph.find_nodes(op="call_function", target=OPS.swiglu.default)
    a.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert recompute_activation_pass(graph) == 0
    assert a.meta["recompute"] == CheckpointPolicy.MUST_SAVE
