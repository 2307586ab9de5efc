"""The pool of ranks itself: results, errors, hangs and deaths reach the test."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, expect_error_on_ranks, run_on_ranks

pytestmark = pytest.mark.dist


def _sum(rank: int, values: torch.Tensor) -> torch.Tensor:
    total = values + rank
    dist.all_reduce(total)
    return total


def _empty(rank: int) -> torch.Tensor:
    return torch.empty(3)


def _raise(rank: int, ranks: tuple[int, ...]) -> None:
    if rank in ranks:
        raise ValueError(f"bad on {rank}")


def _sleep_or_die(rank: int, dies: bool) -> None:
    if rank == 1:
        os._exit(3) if dies else time.sleep(60)


def test_results_come_back_in_rank_order() -> None:
    first, second = run_on_ranks(2, _sum, torch.tensor([1.0, 2.0]))
    assert first.tolist() == second.tolist() == [3.0, 5.0]


def test_second_call_is_fast() -> None:
    run_on_ranks(2, _sum, torch.zeros(1))
    start = time.perf_counter()
    for _ in range(10):
        run_on_ranks(2, _sum, torch.zeros(1))
    assert (time.perf_counter() - start) / 10 < 0.5


def test_uninitialised_memory_is_nan_on_every_rank() -> None:
    assert all(values.isnan().all() for values in [torch.empty(3), *run_on_ranks(2, _empty)])


def test_error_on_a_rank_is_raised_here() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: Traceback.*ValueError: bad on 1"):
        run_on_ranks(2, _raise, (1,))


def test_expected_errors_come_back() -> None:
    errors = expect_error_on_ranks(2, _raise, (0, 1))
    assert errors == [("ValueError", "bad on 0"), ("ValueError", "bad on 1")]


def test_expected_error_missing_on_a_rank_fails() -> None:
    with pytest.raises(RankError, match="rank 0 must raise"):
        expect_error_on_ranks(2, _raise, (1,))


def test_hanging_rank_fails_and_shows_where() -> None:
    run_on_ranks(2, _empty)
    with pytest.raises(RankError, match=r"(?s)rank 1: no answer.*_sleep_or_die"):
        run_on_ranks(2, _sleep_or_die, False, timeout_s=1)
    assert len(run_on_ranks(2, _empty)) == 2


def test_dead_rank_fails() -> None:
    with pytest.raises(RankError, match="rank 1: the process ended with exit code 3"):
        run_on_ranks(2, _sleep_or_die, True)
