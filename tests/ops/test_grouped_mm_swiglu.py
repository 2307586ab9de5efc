"""Private fused operators of an expert's activation against the plain ones they are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ops.testing import assert_close, assert_equal, make_ids

from .checks import all_dtypes, check_fake, values
from .samples import overload

OPS = torch.ops.moe_ops
OPCHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
EXPERTS, WIDTH_I, WIDTH_F = 4, 8, 6
FORMS = {
    "swiglu": ("silu", None, 1.0, 0.0),
    "geglu": ("gelu", None, 1.0, 0.0),
    "swiglu_clamped": ("silu", 7.0, 1.702, 1.0),
}
all_forms = pytest.mark.parametrize("form", FORMS)
gathered_or_not = pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gathered"])
weighted_or_not = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
all_ops = pytest.mark.parametrize(
    "op", ["grouped_mm_swiglu", "grouped_mm_swiglu_backward", "swiglu_backward_with_output"]
)


def tensors(
    num_tokens: int = 7, dtype: torch.dtype = torch.float32, weighted: bool = True
) -> dict[str, Any]:
    ids = make_ids(num_tokens, 2, EXPERTS, "zipf", none_fraction=0.3)
    slots, row_of_slot, offsets = OPS.sort_slots(ids, EXPERTS, 2 * num_tokens + 3, None)
    x = values(num_tokens, WIDTH_I, dtype=dtype)
    gate_dtype = torch.promote_types(dtype, torch.float32)
    return {
        "slots": slots,
        "offsets": offsets,
        "x": x,
        "rows": OPS.permute(x, None, slots, row_of_slot),
        "weights": values(slots.shape[0], dtype=gate_dtype, seed=1) if weighted else None,
        "w13": values(EXPERTS, 2 * WIDTH_F, WIDTH_I, dtype=dtype, seed=2),
        "w2": values(EXPERTS, WIDTH_F, WIDTH_I, dtype=dtype, seed=3).mT.contiguous().mT,
        "h": values(slots.shape[0], 2 * WIDTH_F, dtype=dtype, seed=4) * 5,
        "grad": values(slots.shape[0], WIDTH_F, dtype=dtype, seed=5),
    }


def arguments(op: str, t: dict[str, Any], options: tuple[Any, ...], gathered: bool) -> Any:
    first = (t["x"], t["slots"], 2) if gathered else (t["rows"], None, 1)
    rest = t["weights"], t["offsets"], *options
    return {
        "grouped_mm_swiglu": (*first, t["w13"], *rest),
        "grouped_mm_swiglu_backward": (*first, t["w2"], t["h"], *rest),
        "swiglu_backward_with_output": (t["grad"], t["h"], *rest),
    }[op]


def plain(op: str, t: dict[str, Any], options: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
    """What `op` is made of."""
    rest = t["weights"], t["offsets"], *options
    if op == "grouped_mm_swiglu":
        h_C2F = OPS.grouped_mm(t["rows"], t["w13"], t["offsets"])
        return h_C2F, OPS.swiglu(h_C2F, *rest)
    grad_CF = t["grad"]
    if op == "grouped_mm_swiglu_backward":
        grad_CF = OPS.grouped_mm(t["rows"], t["w2"], t["offsets"])
    grad_h_C2F, grad_row_weights_C = OPS.swiglu_backward(grad_CF, t["h"], *rest)
    return grad_h_C2F, OPS.swiglu(t["h"], *rest), grad_row_weights_C


def check_equal(op: str, t: dict[str, Any], options: tuple[Any, ...], gathered: bool) -> None:
    found = overload(op)(*arguments(op, t, options, gathered))
    for index, (value, expected) in enumerate(zip(found, plain(op, t, options), strict=True)):
        assert_equal(f"{op} output {index}", value, expected)


@all_ops
@all_forms
@gathered_or_not
@weighted_or_not
def test_grouped_mm_swiglu_matches_reference(op, form, gathered, weighted) -> None:
    check_equal(op, tensors(weighted=weighted), FORMS[form], gathered)


@all_ops
@all_dtypes
@pytest.mark.parametrize("num_tokens", [7, 0])
def test_grouped_mm_swiglu_matches_reference_in(op, dtype, num_tokens) -> None:
    check_equal(op, tensors(num_tokens, dtype), FORMS["swiglu"], gathered=True)


@gathered_or_not
def test_grouped_mm_swiglu_handles_unwanted_h(gathered: bool) -> None:
    t = tensors()
    sample = arguments("grouped_mm_swiglu", t, FORMS["swiglu"], gathered)
    h_C2F, a_CF = OPS.grouped_mm_swiglu(*sample, keep_h=False)
    assert h_C2F.shape == (0, 2 * WIDTH_F)
    assert_equal("a_CF", a_CF, OPS.grouped_mm_swiglu(*sample)[1])
    check_fake("grouped_mm_swiglu", (*sample, False))


@all_ops
@weighted_or_not
def test_grouped_mm_swiglu_opcheck(op: str, weighted: bool) -> None:
    sample = arguments(op, tensors(weighted=weighted), FORMS["swiglu_clamped"], True)
    torch.library.opcheck(overload(op), sample, test_utils=OPCHECKS)


@all_ops
@all_dtypes
@gathered_or_not
@weighted_or_not
def test_grouped_mm_swiglu_fake_matches_real(op, dtype, gathered, weighted) -> None:
    t = tensors(dtype=dtype, weighted=weighted)
    check_fake(op, arguments(op, t, FORMS["geglu"], gathered))


def test_grouped_mm_swiglu_worked_example() -> None:
    x_TI = torch.tensor([[2.0], [3.0]])
    slots, offsets = torch.tensor([1, 0, -1]).int(), torch.tensor([2]).int()
    w13 = torch.tensor([[[1.0], [0.5]]])
    h_C2F, a_CF = OPS.grouped_mm_swiglu(x_TI, slots, 1, w13, None, offsets, *FORMS["swiglu"])
    assert h_C2F.tolist() == [[3, 1.5], [2, 1], [0, 0]]
    expected = torch.tensor([[4.2866], [1.7616], [0.0]], dtype=torch.float64)
    assert_close("a_CF", a_CF, expected, scale=10)


@pytest.mark.parametrize(
    ("place", "value", "error", "message"),
    [
        (2, 0, ValueError, "top_k must be positive, got 0"),
        (3, torch.ones(EXPERTS, 5, WIDTH_I), ValueError, "w13_L2FI must have even 2F, got 5"),
        (3, torch.ones(EXPERTS, 4, 3), ValueError, "must share I, got 8 and 3"),
        (4, torch.ones(3), ValueError, "one weight a row, got 3 and 17"),
        (6, "relu", ValueError, r"act must be one of \['silu', 'gelu'\], got 'relu'"),
    ],
)
def test_grouped_mm_swiglu_rejects_bad_input(place, value, error, message) -> None:
    sample = list(arguments("grouped_mm_swiglu", tensors(), FORMS["swiglu"], True))
    sample[place] = value
    with pytest.raises(error, match=f"grouped_mm_swiglu: .*{message}"):
        OPS.grouped_mm_swiglu(*sample)


@pytest.mark.parametrize("op", ["grouped_mm_swiglu_backward", "swiglu_backward_with_output"])
def test_grouped_mm_swiglu_rejects_narrow_h(op: str) -> None:
    t = tensors()
    t["h"] = t["h"][:, :4]
    with pytest.raises(ValueError, match=f"{op}: h_C2F must be twice .* got 4 and 12"):
        overload(op)(*arguments(op, t, FORMS["swiglu"], True))


@pytest.mark.gpu
@all_ops
@all_forms
@gathered_or_not
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_grouped_mm_swiglu_matches_reference_on_gpu(op, form, gathered, dtype) -> None:
    t = tensors(70, dtype)
    on_gpu = {name: value.cuda() for name, value in t.items()}
    exact = {name: v.double() if v.is_floating_point() else v for name, v in on_gpu.items()}
    found = overload(op)(*arguments(op, on_gpu, FORMS[form], gathered))
    references = plain(op, on_gpu, FORMS[form]), plain(op, exact, FORMS[form])
    for index, (value, same_dtype, f64) in enumerate(zip(found, *references, strict=True)):
        assert_close(f"{op} output {index}", value, f64, same_dtype)
