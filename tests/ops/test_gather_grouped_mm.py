"""Private gathering matmuls against the plain operators on rows gathered by indexing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ops.testing import assert_close, assert_equal, make_ids

from .checks import all_dtypes, check_fake, check_rejects, values
from .samples import overload

OPS = torch.ops.moe_ops
# An operator that only passes emit has no autograd rule to test.
OPCHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
EXPERTS, WIDTH_I, WIDTH_O = 4, 8, 6
SIZES = {"T7-K2": (7, 2), "T5-K1": (5, 1), "T6-K3": (6, 3), "T0-K2": (0, 2)}
all_sizes = pytest.mark.parametrize(("num_tokens", "top_k"), SIZES.values(), ids=list(SIZES))


def routed(num_tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """slot_of_row_C with slots of -1 and a tail, offsets_L."""
    ids = make_ids(num_tokens, top_k, EXPERTS, "zipf", none_fraction=0.3)
    slot_of_row, _, offsets = OPS.sort_slots(ids, EXPERTS, num_tokens * top_k + 3, None)
    if num_tokens:
        slot_of_row[1] = -1  # within the valid rows, as with a capacity of each expert
    return slot_of_row, offsets


def rows_of(x: torch.Tensor, slot_of_row: torch.Tensor, top_k: int) -> torch.Tensor:
    rows = [x[slot // top_k] if slot >= 0 else x.new_zeros(x.shape[1]) for slot in slot_of_row]
    return torch.stack(rows)


def tensors(num_tokens: int, top_k: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    slot_of_row, offsets = routed(num_tokens, top_k)
    return {
        "slots": slot_of_row,
        "offsets": offsets,
        "x": values(num_tokens, WIDTH_I, dtype=dtype),
        "g": values(num_tokens, WIDTH_O, dtype=dtype, seed=1),
        "w": values(EXPERTS, WIDTH_O, WIDTH_I, dtype=dtype, seed=2),
    }


@all_sizes
@all_dtypes
def test_gather_grouped_mm_matches_reference(num_tokens, top_k, dtype) -> None:
    t = tensors(num_tokens, top_k, dtype)
    for w in (t["w"], t["w"].mT.contiguous().mT):
        c_CO = OPS.gather_grouped_mm(t["x"], t["slots"], top_k, w, t["offsets"])
        rows = rows_of(t["x"], t["slots"], top_k)
        assert_equal("c_CO", c_CO, OPS.grouped_mm(rows, w, t["offsets"]))


@all_sizes
@all_dtypes
def test_gather_grouped_mm_wgrad_matches_reference(num_tokens, top_k, dtype) -> None:
    t = tensors(num_tokens, top_k, dtype)
    slots, offsets = t["slots"], t["offsets"]
    g, a = rows_of(t["g"], slots, top_k), rows_of(t["x"], slots, top_k)
    expected = OPS.grouped_mm_wgrad(g, a, offsets)
    wgrad = OPS.gather_grouped_mm_wgrad
    assert_equal("g", wgrad(t["g"], slots, a, None, top_k, offsets), expected)
    assert_equal("a", wgrad(g, None, t["x"], slots, top_k, offsets), expected)
    assert_equal("both", wgrad(t["g"], slots, t["x"], slots, top_k, offsets), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_grouped_mm_wgrad_f32_matches_reference(dtype: torch.dtype) -> None:
    """Nothing is rounded to 16 bits."""
    t = tensors(7, 2, dtype)
    slots, offsets = t["slots"], t["offsets"]
    g, a = rows_of(t["g"], slots, 2), rows_of(t["x"], slots, 2)
    expected = OPS.grouped_mm_wgrad(g.double(), a.double(), offsets)
    w_LOI = OPS.grouped_mm_wgrad_f32(g, a, offsets)
    assert w_LOI.dtype == torch.float32
    assert_close("w_LOI", w_LOI, expected)
    gathered = OPS.gather_grouped_mm_wgrad(t["g"], slots, a, None, 2, offsets, f32=True)
    assert_equal("gathered", gathered, w_LOI)


def arguments(op: str, t: dict[str, Any], top_k: int) -> list[tuple[Any, ...]]:
    slots, offsets = t["slots"], t["offsets"]
    g, a = rows_of(t["g"], slots, top_k), rows_of(t["x"], slots, top_k)
    if op == "gather_grouped_mm":
        return [(t["x"], slots, top_k, w, offsets) for w in (t["w"], t["w"].mT.contiguous().mT)]
    if op == "gather_grouped_mm_wgrad":
        return [
            (t["g"], slots, a, None, top_k, offsets),
            (g, None, t["x"], slots, top_k, offsets, t["g"].dtype != torch.float64),
        ]
    return [(g, a, offsets)]


all_ops = pytest.mark.parametrize(
    "op", ["gather_grouped_mm", "gather_grouped_mm_wgrad", "grouped_mm_wgrad_f32"]
)


@all_ops
def test_gather_grouped_mm_opcheck(op: str) -> None:
    for sample in arguments(op, tensors(7, 2, torch.bfloat16), 2):
        torch.library.opcheck(overload(op), sample, test_utils=OPCHECKS)


@all_ops
@all_sizes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gather_grouped_mm_fake_matches_real(op, num_tokens, top_k, dtype) -> None:
    for sample in arguments(op, tensors(num_tokens, top_k, dtype), top_k):
        check_fake(op, sample)


def test_gather_grouped_mm_worked_example() -> None:
    x_TI = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    slots = torch.tensor([1, 2, 6, 3, 0, 4, 7, -1], dtype=torch.int32)
    offsets = torch.tensor([3, 4, 7], dtype=torch.int32)
    w_LOI = torch.tensor([[[1.0]], [[10.0]], [[100.0]]])
    c_CO = OPS.gather_grouped_mm(x_TI, slots, 2, w_LOI, offsets)
    assert c_CO.flatten().tolist() == [1, 2, 4, 20, 100, 300, 400, 0]
    a_CI = torch.ones(8, 1)
    w_LOI = OPS.gather_grouped_mm_wgrad(x_TI, slots, a_CI, None, 2, offsets)
    assert w_LOI.flatten().tolist() == [7, 2, 8]


def test_gather_grouped_mm_handles_tail_of_nan() -> None:
    t = tensors(7, 2)
    slots, offsets = t["slots"], t["offsets"]
    g = rows_of(t["g"], slots, 2)
    expected = OPS.gather_grouped_mm_wgrad(g, None, t["x"], slots, 2, offsets)
    g[int(offsets[-1]) :] = torch.nan
    w_LOI = OPS.gather_grouped_mm_wgrad(g, None, t["x"], slots, 2, offsets)
    assert_equal("w_LOI", w_LOI, expected)


GOOD = {
    "x_TI": torch.ones(3, 4),
    "slot_of_row_C": torch.tensor([0, 5, -1], dtype=torch.int32),
    "top_k": 2,
    "w_LOI": torch.ones(2, 6, 4),
    "offsets_L": torch.tensor([1, 2], dtype=torch.int32),
}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x_TI": torch.ones(3, 5)}, ValueError, "must share I, got 5 and 4"),
        ({"top_k": 0}, ValueError, "top_k must be positive, got 0"),
        ({"w_LOI": torch.ones(2, 6, 4).half()}, TypeError, "w_LOI must be torch.float32, got"),
        ({"slot_of_row_C": torch.ones(3)}, TypeError, "slot_of_row_C must be torch.int32, got"),
        ({"offsets_L": torch.ones(3).int()}, ValueError, "must share L, got 2 and 3"),
    ],
)
def test_gather_grouped_mm_rejects_bad_input(changes, error, message) -> None:
    def call(**arguments: Any) -> torch.Tensor:
        return OPS.gather_grouped_mm(*arguments.values())

    check_rejects("gather_grouped_mm", call, GOOD, changes, error, message)


def test_gather_grouped_mm_wgrad_rejects_nothing_to_gather() -> None:
    ones, offsets = torch.ones(3, 4), GOOD["offsets_L"]
    with pytest.raises(ValueError, match="g_slots_C or a_slots_C must be given, got neither"):
        OPS.gather_grouped_mm_wgrad(ones, None, ones, None, 1, offsets)
    with pytest.raises(TypeError, match=r"g must be .*float16, got torch.float64"):
        OPS.gather_grouped_mm_wgrad(
            ones.double(), GOOD["slot_of_row_C"], ones.double(), None, 2, offsets, f32=True
        )


def test_gather_grouped_mm_has_no_derivative() -> None:
    x_TI = torch.ones(3, 4, requires_grad=True)
    c_CO = OPS.gather_grouped_mm(x_TI, *list(GOOD.values())[1:])
    with pytest.raises(NotImplementedError, match="gather_grouped_mm: has no derivative"):
        c_CO.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gather_grouped_mm_matches_reference_on_gpu(dtype: torch.dtype) -> None:
    t = {name: tensor.cuda() for name, tensor in tensors(70, 3, dtype).items()}
    slots, offsets = t["slots"], t["offsets"]
    rows = rows_of(t["x"], slots, 3)
    exact = OPS.grouped_mm(rows.double(), t["w"].double(), offsets)
    plain = OPS.grouped_mm(rows, t["w"], offsets)
    c_CO = OPS.gather_grouped_mm(t["x"], slots, 3, t["w"], offsets)
    assert_close("c_CO", c_CO, exact, plain)
    exact = OPS.grouped_mm_wgrad(c_CO.double(), rows.double(), offsets)
    w_LOI = OPS.gather_grouped_mm_wgrad(c_CO, None, t["x"], slots, 3, offsets)
    assert_close("w_LOI", w_LOI, exact, OPS.grouped_mm_wgrad(c_CO, rows, offsets))
    w_LOI = OPS.gather_grouped_mm_wgrad(c_CO, None, t["x"], slots, 3, offsets, f32=True)
    assert w_LOI.dtype == torch.float32
    assert_close("w_LOI in float32", w_LOI, exact, OPS.grouped_mm_wgrad(c_CO, rows, offsets))
    assert_close("wgrad_f32", OPS.grouped_mm_wgrad_f32(c_CO, rows, offsets), exact, w_LOI)
