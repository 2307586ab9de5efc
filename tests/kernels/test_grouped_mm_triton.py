"""Triton's grouped_mm and grouped_mm_wgrad against the references in float64."""

from __future__ import annotations

import pytest
import torch

from moe_ops import _library
from moe_ops.testing import DTYPE_NAMES, assert_close, assert_equal

from . import DEVICE

pytest.importorskip("triton", reason="optional package triton is not installed")

from moe_ops.kernels import grouped_mm_triton as forward
from moe_ops.kernels import grouped_mm_wgrad_triton as backward

GROUPED_MM = _library.OPS["grouped_mm"].reference
GROUPED_MM_WGRAD = _library.OPS["grouped_mm_wgrad"].reference
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=DTYPE_NAMES.get
)
COUNTS = [[2, 0, 3, 1], [1, 127, 128, 129], [1, 3, 200, 0], [0, 0, 90], [0, 0, 0], [33, 30]]
ROUTINGS = pytest.mark.parametrize("counts", COUNTS, ids=str)
WIDTHS = pytest.mark.parametrize("widths", [(40, 72), (1, 7), (7, 1), (130, 18)], ids=str)
TAIL = 3


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int().to(DEVICE)


def rows_of(
    counts: list[int], width: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    """Rows of experts, then a tail of NaN."""
    rows = values(sum(counts) + TAIL, width, dtype=dtype, seed=seed)
    rows[sum(counts) :] = torch.nan
    return rows


def check_grouped_mm(a_CI, w_LOI, offsets_L) -> None:
    c_CO = forward.grouped_mm(a_CI, w_LOI, offsets_L)
    expected = GROUPED_MM(a_CI.double(), w_LOI.double(), offsets_L)
    assert c_CO.dtype == a_CI.dtype and c_CO.is_contiguous()
    assert_close("c_CO", c_CO, expected)


def check_wgrad(g_CO, a_CI, offsets_L) -> None:
    w_LOI = backward.grouped_mm_wgrad(g_CO, a_CI, offsets_L)
    expected = GROUPED_MM_WGRAD(g_CO.double(), a_CI.double(), offsets_L)
    assert w_LOI.dtype == g_CO.dtype and w_LOI.is_contiguous()
    assert_close("w_LOI", w_LOI, expected)


@ROUTINGS
@DTYPES
def test_grouped_mm_matches_reference(counts: list[int], dtype: torch.dtype) -> None:
    w_LOI = values(len(counts), 40, 72, dtype=dtype, seed=1)
    check_grouped_mm(rows_of(counts, 72, dtype), w_LOI, offsets_of(counts))


@ROUTINGS
@DTYPES
def test_grouped_mm_wgrad_matches_reference(counts: list[int], dtype: torch.dtype) -> None:
    g_CO, a_CI = rows_of(counts, 40, dtype), rows_of(counts, 72, dtype, seed=1)
    check_wgrad(g_CO, a_CI, offsets_of(counts))


@WIDTHS
def test_grouped_mm_handles_odd_sizes(widths: tuple[int, int]) -> None:
    counts, (width_o, width_i) = [2, 0, 31, 20], widths
    a_CI, g_CO = rows_of(counts, width_i), rows_of(counts, width_o, seed=2)
    check_grouped_mm(a_CI, values(4, width_o, width_i, seed=1), offsets_of(counts))
    check_wgrad(g_CO, a_CI, offsets_of(counts))


def test_grouped_mm_handles_more_than_one_group_of_tiles() -> None:
    """14 blocks of rows in groups of 8 times 3 blocks of features."""
    counts = [1] * 9 + [40]
    check_grouped_mm(rows_of(counts, 16), values(10, 130, 16, seed=1), offsets_of(counts))


@pytest.mark.parametrize("layout", ["transposed", "slice", "expanded", "no unit stride"])
def test_grouped_mm_handles_strided_weight(layout: str) -> None:
    counts, w_LOI = [2, 0, 70], values(3, 20, 24, seed=1)
    views = {
        "transposed": w_LOI.mT.contiguous().mT,
        "slice": values(3, 40, 30, seed=1)[:, ::2, 3:27],
        "expanded": w_LOI[:1, :, :1].expand(3, 20, 24),
        "no unit stride": values(3, 40, 48, seed=1)[:, ::2, ::2],
    }
    check_grouped_mm(rows_of(counts, 24), views[layout], offsets_of(counts))


@pytest.mark.parametrize("layout", ["transposed", "slice", "expanded"])
def test_grouped_mm_handles_strided_rows(layout: str) -> None:
    counts, rows = [2, 0, 70], rows_of([2, 0, 70], 24)
    views = {
        "transposed": rows.mT.contiguous().mT,
        "slice": rows_of(counts, 30)[:, 3:27],
        "expanded": rows[:1].expand(75, 24),
    }
    check_grouped_mm(views[layout], values(3, 20, 24, seed=1), offsets_of(counts))
    check_wgrad(views[layout], rows_of(counts, 20), offsets_of(counts))
    check_wgrad(rows_of(counts, 20), views[layout], offsets_of(counts))


def test_grouped_mm_handles_no_rows() -> None:
    offsets_L, a_CI, g_CO = offsets_of([0, 0]), values(0, 24), values(0, 20)
    check_grouped_mm(a_CI, values(2, 20, 24), offsets_L)
    check_wgrad(g_CO, a_CI, offsets_L)


@pytest.mark.parametrize("widths", [(0, 6), (8, 0)], ids=str)
def test_grouped_mm_handles_no_features(widths: tuple[int, int]) -> None:
    counts, (width_o, width_i) = [2, 3], widths
    check_grouped_mm(rows_of(counts, width_i), values(2, width_o, width_i), offsets_of(counts))
    check_wgrad(rows_of(counts, width_o), rows_of(counts, width_i), offsets_of(counts))


@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_mm_wgrad_adds_to_out(transposed: bool) -> None:
    """In float32, although the operands are not; nothing is added for an expert without rows."""
    counts, before = [2, 0, 90], values(3, 20, 24)
    g_CO, a_CI = (rows_of(counts, width, torch.bfloat16, seed=width) for width in (20, 24))
    out = before.mT.contiguous().mT if transposed else before.clone()
    found = backward.grouped_mm_wgrad(g_CO, a_CI, offsets_of(counts), out=out)
    assert found is out
    wgrad = GROUPED_MM_WGRAD(g_CO.double(), a_CI.double(), offsets_of(counts))
    assert_close("out", out, before.double() + wgrad)
    assert_equal("out of the empty expert", out[1], before[1])


@DTYPES
@pytest.mark.parametrize("num_rows", [8, 1000, 4096, 262144])
@pytest.mark.parametrize("widths", [(72, 1404), (1408, 2048), (2880, 2880), (1, 7)], ids=str)
def test_tiles_fit_in_shared_memory(
    widths: tuple[int, int], num_rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 KiB or more; and they are not padded far beyond the sizes."""
    w_LOI, (g, a) = torch.empty(16, *widths, dtype=dtype), torch.empty(2, 1, 1, dtype=dtype)
    g, a = g.expand(1, widths[0]), a.expand(1, widths[1])
    for limit in (64 << 10, 99 << 10, 227 << 10):
        monkeypatch.setattr(forward, "_shared_memory", lambda device, limit=limit: limit)
        for tiles in (
            forward.grouped_mm_tiles(a, w_LOI, num_rows),
            backward.wgrad_tiles(g, a, 16, num_rows, accumulate=False),
        ):
            step_bytes = (tiles.block_m + tiles.block_n) * tiles.block_k * dtype.itemsize
            assert step_bytes * tiles.num_stages <= limit
            assert tiles.num_stages >= 1 and min(tiles[:3]) >= 16
            assert tiles.block_n < max(17, 2 * max(widths))


def test_float32_is_exact_unless_tf32_is_allowed() -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    assert forward.precision_of(torch.float32) == "ieee"
    try:
        matmul.fp32_precision = "tf32"
        assert forward.precision_of(torch.float32) == "tf32"
        assert forward.precision_of(torch.bfloat16) == "ieee"
    finally:
        matmul.fp32_precision = before
