"""cp_shift, whole and in halves, on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from moe_ops.comm import in_flight
from moe_ops.testing import assert_equal
from tests.ranks import expect_error_on_ranks, run_on_ranks

from .checks import check_compiled, check_double_backward, check_rejects, values, world

HOPS = (1, 2, -1, 0, 5)
SIZE = 7


def _shift(rank: int, hops: int, dtype: torch.dtype):
    buf = (values(SIZE, seed=rank) * 10).to(dtype)
    shifted = moe_ops.cp_shift(buf, hops=hops, group=world())
    ticket = torch.ops.moe_ops.cp_shift_start(buf, buf, hops, world())
    assert_equal("in halves", torch.ops.moe_ops.cp_shift_wait(ticket, buf), shifted)
    assert in_flight.num_in_flight() == 0
    return shifted


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("hops", HOPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_cp_shift_matches_reference(num_ranks: int, hops: int, dtype: torch.dtype) -> None:
    for rank, shifted in enumerate(run_on_ranks(num_ranks, _shift, hops, dtype)):
        wanted = (values(SIZE, seed=(rank - hops) % num_ranks) * 10).to(dtype)
        assert_equal(f"rank {rank}", shifted, wanted)


def test_cp_shift_handles_one_rank_and_no_elements() -> None:
    for buf in (values(SIZE), values(0)):
        shifted = moe_ops.cp_shift(buf, group=None)
        assert_equal("out", shifted, buf)
        assert buf.numel() == 0 or shifted.data_ptr() != buf.data_ptr()


def _grad(rank: int, hops: int):
    buf, dep = values(SIZE, seed=rank).requires_grad_(), values(2).requires_grad_()
    shifted = moe_ops.cp_shift(buf, dep, hops, group=world())
    return torch.autograd.grad(shifted, (buf, dep), values(SIZE, seed=10 + rank), allow_unused=True)


@pytest.mark.dist
@pytest.mark.parametrize("hops", [1, -1, 2])
def test_cp_shift_grad_matches_reference(hops: int) -> None:
    for rank, (of_buf, of_dep) in enumerate(run_on_ranks(4, _grad, hops)):
        assert_equal(f"rank {rank}", of_buf, values(SIZE, seed=10 + (rank + hops) % 4))
        assert of_dep is None


def test_cp_shift_grad_matches_reference_twice() -> None:
    check_double_backward(lambda buf: moe_ops.cp_shift(buf, group=None), values(3))


def _worked_example(rank: int):
    buf = torch.tensor([[1.0, 2, 3, 4], [5.0, 6, 7, 8]][rank])
    return moe_ops.cp_shift(buf, group=world()).tolist()


@pytest.mark.dist
def test_cp_shift_worked_example() -> None:
    assert run_on_ranks(2, _worked_example) == [[5, 6, 7, 8], [1, 2, 3, 4]]


def _compiled(rank: int) -> None:
    def shifted_twice(buf):
        return moe_ops.cp_shift(moe_ops.cp_shift(buf * 2, group=world()) * 3, group=world())

    check_compiled(shifted_twice, values(SIZE, seed=rank).requires_grad_())


@pytest.mark.dist
def test_cp_shift_compiles_fullgraph() -> None:
    run_on_ranks(2, _compiled)


GOOD = {"buf": torch.ones(3), "group": None}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"buf": torch.ones(3, 2)}, ValueError, "buf must have 1 dimensions, got shape"),
        ({"dep": torch.ones(3, device="meta")}, ValueError, "dep must be on cpu like the other"),
        ({"group": "nobody"}, ValueError, "group must name an initialised process group"),
    ],
)
def test_cp_shift_rejects_bad_input(changes, error, message) -> None:
    check_rejects("cp_shift", moe_ops.cp_shift, GOOD, changes, error, message)


def _one_rank_is_wrong(rank: int, wrong: dict) -> None:
    arguments = {"buf": torch.ones(3), "hops": 1, "group": world()}
    moe_ops.cp_shift(**{**arguments, **(wrong if rank else {})})


@pytest.mark.dist
@pytest.mark.parametrize(
    "wrong", [{"buf": torch.ones(4)}, {"buf": torch.ones(3).half()}, {"hops": 2}]
)
def test_cp_shift_rejects_what_differs_on_every_rank(wrong: dict) -> None:
    for name, text in expect_error_on_ranks(2, _one_rank_is_wrong, wrong):
        assert name == "ValueError"
        assert text.startswith("cp_shift: every rank of group")


def test_cp_shift_wait_rejects_a_used_ticket() -> None:
    buf = values(SIZE)
    ticket = torch.ops.moe_ops.cp_shift_start(buf, buf, 1, "")
    torch.ops.moe_ops.cp_shift_wait(ticket, buf)
    with pytest.raises(RuntimeError, match="cp_shift_wait: ticket must come from cp_shift_start"):
        torch.ops.moe_ops.cp_shift_wait(ticket, buf)
