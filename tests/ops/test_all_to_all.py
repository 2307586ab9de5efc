"""all_to_all against loops on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.testing import assert_close, assert_equal
from tests.ranks import expect_error_on_ranks, run_on_ranks

from .checks import (
    GRAD_LAYOUTS,
    check_compiled,
    check_double_backward,
    check_rejects,
    group_of,
    make_grad,
    values,
    world,
)

# SENDS[P][r][q]: rows that rank r sends to rank q.
SENDS = {
    1: [[3]],
    2: [[3, 1], [0, 2]],
    4: [[1, 0, 2, 3], [0, 0, 0, 0], [4, 0, 1, 0], [2, 0, 0, 5]],
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int64]
ranks_and_shapes = pytest.mark.parametrize(
    ("num_ranks", "shape"), [(1, (4,)), (2, ()), (2, (4,)), (2, (2, 3)), (4, (5,)), (2, (0,))]
)


def arguments(rank: int, num_ranks: int, shape, dtype, send_tail: int = 2, tail: int = 3):
    """rows with a tail that is not sent, send_P, recv_P, num_rows; another set for each rank."""
    sends = torch.tensor(SENDS[num_ranks])
    rows = (values(int(sends[rank].sum()) + send_tail, *shape, seed=rank) * 9).to(dtype)
    return rows, sends[rank], sends[:, rank].clone(), int(sends[:, rank].sum()) + tail


def all_to_all_loop(rank: int, num_ranks: int, shape, dtype, tail: int = 3):
    chunks = []
    for source in range(num_ranks):
        rows, send, _, _ = arguments(source, num_ranks, shape, dtype)
        start = int(send[:rank].sum())
        chunks.append(rows[start : start + int(send[rank])])
    return torch.cat([*chunks, torch.zeros(tail, *shape, dtype=dtype)])


def _exchange(rank: int, num_ranks: int, shape, dtype):
    return moe_ops.all_to_all(*arguments(rank, num_ranks, shape, dtype), group=world())


@pytest.mark.dist
@ranks_and_shapes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all_matches_reference(num_ranks: int, shape, dtype) -> None:
    if num_ranks == 1:
        found = [moe_ops.all_to_all(*arguments(0, 1, shape, dtype), group=None)]
    else:
        found = run_on_ranks(num_ranks, _exchange, num_ranks, shape, dtype)
    for rank, rows in enumerate(found):
        assert_equal(f"rank {rank}", rows, all_to_all_loop(rank, num_ranks, shape, dtype))


def _grad(rank: int, layout: str, dtype: torch.dtype) -> None:
    rows, send, recv, num_rows = arguments(rank, 2, (4,), dtype)
    rows[send.sum() :] = torch.nan
    rows.requires_grad_()
    received = moe_ops.all_to_all(rows, send, recv, num_rows, group=world())
    assert received.isfinite().all()
    grad = make_grad(received, layout)
    (found,) = torch.autograd.grad(received, rows, grad)
    mirror = moe_ops.all_to_all(grad.contiguous(), recv, send, rows.shape[0], group=world())
    assert_equal("grad", found, mirror)
    assert not found[send.sum() :].count_nonzero()


@pytest.mark.dist
@pytest.mark.parametrize("layout", GRAD_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_to_all_grad_matches_reference(layout: str, dtype: torch.dtype) -> None:
    run_on_ranks(2, _grad, layout, dtype)


def _adjoint(rank: int):
    rows, send, recv, num_rows = arguments(rank, 4, (3,), torch.float64)
    y = values(num_rows, 3, dtype=torch.float64, seed=rank + 10)
    there = moe_ops.all_to_all(rows, send, recv, num_rows, group=world())
    back = moe_ops.all_to_all(y, recv, send, rows.shape[0], group=world())
    return (there * y).sum(), (rows * back).sum()


@pytest.mark.dist
def test_all_to_all_is_its_own_adjoint() -> None:
    left, right = map(sum, zip(*run_on_ranks(4, _adjoint)))
    assert_close("<Ax, y> - <x, A'y>", left, right)


def test_all_to_all_grad_matches_reference_twice() -> None:
    counts = torch.tensor([3])
    check_double_backward(
        lambda rows: moe_ops.all_to_all(rows, counts, counts, 5, group=None), values(4, 2)
    )


def _second_gradient(rank: int) -> None:
    rows, send, recv, num_rows = arguments(rank, 2, (4,), torch.float64)
    rows.requires_grad_()
    received = moe_ops.all_to_all(rows, send, recv, num_rows, group=world())
    (grad,) = torch.autograd.grad((received**3).sum(), rows, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), rows)
    sent = torch.arange(len(rows))[:, None] < send.sum()
    assert_close("second gradient", second, 6 * rows * sent)


@pytest.mark.dist
def test_all_to_all_grad_matches_reference_twice_on_two_ranks() -> None:
    run_on_ranks(2, _second_gradient)


def _worked_example(rank: int):
    rows = torch.tensor([[1.0, 2, 3, 4], [5]][rank] if rank == 0 else [5.0])
    send, recv = torch.tensor([[3, 1], [0, 1]][rank]), torch.tensor([[3, 0], [1, 1]][rank])
    return moe_ops.all_to_all(rows, send, recv, int(recv.sum()), group=world())


@pytest.mark.dist
def test_all_to_all_worked_example() -> None:
    assert [r.tolist() for r in run_on_ranks(2, _worked_example)] == [[1, 2, 3], [4, 5]]


def _compiled(rank: int) -> None:
    rows, send, recv, num_rows = arguments(rank, 2, (4,), torch.float32)
    check_compiled(
        lambda rows: moe_ops.all_to_all(rows, send, recv, num_rows, group=world()),
        rows.requires_grad_(),
    )


@pytest.mark.dist
def test_all_to_all_compiles_fullgraph() -> None:
    run_on_ranks(2, _compiled)


def _nothing(rank: int):
    none = torch.zeros(2, dtype=torch.int64)
    rows = torch.zeros(0, 4, requires_grad=True)
    received = moe_ops.all_to_all(rows, none, none, 2 * rank, group=world())
    received.sum().backward()
    return received, rows.grad


@pytest.mark.dist
def test_all_to_all_handles_nothing_to_send() -> None:
    for rank, (received, grad) in enumerate(run_on_ranks(2, _nothing)):
        assert_equal("received", received, torch.zeros(2 * rank, 4))
        assert grad.shape == (0, 4)


def _members(rank: int, members):
    group = group_of(*members)
    if rank not in members:
        return None
    return moe_ops.all_to_all(*arguments(members.index(rank), 2, (4,), torch.float32), group=group)


@pytest.mark.dist
def test_all_to_all_handles_subset_of_the_world() -> None:
    results = run_on_ranks(4, _members, (1, 3))
    for index, member in enumerate((1, 3)):
        expected = all_to_all_loop(index, 2, (4,), torch.float32)
        assert_equal(f"rank {member}", results[member], expected)


ONE = torch.tensor([2])
GOOD = {"rows": torch.ones(3, 4), "send_P": ONE, "recv_P": ONE, "num_rows": 2, "group": None}
REJECTED = [
    ({"rows": torch.tensor(1.0)}, ValueError, r"rows must have at least 1 dimension, got \(\)"),
    ({"send_P": ONE.int()}, TypeError, "send_P must be torch.int64, got torch.int32"),
    ({"recv_P": ONE[None]}, ValueError, "recv_P must have 1 dimensions, got shape"),
    ({"send_P": torch.tensor([1, 1, 1])}, ValueError, "send_P must have a count a rank, got 3"),
    ({"send_P": torch.tensor([4])}, ValueError, "sum to more than the 3 rows given .*, got"),
    ({"recv_P": torch.tensor([3])}, ValueError, r"num_rows = 2 wanted, got \[2\] and \[3\]"),
    ({"recv_P": torch.tensor([-1])}, ValueError, "must not be negative, .*got"),
    ({"num_rows": -1}, ValueError, "num_rows must not be negative, got -1"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REJECTED)
def test_all_to_all_rejects_bad_input(changes, error, message) -> None:
    check_rejects("all_to_all", moe_ops.all_to_all, GOOD, changes, error, message)


def _one_rank_is_wrong(rank: int, changes: dict) -> None:
    good = {**GOOD, "send_P": torch.ones(2).long(), "recv_P": torch.ones(2).long()}
    moe_ops.all_to_all(**{**good, "group": world(), **(changes if rank == 1 else {})})


@pytest.mark.dist
@pytest.mark.parametrize(
    "changes",
    [
        *(changes for changes, _, _ in REJECTED),
        {"rows": torch.ones(3, 5)},
        {"rows": torch.ones(3, 4).half()},
        {"recv_P": torch.tensor([0, 1])},
        {"recv_P": torch.tensor([1, 0])},
        {"recv_P": torch.tensor([2, 0])},
        {"send_P": torch.tensor([2, 1])},
    ],
)
def test_all_to_all_rejects_bad_input_on_every_rank(changes) -> None:
    for name, text in expect_error_on_ranks(2, _one_rank_is_wrong, changes):
        assert name in ("TypeError", "ValueError")
        assert text.startswith("all_to_all: ")
        assert "got" in text
