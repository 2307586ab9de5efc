"""What csrc/ takes, asked of tensors without data as if its library and a Hopper GPU were there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ops import kernels
from moe_ops.kernels import grouped_mm, native, sort_slots

MANY = (1 << 30) + 1
BF16, INT32 = torch.bfloat16, torch.int32


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: True)
    for module in (grouped_mm, sort_slots):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def takes(op: str, *args: Any) -> bool:
    return any(k.takes(*args) for k in kernels._kernels()[op] if k.name.startswith("csrc/"))


@pytest.mark.parametrize("capacities", [(), (None, None), (9, None), (None, 3)], ids=str)
def test_native_sort_slots_takes_any_capacity(capacities: tuple[int | None, ...]) -> None:
    assert takes("sort_slots", empty(7, 2, dtype=INT32), 4, *capacities)


@pytest.mark.parametrize(
    ("tokens", "experts", "capacity"),
    [(7, 1025, None), (MANY, 4, None), (7, 4, MANY)],
    ids=["experts", "slots", "rows"],
)
def test_native_sort_slots_refuses(tokens: int, experts: int, capacity: int | None) -> None:
    assert not takes("sort_slots", empty(tokens, 1, dtype=INT32), experts, capacity, None)


@pytest.mark.parametrize(
    ("rows", "width_i", "width_o", "dtype", "taken"),
    [
        (5, 64, 8, BF16, True),
        (5, 72, 1408, torch.float16, True),
        (MANY - 1, 8, 8, BF16, True),
        (MANY, 8, 8, BF16, False),
        (0, 64, 8, BF16, False),
        (5, 0, 8, BF16, False),
        (5, 64, 12, BF16, False),
        (5, 1404, 8, BF16, False),
        (5, 64, 8, torch.float32, False),
    ],
    ids=str,
)
def test_native_matmuls_take(
    rows: int, width_i: int, width_o: int, dtype: torch.dtype, taken: bool
) -> None:
    a, g = empty(rows, width_i, dtype=dtype), empty(rows, width_o, dtype=dtype)
    w, offsets = empty(2, width_o, width_i, dtype=dtype), empty(2, dtype=INT32)
    slots = empty(rows, dtype=INT32)
    assert takes("grouped_mm", a, w, offsets) == taken
    assert takes("grouped_mm_wgrad", g, a, offsets) == taken
    assert takes("grouped_mm_wgrad_f32", g, a, offsets) == taken
    few_columns = width_o <= grouped_mm._GATHERED_COLUMNS
    tokens = empty(3, width_i, dtype=dtype)
    assert takes("gather_grouped_mm", tokens, slots, 2, w, offsets) == (taken and few_columns)


@pytest.mark.parametrize("slots", [None, empty(5, dtype=INT32)], ids=["rows", "slots"])
@pytest.mark.parametrize("ffn", [8, 12])
def test_native_activations_take_rows_only(ffn: int, slots: torch.Tensor | None) -> None:
    options = ("silu", None, 1.0, 0.0)
    offsets = empty(2, dtype=INT32)
    forward = (empty(5, 64), slots, 1, empty(2, 2 * ffn, 64), None, offsets, *options)
    w2t = empty(2, 64, ffn).mT
    backward = (empty(5, 64), slots, 1, w2t, empty(5, 2 * ffn), None, offsets, *options)
    expected = slots is None and ffn % 8 == 0
    assert takes("grouped_mm_swiglu", *forward) == expected
    assert takes("grouped_mm_swiglu_backward", *backward) == expected


def test_aligned_gives_usual_strides_to_dimensions_of_size_one() -> None:
    """The copy engine takes row strides of a multiple of 16 bytes only."""
    one_row = torch.zeros(4, 13, dtype=BF16)[:1, :8]
    assert grouped_mm.aligned(one_row).stride() == (8, 1)
    one_expert = torch.zeros(2, 17, 4, dtype=BF16)[:1, :16]
    assert grouped_mm.aligned_weights(one_expert).stride() == (64, 4, 1)
    assert grouped_mm.aligned_weights(one_expert.mT).stride() == (64, 1, 4)
