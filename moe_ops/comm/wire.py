"""Row formats on the wire. Sums and everything outside an exchange stay in the rows' own dtype."""

from __future__ import annotations

import torch

FORMATS = ("full", "fp8", "fp8_pow2")

_BLOCK = 128
_FP8 = torch.float8_e4m3fn


def quantize(rows_NH: torch.Tensor, pow2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 (e4m3) codes [N, H] as uint8 and one float32 scale a run of 128 values, [N, ceil(H /
    128)].

    A scale is the run's largest finite magnitude / 448, at least the smallest normal
    float32, rounded up to a power of two if `pow2`. A value that is not finite arrives as NaN: this
    format has no infinity.
    """
    num_rows, width = rows_NH.shape
    num_blocks = -(-width // _BLOCK)
    padded = torch.nn.functional.pad(rows_NH.float(), (0, num_blocks * _BLOCK - width))
    blocks = padded.reshape(num_rows, num_blocks, _BLOCK)
    finite = blocks.isfinite()
    scales = torch.where(finite, blocks.abs(), 0).amax(2) / torch.finfo(_FP8).max
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)
    if pow2:
        scales = torch.exp2(scales.log2().ceil())
    scaled = torch.where(finite, blocks / scales[:, :, None], torch.nan)
    codes = scaled.to(_FP8).reshape(num_rows, num_blocks * _BLOCK)[:, :width]
    return codes.contiguous().view(torch.uint8), scales


def dequantize(codes_NH: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows [N, H] of `dtype` from `quantize`'s codes and scales."""
    width = codes_NH.shape[1]
    factors = scales.repeat_interleave(_BLOCK, dim=1)[:, :width]
    return (codes_NH.view(_FP8).float() * factors).to(dtype)
