"""Which kernel of those that any GPU has a grouped matmul is given to, with Triton and without."""

from __future__ import annotations

import pytest
import torch

from moe_ops import kernels
from moe_ops.kernels import grouped_mm
from moe_ops.kernels.kernel import has_triton

SHAPES = {"grouped_mm": ((5, 8), (2, 6, 8)), "grouped_mm_wgrad": ((5, 6), (5, 8))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", SHAPES)
def test_masked_matmuls_take_what_triton_does_not(op: str, dtype: torch.dtype) -> None:
    operands = [torch.empty(shape, dtype=dtype) for shape in SHAPES[op]]
    found = kernels.name_of(op, *operands, torch.empty(2, dtype=torch.int32))
    triton = has_triton() and dtype == torch.float32
    assert found == ("triton" if triton else "masked matmuls")


@pytest.mark.parametrize("op", SHAPES)
def test_masked_matmuls_take_all_without_triton(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_mm, "has_triton", lambda: False)
    masked = next(k for k in grouped_mm.KERNELS[op] if k.name == "masked matmuls")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert masked.takes(torch.empty(5, 8, dtype=dtype))
