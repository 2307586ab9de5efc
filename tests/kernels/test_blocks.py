"""How kernels cut sizes into blocks."""

from __future__ import annotations

import pytest
import torch

from moe_ops.kernels import blocks


def test_kernels_that_sum_in_float32_take_all_but_float64() -> None:
    x = torch.empty(2, 3)
    assert blocks.computes_in_float32(x, None, None, None)
    assert not blocks.computes_in_float32(x.double(), None, None, None)


@pytest.mark.parametrize(
    ("width", "block"),
    [(1, 1), (6, 8), (768, 1024), (1408, 512), (2048, 2048), (2880, 1024), (7168, 1024)],
)
def test_column_block_pads_little(width: int, block: int) -> None:
    assert blocks.column_block(width, 512, 2048) == block
