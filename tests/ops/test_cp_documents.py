"""Packed documents, each in zigzag order by itself: cp_split, cp_unsplit and cp_attention with
cu_seqlens_N1, on 1, 2 and 4 ranks, against loops over documents.
"""

from __future__ import annotations

import functools
import itertools
import types

import pytest
import torch
import torch._dynamo

import moe_ops
from moe_ops.kernels import flash_attention
from moe_ops.kernels.flash_attention import Settings
from moe_ops.testing import assert_close, assert_equal
from tests.fx_passes.captured import fake_ranks
from tests.ranks import expect_error_on_ranks

from .checks import (
    check_compiled,
    check_rejects,
    group,
    num_saved,
    on_ranks,
    partitioned,
    values,
    world,
)

BOUNDS = [0, 8, 8, 32, 48]  # multiples of 8, for 4 ranks; one document is empty
SIZE = BOUNDS[-1]
NAMES = ("out", "lse", "grad of q", "grad of k", "grad of v")
CPU_KERNELS = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
)
all_ranks = pytest.mark.parametrize("num_ranks", [1, 2, 4])
all_causal = pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
all_methods = pytest.mark.parametrize("method", ["ring", "all_gather", "heads"])


def bounds(dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(BOUNDS, dtype=dtype)


def places(rank: int, num_ranks: int) -> torch.Tensor:
    """Of the tokens of a rank in the whole sequence."""
    chunks = [
        torch.arange(first, last).chunk(2 * num_ranks)
        for first, last in itertools.pairwise(BOUNDS)
        if last > first
    ]
    parts = [(each[rank], each[2 * num_ranks - 1 - rank]) for each in chunks]
    return torch.cat([x for pair in parts for x in pair])


def _split(rank: int, num_ranks: int, dim: int, dtype: torch.dtype):
    """Part and whole, and the gradient of each."""
    where = {"cu_seqlens_N1": bounds(dtype), "group": group(num_ranks)}
    x = values(2, SIZE, 3).movedim(1, dim).requires_grad_()
    part = moe_ops.cp_split(x, dim, **where)
    (of_split,) = torch.autograd.grad(part, x, part)
    part = part.detach().requires_grad_()
    again = moe_ops.cp_unsplit(part, dim, **where)
    (of_unsplit,) = torch.autograd.grad(again, part, again)
    return part.detach(), of_split, again.detach(), of_unsplit


@pytest.mark.dist
@all_ranks
@pytest.mark.parametrize("dim", [0, -2])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_cp_split_of_documents_matches_reference(num_ranks: int, dim: int, dtype) -> None:
    x = values(2, SIZE, 3).movedim(1, dim)
    for rank, results in enumerate(on_ranks(num_ranks, _split, dim, dtype)):
        part, of_split, again, of_unsplit = results
        index = places(rank, num_ranks)
        wanted = x.index_select(dim, index)
        assert_equal(f"part of rank {rank}", part, wanted)
        assert_equal("whole", again, x)
        assert_equal("grad of cp_split", of_split, torch.zeros_like(x).index_copy(dim, index, part))
        assert_equal("grad of cp_unsplit", of_unsplit, num_ranks * wanted)


def whole(kv_heads: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of out, of two sequences."""
    return [values(2, h, SIZE, 8, seed=i) for i, h in enumerate((4, kv_heads, kv_heads, 4))]


def expected(tensors: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """By NAMES, in float64, a document at a time."""
    *leaves, grad = (x.double().requires_grad_() for x in tensors)
    parts = []
    for first, last in itertools.pairwise(BOUNDS):
        q, k, v = (x[:, :, first:last] for x in leaves)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        parts.append((scores.softmax(-1) @ v, scores.logsumexp(-1)))
    out, lse = (torch.cat(x, 2) for x in zip(*parts))
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, grad)]


def _attend(rank: int, num_ranks: int, tensors, causal: bool, method: str):
    """By NAMES, of the whole sequence."""
    where = {"cu_seqlens_N1": bounds(), "group": group(num_ranks)}
    *leaves, grad = (moe_ops.cp_split(x, 2, **where).requires_grad_() for x in tensors)
    out, lse = moe_ops.cp_attention(*leaves, causal=causal, method=method, **where)
    assert not lse.requires_grad
    assert out.is_contiguous() and lse.is_contiguous()
    parts = (out.detach(), lse, *torch.autograd.grad(out, leaves, grad))
    return [moe_ops.cp_unsplit(x, 2, **where) for x in parts]


@pytest.mark.dist
@all_ranks
@all_causal
@all_methods
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_cp_attention_of_documents_matches_reference(num_ranks, causal, method, kv_heads) -> None:
    """Gradients of q, k, v, too."""
    tensors = whole(kv_heads)
    found = on_ranks(num_ranks, _attend, tensors, causal, method)[0]
    for name, actual, wanted in zip(NAMES, found, expected(tensors, causal)):
        assert_close(name, actual, wanted)


def _compiled(rank: int, num_ranks: int, causal: bool, method: str, backend: str) -> None:
    def attend(cu_seqlens_N1, *tensors):
        where = {"cu_seqlens_N1": cu_seqlens_N1, "group": group(num_ranks)}
        parts = (moe_ops.cp_split(x * 2, 2, **where) for x in tensors)
        out, lse = moe_ops.cp_attention(*parts, causal=causal, method=method, **where)
        return moe_ops.cp_unsplit(out, 2, **where), lse.detach()

    leaves = [x.requires_grad_() for x in whole(2)[:3]]
    check_compiled(attend, bounds(), *leaves, backend=backend, exact=backend != "inductor")


def _pieces(bounds, *rows: torch.Tensor) -> list[torch.Tensor]:
    """[1, heads, S, ...] of one document, of [S, heads, ...] of all."""
    parts = (x[first:last] for x, (first, last) in zip(rows, bounds))
    return [x.transpose(0, 1).unsqueeze(0).contiguous() for x in parts]


def _documents(ends_q: torch.Tensor, ends_k: torch.Tensor):
    pairs = zip(itertools.pairwise(ends_q.tolist()), itertools.pairwise(ends_k.tolist()))
    return [(of_q, of_k) for of_q, of_k in pairs if of_q[1] > of_q[0]]


def _packed(q, k, v, ends_q, ends_k, max_q, max_k, dropout, masked, debug, scale: float):
    """What PyTorch's kernel for CUDA does: documents one after another."""
    parts = [
        flash_attention.attend(*_pieces((of_q, of_k, of_k), q, k, v), masked, Settings(scale, None))
        for of_q, of_k in _documents(ends_q, ends_k)
    ]
    out, lse = (torch.cat(each, 2)[0] for each in zip(*parts))
    return out.transpose(0, 1), lse


def _packed_backward(
    grad, q, k, v, out, lse, ends_q, ends_k, max_q, max_k, dropout, masked, *state, scale: float
):
    assert lse.is_contiguous()
    parts = []
    for of_q, of_k in _documents(ends_q, ends_k):
        bounds = (of_q, of_q, of_k, of_k, of_q, of_q)
        pieces = _pieces(bounds, grad, q, k, v, out, lse.T)
        parts.append(flash_attention.attend_backward(*pieces, masked, Settings(scale, None)))
    return [torch.cat(each, 2)[0].transpose(0, 1) for each in zip(*parts)]


@pytest.mark.parametrize(
    ("chunks_q", "chunks_k", "masked"), [(2, 2, True), (2, 1, False), (1, 2, False), (6, 6, True)]
)
def test_attention_of_packed_rows_matches_masks(monkeypatch, chunks_q, chunks_k, masked) -> None:
    """How documents are put into one piece for CUDA, and back; two sequences, an empty document."""
    documents = flash_attention.Documents(torch.tensor([0, 2, 2, 8, 12]), 12)
    q, grad = (values(2, 4, 12 * chunks_q, 8, seed=seed) for seed in (0, 3))
    k, v = (values(2, 2, 12 * chunks_k, 8, seed=seed) for seed in (1, 2))
    out, lse = flash_attention.attend(q, k, v, masked, Settings(0.3, documents))
    tensors = (grad, q, k, v, out, lse)
    grads = flash_attention.attend_backward(*tensors, masked, Settings(0.3, documents))
    aten = types.SimpleNamespace(**{name: getattr(torch.ops.aten, name) for name in CPU_KERNELS})
    aten._flash_attention_forward = types.SimpleNamespace(default=_packed)
    aten._flash_attention_backward = types.SimpleNamespace(default=_packed_backward)
    monkeypatch.setattr(flash_attention, "_ATEN", aten)
    found = (
        *flash_attention._attend_packed(q, k, v, masked, 0.3, documents),
        *flash_attention._attend_packed_backward(*tensors, masked, 0.3, documents),
    )
    for name, actual, wanted in zip(NAMES, found, (out, lse, *grads)):
        assert_close(name, actual, wanted.double())


@pytest.mark.dist
@all_methods
@pytest.mark.parametrize(
    ("num_ranks", "causal", "backend"),
    [(4, True, "aot_eager"), (4, False, "aot_eager"), (2, True, "inductor")],
)
def test_cp_attention_of_documents_compiles_fullgraph(num_ranks, causal, method, backend) -> None:
    on_ranks(num_ranks, _compiled, causal, method, backend)


@all_methods
def test_cp_attention_of_other_documents_is_not_compiled_again(method: str) -> None:
    attend = functools.partial(moe_ops.cp_attention, method=method, group=None)
    compiled = torch.compile(
        lambda q, cu: attend(q, q, q, cu_seqlens_N1=cu)[0], fullgraph=True, backend="aot_eager"
    )
    q = whole(4)[0]
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for cu in (bounds(), torch.tensor([0, 2, 10, 10, SIZE], dtype=torch.int32)):
            assert_equal("out", compiled(q, cu), attend(q, q, q, cu_seqlens_N1=cu)[0])


@all_causal
@all_methods
def test_cp_attention_of_documents_saves_as_much_on_any_number_of_ranks(causal, method) -> None:
    found = []
    for num_ranks in (2, 4, 8):
        with fake_ranks(num_ranks, num_ranks // 2):
            where = {"cu_seqlens_N1": bounds() // 8 * 2 * num_ranks, "group": world()}
            attend = functools.partial(moe_ops.cp_attention, causal=causal, method=method, **where)
            forward, _ = partitioned(attend, *(torch.randn(1, 8, 12, 8) for _ in range(3)))
        found.append(num_saved(forward))
    assert found == [4 * 8 * 12 * 8 + 8 * 12] * 3  # q, k, v, out, lse; on the CPU masks, too


GOOD = {"x": torch.ones(3, SIZE), "dim": 1, "cu_seqlens_N1": bounds(), "group": None}
REJECTED = [
    ({"cu_seqlens_N1": bounds().float()}, TypeError, "cu_seqlens_N1 must be torch.int32 or"),
    ({"cu_seqlens_N1": bounds()[None]}, ValueError, "cu_seqlens_N1 must have 1 dimensions, got"),
    ({"cu_seqlens_N1": bounds()[:1]}, ValueError, "cu_seqlens_N1 must have at least 2 entries"),
    ({"dim": 2}, ValueError, "for dimension 2 of x, got"),
    ({"x": torch.ones(3, SIZE + 1)}, ValueError, f"x must have a multiple of .* got {SIZE + 1}"),
    *(
        ({"cu_seqlens_N1": torch.tensor(x)}, RuntimeError, "cu_seqlens_N1 must rise from 0 to all")
        for x in ([0, 7, SIZE], [0, 32, 8, SIZE], [0, 8], [8, SIZE])
    ),
]


@pytest.mark.parametrize("op", ["cp_split", "cp_unsplit"])
@pytest.mark.parametrize(("changes", "error", "message"), REJECTED)
def test_cp_split_rejects_bad_documents(op: str, changes, error, message: str) -> None:
    check_rejects(op, getattr(moe_ops, op), GOOD, changes, error, message)


MORE = torch.ones(2, 4, SIZE + 8, 8)
SIZES = ({"k": MORE, "v": MORE}, ValueError, f"q and k may differ in heads alone, got {SIZE} and")


@pytest.mark.parametrize("method", ["ring", "heads"])
@pytest.mark.parametrize(("changes", "error", "message"), [REJECTED[0], REJECTED[-1], SIZES])
def test_cp_attention_rejects_bad_documents(method: str, changes, error, message: str) -> None:
    q = whole(4)[0]
    good = {"q": q, "k": q, "v": q, "method": method, "cu_seqlens_N1": bounds(), "group": None}
    check_rejects("cp_attention", moe_ops.cp_attention, good, changes, error, message)


def _one_rank_is_wrong(rank: int, op: str, wrong: list[int]) -> None:
    cu = torch.tensor(wrong) if rank else bounds().long()
    where = {"cu_seqlens_N1": cu, "group": world()}
    if op == "cp_attention":
        q = torch.ones(1, 2, SIZE // 2, 8)
        moe_ops.cp_attention(q, q, q, **where)
    else:
        size = SIZE if op == "cp_split" else SIZE // 2
        getattr(moe_ops, op)(torch.ones(size), 0, **where)


@pytest.mark.dist
@pytest.mark.parametrize("wrong", [[0, 2, 8, 32, SIZE], [0, SIZE]])
@pytest.mark.parametrize("op", ["cp_split", "cp_unsplit", "cp_attention"])
def test_cp_documents_rejects_bad_input_on_every_rank(op: str, wrong: list[int]) -> None:
    """No multiple of 2P; another number of documents."""
    for name, text in expect_error_on_ranks(2, _one_rank_is_wrong, op, wrong):
        assert name in ("RuntimeError", "ValueError")
        assert text.startswith(f"{op}: ")
