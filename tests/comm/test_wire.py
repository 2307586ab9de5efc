"""FP8 rows on the wire."""

from __future__ import annotations

import pytest
import torch

from moe_ops.comm.wire import dequantize, quantize

all_formats = pytest.mark.parametrize("pow2", [False, True])


@all_formats
@pytest.mark.parametrize("width", [0, 1, 127, 128, 129, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_come_back_nearly(pow2: bool, width: int, dtype: torch.dtype) -> None:
    """Half a step of e4m3: 1/16 of a normal value, 2^-10 of the scale of a run's small ones."""
    rows = (torch.randn(5, width) * 100).to(dtype)
    codes, scales = quantize(rows, pow2)
    assert codes.shape == rows.shape
    assert codes.dtype == torch.uint8
    assert scales.shape == (5, -(-width // 128))
    back = dequantize(codes, scales, dtype)
    assert back.dtype == dtype
    step = scales.repeat_interleave(128, 1)[:, :width] * 2**-9
    assert ((back.float() - rows.float()).abs() <= rows.float().abs() / 15 + step).all()
    if pow2:
        assert torch.equal(torch.exp2(scales.log2().round()), scales)


@all_formats
def test_zeros_and_large_rows(pow2: bool) -> None:
    rows = torch.zeros(2, 128)
    rows[1] = 1e30
    codes, scales = quantize(rows, pow2)
    back = dequantize(codes, scales, torch.float32)
    assert not back[0].count_nonzero()
    assert ((back[1] / 1e30 - 1).abs() < 1 / 15).all()


@all_formats
def test_what_is_not_finite_arrives_as_nan(pow2: bool) -> None:
    """And leaves its neighbours alone."""
    rows = torch.full((3, 128), 1000.0)
    rows[0, 3], rows[1, 5], rows[2, 7] = torch.nan, torch.inf, -torch.inf
    back = dequantize(*quantize(rows, pow2), torch.float32)
    assert torch.equal(back.isnan(), ~rows.isfinite())
    assert ((back[~back.isnan()] / 1000 - 1).abs() < 1 / 15).all()


def test_no_rows() -> None:
    codes, scales = quantize(torch.zeros(0, 256), False)
    assert (codes.shape, scales.shape) == ((0, 256), (0, 2))
    assert dequantize(codes, scales, torch.bfloat16).shape == (0, 256)
