"""The routing kernels on a GPU: chosen by the operators, at sizes of models, past int32 elements,
in CUDA graphs, without waiting for the device.

The tests of tests/kernels run on the GPU as well where there is one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import moe_ops
from moe_ops import _library, kernels
from moe_ops.kernels import sort_slots
from moe_ops.testing import DTYPE_NAMES, SKEWS, assert_close, assert_equal, make_ids
from tests.gpu import skip_without_library

pytest.importorskip("triton", reason="optional package triton is not installed")

from moe_ops.kernels import sort_slots_triton

pytestmark = pytest.mark.gpu

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=DTYPE_NAMES.get
)
SCORES = [("softmax", True), ("softmax", False), ("sigmoid", True), ("sqrtsoftplus", True)]
OPTIONS = [(*score, normalize, 2.5) for score in SCORES for normalize in (True, False)]
all_options = pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(map(str, o)))
# T, E, K
SIZES = [(32768, 128, 8), (4097, 60, 4), (1023, 256, 8), (333, 512, 10), (257, 1000, 32), (7, 8, 2)]
NAMES = ("slot_of_row_C", "row_of_slot_TK", "offsets_E")


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def chosen(op: str, *arguments: Any) -> Callable[..., Any]:
    """The operator; fails if it would run the reference."""
    assert kernels.name_of(op, *arguments) != "reference"
    return getattr(torch.ops.moe_ops, op)


def reference(op: str) -> Callable[..., Any]:
    return _library.OPS[op].reference


def check_route(logits_TE: torch.Tensor, top_k: int, options: tuple[Any, ...]) -> None:
    """Without a bias: ids bitwise; weights and gradients against float64; twice the same bits."""
    arguments = logits_TE, None, None, None, top_k, *options
    route = chosen("topk_route", *arguments)
    weights_TK, ids_TK = route(*arguments)
    same_dtype_TK, wanted_TK = reference("topk_route")(*arguments)
    assert_equal("ids_TK", ids_TK, wanted_TK)
    expected_TK, _ = reference("topk_route")(logits_TE.double(), None, ids_TK, None, *arguments[4:])
    assert_close("weights_TK", weights_TK, expected_TK, same_dtype_TK)

    grad_TK = normal(*ids_TK.shape)
    arguments_of_grad = grad_TK, logits_TE, ids_TK, *options
    backward = chosen("topk_route_backward", *arguments_of_grad)
    grad_TE = backward(*arguments_of_grad)
    expected_TE = reference("topk_route_backward")(
        grad_TK.double(), logits_TE.double(), ids_TK, *options
    )
    same_dtype_TE = reference("topk_route_backward")(*arguments_of_grad)
    assert_close("grad of logits_TE", grad_TE, expected_TE, same_dtype_TE)
    for _ in range(3):
        for name, again, first in zip(
            ("weights_TK", "ids_TK"), route(*arguments), [weights_TK, ids_TK]
        ):
            assert_equal(name, again, first)
        assert_equal("grad of logits_TE", backward(*arguments_of_grad), grad_TE)


@all_options
@DTYPES
def test_topk_route_matches_reference(options, dtype: torch.dtype) -> None:
    check_route(normal(5000, 128, dtype=dtype), 8, options)


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[4]], ids=str)
@DTYPES
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SIZES)
def test_topk_route_matches_reference_at_model_sizes(
    num_tokens, num_experts, top_k, dtype, options
) -> None:
    check_route(normal(num_tokens, num_experts, dtype=dtype), top_k, options)


@pytest.mark.parametrize("top_k", [1, 5, 7, 11, 16, 22, 31, 32])
def test_topk_route_handles_ties(top_k: int) -> None:
    """Three distinct logits, one of them 0 = -0, some rows of NaN or -inf."""
    logits_TE = normal(4096, 128).round().clamp(-1, 1)
    logits_TE[::5] = -torch.inf
    logits_TE[::7, ::3] = torch.nan
    check_route(logits_TE, top_k, OPTIONS[4])
    check_route(logits_TE.bfloat16(), top_k, OPTIONS[4])
    ids_TK = torch.ops.moe_ops.topk_route(logits_TE, None, None, None, top_k)[1]
    assert (ids_TK.sort(1).values.diff(dim=1) > 0).all()
    assert ids_TK.min() >= 0 and ids_TK.max() < 128


# E, K, num_groups, top_groups, group_score_top: DeepSeek-V3, groups of 15, one best expert a group.
GROUPS = [(256, 8, 8, 4, 2), (60, 6, 4, 2, 0), (160, 6, 8, 3, 1), (128, 8, 1, 1, 0)]


@pytest.mark.parametrize("score", SCORES, ids=str)
@pytest.mark.parametrize(("num_experts", "top_k", "num_groups", "top_groups", "best"), GROUPS)
def test_topk_route_handles_bias_and_groups(
    num_experts, top_k, num_groups, top_groups, best, score
) -> None:
    """Scores are equal to rounding, so choices are judged by their keys in float64."""
    num_tokens = 4099
    logits_TE, bias_E = normal(num_tokens, num_experts), normal(num_experts)
    mask_T = torch.rand(num_tokens, device="cuda") > 0.1
    groups = num_groups, top_groups, best
    arguments = logits_TE, bias_E, None, mask_T, top_k, *score, True, 2.5, *groups
    weights_TK, ids_TK = chosen("topk_route", *arguments)(*arguments)
    assert (ids_TK[~mask_T] == -1).all() and not weights_TK[~mask_T].count_nonzero()
    ids_TK, logits_TE = ids_TK[mask_T].long(), logits_TE[mask_T]
    assert (ids_TK.sort(1).values.diff(dim=1) > 0).all()

    keys_TE = logits_TE.double()
    if score == ("softmax", True):
        keys_TE = keys_TE.softmax(1)
    elif score[0] != "softmax":
        keys_TE = (
            keys_TE.sigmoid()
            if score[0] == "sigmoid"
            else torch.nn.functional.softplus(keys_TE).sqrt()
        )
    keys_TE = keys_TE + bias_E.double()
    keys_TGS = keys_TE.unflatten(1, (num_groups, -1))
    best = best or max(top_k // top_groups, 1)
    sums_TG = keys_TGS.topk(min(best, keys_TGS.shape[2]), dim=2).values.sum(2)
    least_T1 = sums_TG.topk(top_groups, dim=1).values[:, -1:]
    assert (sums_TG.gather(1, ids_TK // keys_TGS.shape[2]) > least_T1 - 1e-5).all()
    # Of the groups that are surely eligible nothing better is left out.
    sure_TG = sums_TG > least_T1 - 1e-5
    clear_T = sure_TG.sum(1) == top_groups
    keys_TE = torch.where(sure_TG[:, :, None], keys_TGS, -torch.inf).flatten(1)
    wanted_TK = keys_TE.topk(top_k, dim=1).values
    assert_close("keys", keys_TE.gather(1, ids_TK)[clear_T].float(), wanted_TK[clear_T])
    replayed_TK, _ = reference("topk_route")(
        logits_TE.double(), None, ids_TK, None, top_k, *score, True, 2.5
    )
    assert_close("weights_TK", weights_TK[mask_T], replayed_TK)


@all_options
def test_topk_route_handles_given_ids(options) -> None:
    logits_TE, ids_TK = normal(3000, 60), torch.randint(-1, 60, (3000, 6), device="cuda")
    arguments = logits_TE, None, ids_TK, None, 6, *options
    weights_TK, found_TK = chosen("topk_route", *arguments)(*arguments)
    assert_equal("ids_TK", found_TK, ids_TK.int())
    expected_TK, _ = reference("topk_route")(logits_TE.double(), *arguments[1:])
    assert_close("weights_TK", weights_TK, expected_TK)
    grad_TK = normal(3000, 6)
    grad_TE = torch.ops.moe_ops.topk_route_backward(grad_TK, logits_TE, found_TK, *options)
    expected_TE = reference("topk_route_backward")(
        grad_TK.double(), logits_TE.double(), found_TK, *options
    )
    assert_close("grad of logits_TE", grad_TE, expected_TE)


def test_topk_route_handles_more_elements_than_int32() -> None:
    num_tokens, num_experts = 2**21 + 5, 1024
    logits_TE = torch.zeros(num_tokens, num_experts, dtype=torch.bfloat16, device="cuda")
    logits_TE[-3:] = normal(3, num_experts, dtype=torch.bfloat16)
    weights_TK, ids_TK = moe_ops.topk_route(logits_TE, top_k=2)
    wanted_TK, wanted_ids_TK = moe_ops.topk_route(logits_TE[-3:].clone(), top_k=2)
    assert_equal("ids_TK", ids_TK[-3:], wanted_ids_TK)
    assert_equal("weights_TK", weights_TK[-3:], wanted_TK)
    options = "softmax", True, False, 1.0
    backward = torch.ops.moe_ops.topk_route_backward
    grad_TE = backward(weights_TK, logits_TE, ids_TK, *options)
    wanted_TE = backward(wanted_TK, logits_TE[-3:].clone(), wanted_ids_TK, *options)
    assert_equal("grad of logits_TE", grad_TE[-3:], wanted_TE)


@pytest.fixture
def native_only() -> None:
    skip_without_library()


def check_sort(ids_TK: torch.Tensor, num_experts: int, *capacities: int | None) -> None:
    """The operator and each kernel that takes these arguments, three times."""
    arguments = ids_TK, num_experts, *(capacities or (None, None))
    wanted = reference("sort_slots")(*arguments)
    entries = sort_slots.KERNELS["sort_slots"] + sort_slots_triton.KERNELS["sort_slots"]
    runs = [entry.run for entry in entries if entry.takes(*arguments)]
    for sort in (chosen("sort_slots", *arguments), *runs):
        for _ in range(3):
            for name, actual, expected in zip(NAMES, sort(*arguments), wanted):
                assert actual.is_contiguous()
                assert_equal(name, actual, expected)


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("num_experts", [128, 1024])
def test_sort_slots_matches_reference_at_model_sizes(num_experts: int, skew: str) -> None:
    ids_TK = make_ids(32768, 8, num_experts, skew, 0.1, num_ranks=8).cuda()
    check_sort(ids_TK, num_experts)
    check_sort(ids_TK, num_experts, 200_000, None)
    check_sort(ids_TK, num_experts, 300_001, None)
    check_sort(ids_TK, num_experts, None, 262144 // num_experts)


@pytest.mark.parametrize("num_experts", [1, 7, 31, 60, 128, 257, 1000, 1024])
@pytest.mark.parametrize("num_tokens", [0, 1, 511, 513, 66_000])
def test_sort_slots_handles_sizes(num_tokens: int, num_experts: int) -> None:
    ids_TK = torch.randint(-1, num_experts + 1, (num_tokens, 3), device="cuda")
    check_sort(ids_TK, num_experts)
    check_sort(ids_TK.int(), num_experts, None, num_tokens // num_experts)


@pytest.mark.parametrize("expert", [0, 127, -1, 128])
def test_sort_slots_handles_one_expert(expert: int) -> None:
    check_sort(torch.full((32768, 8), expert, dtype=torch.int32, device="cuda"), 128)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("num_experts", [1, 128, 1024])
def test_sort_slots_handles_millions_of_slots(num_experts: int, dtype: torch.dtype) -> None:
    ids_TK = torch.randint(-1, num_experts, (500_001, 8), device="cuda", dtype=dtype)
    check_sort(ids_TK, num_experts)
    check_sort(ids_TK, num_experts, None, 4_000_008 // num_experts)


def test_sort_slots_handles_capacity() -> None:
    """Around the number of slots that have an expert; 5,000 tokens have foreign ids."""
    ids_TK = make_ids(9000, 3, 60, "zipf", 0.2).cuda()
    ids_TK[:5000] = torch.tensor([-7, 60, 10_000], device="cuda")
    num_held = int(((ids_TK >= 0) & (ids_TK < 60)).sum())
    for capacity in (0, 1, num_held - 1, num_held, num_held + 1, 27_000, 700_000):
        check_sort(ids_TK, 60, capacity, None)
    most = int(ids_TK[5000:][ids_TK[5000:] >= 0].bincount().max())
    for capacity in (0, 1, most - 1, most, most + 1, 20_000):
        check_sort(ids_TK, 60, None, capacity)


def test_sort_slots_handles_strided_and_wide_ids() -> None:
    check_sort(make_ids(9000, 8, 60).cuda().T.contiguous().T, 60)
    check_sort(torch.tensor([[1, 0, 2]], device="cuda").expand(5000, 3), 4)
    check_sort(torch.tensor([[3, 2**33 + 1], [-(2**40), 2**31]], device="cuda"), 4)
    ids_S = torch.randint(60, (30_001,), device="cuda", dtype=torch.int32)
    check_sort(ids_S[1:, None], 60)


@pytest.mark.usefixtures("native_only")
@pytest.mark.parametrize("num_experts", [1, 60, 1024])
@pytest.mark.parametrize("max_chunks", [1, 2, 3, 7, 500, 2000])
def test_native_sort_slots_handles_chunks(max_chunks: int, num_experts: int) -> None:
    """Several tiles a CTA, the last one not full, CTAs that have rows to clear only."""
    ids_TK = make_ids(12_345, min(3, num_experts), num_experts, "zipf", 0.1).cuda()
    for capacities in [(None, None), (200_000, None), (None, 30_000 // num_experts)]:
        wanted = reference("sort_slots")(ids_TK, num_experts, *capacities)
        found = sort_slots.launch_native(ids_TK, num_experts, *capacities, max_chunks)
        for name, actual, expected in zip(NAMES, found, wanted):
            assert_equal(name, actual, expected)


@pytest.mark.usefixtures("native_only")
def test_native_sort_slots_waits_for_ids_of_the_kernel_before() -> None:
    """Its second kernel reads ids before its first one ends; ids come straight from a kernel, and
    memory of earlier calls is used again.
    """
    ids_TK = make_ids(70_000, 8, 128).cuda()
    order = [(ids_TK + shift) % 128 for shift in range(40)]
    wanted = [reference("sort_slots")(ids, 128) for ids in order]
    found = []
    for shift in range(40):
        sort_slots.native_sort_slots((ids_TK + 3 * shift) % 128, 128)
        found.append(sort_slots.native_sort_slots((ids_TK + shift) % 128, 128))
    for outputs, expected in zip(found, wanted):
        for name, actual, right in zip(NAMES, outputs, expected):
            assert_equal(name, actual, right)


def test_route_never_waits_for_the_device_and_replays_in_a_cuda_graph() -> None:
    logits_TE, bias_E, given_TK = normal(999, 128), normal(128), make_ids(999, 8, 128).cuda()

    def step() -> list[torch.Tensor]:
        weights_TK, ids_TK = moe_ops.topk_route(logits_TE, top_k=8)
        biased_TK, _ = moe_ops.topk_route(
            logits_TE, bias_E, top_k=8, score="sigmoid", num_groups=8, top_groups=4
        )
        replayed_TK, _ = moe_ops.topk_route(logits_TE, ids_TK=given_TK, top_k=8)
        grad_TE = torch.ops.moe_ops.topk_route_backward(
            weights_TK, logits_TE, ids_TK, "softmax", True, False, 1.0
        )
        maps = moe_ops.sort_slots(ids_TK, 128)
        padded = moe_ops.sort_slots(ids_TK, 128, expert_capacity=70)
        return [weights_TK, ids_TK, biased_TK, replayed_TK, grad_TE, *maps, *padded]

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for _ in range(3):
        logits_TE.copy_(normal(999, 128))
        given_TK.copy_(make_ids(999, 8, 128))
        graph.replay()
        for index, (found, expected) in enumerate(zip(outputs, step(), strict=True)):
            assert_equal(f"output {index}", found, expected)
