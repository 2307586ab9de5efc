"""Whole expert-parallel layers made of operators against the float64 oracle, gradients too."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import moe_ops
from moe_ops.testing import DTYPE_NAMES, SKEWS, Case
from tests.ranks import expect_error_on_ranks, run_on_ranks

from .chains import CHAINS, Run, check_run, run_chain, run_on_member
from .checks import world

all_chains = pytest.mark.parametrize("chain", CHAINS)
F64 = Case(num_experts=8, none_fraction=0.2, dtype=torch.float64)


def check(run: Run) -> None:
    """On the ranks that `run` has members for."""
    num_ranks = len(run.tokens)
    if num_ranks == 1:
        check_run(run, [run_chain(0, run, None)])
        return
    members = run.members or tuple(range(num_ranks))
    run = dataclasses.replace(run, members=members)
    results = run_on_ranks(4 if max(members) > 1 else 2, run_on_member, run)
    check_run(run, [results[member] for member in members])


routings = {
    "top_k": st.integers(1, 4),
    "skew": st.sampled_from(SKEWS),
    "none_fraction": st.sampled_from([0.0, 0.3, 1.0]),
    "dtype": st.sampled_from(list(DTYPE_NAMES)),
    "activation": st.sampled_from(["swiglu", "geglu", "swiglu_clamped"]),
    "chain": st.sampled_from(sorted(CHAINS)),
    "capacity": st.booleans(),
    "num_experts": st.sampled_from([4, 8]),
}


def check_case(tokens: list[int], chain: str, capacity: bool, **sizes: object) -> None:
    capacity = capacity and chain.startswith("flex")
    check(Run(case=Case(**sizes), tokens=tuple(tokens), chain=chain, capacity=capacity))


@hypothesis.settings(max_examples=40)
@hypothesis.given(tokens=st.lists(st.integers(0, 17), min_size=1, max_size=1), **routings)
def test_chain_matches_oracle(tokens, **routing) -> None:
    check_case(tokens, **routing)


@pytest.mark.dist
@hypothesis.settings(max_examples=20)
@hypothesis.given(tokens=st.lists(st.integers(0, 17), min_size=2, max_size=2), **routings)
def test_chain_matches_oracle_on_two_ranks(tokens, **routing) -> None:
    check_case(tokens, **routing)


@pytest.mark.dist
@hypothesis.settings(max_examples=10)
@hypothesis.given(tokens=st.lists(st.integers(0, 9), min_size=4, max_size=4), **routings)
def test_chain_matches_oracle_on_four_ranks(tokens, **routing) -> None:
    check_case(tokens, **routing)


@pytest.mark.dist
@all_chains
@pytest.mark.parametrize(
    "tokens", [(7, 0, 13, 64), (0, 0, 0, 0), (5, 0), (0, 0), (17, 64)], ids=str
)
def test_chain_handles_unequal_tokens(chain: str, tokens: tuple[int, ...]) -> None:
    check(Run(case=F64, tokens=tokens, chain=chain))


@pytest.mark.dist
@all_chains
def test_chain_handles_all_to_rank_0(chain: str) -> None:
    """Rank 1 receives nothing, takes part, and its weight gradients are zeros."""
    case = dataclasses.replace(F64, skew="rank0 only", none_fraction=0.0)
    run = Run(case=case, tokens=(7, 5), chain=chain, members=(0, 1))
    results = run_on_ranks(2, run_on_member, run)
    check_run(run, results)
    assert all(not grad.count_nonzero() for grad in results[1][3:])


@pytest.mark.dist
@all_chains
def test_chain_handles_subset_of_the_world(chain: str) -> None:
    check(Run(case=F64, tokens=(7, 4), chain=chain, members=(1, 3)))


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@all_chains
def test_chain_gives_the_same_bits_twice(chain: str, dtype: torch.dtype) -> None:
    case = dataclasses.replace(F64, dtype=dtype)
    run = Run(case=case, tokens=(17, 9), chain=chain, members=(0, 1))
    first, second = (run_on_ranks(2, run_on_member, run) for _ in range(2))
    for left, right in zip(first, second):
        assert all(map(torch.equal, left, right))


def _plans_differ(rank: int, op: str) -> None:
    """Rank 1 takes the plan of another exchange, with other sizes."""
    plans = [
        moe_ops.exchange_plan(torch.full((tokens, 1), 4), 8, group=world()) for tokens in (3, 2)
    ]
    plan = plans[rank]
    if op == "dispatch":
        x_TH = torch.ones(plan.copy_of_token_TP.shape[0], 4)
        torch.ops.moe_ops.dispatch(x_TH, None, plan.tensors(), world(), "full")
    else:
        moe_ops.combine(torch.ones(plan.num_copies, 4), plan, group=world())


@pytest.mark.dist
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_exchange_rejects_plans_that_differ(op: str) -> None:
    for name, text in expect_error_on_ranks(2, _plans_differ, op):
        assert name == "ValueError"
        assert text.startswith(f"{op}: what rank r sends to rank q must be what q receives from r")
