"""What the host's code of several kernels shares: how sizes are cut into blocks."""

from __future__ import annotations

import functools
from typing import Any

import torch


def computes_in_float32(values: torch.Tensor, *others: Any) -> bool:
    """`takes` of a kernel whose sums are in float32: anything but float64 values."""
    return values.dtype != torch.float64


def ceil_div(a: int, b: int) -> int:
    """Not triton.cdiv, which takes longer on the host than the rest of a launch's arithmetic."""
    return -(-a // b)


def power_of_two_from(size: int) -> int:
    """The least that is not less than `size` >= 1."""
    return 1 << (size - 1).bit_length()


@functools.cache
def column_block(width: int, least: int, most: int) -> int:
    """Columns a program covers at a time: the power of two between `least` and `most` that pads the
    width least, the largest of several; less than `least` only if the width is.
    """
    block = best = min(most, power_of_two_from(width))
    while block > least:
        block //= 2
        if ceil_div(width, block) * block < ceil_div(width, best) * best:
            best = block
    return best


def warps_for(elements: int, per_thread: int) -> int:
    """Warps of a program, 1 to 8, that leave each thread about `per_thread` of its elements."""
    return min(max(power_of_two_from(elements) // (32 * per_thread), 1), 8)
