"""FP8 rows on the wire."""

from __future__ import annotations

import math

import pytest
import torch

from moe_ops.comm.wire import dequantize, quantize
from moe_ops.testing import assert_equal

all_formats = pytest.mark.parametrize("pow2", [False, True])
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def rows_of_all_sizes(dtype: torch.dtype, width: int) -> torch.Tensor:
    """300 rows, of the smallest normal size to half the largest, of values up to 2^24 smaller."""
    limits, stream = torch.finfo(dtype), torch.Generator().manual_seed(0)
    if dtype == torch.float64:
        limits = torch.finfo(torch.float32)
    low, high = math.log2(limits.tiny), math.log2(limits.max) - 1

    def random() -> torch.Tensor:
        return torch.rand(300, width, generator=stream, dtype=torch.float64)

    sizes = torch.linspace(low, high, 300, dtype=torch.float64)[:, None] - 24 * random()
    return (torch.exp2(sizes) * torch.where(random() < 0.5, -1, 1)).to(dtype)


def largest_of_runs(rows: torch.Tensor) -> torch.Tensor:
    """By value."""
    runs = [run.abs().amax(1, keepdim=True).expand_as(run) for run in rows.split(128, dim=1)]
    return torch.cat(runs, dim=1)


@all_formats
@pytest.mark.parametrize("width", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_rows_come_back_nearly(pow2: bool, width: int, dtype: torch.dtype) -> None:
    """As the docstring of `dispatch` says.

    Half a step of e4m3 is at most 1/17 of a value whose code is normal, and 2^-10 of the scale
    below; a scale is the largest value / 448, or up to twice that; rounding to bfloat16 adds 2^-9
    of the value.
    """
    rows = rows_of_all_sizes(dtype, width)
    codes, scales = quantize(rows, pow2)
    assert codes.shape == rows.shape
    assert codes.dtype == torch.uint8
    assert scales.shape == (300, -(-width // 128))
    back = dequantize(codes, scales, dtype)
    assert back.dtype == dtype
    exact = rows.double()
    allowed = torch.maximum(
        exact.abs() / 16, largest_of_runs(exact) * 2.0 ** (-17 if pow2 else -18)
    )
    normal = exact.abs() >= torch.finfo(torch.float32 if dtype == torch.float64 else dtype).tiny
    assert ((back.double() - exact).abs() <= allowed)[normal].all()


@all_formats
def test_codes_are_the_nearest(pow2: bool) -> None:
    """The even one of two."""
    rows = rows_of_all_sizes(torch.float32, 128)
    rows[0] = torch.arange(-64, 64) * 7.0
    rows[1] = torch.arange(-64, 64) * 0.5 / 512 + 448 * (torch.arange(128) == 0)
    codes, scales = quantize(rows, pow2)
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    scaled = (rows * (1 / scales)).double()
    distances = (scaled[:, :, None] - values.nan_to_num(torch.inf)).abs()
    odd = torch.arange(256) % 2
    nearest = torch.where(distances == distances.amin(2, keepdim=True), odd, 2).argmin(2)
    assert_equal("values", values[codes.long()], values[nearest])
    nonzero = scaled != 0
    assert_equal("signs", codes[nonzero] >= 128, scaled[nonzero] < 0)


@pytest.mark.parametrize("largest", [448, 449, 512, 895])
def test_powers_of_two_are_exact(largest: int) -> None:
    powers = torch.exp2(torch.arange(-126, 118, dtype=torch.float64)).float()
    _, scales = quantize(powers[:, None] * largest, True)
    assert_equal("scales", scales[:, 0], powers * (1 if largest == 448 else 2))


@all_formats
def test_zeros_and_denormal_rows(pow2: bool) -> None:
    rows = torch.zeros(3, 128)
    rows[1] = -0.0
    rows[2] = torch.arange(128) * torch.finfo(torch.float32).tiny / 128
    codes, scales = quantize(rows, pow2)
    back = dequantize(codes, scales, torch.float32)
    assert not back[:2].count_nonzero()
    assert_equal("signs", back.signbit(), rows.signbit())
    assert (scales == torch.finfo(torch.float32).tiny).all()
    assert ((back[2] - rows[2]).abs() <= rows[2] / 16).all()


@all_formats
def test_large_rows(pow2: bool) -> None:
    rows = torch.full((2, 128), 1e30)
    back = dequantize(*quantize(rows, pow2), torch.float32)
    assert ((back / 1e30 - 1).abs() < 1 / 16).all()


@all_formats
def test_what_is_not_finite_arrives_as_nan(pow2: bool) -> None:
    """And leaves its neighbours alone."""
    rows = torch.full((3, 128), 1000.0)
    rows[0, 3], rows[1, 5], rows[2, 7] = torch.nan, torch.inf, -torch.inf
    back = dequantize(*quantize(rows, pow2), torch.float32)
    assert torch.equal(back.isnan(), ~rows.isfinite())
    assert ((back[~back.isnan()] / 1000 - 1).abs() < 1 / 16).all()


@pytest.mark.parametrize(("num_rows", "width"), [(0, 256), (2, 0)])
def test_nothing(num_rows: int, width: int) -> None:
    codes, scales = quantize(torch.zeros(num_rows, width), False)
    assert (codes.shape, scales.shape) == ((num_rows, width), (num_rows, width // 128))
    assert dequantize(codes, scales, torch.bfloat16).shape == (num_rows, width)
