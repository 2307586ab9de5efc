"""Triton's grouped_mm and grouped_mm_wgrad compiled: real sizes, no sync, no int32 overflow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moe_ops.testing import assert_close, assert_equal

pytest.importorskip("triton", reason="optional package triton is not installed")

from moe_ops.kernels.grouped_mm_triton import grouped_mm
from moe_ops.kernels.grouped_mm_wgrad_triton import grouped_mm_wgrad
from tests.kernels.test_grouped_mm_triton import (
    DTYPES,
    GROUPED_MM_WGRAD,
    check_grouped_mm,
    check_wgrad,
    offsets_of,
    rows_of,
    values,
)

pytestmark = pytest.mark.gpu

ROUTINGS = {
    "uneven": [0, 3000, 1, 95, 0, 128, 700, 129],
    "one expert": [0, 0, 4096],
    "short": [16] * 128,
    "decode": [1, 0, 2, 0, 0, 1] * 10,
    "even": [512] * 8,
}
CASES = pytest.mark.parametrize(
    ("routing", "widths"),
    [
        *(("uneven", (o, i)) for o, i in [(72, 1404), (1404, 72), (1408, 512), (257, 131)]),
        *((routing, (2880, 384)) for routing in ROUTINGS),
    ],
    ids=str,
)


def expected_rows(a_CI: torch.Tensor, w_OI: torch.Tensor) -> torch.Tensor:
    return a_CI.double() @ w_OI.double().mT


@CASES
@DTYPES
def test_grouped_mm_matches_reference_on_gpu(routing, widths, dtype) -> None:
    counts = ROUTINGS[routing]
    a_CI, offsets_L = rows_of(counts, widths[1], dtype), offsets_of(counts)
    w_LOI = values(len(counts), *widths, dtype=dtype, seed=1)
    check_grouped_mm(a_CI, w_LOI, offsets_L)
    check_grouped_mm(a_CI, w_LOI.mT.contiguous().mT, offsets_L)


@CASES
@DTYPES
def test_grouped_mm_wgrad_matches_reference_on_gpu(routing, widths, dtype) -> None:
    counts, (width_o, width_i) = ROUTINGS[routing], widths
    g_CO, a_CI = rows_of(counts, width_o, dtype), rows_of(counts, width_i, dtype, seed=1)
    check_wgrad(g_CO, a_CI, offsets_of(counts))


@DTYPES
def test_grouped_mm_wgrad_adds_to_out_on_gpu(dtype) -> None:
    counts = ROUTINGS["uneven"]
    g_CO, a_CI = rows_of(counts, 1404, dtype), rows_of(counts, 520, dtype, seed=1)
    before = values(8, 1404, 520, seed=2)
    out = grouped_mm_wgrad(g_CO, a_CI, offsets_of(counts), out=before.clone())
    wgrad = GROUPED_MM_WGRAD(g_CO.double(), a_CI.double(), offsets_of(counts))
    assert_close("out", out, before.double() + wgrad, scale=10 * wgrad.abs().max().item())


def test_grouped_mm_follows_tf32() -> None:
    counts, matmul = ROUTINGS["even"], torch.backends.cuda.matmul
    a_CI, w_LOI, offsets_L = rows_of(counts, 512), values(8, 256, 512), offsets_of(counts)
    exact, before = grouped_mm(a_CI, w_LOI, offsets_L), matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        rounded = [grouped_mm(a_CI, w, offsets_L) for w in (w_LOI, w_LOI.mT.contiguous().mT)]
        rounded.append(grouped_mm_wgrad(exact, a_CI, offsets_L))
    finally:
        matmul.fp32_precision = before
    exact_wgrad = grouped_mm_wgrad(exact, a_CI, offsets_L)
    for found, wanted in zip(rounded, (exact, exact, exact_wgrad)):
        assert not torch.equal(found, wanted)
        assert_close("rounded", found, wanted.double(), scale=400 * wanted.abs().max().item())


@DTYPES
def test_grouped_mm_is_reproducible(dtype) -> None:
    counts = ROUTINGS["uneven"]
    offsets_L, a_CI = offsets_of(counts), rows_of(counts, 1408, dtype)
    w_LOI, g_CO = values(8, 520, 1408, dtype=dtype), rows_of(counts, 520, dtype)
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: grouped_mm(a_CI, w_LOI, offsets_L),
        lambda: grouped_mm(g_CO, w_LOI.mT, offsets_L),
        lambda: grouped_mm_wgrad(g_CO, a_CI, offsets_L),
    ]
    for call in calls:
        first = call()
        for _ in range(10):
            assert_equal("second run", call(), first)


@DTYPES
def test_grouped_mm_replays_in_a_cuda_graph(dtype) -> None:
    """With other offsets than it was captured with; nor does it ever wait."""
    counts = ROUTINGS["uneven"]
    rows, offsets_L = sum(counts), offsets_of(counts)
    a_CI, g_CO = rows_of(counts, 192, dtype), rows_of(counts, 136, dtype)
    w_LOI = values(8, 136, 192, dtype=dtype)

    def step() -> list[torch.Tensor]:
        return [
            grouped_mm(a_CI, w_LOI, offsets_L),
            grouped_mm(g_CO, w_LOI.mT, offsets_L),
            grouped_mm_wgrad(g_CO, a_CI, offsets_L),
        ]

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for other in ([rows, 0, 0, 0, 0, 0, 0, 0], [0] * 8, [7, 0, 300, 0, 1, 500, 64, 65]):
        offsets_L.copy_(offsets_of(other))
        graph.replay()
        for found, wanted in zip(results, step(), strict=True):
            assert_equal("replayed", found, wanted)


@pytest.mark.parametrize("widths", [(64, 7168), (7168, 64)], ids=str)
def test_grouped_mm_handles_over_2_to_the_31_elements(widths) -> None:
    width_o, width_i = widths
    counts = [299_000, 0, 800]
    a_CI = torch.randn(300_000, width_i, device="cuda", dtype=torch.bfloat16)
    w_LOI = values(3, width_o, width_i, dtype=torch.bfloat16)
    c_CO = grouped_mm(a_CI, w_LOI, offsets_of(counts))
    for rows, expert in ((slice(290_000, 290_300), 0), (slice(299_000, 299_800), 2)):
        assert_close(f"c_CO[{rows}]", c_CO[rows], expected_rows(a_CI[rows], w_LOI[expert]))
    assert not c_CO[299_800:].any()
    wgrad = grouped_mm_wgrad(c_CO, a_CI, offsets_of(counts))
    last = slice(299_000, 299_800)
    assert_close("w_LOI[2]", wgrad[2], expected_rows(c_CO[last].mT, a_CI[last].mT))


def test_grouped_mm_handles_weights_of_over_2_to_the_31_elements() -> None:
    w_LOI = torch.randn(80, 7168, 4096, device="cuda", dtype=torch.bfloat16)
    counts = [0] * 79 + [130]
    a_CI, g_CO = rows_of(counts, 4096, torch.bfloat16), rows_of(counts, 7168, torch.bfloat16)
    c_CO = grouped_mm(a_CI, w_LOI, offsets_of(counts))
    assert_close("c_CO", c_CO[:130], expected_rows(a_CI[:130], w_LOI[79]))
    wgrad = grouped_mm_wgrad(g_CO, a_CI, offsets_of(counts))
    assert_close("w_LOI[79]", wgrad[79], expected_rows(g_CO[:130].mT, a_CI[:130].mT))
    assert not wgrad[:79].any()
