"""Row formats on the wire. Sums and everything outside an exchange stay in the rows' own dtype."""

from __future__ import annotations

import torch

FORMATS = ("full", "fp8", "fp8_pow2")  # in the order of `Wire` in csrc/wire.cuh

_RUN = 128
_FP8 = torch.float8_e4m3fn


def quantize(rows_NH: torch.Tensor, pow2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 (e4m3) codes [N, H] as uint8 and one float32 scale a run of 128 values, [N, ceil(H /
    128)].

    A scale is the run's largest finite magnitude / 448, at least the smallest normal
    float32, rounded up to a power of two if `pow2`. A value that is not finite arrives as NaN: this
    format has no infinity.
    """
    num_rows, width = rows_NH.shape
    num_runs = -(-width // _RUN)
    padded = torch.nn.functional.pad(rows_NH.float(), (0, num_runs * _RUN - width))
    runs = padded.reshape(num_rows, num_runs, _RUN)
    finite = runs.isfinite()
    # NOTE: times the reciprocal, twice: what GPUs make of a division by a number depends on who
    # compiles it. csrc/wire.cuh does the same.
    scales = torch.where(finite, runs.abs(), 0).amax(2) * (1 / torch.finfo(_FP8).max)
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    if pow2:
        scales = _round_up_to_pow2(scales)
    scaled = torch.where(finite, runs * scales.reciprocal()[:, :, None], torch.nan)
    codes = scaled.to(_FP8).reshape(num_rows, num_runs * _RUN)[:, :width]
    return codes.contiguous().view(torch.uint8), scales


def _round_up_to_pow2(normal: torch.Tensor) -> torch.Tensor:
    mantissa = (1 << 23) - 1
    return ((normal.view(torch.int32) + mantissa) & ~mantissa).view(torch.float32)


def dequantize(codes_NH: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [N, H] of `dtype` from `quantize`'s codes and scales."""
    width = codes_NH.shape[1]
    factors = scales.repeat_interleave(_RUN, dim=1)[:, :width]
    return (codes_NH.view(_FP8).float() * factors).to(dtype)
