"""A search that several Triton kernels share."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def interval_of(index, ends_ptr, num_intervals, STEPS: tl.constexpr):
    """How many of the ascending `ends` are <= index, for a scalar or a tensor of them; 2^STEPS >
    num_intervals.
    """
    low = index * 0
    high = low + num_intervals
    for _ in tl.static_range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        below = tl.load(ends_ptr + middle, mask=searching, other=0) <= index
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & ~below, middle, high)
    return low
