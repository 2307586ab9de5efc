"""What the engine `nvlink` takes, asked of tensors without data as if its workspace were there."""

from __future__ import annotations

import types

import pytest
import torch

from moe_ops import kernels
from moe_ops.comm import nvlink
from moe_ops.comm.wire import FORMATS

SPACE = types.SimpleNamespace(num_ranks=2, max_tokens=100, row_bytes=4096)


@pytest.fixture(autouse=True)
def _set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvlink, "workspace", lambda group: SPACE if group == "fast" else None)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan(top_k: int) -> list[torch.Tensor]:
    shapes = ((5, 2), (7, 2), (7, top_k), (9,), (7, top_k), (4,), (2, 4), (2,), (4, 2))
    return [empty(*shape, dtype=torch.int32) for shape in shapes]


@pytest.mark.parametrize(
    ("group", "top_k", "num_experts", "taken"),
    [
        ("fast", 8, 64, True),
        ("fast", 32, 2038, True),
        ("fast", 33, 64, False),
        ("fast", 8, 2040, False),
        ("slow", 8, 64, False),
    ],
)
def test_plan(group: str, top_k: int, num_experts: int, taken: bool) -> None:
    ids_TK = empty(5, top_k, dtype=torch.int64)
    name = kernels.name_of("exchange_plan", ids_TK, num_experts, group, 0, None, None)
    assert (name == "csrc/exchange_plan.cu") == taken


@pytest.mark.parametrize(
    ("group", "width", "dtype", "top_k", "taken"),
    [
        ("fast", 8, torch.bfloat16, 8, True),
        ("fast", 2048, torch.float16, 1, True),
        ("fast", 1024, torch.float32, 32, True),
        ("fast", 12, torch.bfloat16, 8, False),
        ("fast", 2056, torch.bfloat16, 8, False),
        ("fast", 0, torch.bfloat16, 8, False),
        ("fast", 8, torch.float64, 8, False),
        ("fast", 8, torch.bfloat16, 33, False),
        ("slow", 8, torch.bfloat16, 8, False),
    ],
    ids=str,
)
def test_rows(group: str, width: int, dtype: torch.dtype, top_k: int, taken: bool) -> None:
    x, rows, weights = empty(5, width, dtype=dtype), empty(7, width, dtype=dtype), None
    for wire in FORMATS:
        sent = kernels.name_of("dispatch", x, weights, plan(top_k), group, wire)
        assert sent == ("csrc/exchange_dispatch.cu" if taken else "reference")
    back = kernels.name_of("combine", rows, weights, None, plan(top_k), group)
    assert back == ("csrc/exchange_combine.cu" if taken else "reference")
