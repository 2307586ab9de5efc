"""Triton's sort_chunks against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from moe_ops.testing import assert_equal

pytest.importorskip("triton", reason="optional package triton is not installed")

from moe_ops.kernels.sort_chunks import KERNELS, sort_chunks

from . import check_kernel, on_device

COUNTS = {
    "2x3": [[2, 0, 1], [1, 3, 0]],
    "3x1": [[2], [0], [5]],
    "1x3": [[2, 0, 5]],
    "empty": [[0, 0], [0, 0]],
    "none": [[], []],
}
ALL_COUNTS = pytest.mark.parametrize("counts", COUNTS)
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
]


def counts_of(name: str) -> torch.Tensor:
    return torch.tensor(COUNTS[name], dtype=torch.int32)


def rows_of(num_rows: int, *shape: int) -> torch.Tensor:
    count = num_rows * torch.Size(shape).numel()
    return torch.arange(1, count + 1).reshape(num_rows, *shape)


@ALL_COUNTS
@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (600,)], ids=str)
def test_sort_chunks_kernel_matches_reference(counts: str, shape) -> None:
    counts_AB = counts_of(counts)
    num_rows = int(counts_AB.sum()) + 2
    check_kernel("sort_chunks", sort_chunks, rows_of(num_rows, *shape), counts_AB, exact=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 3, 8])
def test_sort_chunks_kernel_handles_dtypes(dtype: torch.dtype, width: int) -> None:
    """float8 has no comparison and no `where`, so bits are compared with those of integers."""
    counts_AB = counts_of("2x3")
    rows = (rows_of(9, width) % 2).to(dtype)
    found = sort_chunks(*on_device((rows, counts_AB)))
    expected = sort_chunks(*on_device((rows.double(), counts_AB)))
    assert found.dtype == dtype and found.is_contiguous()
    assert_equal("sorted rows", found.double(), expected)
    assert_equal("sorted rows", expected[-2:], torch.zeros_like(expected[-2:]))


def test_sort_chunks_kernel_undoes_itself() -> None:
    rows, counts_AB = on_device((rows_of(7, 5), counts_of("2x3")))
    assert_equal("rows", sort_chunks(sort_chunks(rows, counts_AB), counts_AB.T), rows)


@pytest.mark.parametrize("layout", ["expanded", "transposed", "odd offset"])
def test_sort_chunks_kernel_handles_layouts(layout: str) -> None:
    """A slice that starts between two words is copied in smaller pieces."""
    rows, counts_AB = rows_of(7, 4).to(torch.bfloat16), counts_of("2x3")
    if layout == "expanded":
        rows = rows[:1].expand(7, 4)
    elif layout == "transposed":
        rows, counts_AB = rows.mT.contiguous().mT, counts_AB.T
    else:
        rows = on_device(torch.cat([rows.flatten(), rows[0, :1]]))[1:].reshape(7, 4)
    check_kernel("sort_chunks", sort_chunks, rows, counts_AB, exact=True)


def test_sort_chunks_kernel_handles_more_chunks_than_a_block() -> None:
    counts_AB = (torch.arange(23 * 29) % 3 % 2).reshape(23, 29).int()
    rows = rows_of(int(counts_AB.sum()) + 1, 2)
    check_kernel("sort_chunks", sort_chunks, rows, counts_AB, exact=True)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0)])
def test_sort_chunks_kernel_handles_nothing(shape) -> None:
    check_kernel("sort_chunks", sort_chunks, torch.ones(shape), counts_of("empty"), exact=True)


def test_sort_chunks_kernel_leaves_complex_rows_to_the_reference() -> None:
    (kernel,) = KERNELS["sort_chunks"]
    assert kernel.takes(torch.ones(3), None)
    assert not kernel.takes(torch.ones(3).cfloat(), None)
