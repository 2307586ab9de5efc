"""cp_attention and its gradients on 1, 2 and 4 ranks against full attention in float64."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch.fx import GraphModule

import moe_ops
from moe_ops.comm import in_flight
from moe_ops.testing import assert_close, assert_equal
from tests.fx_passes.captured import fake_ranks
from tests.ranks import expect_error_on_ranks, run_on_ranks

from .checks import (
    GRAD_LAYOUTS,
    check_compiled,
    check_double_backward_raises,
    check_rejects,
    group,
    make_grad,
    num_saved,
    on_ranks,
    partitioned,
    values,
    world,
)

SIZE, HEADS, HEAD_SIZE = 16, 4, 8
NAMES = ("out", "lse", "grad of q", "grad of k", "grad of v")
all_ranks = pytest.mark.parametrize("num_ranks", [1, 2, 4])
all_causal = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
all_methods = pytest.mark.parametrize("method", ["ring", "all_gather", "heads"])


def whole(kv_heads: int = 2, dtype: torch.dtype = torch.float32, scale: float = 1, size=SIZE):
    """q, k, v and the gradient of out, of the whole sequence."""
    shapes = ((2, heads, size, HEAD_SIZE) for heads in (HEADS, kv_heads, kv_heads, HEADS))
    tensors = [values(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
    return [tensors[0] * scale, *tensors[1:]]


def oracle(q, k, v, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: out, lse."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def expected(tensors, causal: bool) -> list[torch.Tensor]:
    """By NAMES, of the whole sequence."""
    *leaves, grad = (x.detach().double().requires_grad_() for x in tensors)
    out, lse = oracle(*leaves, causal)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


def _attend(rank: int, num_ranks: int, tensors, causal: bool, method: str):
    """By NAMES, of this rank's part."""
    where = group(num_ranks)
    *leaves, grad = (moe_ops.cp_split(x, 2, group=where).requires_grad_() for x in tensors)
    out, lse = moe_ops.cp_attention(*leaves, causal=causal, method=method, group=where)
    assert not lse.requires_grad
    grads = torch.autograd.grad(out, leaves, grad)
    assert in_flight.num_in_flight() == 0
    return [out.detach(), lse, *grads]


def joined(results: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Whole sequences from the parts of all ranks."""
    halves = [[x.chunk(2, 2) for x in parts] for parts in results]
    return [
        torch.cat([*(p[0] for p in parts), *(p[1] for p in reversed(parts))], 2)
        for parts in zip(*halves)
    ]


def check(num_ranks: int, tensors, causal: bool, method: str) -> None:
    found = joined(on_ranks(num_ranks, _attend, tensors, causal, method))
    for name, actual, wanted in zip(NAMES, found, expected(tensors, causal)):
        assert_close(name, actual, wanted)


@pytest.mark.dist
@all_ranks
@all_causal
@all_methods
@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_cp_attention_matches_reference(num_ranks, causal, method, kv_heads, dtype) -> None:
    """Gradients of q, k, v, too."""
    check(num_ranks, whole(kv_heads, dtype), causal, method)


@all_causal
@all_methods
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_cp_attention_takes_any_strides(causal: bool, method: str, backend: str | None) -> None:
    """Of its inputs and of the gradient: case 18. PyTorch's kernel on the CPU would read others."""
    attend = functools.partial(moe_ops.cp_attention, causal=causal, method=method, group=None)
    if backend:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, backend=backend)
    *inputs, grad = whole(dtype=torch.float64)
    grad = grad[..., :1].expand(grad.shape)
    leaves = [x.mT.contiguous().mT.requires_grad_() for x in inputs]
    out, lse = attend(*leaves)
    found = (out, lse, *torch.autograd.grad(out, leaves, grad))
    for name, actual, wanted in zip(NAMES, found, expected([*inputs, grad], causal)):
        assert_close(name, actual, wanted)


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
@all_causal
@all_methods
def test_cp_attention_handles_large_gaps(num_ranks: int, causal: bool, method: str) -> None:
    """Log-sum-exps of two steps more than 88 apart: exp of the gap is no float32."""
    tensors = whole(scale=300, dtype=torch.float64)
    one, other = (oracle(tensors[0], k, k, False)[1] for k in tensors[1].chunk(2, 2))
    assert (one - other).max() > 88 and (one - other).min() < -88
    check(num_ranks, tensors, causal, method)
    narrow = [x.float() for x in tensors]
    out, lse, *grads = joined(on_ranks(num_ranks, _attend, narrow, causal, method))
    assert_close("lse", lse, expected(tensors, causal)[1])
    assert all(x.isfinite().all() for x in (out, *grads))


def errors(num_ranks: int, causal: bool, method: str) -> list[float]:
    tensors = whole(dtype=torch.bfloat16, size=64)
    found = joined(on_ranks(num_ranks, _attend, tensors, causal, method))
    pairs = zip(found, expected(tensors, causal))
    return [((x.double() - y).square().mean() / y.square().mean()).sqrt().item() for x, y in pairs]


@pytest.mark.dist
@all_causal
@all_methods
def test_cp_attention_error_does_not_grow_with_ranks(causal: bool, method: str) -> None:
    one, two, four = (errors(num_ranks, causal, method) for num_ranks in (1, 2, 4))
    for name, *found in zip(NAMES, one, two, four):
        assert max(found) <= 1.5 * found[0] + 1e-6, f"{name}: {found}"


def _layouts(rank: int, num_ranks: int, layout: str, method: str):
    *tensors, _ = whole()
    parts = [moe_ops.cp_split(x, 2, group=world()) for x in tensors]
    grad = make_grad(parts[0], layout)
    results = []
    for leaves, given in (
        (parts, grad.contiguous()),
        ([x.transpose(1, 2).contiguous().transpose(1, 2) for x in parts], grad),
    ):
        leaves = [x.detach().requires_grad_() for x in leaves]
        out, lse = moe_ops.cp_attention(*leaves, method=method, group=world())
        assert out.is_contiguous() and lse.is_contiguous()
        results.append([out, *torch.autograd.grad(out, leaves, given)])
    for name, plain, other in zip(("out", *NAMES[2:]), *results):
        assert_close(name, other, plain.double())


@pytest.mark.dist
@all_methods
@pytest.mark.parametrize("layout", GRAD_LAYOUTS)
def test_cp_attention_grad_handles_layouts(layout: str, method: str) -> None:
    """q, k, v as [B, S, heads, D] in memory; gradients of stride 0, transposed, a slice."""
    on_ranks(2, _layouts, layout, method)


@pytest.mark.parametrize("method", ["ring", "all_gather"])
def test_cp_attention_grad_matches_reference_twice(method: str) -> None:
    def attend(*tensors):
        return moe_ops.cp_attention(*tensors, method=method, group=None)[0]

    small = [x[:1, :2, :4, :3] for x in whole()[:3]]
    check_double_backward_raises("cp_attention", attend, *small)


def _worked_example(rank: int, method: str):
    where = world()
    zero, v = (x.reshape(1, 1, 4, 1) for x in (torch.zeros(4), torch.arange(1.0, 5)))
    zero, v = (x.expand(1, 2, 4, 1) for x in (zero, v))  # a head a rank
    zero, v = (moe_ops.cp_split(x, 2, group=where) for x in (zero, v))
    return [
        x[0, 0].flatten() for x in moe_ops.cp_attention(zero, zero, v, method=method, group=where)
    ]


@pytest.mark.dist
@all_methods
def test_cp_attention_worked_example(method: str) -> None:
    rows = zip(run_on_ranks(2, _worked_example, method), ([1, 2.5, 1, 4], [1.5, 2, 2, 3]))
    for (out, lse), wanted in rows:
        found = torch.cat([out, lse.exp()])
        assert_close("out, exp(lse)", found, torch.tensor(wanted, dtype=torch.float64))


def _compiled(rank: int, num_ranks: int, causal: bool, method: str, backend: str) -> None:
    where = group(num_ranks)
    *parts, _ = (moe_ops.cp_split(x, 2, group=where).requires_grad_() for x in whole())

    def attend(q, k, v):
        out, lse = moe_ops.cp_attention(q * 2, k, v, causal=causal, method=method, group=where)
        return out, lse.detach()

    check_compiled(attend, *parts, backend=backend, exact=backend != "inductor")


@pytest.mark.dist
@all_causal
@all_methods
@pytest.mark.parametrize(("num_ranks", "backend"), [(4, "aot_eager"), (2, "inductor")])
def test_cp_attention_compiles_fullgraph(num_ranks, causal, method, backend) -> None:
    on_ranks(num_ranks, _compiled, causal, method, backend)


def graphs(
    num_ranks: int, rank: int, causal: bool, method: str = "ring", heads=(HEADS, 2, 2)
) -> list[GraphModule]:
    """Forward and backward of one rank, which alone exists, as Inductor partitions them."""
    attend = functools.partial(moe_ops.cp_attention, causal=causal, method=method)
    with fake_ranks(num_ranks, rank):
        leaves = (torch.randn(1, h, 8, HEAD_SIZE) for h in heads)
        return partitioned(functools.partial(attend, group=world()), *leaves)


WORDS = ("cp_shift", "cp_unsplit_backward", "cp_unsplit", "all_to_all", "flash")


def ops_of(module: GraphModule) -> list[str]:
    """Exchanges and attentions, in order."""
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    found = [next((word for word in WORDS if word in name), "") for name in names]
    return [word for word in found if word]


@all_causal
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_cp_attention_saves_as_much_on_any_number_of_ranks(num_ranks: int, causal: bool) -> None:
    """q, k, v, out, lse of this rank: nothing of what went around, or was gathered."""
    wanted = 2 * (HEADS + 2) * 8 * HEAD_SIZE + HEADS * 8
    forward, backward = graphs(num_ranks, num_ranks // 2, causal)
    assert num_saved(forward) == wanted
    assert ops_of(forward) == [*["cp_shift", "flash"] * (num_ranks - 1), "flash"]
    assert ops_of(backward).count("cp_shift") == 2 * (num_ranks - 1)
    assert ops_of(backward).count("flash") == num_ranks

    forward, backward = graphs(num_ranks, num_ranks // 2, causal, "all_gather")
    assert num_saved(forward) == wanted
    seen = ["flash"] * (1 + causal * (1 if num_ranks == 2 else 2))  # rank 1 of 2 has none between
    assert ops_of(forward) == ["cp_unsplit", *seen]
    assert ops_of(backward) == ["cp_unsplit", *seen, "cp_unsplit_backward"]

    forward, backward = graphs(num_ranks, num_ranks // 2, causal, "heads", (8, 8, 8))
    assert num_saved(forward) == 4 * 8 * 8 * HEAD_SIZE + 8 * 8
    assert ops_of(forward) == [*["all_to_all"] * 3, "flash", "all_to_all"]
    assert ops_of(backward) == ["all_to_all", "flash", *["all_to_all"] * 3]


@pytest.mark.parametrize("method", ["ring", "all_gather"])
@pytest.mark.parametrize("rank", range(4))
def test_cp_attention_does_an_equal_share(rank: int, method: str) -> None:
    """At every step of the ring, or of the whole."""
    forward, backward = graphs(4, rank, True, method)
    for module, at in ((forward, 0), (backward, 1)):
        calls = [node for node in module.graph.nodes if "flash" in str(node.target)]
        pairs = [[x.meta["val"].shape[2] for x in node.args[at : at + 2]] for node in calls]
        work = [q * k for q, k in pairs]
        assert (work[0], sum(work)) == (64, 64 + 96)  # the diagonal does half of its 8 x 8
        assert method == "all_gather" or work[1:] == [32, 32, 32]


Q = torch.ones(1, 4, 2, 8)
GOOD = {"q": Q, "k": Q, "v": Q, "group": None}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"q": Q[0]}, ValueError, "q must have 4 dimensions, got shape"),
        ({"q": Q.int()}, TypeError, "q must be torch.float32 or .*, got torch.int32"),
        ({"k": Q.half()}, TypeError, "k must be torch.float32, got torch.float16"),
        ({"v": Q.to("meta")}, ValueError, "v must be on cpu like the other tensors, got meta"),
        ({"v": Q[:, :2]}, ValueError, "k and v must have equal shapes, got 4 and 2"),
        ({"q": Q[:, :, :, :4]}, ValueError, "q and k may differ in heads alone, got 4 and 8"),
        ({"q": Q[:, :3]}, ValueError, "q's heads must be a multiple of k's 4, got 3"),
        (dict.fromkeys("qkv", Q[:, :, :1]), ValueError, "q must have an even number .*, got 1"),
        (dict.fromkeys("qkv", Q[:, :, :0]), ValueError, "k must not be empty, got"),
        *(({"scale": x}, ValueError, "scale must be positive") for x in (0.0, -1.0, math.nan)),
        ({"method": "p2p"}, ValueError, "method must be one of .*'heads'], got 'p2p'"),
        ({"method": "heads", "k": Q[0]}, ValueError, "k must have 4 dimensions, got shape"),
    ],
)
def test_cp_attention_rejects_bad_input(changes, error, message: str) -> None:
    check_rejects("cp_attention", moe_ops.cp_attention, GOOD, changes, error, message)


def _one_rank_is_wrong(rank: int, wrong: dict) -> None:
    moe_ops.cp_attention(**{**GOOD, "group": world(), **(wrong if rank else {})})


@pytest.mark.dist
@pytest.mark.parametrize(
    "wrong",
    [
        {"causal": False},
        {"scale": 2.0},
        {"q": Q.half()},
        {"q": torch.ones(1, 8, 2, 8)},
        {"q": Q.clone().requires_grad_()},
        {"q": torch.ones(())},
        {"q": Q[..., :0]},
        *({"method": method} for method in ("all_gather", "heads", "p2p")),
    ],
)
def test_cp_attention_rejects_bad_input_on_every_rank(wrong: dict) -> None:
    for name, text in expect_error_on_ranks(2, _one_rank_is_wrong, wrong):
        assert name in ("TypeError", "ValueError")
        assert text.startswith("cp_attention: ")


def _odd_heads(rank: int) -> None:
    q = Q[:, :3]
    moe_ops.cp_attention(q, q, q, method="heads", group=world())


@pytest.mark.dist
def test_cp_attention_rejects_heads_that_do_not_divide() -> None:
    for name, text in expect_error_on_ranks(2, _odd_heads):
        assert name == "ValueError"
        assert "q's heads must be a multiple of the group's 2 ranks, got 3" in text


def _lse_alone(rank: int, num_ranks: int, method: str):
    q = Q.clone().requires_grad_()
    out, lse = moe_ops.cp_attention(q, Q, Q, method=method, group=world())
    return torch.autograd.grad(out.sum() + lse.sum(), q)[0]


@pytest.mark.dist
@all_methods
def test_cp_attention_grad_stops_at_lse(method: str) -> None:
    for grad in on_ranks(2, _lse_alone, method):
        assert_equal("grad of q", grad.round(decimals=5).abs(), torch.zeros_like(Q))
