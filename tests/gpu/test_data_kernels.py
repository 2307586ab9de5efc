"""Triton's data-movement kernels on a GPU: chosen by the operators, at sizes of models, with rows
past int32 elements, in CUDA graphs, without waiting for the device.

The tests of tests/kernels run on the GPU as well where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import moe_ops
from moe_ops import _library, kernels
from moe_ops.testing import DTYPE_NAMES, assert_equal, make_ids
from tests.kernels import check_kernel, on_device
from tests.ops.samples import Sizes, overload, samples

pytestmark = pytest.mark.gpu

OPS = [
    "permute",
    "unpermute",
    "row_dot",
    "swiglu",
    "swiglu_backward",
    "grouped_bias",
    "grouped_bias_backward",
    "sort_chunks",
]
all_ops = pytest.mark.parametrize("op", OPS)
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=DTYPE_NAMES.get
)
BITWISE = {"permute", "unpermute", "sort_chunks"}

# T, K, E, H, F of Qwen3-30B-A3B, gpt-oss-120b, Mixtral-8x7B and of nothing, with fewer tokens.
MODELS = {
    "qwen3": (4096, 8, 128, 2048, 768),
    "gpt-oss": (2000, 4, 128, 2880, 2880),
    "mixtral": (1023, 2, 8, 4096, 14336),
    "odd": (777, 3, 7, 333, 91),
}


@pytest.fixture(autouse=True)
def _triton() -> None:
    pytest.importorskip("triton", reason="optional package triton is not installed")


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.float32).to(dtype)


def model_arguments(op: str, model: str, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Weighted, with NaN in the rows of no slot, then the same without weights."""
    num_tokens, top_k, num_experts, hidden, ffn = MODELS[model]
    ids_TK = make_ids(num_tokens, top_k, num_experts, "zipf", 0.1).cuda()
    rows = num_tokens * top_k + 100
    slots, rows_of, offsets = moe_ops.sort_slots(ids_TK, num_experts, row_capacity=rows)
    weights_TK = torch.rand(num_tokens, top_k, device="cuda")
    weights_C = torch.rand(rows, device="cuda")

    def with_tail(width: int) -> torch.Tensor:
        values = normal(rows, width, dtype=dtype)
        return values.masked_fill_((slots < 0)[:, None], torch.nan)

    if op == "sort_chunks":
        counts = torch.randint(rows // 32, (4, 8), device="cuda", dtype=torch.int32)
        return [(normal(rows, hidden, dtype=dtype), counts)]
    if op == "row_dot":
        return [(with_tail(hidden), normal(num_tokens, hidden, dtype=dtype), slots, rows_of)]
    if op in ("permute", "unpermute"):
        x = normal(num_tokens, hidden, dtype=dtype) if op == "permute" else with_tail(hidden)
        return [(x, weights, slots, rows_of) for weights in (weights_TK, None)]
    if op.startswith("grouped_bias"):
        bias = normal(num_experts, hidden, dtype=dtype)
        return [(with_tail(hidden), bias, weights, offsets) for weights in (weights_C, None)]
    first = (with_tail(ffn),) if op == "swiglu_backward" else ()
    h = with_tail(2 * ffn)
    forms = [(), ("gelu",), ("silu", 7.0, 1.702, 1.0)]
    return [(*first, h, weights, offsets, *f) for weights in (weights_C, None) for f in forms]


def chosen(op: str, *arguments: Any) -> Callable[..., Any]:
    """The operator; fails if it would not run a Triton kernel."""
    assert kernels.choose(op, *arguments) is not _library.OPS[op].reference
    return overload(op)


@all_ops
@DTYPES
def test_data_op_matches_reference(op: str, dtype: torch.dtype) -> None:
    sizes = Sizes(dtype=dtype, hidden_size=130, requires_grad=False)
    for arguments in map(on_device, samples(op, sizes)):
        check_kernel(op, chosen(op, *arguments), *arguments, exact=op in BITWISE)


@all_ops
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("qwen3", torch.bfloat16),
        ("gpt-oss", torch.bfloat16),
        ("mixtral", torch.float16),
        ("odd", torch.float32),
        ("odd", torch.bfloat16),
    ],
    ids=str,
)
def test_data_op_matches_reference_at_model_sizes(op: str, model: str, dtype: torch.dtype) -> None:
    for arguments in model_arguments(op, model, dtype):
        check_kernel(op, chosen(op, *arguments), *arguments, exact=op in BITWISE)


def test_swiglu_backward_with_output_gives_the_same_bits_at_model_size() -> None:
    from moe_ops.kernels import swiglu  # noqa: PLC0415 - needs triton

    for arguments in model_arguments("swiglu_backward", "qwen3", torch.bfloat16):
        grad_h, a_CF, grad_weights = swiglu.swiglu_backward_with_output(*arguments)
        grad_h_alone, grad_weights_alone = swiglu.swiglu_backward(*arguments)
        assert_equal("a_CF", a_CF, swiglu.swiglu(*arguments[1:]))
        assert_equal("grad_h_C2F", grad_h, grad_h_alone)
        assert_equal("grad_row_weights_C", grad_weights, grad_weights_alone)


@all_ops
def test_data_op_gives_the_same_bits_in_every_run(op: str) -> None:
    for arguments in model_arguments(op, "qwen3", torch.bfloat16)[:1]:
        first = pytree.tree_leaves(overload(op)(*arguments))
        for run in range(10):
            again = pytree.tree_leaves(overload(op)(*arguments))
            for index, (found, expected) in enumerate(zip(again, first)):
                assert_equal(f"output {index} of run {run}", found, expected)


@pytest.mark.parametrize("counts", [[262144], [0, 262143, 1], [1] * 1024], ids=["1", "3", "1024"])
def test_grouped_bias_handles_extreme_experts(counts: list[int]) -> None:
    """One expert with all rows, experts of one row each."""
    offsets_L = torch.tensor(counts).cumsum(0).int().cuda()
    rows_CO = normal(sum(counts), 256, dtype=torch.bfloat16)
    bias_LO = normal(len(counts), 256, dtype=torch.bfloat16)
    weights_C = torch.rand(sum(counts), device="cuda")
    for op in ("grouped_bias", "grouped_bias_backward"):
        arguments = rows_CO, bias_LO, weights_C, offsets_L
        check_kernel(op, chosen(op, *arguments), *arguments)


@all_ops
def test_data_op_never_syncs_and_replays_in_a_cuda_graph(op: str) -> None:
    arguments = model_arguments(op, "odd", torch.bfloat16)[0]
    expected = pytree.tree_leaves(overload(op)(*arguments))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        overload(op)(*arguments)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    with torch.cuda.graph(graph):
        outputs = pytree.tree_leaves(overload(op)(*arguments))
    for _ in range(2):
        for output in outputs:
            output.fill_(-1)
        graph.replay()
        for index, (found, wanted) in enumerate(zip(outputs, expected)):
            assert_equal(f"{op} output {index}", found, wanted)


# Rows of 7168 elements beyond which a row's first element has no int32 number.
FAR = 2**31 // 7168 + 1000
LAST = 64


def far_rows(width: int = 7168) -> torch.Tensor:
    """Of them only the last ones differ from 1."""
    rows = torch.ones(FAR, width, device="cuda", dtype=torch.bfloat16)
    rows[-LAST:] = normal(LAST, width, dtype=torch.bfloat16)
    return rows


def test_permute_and_unpermute_address_far_rows() -> None:
    identity_C = torch.arange(FAR, device="cuda", dtype=torch.int32)
    maps = identity_C.clone(), identity_C[:, None].clone()
    maps[0][-1], maps[1][-1] = -1, -1
    x = far_rows()
    expected = x[-LAST:].clone()
    expected[-1] = 0
    for op in (moe_ops.permute, moe_ops.unpermute):
        assert_equal(op.__name__, op(x, None, *maps)[-LAST:], expected)
    dots = moe_ops.row_dot(x, x, *maps)[-LAST:]
    wanted = expected.double().square().sum(1)[:, None]
    torch.testing.assert_close(dots.double(), wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("op", ["swiglu", "swiglu_backward", "grouped_bias", "sort_chunks"])
def test_data_op_addresses_far_rows(op: str) -> None:
    """The last rows come out as they do alone."""
    offsets_L = torch.tensor([FAR - LAST, FAR - 1], device="cuda", dtype=torch.int32)
    last_L = torch.tensor([0, LAST - 1], device="cuda", dtype=torch.int32)
    x = far_rows()
    if op == "sort_chunks":
        counts = torch.tensor([[FAR - LAST], [LAST]], device="cuda", dtype=torch.int32)
        assert_equal("rows", moe_ops.sort_chunks(x, counts), x)
        return
    if op == "grouped_bias":
        bias_LO = normal(2, 7168, dtype=torch.bfloat16)
        arguments, last = (x, bias_LO, None, offsets_L), (x[-LAST:], bias_LO, None, last_L)
    else:
        grad = (torch.ones(FAR, 3584, device="cuda", dtype=torch.bfloat16),)
        grad = grad if op == "swiglu_backward" else ()
        arguments = (*grad, x, None, offsets_L)
        last = (*(g[-LAST:] for g in grad), x[-LAST:], None, last_L)
    found = pytree.tree_leaves(overload(op)(*arguments))[0]
    assert_equal(op, found[-LAST:], pytree.tree_leaves(overload(op)(*last))[0])


def test_data_ops_handle_float64_by_the_reference() -> None:
    sizes = Sizes(dtype=torch.float64, requires_grad=False)
    for op in OPS:
        for arguments in map(on_device, samples(op, sizes)):
            if op != "sort_chunks":
                assert kernels.choose(op, *arguments) is _library.OPS[op].reference
            overload(op)(*arguments)
