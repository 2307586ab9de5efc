"""all_gather_rows and reduce_scatter_rows against loops on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.testing import DTYPE_NAMES, assert_close, assert_equal
from tests.ranks import expect_error_on_ranks, run_on_ranks

from .checks import (
    GRAD_LAYOUTS,
    check_compiled,
    check_double_backward,
    check_rejects,
    make_grad,
    values,
    world,
)

# Tokens of each rank and the chunk that stands for it; a rank may hold less than its chunk.
SIZES = {
    "one": ((4,), (4,)),
    "two": ((7, 3), (7, 3)),
    "padded": ((5, 2), (6, 6)),
    "empty": ((0, 4), (0, 4)),
    "nothing": ((0, 0), (0, 0)),
    "four": ((7, 0, 3, 5), (7, 0, 3, 5)),
}
TAIL = 2
all_sizes = pytest.mark.parametrize("sizes", SIZES)
all_dtypes = pytest.mark.parametrize("dtype", list(DTYPE_NAMES), ids=DTYPE_NAMES.get)


def on_ranks(function, sizes: str, *args):
    num_ranks = len(SIZES[sizes][0])
    if num_ranks == 1:
        return [function(0, sizes, *args)]
    return run_on_ranks(num_ranks, function, sizes, *args)


def group(sizes: str):
    return world() if len(SIZES[sizes][0]) > 1 else None


def counts_of(sizes: str):
    counts = SIZES[sizes][1]
    return torch.tensor(counts), sum(counts) + TAIL


def gather_input(rank: int, sizes: str, dtype: torch.dtype) -> torch.Tensor:
    return values(SIZES[sizes][0][rank], 3, dtype=dtype, seed=rank)


def scatter_input(rank: int, sizes: str, dtype: torch.dtype) -> torch.Tensor:
    rows = values(counts_of(sizes)[1], 3, dtype=dtype, seed=rank + 10)
    rows[-TAIL:] = torch.nan
    return rows


def gather_loop(sizes: str, dtype: torch.dtype) -> torch.Tensor:
    tokens, chunks = SIZES[sizes]
    parts = [torch.zeros(0, 3, dtype=dtype)]
    for rank, (number, chunk) in enumerate(zip(tokens, chunks)):
        parts += [gather_input(rank, sizes, dtype), torch.zeros(chunk - number, 3, dtype=dtype)]
    return torch.cat([*parts, torch.zeros(TAIL, 3, dtype=dtype)])


def scatter_loop(rank: int, sizes: str, dtype: torch.dtype) -> torch.Tensor:
    """In rank order, in at least float32, one cast at the end."""
    tokens, chunks = SIZES[sizes]
    start, total = sum(chunks[:rank]), 0
    for source in range(len(chunks)):
        rows = scatter_input(source, sizes, dtype)[start : start + tokens[rank]]
        total = total + rows.to(torch.promote_types(dtype, torch.float32))
    return total.to(dtype)


def _gather(rank: int, sizes: str, dtype: torch.dtype):
    counts_P, total = counts_of(sizes)
    x = gather_input(rank, sizes, dtype)
    return moe_ops.all_gather_rows(x, counts_P, total, group=group(sizes))


def _scatter(rank: int, sizes: str, dtype: torch.dtype):
    counts_P, _ = counts_of(sizes)
    x, num_rows = scatter_input(rank, sizes, dtype), SIZES[sizes][0][rank]
    return moe_ops.reduce_scatter_rows(x, counts_P, num_rows, group=group(sizes))


@pytest.mark.dist
@all_sizes
@all_dtypes
def test_all_gather_rows_matches_reference(sizes: str, dtype: torch.dtype) -> None:
    for rank, rows in enumerate(on_ranks(_gather, sizes, dtype)):
        assert_equal(f"rank {rank}", rows, gather_loop(sizes, dtype))


@pytest.mark.dist
@all_sizes
@all_dtypes
def test_reduce_scatter_rows_matches_reference(sizes: str, dtype: torch.dtype) -> None:
    for rank, rows in enumerate(on_ranks(_scatter, sizes, dtype)):
        assert_equal(f"rank {rank}", rows, scatter_loop(rank, sizes, dtype))


def _gather_integers(rank: int, dtype: torch.dtype):
    x = torch.full((2 - rank, 3), rank + 1, dtype=dtype)
    return moe_ops.all_gather_rows(x, torch.tensor([2, 1]), 4, group=world())


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool], ids=str)
def test_all_gather_rows_handles_integers(dtype: torch.dtype) -> None:
    for rows in run_on_ranks(2, _gather_integers, dtype):
        assert_equal("rows", rows, torch.tensor([[1], [1], [2], [0]]).expand(4, 3).to(dtype))


def _grads(rank: int, sizes: str, layout: str, dtype: torch.dtype) -> None:
    """The gradient of each is the other, bit for bit."""
    counts_P, total = counts_of(sizes)
    num_rows, where = SIZES[sizes][0][rank], group(sizes)
    x = gather_input(rank, sizes, dtype).requires_grad_()
    gathered = moe_ops.all_gather_rows(x, counts_P, total, group=where)
    grad = make_grad(gathered, layout)
    (found,) = torch.autograd.grad(gathered, x, grad)
    wanted = moe_ops.reduce_scatter_rows(grad.contiguous(), counts_P, num_rows, group=where)
    assert_equal("grad of all_gather_rows", found, wanted)
    y = scatter_input(rank, sizes, dtype).requires_grad_()
    scattered = moe_ops.reduce_scatter_rows(y, counts_P, num_rows, group=where)
    grad = make_grad(scattered, layout)
    (found,) = torch.autograd.grad(scattered, y, grad)
    wanted = moe_ops.all_gather_rows(grad.contiguous(), counts_P, total, group=where)
    assert_equal("grad of reduce_scatter_rows", found, wanted)


@pytest.mark.dist
@all_sizes
@pytest.mark.parametrize("layout", GRAD_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_gather_rows_grad_matches_reference(sizes, layout, dtype) -> None:
    on_ranks(_grads, sizes, layout, dtype)


def test_all_gather_rows_grad_matches_reference_twice() -> None:
    counts_P = torch.tensor([3])
    check_double_backward(
        lambda x: moe_ops.all_gather_rows(x, counts_P, 4, group=None), values(2, 2)
    )
    check_double_backward(
        lambda x: moe_ops.reduce_scatter_rows(x, counts_P, 2, group=None), values(4, 2)
    )


def _adjoint(rank: int, sizes: str):
    counts_P, total = counts_of(sizes)
    x = gather_input(rank, sizes, torch.float64)
    y = values(total, 3, dtype=torch.float64, seed=rank + 20)
    there = moe_ops.all_gather_rows(x, counts_P, total, group=world())
    back = moe_ops.reduce_scatter_rows(y, counts_P, x.shape[0], group=world())
    return (there * y).sum(), (x * back).sum()


@pytest.mark.dist
@pytest.mark.parametrize("sizes", ["two", "padded", "four"])
def test_all_gather_rows_is_adjoint_of_reduce_scatter_rows(sizes: str) -> None:
    left, right = map(sum, zip(*on_ranks(_adjoint, sizes)))
    assert_close("<Gx, y> - <x, Sy>", left, right)


def _second_gradient(rank: int) -> None:
    counts_P, total = counts_of("two")
    x = gather_input(rank, "two", torch.float64).requires_grad_()
    gathered = moe_ops.all_gather_rows(x, counts_P, total, group=world())
    (grad,) = torch.autograd.grad((gathered**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    # Each of the two ranks sums over both copies, in the gradient and in its gradient.
    assert_close("second gradient", second, 2 * 6 * x)


@pytest.mark.dist
def test_all_gather_rows_grad_matches_reference_twice_on_two_ranks() -> None:
    run_on_ranks(2, _second_gradient)


def _worked_example(rank: int):
    counts_P, x = torch.tensor([4, 1]), torch.tensor([[1.0, 2, 3, 4], [5.0]][rank])
    gathered = moe_ops.all_gather_rows(x, counts_P, 5, group=world())
    return gathered, moe_ops.reduce_scatter_rows(gathered, counts_P, len(x), group=world())


@pytest.mark.dist
def test_all_gather_rows_worked_example() -> None:
    results = run_on_ranks(2, _worked_example)
    assert [gathered.tolist() for gathered, _ in results] == [[1, 2, 3, 4, 5]] * 2
    assert [scattered.tolist() for _, scattered in results] == [[2, 4, 6, 8], [10]]


def _compiled(rank: int) -> None:
    counts_P, total = counts_of("two")
    x = gather_input(rank, "two", torch.float32).requires_grad_()

    def there_and_back(x):
        gathered = moe_ops.all_gather_rows(x, counts_P, total, group=world())
        return moe_ops.reduce_scatter_rows(gathered * 2, counts_P, x.shape[0], group=world())

    check_compiled(there_and_back, x)


@pytest.mark.dist
def test_all_gather_rows_compiles_fullgraph() -> None:
    run_on_ranks(2, _compiled)


ONE = torch.tensor([3])
GOOD = {"x": torch.ones(3, 2), "counts_P": ONE, "num_rows": 3, "group": None}
REJECTED = [
    ({"x": torch.tensor(1.0)}, ValueError, "x must have at least 1 dimension, got"),
    ({"counts_P": ONE.int()}, TypeError, "counts_P must be torch.int64, got torch.int32"),
    ({"counts_P": ONE[None]}, ValueError, "counts_P must have 1 dimensions, got shape"),
    ({"counts_P": torch.ones(3).long()}, ValueError, "counts_P must have a count a rank, got 3"),
    ({"counts_P": torch.tensor([-1])}, ValueError, r"counts_P must not be negative, .* got \[-1\]"),
    ({"num_rows": -1}, ValueError, "num_rows must not be negative, got -1"),
]
TOO_FEW = ({"counts_P": torch.tensor([2])}, ValueError, r"cover this rank's 3 rows .*, got \[2\]")
OPS = {
    "all_gather_rows": [*REJECTED, TOO_FEW, ({"num_rows": 2}, ValueError, "at most 2, got")],
    "reduce_scatter_rows": [
        *REJECTED,
        TOO_FEW,
        ({"x": torch.ones(3, 2).int()}, TypeError, "x must be floating, got torch.int32"),
        ({"x": torch.ones(2, 2)}, ValueError, "at most 2, got"),
    ],
}


@pytest.mark.parametrize(
    ("op", "changes", "error", "message"), [(op, *case) for op in OPS for case in OPS[op]]
)
def test_all_gather_rows_rejects_bad_input(op, changes, error, message) -> None:
    check_rejects(op, getattr(moe_ops, op), GOOD, changes, error, message)


def _one_rank_is_wrong(rank: int, op: str, changes: dict) -> None:
    good = {**GOOD, "counts_P": torch.tensor([3, 3]), "group": world()}
    good["num_rows" if op == "all_gather_rows" else "x"] = (
        6 if op == "all_gather_rows" else torch.ones(6, 2)
    )
    getattr(moe_ops, op)(**{**good, **(changes if rank == 1 else {})})


@pytest.mark.dist
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "changes",
    [
        *(changes for changes, _, _ in REJECTED),
        {"x": torch.ones(6, 3)},
        {"x": torch.ones(6, 2).half()},
        {"counts_P": torch.tensor([3, 4]), "num_rows": 3},
    ],
)
def test_all_gather_rows_rejects_bad_input_on_every_rank(op: str, changes) -> None:
    for name, text in expect_error_on_ranks(2, _one_rank_is_wrong, op, changes):
        assert name in ("TypeError", "ValueError")
        assert text.startswith(f"{op}: ")
        assert "got" in text
