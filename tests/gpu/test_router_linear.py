"""The router's matmul on tensor cores, and the counts of its choices, on a GPU."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops import _library, kernels, layout
from moe_ops.testing import DTYPE_NAMES, assert_close, assert_equal, make_ids
from tests.gpu import captured
from tests.ops.samples import Sizes, samples

pytestmark = pytest.mark.gpu

OPS = torch.ops.moe_ops
BACKWARD = "router_linear_backward"
NAMES = ("logits_TE", "grad of x_TH", "grad of weight_EH")
# T, E, H of Qwen3-30B-A3B, DeepSeek-V3, gpt-oss-120b, Mixtral-8x7B, Qwen3-Next, and of nothing.
SIZES = [
    (32768, 128, 2048),
    (8192, 256, 7168),
    (8192, 128, 2880),
    (4096, 8, 4096),
    (4096, 512, 2048),
    (777, 7, 333),
    (1, 60, 17),
    (5, 1, 1),
]
Tensors = tuple[torch.Tensor, ...]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def arguments(
    num_tokens: int, num_experts: int, hidden: int, dtype: torch.dtype = torch.bfloat16
) -> Tensors:
    """grad_TE, x_TH, weight_EH."""
    x_TH, weight_EH = normal(num_tokens, hidden, dtype=dtype), normal(num_experts, hidden) * 0.02
    return normal(num_tokens, num_experts), x_TH, weight_EH.to(dtype)


def run(grad_TE: torch.Tensor, x_TH: torch.Tensor, weight_EH: torch.Tensor) -> Tensors:
    return OPS.router_linear(x_TH, weight_EH), *OPS.router_linear_backward(grad_TE, x_TH, weight_EH)


def reference(grad_TE: torch.Tensor, x_TH: torch.Tensor, weight_EH: torch.Tensor) -> Tensors:
    forward, backward = (_library.OPS[op].reference for op in ("router_linear", BACKWARD))
    return forward(x_TH, weight_EH), *backward(grad_TE, x_TH, weight_EH)


def check(*tensors: torch.Tensor, kernel: str = "bf16 torch.mm") -> None:
    """The operators, with this kernel, against float64; twice the same bits."""
    assert kernels.name_of("router_linear", *tensors[1:]) == kernel
    assert kernels.name_of(BACKWARD, *tensors) == kernel
    exact = reference(*(tensor.double() for tensor in tensors))
    found, again, same = run(*tensors), run(*tensors), reference(*tensors)
    for name, one, two, wanted, narrow in zip(NAMES, found, again, exact, same):
        assert one.dtype == narrow.dtype and one.is_contiguous(), name
        assert_close(name, one, wanted, narrow)
        assert_equal(f"{name}, second run", two, one)


@pytest.mark.parametrize(("num_tokens", "num_experts", "hidden"), SIZES)
def test_router_linear_matches_reference(num_tokens: int, num_experts: int, hidden: int) -> None:
    check(*arguments(num_tokens, num_experts, hidden))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=DTYPE_NAMES.get)
def test_router_linear_leaves_other_dtypes_to_the_reference(dtype: torch.dtype) -> None:
    grad_TE, x_TH, weight_EH = arguments(300, 60, 64, dtype)
    check(grad_TE, x_TH, weight_EH, kernel="reference")
    check(grad_TE, x_TH.bfloat16(), weight_EH.float(), kernel="reference")
    check(grad_TE, x_TH.float(), weight_EH.bfloat16(), kernel="reference")


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "hidden"), [(0, 60, 64), (5, 60, 0), (0, 1, 0)]
)
def test_router_linear_handles_no_tokens_or_features(
    num_tokens: int, num_experts: int, hidden: int
) -> None:
    for name, value in zip(NAMES, run(*arguments(num_tokens, num_experts, hidden))):
        assert_equal(name, value, torch.zeros_like(value))


def test_router_linear_handles_strides() -> None:
    grad_TE, x_TH, weight_EH = arguments(640, 60, 200)
    check(torch.ones((), device="cuda").expand(640, 60), x_TH, weight_EH)
    check(grad_TE.T.contiguous().T, x_TH.T.contiguous().T, weight_EH.T.contiguous().T)
    check(grad_TE[:, ::2], x_TH[:, 1::2], weight_EH[::2, 1::2])
    check(grad_TE, x_TH[:1].expand(640, -1), weight_EH[:, :1].expand(-1, 200))
    # The first value is not aligned for the matmul's vector loads.
    check(grad_TE[:600], x_TH.flatten()[1:120_001].reshape(600, 200), weight_EH)


def test_router_linear_keeps_16_bits_of_the_gradient() -> None:
    """1 + 2^-9 is 1 in bf16, which would leave nothing of sums that cancel."""
    ones = torch.ones(2, 64, device="cuda", dtype=torch.bfloat16)
    grad_TE = torch.tensor([[1 + 2**-9], [-1]], device="cuda")
    _, grad_weight_EH = OPS.router_linear_backward(grad_TE, ones, ones[:1])
    grad_x_TH, _ = OPS.router_linear_backward(grad_TE.T, ones[:1], ones)
    assert (grad_weight_EH == 2**-9).all() and (grad_x_TH == 2**-9).all()


def test_router_linear_is_float32_under_autocast_and_keeps_its_inputs_alone() -> None:
    leaves = [value.requires_grad_() for value in arguments(4096, 128, 2048)[1:]]
    expected = moe_ops.router_linear(*leaves)
    saved: list[torch.Tensor] = []
    with (
        torch.autocast("cuda", torch.float16),
        torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor),
    ):
        logits_TE = moe_ops.router_linear(*leaves)
    assert_equal("logits_TE", logits_TE, expected)
    assert {tensor.data_ptr() for tensor in saved} == {leaf.data_ptr() for leaf in leaves}


def test_router_linear_makes_no_float32_copy() -> None:
    grad_TE, x_TH, weight_EH = arguments(32768, 128, 2048)
    run(grad_TE, x_TH, weight_EH)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = run(grad_TE, x_TH, weight_EH)
    # The logits, the gradient of x, the gradient in two parts and a tenth of x for small tensors.
    allowed = 2 * grad_TE.nbytes + 1.1 * x_TH.nbytes
    assert torch.cuda.max_memory_allocated() - before <= allowed
    del outputs


@pytest.mark.parametrize("op", ["router_linear", BACKWARD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=DTYPE_NAMES.get)
def test_router_linear_opcheck(op: str, dtype: torch.dtype) -> None:
    for sample in samples(op, Sizes(dtype=dtype)):
        on_gpu = [t.detach().cuda().requires_grad_() for t in sample]
        torch.library.opcheck(getattr(OPS, op).default, on_gpu)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_router_linear_compiles_fullgraph(backend: str) -> None:
    torch._dynamo.reset()
    grad_TE, *inputs = arguments(512, 60, 256)
    leaves = [value.requires_grad_() for value in inputs]
    results = []
    for function in (
        moe_ops.router_linear,
        torch.compile(moe_ops.router_linear, fullgraph=True, backend=backend),
    ):
        logits_TE = function(*leaves)
        results.append((logits_TE, *torch.autograd.grad(logits_TE, leaves, grad_TE)))
    for name, wanted, found in zip(NAMES, *results):
        assert_equal(name, found, wanted)


def test_router_never_waits_for_the_device_and_replays_in_a_cuda_graph() -> None:
    tensors = arguments(999, 128, 512)
    ids_TK = make_ids(999, 8, 128).cuda()

    def step() -> Tensors:
        return *run(*tensors), layout.count(ids_TK, 128)

    outputs, replay = captured(step)
    for _ in range(3):
        tensors[0].copy_(normal(999, 128))
        tensors[1].copy_(normal(999, 512))
        ids_TK.copy_(make_ids(999, 8, 128))
        replay()
        for name, found, expected in zip((*NAMES, "counts"), outputs, step()):
            assert_equal(name, found, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("size", [1, 2, 60, 128, 1024, 20_000])
def test_count_matches_the_cpu(size: int, dtype: torch.dtype) -> None:
    for shape in ((32768, 8), (1, 1), (0, 8), (1001, 3)):
        values = torch.randint(-2, size + 3, shape).to(dtype)
        assert_equal("counts", layout.count(values.cuda(), size), layout.count(values, size))
        columns = values.cuda()[:, 0]
        assert_equal("strided", layout.count(columns, size), layout.count(values[:, 0], size))
    one = torch.full((262_144,), size - 1, dtype=dtype)
    assert_equal("one value", layout.count(one.cuda(), size), layout.count(one, size))


def test_count_ignores_wide_values() -> None:
    for dtype in (torch.int32, torch.int64):
        info = torch.iinfo(dtype)
        values = torch.tensor([info.min, info.max, info.max - 1, 2, -1], dtype=dtype)
        assert layout.count(values.cuda(), 4).tolist() == [0, 0, 1, 0]
    values = torch.tensor([2**32 + 1, -(2**32) + 1, 2**31, 3], device="cuda")
    assert layout.count(values, 4).tolist() == [0, 0, 0, 1]


def test_count_compiles_fullgraph() -> None:
    torch._dynamo.reset()
    ids_TK = make_ids(4096, 8, 128, none_fraction=0.1).cuda()
    compiled = torch.compile(layout.count, fullgraph=True)
    assert_equal("counts", compiled(ids_TK, 128), layout.count(ids_TK, 128))
