"""Gradients of float32 weights without a rounding to 16 bits, and the log of kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fx_passes.lower import find_widened_wgrads
from fx_passes.lower import lower_pass as lower
from moe_ops.testing import assert_close

from .compiled import ops_of
from .graphs import OPS, check_leaves_alone, check_refuses, install_kernels, trace, trace_on_cuda

CAST = torch.ops.prims.convert_element_type.default


def wgrad(rows, a, offsets):
    return CAST(OPS.grouped_mm_wgrad(rows, a, offsets), torch.float32)


def gathered(g, a, slots, offsets):
    return CAST(OPS.gather_grouped_mm_wgrad(g, slots, a, None, 2, offsets), torch.float32)


def cast_last(rows, a, offsets):
    w2 = OPS.grouped_mm_wgrad(rows, a, offsets)
    rest = OPS.grouped_mm_wgrad(a, rows, offsets)
    return CAST(w2, torch.float32), rest


def two_readers(rows, a, offsets):
    w2 = OPS.grouped_mm_wgrad(rows, a, offsets)
    return CAST(w2, torch.float32), w2


def to_float64(rows, a, offsets):
    return CAST(OPS.grouped_mm_wgrad(rows, a, offsets), torch.float64)


@pytest.mark.parametrize(
    ("function", "op"),
    [(wgrad, "grouped_mm_wgrad_f32"), (gathered, "gather_grouped_mm_wgrad")],
    ids=["rows", "gathered"],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lower_rewrites(function: Any, op: str, dtype: torch.dtype) -> None:
    module, args = trace(function, dtype)
    plain = module(*args)
    exact = function(*[a.double() if a.is_floating_point() else a for a in args]).double()
    assert len(find_widened_wgrads(module.graph)) == 1
    assert lower(module.graph) == 1
    assert ops_of(module.graph) == [op]
    module.graph.lint()
    module.recompile()
    result = module(*args)
    assert_close("wgrad", result, exact)
    assert (result - exact).abs().max() < (plain - exact).abs().max()
    assert lower(module.graph) == 0


@pytest.mark.parametrize(
    ("function", "dtype"),
    [(wgrad, torch.float32), (to_float64, torch.bfloat16)],
    ids=["float32", "to_float64"],
)
def test_lower_finds_nothing_to_widen(function: Any, dtype: torch.dtype) -> None:
    assert find_widened_wgrads(trace(function, dtype)[0].graph) == []


def test_lower_keeps_the_place_of_the_wgrad() -> None:
    """Its operands would live on until the cast otherwise."""
    module, _ = trace(cast_last, torch.bfloat16)
    assert lower(module.graph) == 1
    assert ops_of(module.graph) == ["grouped_mm_wgrad_f32", "grouped_mm_wgrad"]


def test_lower_refuses_a_second_reader(caplog: pytest.LogCaptureFixture) -> None:
    reason = "something else reads the 16-bit gradient"
    check_refuses(lower, two_readers, reason, caplog, dtype=torch.bfloat16)


def test_lower_refuses_on_cuda_without_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_kernels(monkeypatch)
    reason = "no kernel of grouped_mm_wgrad returns float32"
    check_leaves_alone(lower, trace_on_cuda(wgrad, torch.bfloat16), reason, caplog)


def test_lower_logs_the_kernel_of_each_plain_operator(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install_kernels(monkeypatch, "grouped_mm_wgrad")
    caplog.set_level("DEBUG", logger="fx_passes")
    assert lower(trace_on_cuda(wgrad).graph) == 0
    assert "grouped_mm_wgrad runs made up" in caplog.text
    assert lower(trace(wgrad, mode="symbolic")[0].graph) == 0
    assert "grouped_mm_wgrad runs reference" in caplog.text
