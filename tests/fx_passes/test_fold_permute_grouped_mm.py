"""Folding a permute into the grouped matmuls that read its rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from fx_passes.fold_permute_grouped_mm import find_permutes, recompute_rows_pass
from fx_passes.fold_permute_grouped_mm import fold_permute_grouped_mm_pass as fold

from .graphs import (
    OPS,
    check_leaves_alone,
    check_refuses,
    check_rewrites,
    install_kernels,
    trace,
    trace_on_cuda,
)

GATHER, GATHER_WGRAD = "gather_grouped_mm", "gather_grouped_mm_wgrad"
OPTIONS = ("silu", None, 1.0, 0.0)


def fc1(x, slots, row_of_slot, w13, offsets):
    return OPS.grouped_mm(OPS.permute(x, None, slots, row_of_slot), w13, offsets)


def wgrad_of_tokens(x, grad_h, slots, row_of_slot, offsets):
    rows = OPS.permute(x, None, slots, row_of_slot)
    return OPS.grouped_mm_wgrad(grad_h, rows, offsets)


def dgrad_and_wgrad(g, a, slots, row_of_slot, w2t, offsets):
    rows = OPS.permute(g, None, slots, row_of_slot)
    return OPS.grouped_mm(rows, w2t, offsets), OPS.grouped_mm_wgrad(rows, a, offsets)


def wgrad_of_both(x, g, slots, row_of_slot, offsets):
    g_rows = OPS.permute(g, None, slots, row_of_slot)
    x_rows = OPS.permute(x, None, slots, row_of_slot)
    return OPS.grouped_mm_wgrad(g_rows, x_rows, offsets)


def fused_forward(x, slots, row_of_slot, w13, row_weights, offsets):
    rows = OPS.permute(x, None, slots, row_of_slot)
    return OPS.grouped_mm_swiglu(rows, None, 1, w13, row_weights, offsets, *OPTIONS)


def fused_backward(g, a, h, slots, row_of_slot, w2t, offsets):
    rows = OPS.permute(g, None, slots, row_of_slot)
    wgrad = OPS.grouped_mm_wgrad(rows, a, offsets)
    fused = OPS.grouped_mm_swiglu_backward(rows, None, 1, w2t, h, None, offsets, *OPTIONS)
    return wgrad, *fused


REWRITES: dict[Any, tuple[list[str], int]] = {
    fc1: ([GATHER], 1),
    wgrad_of_tokens: ([GATHER_WGRAD], 1),
    dgrad_and_wgrad: ([GATHER, GATHER_WGRAD], 1),
    wgrad_of_both: ([GATHER_WGRAD], 2),
    fused_forward: (["grouped_mm_swiglu"], 1),
    fused_backward: ([GATHER_WGRAD, "grouped_mm_swiglu_backward"], 1),
}


@pytest.mark.parametrize("function", REWRITES, ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fold_rewrites(function: Any, dtype: torch.dtype) -> None:
    ops, count = REWRITES[function]
    module, _ = trace(function)
    assert len(find_permutes(module.graph)) == count
    check_rewrites(fold, function, ops, count, dtype)


def test_fold_reads_the_token_by_its_slot() -> None:
    graph = check_rewrites(fold, fc1, [GATHER]).graph
    (node,) = graph.find_nodes(op="call_function", target=OPS.gather_grouped_mm.default)
    x, slots, row_of_slot, w13, offsets = graph.find_nodes(op="placeholder")
    assert node.args == (x, slots, 2, w13, offsets)
    assert not row_of_slot.users


def with_weights(x, weights, slots, row_of_slot, w13, offsets):
    return OPS.grouped_mm(OPS.permute(x, weights, slots, row_of_slot), w13, offsets)


def with_another_user(x, slots, row_of_slot, w13, offsets):
    rows = OPS.permute(x, None, slots, row_of_slot)
    return OPS.grouped_mm(rows, w13, offsets), rows.relu()


def returned(x, slots, row_of_slot, w13, offsets):
    rows = OPS.permute(x, None, slots, row_of_slot)
    return OPS.grouped_mm(rows, w13, offsets), rows


def squared(x, slots, row_of_slot, w13, offsets):
    rows = OPS.permute(x, None, slots, row_of_slot)
    return OPS.grouped_mm(rows, w13, offsets), OPS.grouped_mm_wgrad(rows, rows, offsets)


REFUSALS = {
    with_weights: "the permute has weights",
    with_another_user: "relu needs the rows",
    returned: "output needs the rows",
    squared: "grouped_mm_wgrad needs the rows",
}


@pytest.mark.parametrize("function", REFUSALS, ids=lambda function: function.__name__)
def test_fold_refuses(function: Any, caplog: pytest.LogCaptureFixture) -> None:
    check_refuses(fold, function, REFUSALS[function], caplog)


def test_fold_refuses_symbolic_top_k(caplog: pytest.LogCaptureFixture) -> None:
    check_refuses(fold, fc1, "top_k must be a number, got s", caplog, mode="symbolic")


def test_fold_leaves_row_weights_alone() -> None:
    def weights_of_rows(weights, slots, row_of_slot):
        maps = slots, row_of_slot.reshape(-1, 1)
        return OPS.permute(weights.reshape(-1, 1), None, *maps).reshape(-1)

    module, _ = trace(weights_of_rows)
    assert find_permutes(module.graph) == []


def test_fold_refuses_on_cuda_without_gathering_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel for one of two users folds neither."""
    install_kernels(monkeypatch, GATHER)
    reason = "no kernel of grouped_mm_wgrad gathers"
    check_leaves_alone(fold, trace_on_cuda(dgrad_and_wgrad), reason, caplog)


def test_fold_rewrites_on_cuda_with_gathering_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    install_kernels(monkeypatch, GATHER, GATHER_WGRAD)
    assert fold(trace_on_cuda(dgrad_and_wgrad).graph) == 1


def step(x, g, slots, row_of_slot, w13, offsets, grad_h):
    """Forward and backward, as in the joint graph."""
    rows = OPS.permute(x, None, slots, row_of_slot)
    h = OPS.grouped_mm(rows, w13, offsets)
    grad_rows = OPS.permute(g, None, slots, row_of_slot)
    grad = OPS.grouped_mm(grad_rows, w13, offsets)
    return h, grad, OPS.grouped_mm_wgrad(grad_h, rows, offsets)


def test_recompute_rows_marks_tokens_that_a_wgrad_reads() -> None:
    module, _ = trace(step)
    assert recompute_rows_pass(module.graph) == 1
    rows, grad_rows = module.graph.find_nodes(op="call_function", target=OPS.permute.default)
    assert rows.meta["recompute"] == CheckpointPolicy.MUST_RECOMPUTE
    assert "recompute" not in grad_rows.meta
    assert recompute_rows_pass(module.graph) == 0


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_recompute_rows_leaves_the_users_policy(policy: CheckpointPolicy) -> None:
    module, _ = trace(step)
    rows, _ = module.graph.find_nodes(op="call_function", target=OPS.permute.default)
    rows.meta["recompute"] = policy
    assert recompute_rows_pass(module.graph) == 0
    assert rows.meta["recompute"] == policy
