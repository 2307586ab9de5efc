"""Triton's swiglu and swiglu_backward against the references."""

from __future__ import annotations

import pytest
import torch

from moe_ops.testing import DTYPE_NAMES, assert_equal
from tests.ops.checks import GRAD_LAYOUTS, make_grad, values

pytest.importorskip("triton", reason="optional package triton is not installed")

from moe_ops.kernels import swiglu as kernels

from . import check_kernel, on_device

FORMS = {
    "swiglu": (),
    "geglu": ("gelu",),
    "swiglu_clamped": ("silu", 7.0, 1.702, 1.0),
    "geglu_clamped": ("gelu", 2.0),
}
all_forms = pytest.mark.parametrize("form", FORMS)
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=DTYPE_NAMES.get
)
TAIL = 3


def arguments(width: int, weighted: bool, dtype: torch.dtype = torch.float32, num_rows: int = 9):
    """grad, h, row weights, offsets; values wide enough for the clamp to act, NaN in the tail."""
    grad_CF = values(num_rows, width, dtype=dtype, seed=1)
    h_C2F = values(num_rows, 2 * width, dtype=dtype) * 5
    row_weights_C = values(num_rows, seed=2) if weighted else None
    for tensor in (grad_CF, h_C2F, row_weights_C):
        if tensor is not None:
            tensor[num_rows - TAIL :] = torch.nan
    offsets_L = torch.tensor([2, 2, num_rows - TAIL, num_rows - TAIL], dtype=torch.int32)
    return grad_CF, h_C2F, row_weights_C, offsets_L


def check_both(inputs, form: str) -> None:
    check_kernel("swiglu", kernels.swiglu, *inputs[1:], *FORMS[form])
    check_kernel("swiglu_backward", kernels.swiglu_backward, *inputs, *FORMS[form])


@all_forms
@WEIGHTED
@DTYPES
def test_swiglu_kernels_match_reference(form, weighted, dtype) -> None:
    check_both(arguments(48, weighted, dtype), form)


@WEIGHTED
@pytest.mark.parametrize("width", [1, 5, 300])
def test_swiglu_kernels_handle_widths(width: int, weighted: bool) -> None:
    check_both(arguments(width, weighted), "swiglu_clamped")


@all_forms
@pytest.mark.parametrize(("weighted", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_swiglu_backward_with_output_gives_the_same_bits(form, weighted, dtype) -> None:
    inputs = on_device(arguments(48, weighted, dtype))
    grad_h, a_CF, grad_weights = kernels.swiglu_backward_with_output(*inputs, *FORMS[form])
    grad_h_alone, grad_weights_alone = kernels.swiglu_backward(*inputs, *FORMS[form])
    assert_equal("a_CF", a_CF, kernels.swiglu(*inputs[1:], *FORMS[form]))
    assert_equal("grad_h_C2F", grad_h, grad_h_alone)
    assert_equal("grad_row_weights_C", grad_weights, grad_weights_alone)


@pytest.mark.parametrize("layout", GRAD_LAYOUTS[1:])
def test_swiglu_kernels_handle_layouts(layout: str) -> None:
    grad_CF, h_C2F, _, offsets_L = arguments(5, False)
    grad_CF, h_C2F = (make_grad(t, layout) for t in (grad_CF, h_C2F))
    row_weights_C = torch.ones(()).expand(h_C2F.shape[0])
    offsets_L = torch.stack([offsets_L, offsets_L], -1)[..., 0]
    check_both((grad_CF, h_C2F, row_weights_C, offsets_L), "geglu_clamped")


@WEIGHTED
@pytest.mark.parametrize(("num_rows", "width"), [(0, 4), (3, 0), (0, 0)])
def test_swiglu_kernels_handle_nothing(num_rows, width, weighted) -> None:
    weights = torch.ones(num_rows) if weighted else None
    offsets_L = torch.full((3,), num_rows, dtype=torch.int32)
    grad_CF, h_C2F = torch.ones(num_rows, width), torch.ones(num_rows, 2 * width)
    check_both((grad_CF, h_C2F, weights, offsets_L), "swiglu")


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # 1 / inf = 0 is what is meant
@all_forms
def test_swiglu_kernels_handle_gates_at_the_ends(form: str) -> None:
    """No overflow of an exponential; the limit itself lets the gradient pass; NaN stays NaN."""
    gates = torch.tensor([-1000.0, 1000, 7, 2, 0, -0.0, torch.nan, 7.5])
    ups = torch.tensor([2.0, 2, 7, -2, torch.nan, 8, 1, -7])
    h_C2F = torch.stack([gates, ups], 1)
    offsets_L = torch.tensor([8], dtype=torch.int32)
    check_both((torch.ones(8, 1), h_C2F, torch.ones(8), offsets_L), form)
