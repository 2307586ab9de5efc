"""Triton's topk_route and its backward against the references."""

from __future__ import annotations

from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from moe_ops import _library
from moe_ops.testing import DTYPE_NAMES, assert_close, assert_equal
from tests.kernels import DEVICE

pytest.importorskip("triton", reason="optional package triton is not installed")

from moe_ops.kernels.topk_route import topk_route
from moe_ops.kernels.topk_route_backward import topk_route_backward

SCORES = [("softmax", True), ("softmax", False), ("sigmoid", True), ("sqrtsoftplus", True)]
OPTIONS = [(*score, normalize, 2.5) for score in SCORES for normalize in (True, False)]
all_options = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o)))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN, INF = float("nan"), float("inf")

# The interpreter computes with NumPy, which warns where values are not finite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

reference = _library.OPS["topk_route"].reference
reference_backward = _library.OPS["topk_route_backward"].reference


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)


def check_forward(
    logits_TE: torch.Tensor,
    top_k: int,
    options: tuple[Any, ...] = OPTIONS[0],
    bias_E: torch.Tensor | None = None,
    ids_TK: torch.Tensor | None = None,
    mask_T: torch.Tensor | None = None,
    groups: tuple[int, int, int] = (1, 1, 0),
) -> torch.Tensor:
    """Ids are those of the reference, weights about those in float64; the ids."""
    args = top_k, *options, *groups
    weights_TK, found_TK = topk_route(logits_TE, bias_E, ids_TK, mask_T, *args)
    same_dtype_TK, wanted_TK = reference(logits_TE, bias_E, ids_TK, mask_T, *args)
    assert weights_TK.dtype == torch.float32 and weights_TK.is_contiguous()
    assert_equal("ids_TK", found_TK, wanted_TK)
    expected_TK, _ = reference(logits_TE.double(), None, wanted_TK, None, *args)
    assert_close("weights_TK", weights_TK, expected_TK, same_dtype_TK)
    return found_TK


def check_backward(
    grad_TK: torch.Tensor,
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    options: tuple[Any, ...] = OPTIONS[0],
) -> torch.Tensor:
    grad_TE = topk_route_backward(grad_TK, logits_TE, ids_TK, *options)
    assert grad_TE.dtype == logits_TE.dtype and grad_TE.is_contiguous()
    same_dtype_TE = reference_backward(grad_TK, logits_TE, ids_TK, *options)
    expected_TE = reference_backward(grad_TK.double(), logits_TE.double(), ids_TK, *options)
    assert_close("grad of logits_TE", grad_TE, expected_TE, same_dtype_TE)
    return grad_TE


def check(logits_TE: torch.Tensor, top_k: int, *args: Any, **more: Any) -> None:
    ids_TK = check_forward(logits_TE, top_k, *args, **more)
    grad_TK = values(*ids_TK.shape, seed=1)
    check_backward(grad_TK, logits_TE, ids_TK, *args)


@all_options
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
def test_topk_route_matches_reference(options, dtype: torch.dtype) -> None:
    check(values(5, 6, dtype=dtype), 3, options)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_NAMES.get)
@pytest.mark.parametrize(
    ("num_experts", "top_k"),
    [(1, 1), (7, 7), (16, 1), (60, 4), (64, 6), (128, 8), (1000, 10), (1024, 32)],
)
def test_topk_route_handles_sizes(num_experts: int, top_k: int, dtype: torch.dtype) -> None:
    check(values(2, num_experts, dtype=dtype), top_k)


@hypothesis.settings(max_examples=12)
@hypothesis.given(
    num_tokens=st.integers(0, 40),
    num_experts=st.integers(3, 40),
    top_k=st.integers(1, 3),
    options=st.sampled_from(OPTIONS),
    dtype=st.sampled_from(DTYPES),
    distinct=st.integers(1, 9),
    masked=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_topk_route_matches_reference_at_random(
    num_tokens, num_experts, top_k, options, dtype, distinct, masked, seed
) -> None:
    """Few distinct logits, so many ties, 0 = -0 among them."""
    logits_TE = (values(num_tokens, num_experts, seed=seed) * distinct).round() / -distinct
    mask_T = values(num_tokens, seed=seed) > 0 if masked else None
    check(logits_TE.to(dtype), top_k, options, mask_T=mask_T)


@all_options
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_topk_route_handles_given_ids(options, dtype: torch.dtype) -> None:
    """-1 at the start and the end, a token without a choice, repeated ids."""
    ids_TK = torch.tensor([[3, -1, 0], [-1, -1, -1], [-1, 5, 2], [4, 4, 4], [1, 2, 1]])
    ids_TK = ids_TK.to(DEVICE, dtype)
    mask_T = torch.tensor([True, True, True, True, False], device=DEVICE)
    check(values(5, 6), 3, options, ids_TK=ids_TK)
    check(values(5, 6), 3, options, ids_TK=ids_TK, mask_T=mask_T)


@pytest.mark.parametrize("outside", [-2, 4])
def test_topk_route_rejects_given_id_out_of_range(outside: int) -> None:
    ids_TK = torch.tensor([[0, outside]])
    with pytest.raises(RuntimeError, match=r"topk_route: ids_TK must be in -1 \.\. E-1 = 3"):
        topk_route(torch.zeros(1, 4), None, ids_TK, None, 2)


@all_options
def test_topk_route_handles_bias(options) -> None:
    check(values(5, 11), 3, options, bias_E=values(11, seed=1))
    check(values(5, 11), 3, options, bias_E=values(11, seed=1, dtype=torch.bfloat16))


GROUPS = [(12, 4, 2, 0), (12, 4, 2, 1), (12, 4, 4, 0), (30, 3, 1, 4), (16, 16, 5, 1), (24, 6, 3, 2)]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("options", OPTIONS[::2], ids=str)
@pytest.mark.parametrize(("num_experts", "num_groups", "top_groups", "best"), GROUPS)
def test_topk_route_handles_groups(
    num_experts, num_groups, top_groups, best, options, biased
) -> None:
    bias_E = values(num_experts, seed=1) if biased else None
    groups = num_groups, top_groups, best
    check(values(5, num_experts), 4, options, bias_E=bias_E, groups=groups)
    check(values(5, num_experts, dtype=torch.bfloat16), 4, options, bias_E=bias_E, groups=groups)


NOT_FINITE = {
    "one NaN": [0.0, NAN, 2.0, 1.0, -1.0],
    "some NaN": [NAN, 3.0, -NAN, 1.0, NAN],
    "all NaN": [NAN] * 5,
    "-inf": [-INF, 1.0, -INF, -INF, 2.0],
    "all -inf": [-INF] * 5,
    "inf": [1.0, INF, 0.0, INF, 2.0],
    "all": [-INF, INF, NAN, 0.0, -0.0],
    "largest": [3.4e38, -3.4e38, INF, -INF, 3.3e38],
    "smallest": [0.0, -1.5e-38, 1.5e-38, -0.0, -1.3e-38],
}


@pytest.mark.parametrize("top_k", [3, 5])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=DTYPE_NAMES.get)
def test_topk_route_handles_not_finite(dtype: torch.dtype, options, top_k: int) -> None:
    """Ids are distinct and in order; weights and gradients that are not finite agree."""
    logits_TE = torch.tensor(list(NOT_FINITE.values()), device=DEVICE).to(dtype)
    check(logits_TE, top_k, options)
    groups_TE = torch.cat([logits_TE, logits_TE.flip(0)], 1)
    ids_TK = topk_route(groups_TE, None, None, None, top_k, *options, 2, 1, 1)[1]
    wanted_TK = reference(groups_TE, None, None, None, top_k, *options, 2, 1, 1)[1]
    assert_equal("ids_TK", ids_TK, wanted_TK)


def test_topk_route_handles_subnormal_logits() -> None:
    logits_TE = torch.tensor([[0.0, -1e-40, 1e-40, -0.0, 2e-45]], device=DEVICE)
    assert check_forward(logits_TE, 5).tolist() == [[2, 4, 0, 3, 1]]


def test_topk_route_handles_masked_logits_in_an_eligible_group() -> None:
    """-inf in the chosen group still comes before the experts of other groups."""
    logits_TE = torch.tensor([[5.0, -INF, 4.0, 3.0]], device=DEVICE)
    assert check_forward(logits_TE, 2, groups=(2, 1, 1)).tolist() == [[0, 1]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("normalize", [False, True])
def test_topk_route_handles_weight_that_underflows(score: str, normalize: bool) -> None:
    """Weights of 0, and weights far from 1 that keep their digits."""
    logits_TE = torch.tensor([[0.0, -200, -300, -400], [-900, -200, -300, -400]], device=DEVICE)
    check(logits_TE, 2, (score, True, normalize, 1.0))
    steps_TE = torch.arange(-30.0, 30, device=DEVICE)[:, None]
    weights_TK, _ = topk_route(steps_TE, None, None, None, 1, score, True, normalize)
    expected_TK, _ = reference(steps_TE.double(), None, None, None, 1, score, True, normalize)
    assert_close("relative weights", weights_TK / expected_TK.float(), torch.ones_like(expected_TK))


def test_topk_route_adds_repeated_ids_in_order() -> None:
    ids_TK = torch.tensor([[1, 1, 1]], dtype=torch.int32, device=DEVICE)
    grad_TK = torch.tensor([[1e8, 1.0, -1e8]], device=DEVICE)
    options = "sigmoid", True, False, 4.0
    grad_TE = topk_route_backward(grad_TK, torch.zeros(1, 3, device=DEVICE), ids_TK, *options)
    assert grad_TE.tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("grad_layout", ["expanded", "transposed"])
def test_topk_route_handles_layouts(grad_layout: str) -> None:
    logits_TE = values(11, 7).T
    ids_TK = check_forward(logits_TE, 3, bias_E=values(1).expand(11), mask_T=values(7, 2)[:, 0] > 0)
    grads = {"expanded": values(1, 1).expand(7, 3), "transposed": values(3, 7).T}
    check_backward(grads[grad_layout], logits_TE, ids_TK)
    check(values(1, 11).expand(7, 11), 3)


@pytest.mark.parametrize("given", [False, True])
def test_topk_route_handles_no_tokens(given: bool) -> None:
    logits_TE = torch.zeros(0, 4, device=DEVICE)
    ids_TK = torch.zeros(0, 2, dtype=torch.int64, device=DEVICE) if given else None
    check(logits_TE, 2, ids_TK=ids_TK)
