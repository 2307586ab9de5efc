"""Uneven exchanges as operators see them. tests/ops has the operators."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe_ops.comm.collectives import all_gather, all_to_all_rows
from moe_ops.testing import assert_equal
from tests.ranks import run_on_ranks


def _rank_without_rows(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Rank 0 sends everything, rank 1 nothing: both must enter the collective."""
    rows = torch.ones(3 * (1 - rank), *shape)
    send, receive = ([1, 2], [1, 0]) if rank == 0 else ([0, 0], [2, 0])
    received = all_to_all_rows(rows, send, receive, dist.group.WORLD.group_name)
    dist.barrier()
    return received


@pytest.mark.dist
@pytest.mark.parametrize("shape", [(), (4,), (2, 3), (0,)], ids=str)
def test_rank_without_rows_takes_part(shape: tuple[int, ...]) -> None:
    first, second = run_on_ranks(2, _rank_without_rows, shape)
    assert_equal("rank 0", first, torch.ones(1, *shape))
    assert_equal("rank 1", second, torch.ones(2, *shape))


def _gather(rank: int) -> torch.Tensor:
    return all_gather(torch.full((2, 3), rank).T, dist.group.WORLD.group_name)


@pytest.mark.dist
def test_all_gather_stacks() -> None:
    expected = torch.stack([torch.zeros(3, 2), torch.ones(3, 2)]).long()
    for gathered in run_on_ranks(2, _gather):
        assert_equal("gathered", gathered, expected)


def test_one_process_copies() -> None:
    rows = torch.ones(3, 2)
    for result in (all_to_all_rows(rows, [3], [3], ""), all_gather(rows, "")[0]):
        assert_equal("rows", result, rows)
        assert result.data_ptr() != rows.data_ptr()
