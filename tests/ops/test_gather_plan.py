"""gather_plan on 1, 2 and 4 ranks."""

from __future__ import annotations

import pytest
import torch

import moe_ops
from tests.ranks import expect_error_on_ranks, run_on_ranks

from .checks import check_compiled, check_rejects, group_of, world


def _plan(rank: int, tokens, members, max_tokens: int, padded: bool):
    group = group_of(*members) if members else world()
    if members and rank not in members:
        return None
    number = tokens[members.index(rank) if members else rank]
    x_TH = torch.ones(number, 3)
    return moe_ops.gather_plan(x_TH, group=group, max_tokens=max_tokens, padded=padded)


def check(plan, counts: list[int]) -> None:
    counts_P, rank_of_token_G = plan
    assert counts_P.tolist() == counts
    assert counts_P.dtype == torch.int64
    assert counts_P.device.type == "cpu"
    assert rank_of_token_G.dtype == torch.int32
    expected = [rank for rank, number in enumerate(counts) for _ in range(number)]
    assert rank_of_token_G.tolist() == expected


@pytest.mark.dist
@pytest.mark.parametrize("max_tokens", [0, 64])
@pytest.mark.parametrize("tokens", [(4,), (7, 4), (7, 0, 13, 64), (0, 0), (0,)], ids=str)
def test_gather_plan_matches_reference(tokens, max_tokens: int) -> None:
    if len(tokens) == 1:
        plan = moe_ops.gather_plan(torch.ones(tokens[0]), group=None, max_tokens=max_tokens)
        check(plan, list(tokens))
        return
    for plan in run_on_ranks(len(tokens), _plan, tokens, (), max_tokens, False):
        check(plan, list(tokens))


@pytest.mark.dist
@pytest.mark.parametrize("tokens", [(7, 0), (7, 7), (0, 0)], ids=str)
def test_gather_plan_handles_padding(tokens) -> None:
    for plan in run_on_ranks(2, _plan, tokens, (), 7, True):
        check(plan, [7, 7])


@pytest.mark.dist
def test_gather_plan_handles_subset_of_the_world() -> None:
    plans = run_on_ranks(4, _plan, (5, 2), (1, 3), 0, False)
    check(plans[1], [5, 2])
    check(plans[3], [5, 2])


@pytest.mark.dist
def test_gather_plan_worked_example() -> None:
    check(run_on_ranks(2, _plan, (4, 1), (), 0, False)[0], [4, 1])
    check(run_on_ranks(2, _plan, (4, 1), (), 4, True)[0], [4, 4])


@pytest.mark.parametrize("padded", [False, True])
def test_gather_plan_compiles_fullgraph(padded: bool) -> None:
    check_compiled(
        lambda x: moe_ops.gather_plan(x, group=None, max_tokens=9, padded=padded),
        torch.ones(7, 3),
    )


GOOD = {"x_TH": torch.ones(3, 2), "group": None}
REJECTED = [
    ({"x_TH": torch.tensor(1.0)}, "x_TH must have at least 1 dimension, got"),
    ({"max_tokens": -1}, "max_tokens must not be negative, got -1"),
    ({"max_tokens": 2}, "at most max_tokens = 2 rows, got 3"),
    ({"padded": True}, "max_tokens must be positive if padded, got 0"),
]


@pytest.mark.parametrize(("changes", "message"), REJECTED)
def test_gather_plan_rejects_bad_input(changes, message) -> None:
    check_rejects("gather_plan", moe_ops.gather_plan, GOOD, changes, ValueError, message)


def _one_rank_is_wrong(rank: int, changes: dict) -> None:
    moe_ops.gather_plan(**{**GOOD, "group": world(), **(changes if rank == 1 else {})})


@pytest.mark.dist
@pytest.mark.parametrize("changes", [*(c for c, _ in REJECTED), {"max_tokens": 4}])
def test_gather_plan_rejects_bad_input_on_every_rank(changes) -> None:
    for name, text in expect_error_on_ranks(2, _one_rank_is_wrong, changes):
        assert name == "ValueError"
        assert text.startswith("gather_plan: ")
        assert "got" in text
