"""cp_split and cp_unsplit, and the gradient of each, against loops on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import moe_ops
from moe_ops.testing import assert_close, assert_equal
from tests.ranks import expect_error_on_ranks, run_on_ranks

from .checks import (
    GRAD_LAYOUTS,
    check_compiled,
    check_double_backward,
    check_rejects,
    group,
    make_grad,
    on_ranks,
    values,
    world,
)

CHUNK = 3
RANKS = (1, 2, 4)
all_ranks = pytest.mark.parametrize("num_ranks", RANKS)


def places(rank: int, num_ranks: int) -> list[int]:
    """Of the tokens of a rank in the whole sequence."""
    chunks = (rank, 2 * num_ranks - 1 - rank)
    return [chunk * CHUNK + i for chunk in chunks for i in range(CHUNK)]


def whole(num_ranks: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return values(2, 2 * num_ranks * CHUNK, 5, dtype=dtype, seed=seed)


def _split(rank: int, num_ranks: int, dim: int, dtype: torch.dtype):
    x = (whole(num_ranks) * 10).to(dtype).movedim(1, dim)
    part = moe_ops.cp_split(x, dim, group=group(num_ranks))
    return part, moe_ops.cp_unsplit(part, dim, group=group(num_ranks))


@pytest.mark.dist
@all_ranks
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_cp_split_matches_reference(num_ranks: int, dim: int, dtype: torch.dtype) -> None:
    """Tokens, labels, positions, masks, and back."""
    x = (whole(num_ranks) * 10).to(dtype).movedim(1, dim)
    for rank, (part, again) in enumerate(on_ranks(num_ranks, _split, dim, dtype)):
        wanted = x.index_select(dim, torch.tensor(places(rank, num_ranks)))
        assert_equal(f"part of rank {rank}", part, wanted)
        assert_equal("whole", again, x)


def _grads(rank: int, num_ranks: int, layout: str, dtype: torch.dtype):
    """Gradients as found on this rank, and what was given for cp_unsplit."""
    x = whole(num_ranks, dtype).requires_grad_()
    part = moe_ops.cp_split(x, 1, group=group(num_ranks))
    given = make_grad(part, layout)
    (of_split,) = torch.autograd.grad(part, x, given)
    part = part.detach().requires_grad_()
    joined = moe_ops.cp_unsplit(part, 1, group=group(num_ranks))
    grad = make_grad(joined, layout) * (rank + 1)
    (of_unsplit,) = torch.autograd.grad(joined, part, grad)
    return given.clone(), of_split, grad.clone(), of_unsplit


@pytest.mark.dist
@all_ranks
@pytest.mark.parametrize("layout", GRAD_LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cp_split_grad_matches_reference(num_ranks: int, layout: str, dtype) -> None:
    results = on_ranks(num_ranks, _grads, layout, dtype)
    total = torch.zeros(whole(num_ranks).shape)
    for _, _, grad, _ in results:  # in rank order, in float32
        total = total + grad.float()
    for rank, (given, of_split, _, of_unsplit) in enumerate(results):
        index = torch.tensor(places(rank, num_ranks))
        wanted = torch.zeros_like(whole(num_ranks, dtype)).index_copy(1, index, given)
        assert_equal(f"rank {rank}: grad of cp_split", of_split, wanted)
        assert_equal(
            f"rank {rank}: grad of cp_unsplit", of_unsplit, total.index_select(1, index).to(dtype)
        )


@pytest.mark.parametrize("op", ["cp_split", "cp_unsplit"])
def test_cp_split_grad_matches_reference_twice(op: str) -> None:
    check_double_backward(lambda x: getattr(moe_ops, op)(x, 0, group=None), values(4, 2))


def _worked_example(rank: int):
    x, ops = torch.tensor([1.0, 2, 3, 4]), torch.ops.moe_ops
    part = moe_ops.cp_split(x, 0, group=world())
    joined = moe_ops.cp_unsplit(part, 0, group=world())
    placed = ops.cp_split_backward(part, 0, world())
    return [y.tolist() for y in (part, joined, placed, ops.cp_unsplit_backward(x, 0, world()))]


@pytest.mark.dist
def test_cp_split_worked_example() -> None:
    assert run_on_ranks(2, _worked_example) == [
        [[1, 4], [1, 2, 3, 4], [1, 0, 0, 4], [2, 8]],
        [[2, 3], [1, 2, 3, 4], [0, 2, 3, 0], [4, 6]],
    ]


def _loss(rank: int, num_ranks: int, masked_from: int):
    """Mean next-token loss of all ranks, its gradient's norm, and the loss of this rank."""
    torch.manual_seed(0)
    where, size = group(num_ranks), 16
    ids, table = torch.randint(7, (1, size)), torch.randn(7, 7, dtype=torch.float64)
    table.requires_grad_()
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    labels[:, masked_from:] = -100
    labels[:, size // 4 : 3 * size // 4] = -100  # all that rank 1 of 2 holds
    ids, labels = (moe_ops.cp_split(x, 1, group=where) for x in (ids, labels))
    losses = F.cross_entropy(table[ids[0]], labels[0], ignore_index=-100, reduction="sum")
    count = moe_ops.cp_unsplit(labels, 1, group=where).ne(-100).sum()
    (grad,) = torch.autograd.grad(losses / count, table)
    parts = torch.stack([losses.detach() / count, *grad.flatten()])
    loss, *grad = moe_ops.comm.all_gather(parts, where or "").sum(0).unbind(0)
    return loss, torch.stack(grad).norm(), losses.detach()


@pytest.mark.dist
def test_cp_split_handles_a_rank_without_labels() -> None:
    """Loss and gradient norm of CP 1 and 2 are equal; the idle rank's loss is finite."""
    ((loss, norm, _),) = on_ranks(1, _loss, 15)
    results = on_ranks(2, _loss, 15)
    for rank_loss, rank_norm, _ in results:
        assert_close("loss", rank_loss, loss)
        assert_close("norm of the gradient", rank_norm, norm)
    assert results[1][2] == 0 and norm > 0


def _compiled(rank: int, num_ranks: int) -> None:
    def there_and_back(x):
        part = moe_ops.cp_split(x * 2, 1, group=world())
        return moe_ops.cp_unsplit(part * 3, 1, group=world())

    check_compiled(there_and_back, whole(num_ranks).requires_grad_())


@pytest.mark.dist
def test_cp_split_compiles_fullgraph() -> None:
    on_ranks(2, _compiled)


GOOD = {"x": torch.ones(3, 4), "dim": 1, "group": None}
REJECTED = [
    ({"x": torch.tensor(1.0)}, "x must have at least 1 dimension, got"),
    ({"dim": 2}, "dim must be one of x's 2 dimensions, got 2"),
    ({"dim": -3}, "dim must be one of x's 2 dimensions, got -3"),
    ({"dim": 0}, "x must have a multiple of 2 tokens in dimension 0, .* got 3; pad the sequence"),
]


def test_cp_unsplit_rejects_what_it_waits_for_elsewhere() -> None:
    changes = {"dep": torch.ones(1, device="meta")}
    message = "dep must be on cpu like the other tensors, got meta"
    check_rejects("cp_unsplit", moe_ops.cp_unsplit, GOOD, changes, ValueError, message)


@pytest.mark.parametrize("op", ["cp_split", "cp_unsplit"])
@pytest.mark.parametrize(("changes", "message"), REJECTED)
def test_cp_split_rejects_bad_input(op: str, changes, message: str) -> None:
    check_rejects(op, getattr(moe_ops, op), GOOD, changes, ValueError, message)


def _one_rank_is_wrong(rank: int, op: str, size: int) -> None:
    getattr(moe_ops, op)(torch.ones(size if rank else 8), 0, group=world())


@pytest.mark.dist
@pytest.mark.parametrize(("op", "size"), [("cp_split", 6), ("cp_split", 4), ("cp_unsplit", 6)])
def test_cp_split_rejects_bad_input_on_every_rank(op: str, size: int) -> None:
    for name, text in expect_error_on_ranks(2, _one_rank_is_wrong, op, size):
        assert name == "ValueError"
        assert text.startswith(f"{op}: ")


def _odd_length(rank: int) -> None:
    moe_ops.cp_split(torch.ones(6), 0, group=world())


@pytest.mark.dist
def test_cp_split_rejects_a_length_that_does_not_divide() -> None:
    for _, text in expect_error_on_ranks(2, _odd_length):
        assert "x must have a multiple of 4 tokens in dimension 0" in text and "got 6" in text
