"""Values of the native grouped matmuls: against plain PyTorch, over routings, widths and layouts.

tests/gpu/test_native_memory.py has what they read and write, and when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from moe_ops import _library
from moe_ops.layout import take
from moe_ops.testing import assert_close, assert_equal
from tests.gpu.native_calls import (
    CALLS,
    DTYPES,
    FORMS,
    Call,
    Sizes,
    all_calls,
    argument,
    check,
    is_native,
    offsets_of,
    run,
    skip_without_native,
)

pytestmark = pytest.mark.gpu

# Rows of each expert and rows past them.
ROUTINGS = {
    "tiles": ([1, 127, 128, 129], 0),
    "sparse": ([1, 3, 200, 0], 1),
    "one row": ([0, 1, 0], 300),
    "no rows": ([0, 0, 0], 130),
    "one row each": ([1] * 33, 95),
    "one expert": ([0, 4096, 0, 0], 0),
    "alone": ([300], 212),
    "unused experts": ([0, 17, 0, 5], 128),
    "empty ends": ([0, 0, 300, 5, 0, 0], 70),
    "300 small": ([7 * expert % 10 for expert in range(300)], 70),
    "1024 experts": ([5 * expert % 7 for expert in range(1024)], 70),
    "far expert": ([0] * 70 + [130] + [0] * 29, 70),
    "many tiles": ([5000, 129, 7000, 0, 260], 500),
}
# Multiples of the tiles, 128 and 256, and not; odd and even numbers of them; the smallest.
WIDTHS_O = [8, 136, 256, 384, 512, 768]
WIDTHS_I = [8, 64, 72, 1408, 2880]
UNEVEN = [130, 0, 1, 300]


@pytest.fixture(autouse=True)
def _native() -> None:
    skip_without_native()


@all_calls
@DTYPES
@pytest.mark.parametrize("routing", ROUTINGS)
def test_native_matches_reference(routing: str, dtype: torch.dtype, call: str) -> None:
    counts, tail = ROUTINGS[routing]
    sizes = Sizes(counts=counts, tail=tail, width_o=520, width_i=200, dtype=dtype)
    check(CALLS[call].op, *CALLS[call].arguments(sizes))


@all_calls
@DTYPES
@pytest.mark.parametrize("width_o", WIDTHS_O)
def test_native_handles_widths(width_o: int, dtype: torch.dtype, call: str) -> None:
    for width_i in WIDTHS_I:
        sizes = Sizes(counts=UNEVEN, width_o=width_o, width_i=width_i, dtype=dtype)
        check(CALLS[call].op, *CALLS[call].arguments(sizes))


@all_calls
@pytest.mark.parametrize(
    ("width_o", "width_i", "dtype"),
    [(1404, 64, torch.bfloat16), (64, 1404, torch.float16), (131, 71, torch.bfloat16)],
    ids=str,
)
def test_other_widths_go_to_another_kernel(width_o, width_i, dtype, call: str) -> None:
    sizes = Sizes(counts=UNEVEN, width_o=width_o, width_i=width_i, dtype=dtype)
    check(CALLS[call].op, *CALLS[call].arguments(sizes), by_native=False)


@all_calls
def test_other_arguments_go_to_another_kernel(call: str) -> None:
    """No rows, float32, and an F whose halves of h are not aligned."""
    op, others = CALLS[call].op, [Sizes(counts=[0, 0], tail=0)]
    if not op.endswith("_f32"):
        others.append(Sizes(counts=UNEVEN, dtype=torch.float32))
    if op == "grouped_mm_swiglu":
        others.append(Sizes(counts=UNEVEN, width_o=68))
    for sizes in others:
        args = CALLS[call].arguments(sizes)
        if sizes.dtype == torch.float32:
            assert not is_native(op, *args)
        else:
            check(op, *args, by_native=False)


def misaligned(tensor: torch.Tensor) -> torch.Tensor:
    """From an odd element on."""
    if tensor.dim() == 3 and not tensor.is_contiguous():
        return misaligned(tensor.mT).mT
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def no_unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() == 2 else no_unit_stride(tensor)


def expanded(tensor: torch.Tensor) -> torch.Tensor:
    """As the gradient of a sum."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.flatten()[:1].expand(tensor.shape)


@all_calls
@DTYPES
@pytest.mark.parametrize("layout", [misaligned, no_unit_stride, transposed, expanded])
def test_native_handles_layouts(layout: Callable[..., Any], dtype: torch.dtype, call: str) -> None:
    """The bits of contiguous arguments."""

    def laid_out(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.dim() == 3 and layout is not misaligned else layout(tensor)

    def contiguous(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if tensor.dim() == 3 else tensor.clone().contiguous()

    op = CALLS[call].op
    args = CALLS[call].arguments(Sizes(counts=UNEVEN, width_o=264, dtype=dtype))
    args = pytree.tree_map_only(torch.Tensor, laid_out, args)
    assert is_native(op, *args)
    expected = run(op, *pytree.tree_map_only(torch.Tensor, contiguous, args))
    for index, (found, wanted) in enumerate(zip(run(op, *args), expected, strict=True)):
        assert_equal(f"output {index}", found, wanted)


@pytest.mark.parametrize("call", [c for c in CALLS if "wgrad" not in c])
def test_native_handles_weight_layouts(call: str) -> None:
    """A weight with gaps, and one for all experts; the backward takes its own layout only."""
    op = CALLS[call].op
    args = CALLS[call].arguments(Sizes(counts=UNEVEN, width_o=264))
    (at,) = [i for i, x in enumerate(args) if isinstance(x, torch.Tensor) and x.dim() == 3]
    for weight in (no_unit_stride(args[at]), args[at][:1].expand(args[at].shape)):
        own_layout = weight.mT.is_contiguous() or not op.endswith("backward")
        check(op, *args[:at], weight, *args[at + 1 :], by_native=own_layout)


def plain_swiglu(op: str, *args: Any) -> Any:
    """swiglu or its backward in float64."""
    wide = [
        x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in args
    ]
    return _library.OPS[op].reference(*wide)


def check_rounded(name: str, found: torch.Tensor, exact: torch.Tensor) -> None:
    """`exact` rounded once: next to everywhere the same value, never far from it."""
    rounded = exact.to(found.dtype)
    assert_close(name, found, exact, rounded, scale=0.0)
    wrong = (found != rounded).double().mean().item()
    assert wrong < 0.02, f"{name}: {wrong:.2%} are not the nearest value"


@DTYPES
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_native_activation_is_exact(weighted: bool, form: str, dtype: torch.dtype) -> None:
    """h has the bits of grouped_mm, and all that follows from h and from grouped_mm of the gradient
    is rounded once, weights in float32 included.
    """
    sizes = Sizes(
        counts=[130, 0, 1, 300, 700],
        width_o=520,
        width_i=1032,
        dtype=dtype,
        size_of_h=1.0 if "gelu" in form else 3.0,  # far from 0 Phi has only absolute accuracy
    )
    call = Call("grouped_mm_swiglu", form=form, weighted=weighted)
    a, _, _, w13, weights, offsets, *options, _ = args = call.arguments(sizes)
    assert is_native(call.op, *args)
    h, out = run(call.op, *args)
    assert_equal("h_C2F", h, torch.ops.moe_ops.grouped_mm(a, w13, offsets))
    check_rounded("a_CF", out, plain_swiglu("swiglu", h, weights, offsets, *options))
    no_h, same_out = run(call.op, *args[:-1], False)
    assert no_h.shape == (0, 1040)
    assert_equal("a_CF without h", same_out, out)

    call = Call("grouped_mm_swiglu_backward", form=form, weighted=weighted)
    g, _, _, w, _, *rest = call.arguments(sizes)
    args = g, None, 1, w, h, *rest
    assert is_native(call.op, *args)
    grad_h, recomputed, grad_weights = run(call.op, *args)
    assert_equal("a_CF recomputed", recomputed, out)
    grad = torch.ops.moe_ops.grouped_mm(g, w, offsets)
    exact_h, exact_weights = plain_swiglu("swiglu_backward", grad, h, *rest)
    check_rounded("grad_h_C2F", grad_h, exact_h)
    assert_close("grad_row_weights_C", grad_weights, exact_weights)


@DTYPES
def test_native_swiglu_handles_infinities_and_nan(dtype: torch.dtype) -> None:
    """They come out where the reference has them, in rows of their own."""
    strange = torch.nan, torch.inf, -60.0, 60.0
    for form in FORMS:
        call = Call("grouped_mm_swiglu_backward", form=form)
        args = list(call.arguments(Sizes(counts=UNEVEN, width_o=264, dtype=dtype)))
        h = args[4]
        for column, value in enumerate(strange):
            h[2 * column, column] = h[2 * column + 1, 264 + column] = value  # gate, up
        grad_h, out, _ = run(call.op, *args)
        grad = torch.ops.moe_ops.grouped_mm(args[0], args[3], args[6])
        for name, found, exact in (
            ("a_CF", out, plain_swiglu("swiglu", h, *args[5:])),
            ("grad_h_C2F", grad_h, plain_swiglu("swiglu_backward", grad, h, *args[5:])[0]),
        ):
            assert_close(f"{form}: {name}", found, exact, exact.to(dtype), scale=0.0)


@DTYPES
def test_native_gather_gives_the_bits_of_gathered_rows(dtype: torch.dtype) -> None:
    sizes = Sizes(counts=UNEVEN, width_o=264, width_i=1032, dtype=dtype)
    for name in ("gather", "gather_dgrad"):
        x_TI, slots, top_k, w, offsets = args = CALLS[name].arguments(sizes)
        assert is_native("gather_grouped_mm", *args)
        assert (slots[: sum(UNEVEN)] < 0).any(), "rows of no token among the experts'"
        rows_CI = take(x_TI, torch.where(slots < 0, -1, slots // top_k))
        (c_CO,) = run("gather_grouped_mm", *args)
        assert_equal(name, c_CO, torch.ops.moe_ops.grouped_mm(rows_CI, w, offsets))


@DTYPES
def test_native_wgrad_is_the_float32_one_rounded(dtype: torch.dtype) -> None:
    args = CALLS["wgrad"].arguments(Sizes(counts=UNEVEN, width_o=264, width_i=264, dtype=dtype))
    (w_LOI,), (wide_LOI,) = run("grouped_mm_wgrad", *args), run("grouped_mm_wgrad_f32", *args)
    assert_equal("w_LOI", wide_LOI.to(dtype), w_LOI)
    assert (wide_LOI != w_LOI.float()).double().mean() > 0.5, "sums were rounded to 16 bits"


# With 7168 columns the last rows' elements have no int32 number.
FAR_ROWS = [299_000, 0, 800]
FAR_CALLS = [
    ("forward", 64, 7168),
    ("forward", 7168, 64),
    ("dgrad", 64, 7168),
    ("dgrad", 7168, 64),
    ("wgrad", 64, 7168),
    ("wgrad", 7168, 64),
    ("wgrad_f32", 64, 7168),
    ("gather", 64, 7168),
    ("gather_dgrad", 64, 7168),
    ("swiglu", 64, 7168),
    ("swiglu", 7168, 64),
    ("swiglu_backward", 64, 7168),
    ("swiglu_backward", 7168, 64),
]


@pytest.mark.parametrize(("call", "width_o", "width_i"), FAR_CALLS)
def test_native_addresses_far_rows(call: str, width_o: int, width_i: int) -> None:
    """The last expert's rows come out as they do alone."""
    op, last = CALLS[call].op, 1000
    sizes = Sizes(counts=FAR_ROWS, tail=200, width_o=width_o, width_i=width_i, top_k=1)
    args = CALLS[call].arguments(sizes)
    rows = sizes.num_rows
    alone = [x[-last:] if isinstance(x, torch.Tensor) and len(x) == rows else x for x in args]
    at = next(i for i, x in enumerate(args) if x is argument(op, "offsets_L", args))
    alone[at] = args[at] - FAR_ROWS[0]
    assert is_native(op, *args)
    for found, expected in zip(run(op, *args), run(op, *alone), strict=True):
        if "wgrad" in op:
            assert not found[1].count_nonzero()
            assert_equal("w_LOI[2]", found[2], expected[2])
        else:
            assert_equal("last rows", found[-last:], expected)
    check(op, *alone)


@pytest.mark.parametrize("call", ["gather", "gather_dgrad"])
def test_native_gathers_38000_tokens_8_times(call: str) -> None:
    sizes = Sizes(counts=[300_000, 3000], tail=1000, width_o=64, width_i=7168, top_k=8)
    x_TI, slots, top_k, w, offsets = args = CALLS[call].arguments(sizes)
    (c_CO,) = run("gather_grouped_mm", *args)
    last = slice(299_000, 304_000)
    rows_CI = take(x_TI, torch.where(slots[last] < 0, -1, slots[last] // top_k))
    expected = torch.ops.moe_ops.grouped_mm(rows_CI, w, offsets - 299_000)
    assert_equal("last rows", c_CO[last], expected)


@pytest.mark.parametrize(
    ("call", "width_o", "width_i"),
    [
        ("forward", 7168, 4096),
        ("dgrad", 7168, 4096),
        ("wgrad", 7168, 4096),
        ("wgrad_f32", 7168, 4096),
        ("gather", 1024, 28672),
        ("swiglu", 3584, 4096),
        ("swiglu_backward", 7168, 4096),
    ],
)
def test_native_addresses_far_weights(call: str, width_o: int, width_i: int) -> None:
    """The last expert comes out as it does alone."""
    op, experts = CALLS[call].op, 80
    sizes = Sizes(counts=[0] * (experts - 1) + [130], width_o=width_o, width_i=width_i)
    args = CALLS[call].arguments(sizes)
    alone = [x[-1:] if isinstance(x, torch.Tensor) and len(x) == experts else x for x in args]
    assert is_native(op, *args)
    for found, expected in zip(run(op, *args), run(op, *alone), strict=True):
        if "wgrad" in op:
            assert not found[:-1].count_nonzero()
            assert_equal("w_LOI[-1]", found[-1:], expected)
        else:
            assert_equal("rows", found, expected)
    check(op, *alone)


def test_native_gives_the_bits_of_each_expert_alone() -> None:
    sizes = Sizes(counts=[200, 129, 1, 0, 385], width_o=520, width_i=200)
    ends = offsets_of(sizes.counts).tolist()

    def own(argument: Any, expert: int, start: int, end: int) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        if argument.dtype == torch.int32:
            return offsets_of([end - start])
        return argument[expert : expert + 1] if argument.dim() == 3 else argument[start:end]

    for name in ("forward", "dgrad", "swiglu", "swiglu_backward"):
        op, args = CALLS[name].op, CALLS[name].arguments(sizes)
        outputs = run(op, *args)
        for expert, (start, end) in enumerate(zip([0, *ends], ends)):
            if start < end:
                alone = run(op, *(own(x, expert, start, end) for x in args))
                for found, expected in zip(outputs, alone, strict=True):
                    assert_equal(f"{name} of expert {expert}", found[start:end], expected)
