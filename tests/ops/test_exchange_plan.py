"""exchange_plan, all nine tensors of it, against a loop over the ids of all ranks."""

from __future__ import annotations

import dataclasses
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

import moe_ops
from moe_ops import _library, exchange_plan
from moe_ops.comm import nvlink
from moe_ops.layout import Plan
from moe_ops.ops.exchange_plan import read_splits
from moe_ops.testing import SKEWS, assert_equal, make_ids
from tests.ranks import expect_error_on_ranks, run_on_ranks

from .checks import check_compiled, check_rejects, group_of, world
from .plan_loop import Settings, plan_loop

TOP_K = 2


def make_all_ids(tokens, skew="uniform", none_fraction=0.0, num_experts=8, seed=0):
    """Ids of every rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        make_ids(t, TOP_K, num_experts, skew, none_fraction, generator, num_ranks=len(tokens))
        for t in tokens
    ]


def check_plan(plan: Plan, expected: Plan) -> None:
    for field in dataclasses.fields(Plan):
        assert_equal(field.name, getattr(plan, field.name), getattr(expected, field.name))
    assert plan.splits_4P.device.type == "cpu"


def _plan(rank: int, ids_of_rank: list[torch.Tensor], settings: Settings) -> Plan:
    return moe_ops.exchange_plan(ids_of_rank[rank], group=world(), **settings.kwargs())


def check_plans(ids_of_rank: list[torch.Tensor], settings: Settings) -> None:
    """On as many ranks as there are ids; one needs no group."""
    if len(ids_of_rank) == 1:
        plans = [moe_ops.exchange_plan(ids_of_rank[0], group=None, **settings.kwargs())]
    else:
        plans = run_on_ranks(len(ids_of_rank), _plan, ids_of_rank, settings)
    for rank, plan in enumerate(plans):
        check_plan(plan, plan_loop(ids_of_rank, rank, settings))


routings = {
    "skew": st.sampled_from(SKEWS),
    "none_fraction": st.sampled_from([0.0, 0.3, 1.0]),
    "copy_capacity": st.none() | st.integers(0, 40),
    "row_capacity": st.integers(0, 60),
    "seed": st.integers(0, 1000),
}


def check_routing(tokens, skew, none_fraction, copy_capacity, row_capacity, seed) -> None:
    ids_of_rank = make_all_ids(tokens, skew, none_fraction, seed=seed)
    settings = Settings()
    if copy_capacity is not None:
        settings = Settings(max_tokens=20, copy_capacity=copy_capacity, row_capacity=row_capacity)
    check_plans(ids_of_rank, settings)


@hypothesis.given(tokens=st.lists(st.integers(0, 20), min_size=1, max_size=1), **routings)
def test_exchange_plan_matches_reference(tokens, **routing) -> None:
    check_routing(tokens, **routing)


@pytest.mark.dist
@hypothesis.settings(max_examples=25)
@hypothesis.given(tokens=st.lists(st.integers(0, 20), min_size=2, max_size=2), **routings)
def test_exchange_plan_matches_reference_on_two_ranks(tokens, **routing) -> None:
    check_routing(tokens, **routing)


@pytest.mark.dist
@hypothesis.settings(max_examples=15)
@hypothesis.given(tokens=st.lists(st.integers(0, 20), min_size=4, max_size=4), **routings)
def test_exchange_plan_matches_reference_on_four_ranks(tokens, **routing) -> None:
    check_routing(tokens, **routing)


EXACT = Settings()
CAPACITY = Settings(max_tokens=64, copy_capacity=256, row_capacity=512)
both_modes = pytest.mark.parametrize("settings", [EXACT, CAPACITY], ids=["exact", "capacity"])


@pytest.mark.dist
@both_modes
@pytest.mark.parametrize(
    "tokens", [(7, 0, 13, 64), (0, 0, 0, 0), (5, 0), (0, 0), (17, 64)], ids=str
)
def test_exchange_plan_handles_unequal_tokens(tokens, settings: Settings) -> None:
    check_plans(make_all_ids(tokens), settings)


@pytest.mark.dist
@both_modes
def test_exchange_plan_handles_all_to_rank_0(settings: Settings) -> None:
    ids_of_rank = make_all_ids((7, 9), "rank0 only")
    check_plans(ids_of_rank, settings)
    if settings is EXACT:
        plans = run_on_ranks(2, _plan, ids_of_rank, settings)
        assert [plan.num_copies for plan in plans] == [16, 0]


@both_modes
def test_exchange_plan_handles_same_expert_twice(settings: Settings) -> None:
    ids_TK = torch.tensor([[3, 3], [3, 0]])
    check_plans([ids_TK], settings)
    plan = moe_ops.exchange_plan(ids_TK, group=None, **settings.kwargs())
    assert plan.counts_PL.tolist() == [[1, 0, 0, 3, 0, 0, 0, 0]]


@pytest.mark.dist
@pytest.mark.parametrize("missing", [0, 1], ids=["full", "one_over"])
@pytest.mark.parametrize("limit", ["copies", "rows"])
def test_exchange_plan_handles_capacity(limit: str, missing: int) -> None:
    """Exactly full is no overflow; one less is counted, and sender and receiver drop the same."""
    ids_of_rank = [torch.tensor([[0, 1], [0, 4]]), torch.tensor([[5, 0], [2, 3], [1, 0]])]
    copies, rows = 5, 8  # of rank 0; rank 1 has 2 of each
    settings = Settings(
        max_tokens=3,
        copy_capacity=copies - (missing if limit == "copies" else 0),
        row_capacity=rows - (missing if limit == "rows" else 0),
    )
    check_plans(ids_of_rank, settings)
    first, second = run_on_ranks(2, _plan, ids_of_rank, settings)
    assert first.overflow_2.tolist() == [missing * (limit == "copies"), missing * (limit == "rows")]
    assert second.overflow_2.tolist() == [0, 0]
    dropped = [-1, -1] if missing and limit == "copies" else [4, -1]
    assert second.copy_of_token_TP[2].tolist() == dropped


def test_exchange_plan_worked_example() -> None:
    ids_TK = torch.tensor([[2, 0], [0, 1], [2, -1], [0, 2]], dtype=torch.int32)
    plan = moe_ops.exchange_plan(ids_TK, 3, group=None)
    assert plan.copy_of_token_TP.tolist() == [[0], [1], [2], [3]]
    assert plan.source_of_copy_D2.tolist() == [[0, 0], [0, 1], [0, 2], [0, 3]]
    assert_equal("ids_DK", plan.ids_DK, ids_TK)
    # No row is left unused in exact mode: one row less than sort_slots gives.
    assert plan.slot_of_row_C.tolist() == [1, 2, 6, 3, 0, 4, 7]
    assert plan.row_of_slot_DK.tolist() == [[4, 0], [1, 3], [5, -1], [2, 6]]
    assert plan.offsets_L.tolist() == [3, 4, 7]
    assert plan.counts_PL.tolist() == [[3, 1, 3]]
    assert plan.overflow_2.tolist() == [0, 0]
    assert plan.splits_4P.tolist() == [[4], [4], [7], [7]]


def _plan_of_members(rank: int, ids_of_rank, members, settings: Settings):
    group = group_of(*members)
    if rank not in members:
        return None
    ids_TK = ids_of_rank[members.index(rank)]
    return moe_ops.exchange_plan(ids_TK, group=group, **settings.kwargs())


@pytest.mark.dist
@both_modes
@pytest.mark.parametrize("members", [(1, 3), (0, 1, 2, 3), (2,)], ids=str)
def test_exchange_plan_handles_subset_of_the_world(members, settings: Settings) -> None:
    ids_of_rank = make_all_ids((7, 4, 0, 5)[: len(members)], none_fraction=0.2)
    plans = run_on_ranks(4, _plan_of_members, ids_of_rank, members, settings)
    for index, member in enumerate(members):
        check_plan(plans[member], plan_loop(ids_of_rank, index, settings))


@both_modes
def test_exchange_plan_compiles_fullgraph(settings: Settings) -> None:
    ids_TK = make_ids(7, 2, 8, none_fraction=0.3)
    check_compiled(
        lambda ids: moe_ops.exchange_plan(ids, group=None, **settings.kwargs()).tensors(), ids_TK
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_exchange_plan_handles_strided_ids(dtype: torch.dtype) -> None:
    ids_TK = make_ids(9, 2, 8, none_fraction=0.3, dtype=dtype)
    check_plans([ids_TK.T.contiguous().T], EXACT)
    check_plans([ids_TK.T.contiguous().T], CAPACITY)


GOOD = {"ids_TK": torch.zeros(3, 2, dtype=torch.int32), "num_experts": 4, "group": None}
FULL = {"max_tokens": 4, "copy_capacity": 4, "row_capacity": 8}
REJECTED = [
    ({"ids_TK": torch.zeros(3, 2)}, TypeError, "ids_TK must be .*, got torch.float32"),
    ({"ids_TK": torch.zeros(3).int()}, ValueError, "ids_TK must have 2 dimensions, got shape"),
    ({"ids_TK": torch.tensor([[0, 4]])}, ValueError, r"in -1 .. E-1 = 3, got .* \{0: 1\}"),
    ({"ids_TK": torch.tensor([[-2, 0]])}, ValueError, r"in -1 .. E-1 = 3, got .* \{0: 1\}"),
    ({"num_experts": 0}, ValueError, "num_experts must be a positive multiple of .*, got 0"),
    ({"max_tokens": -1}, ValueError, "max_tokens must not be negative, got -1"),
    ({"max_tokens": 2}, ValueError, "at most max_tokens = 2 rows, got 3"),
    ({**FULL, "copy_capacity": -1}, ValueError, "copy_capacity must not be negative, got -1"),
    ({**FULL, "row_capacity": -1}, ValueError, "row_capacity must not be negative, got -1"),
    ({"copy_capacity": 4}, ValueError, "must be given together or not at all, got 4 and None"),
    ({**FULL, "max_tokens": 0}, ValueError, "max_tokens must be positive with capacities, got 0"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REJECTED)
def test_exchange_plan_rejects_bad_input(changes, error, message) -> None:
    check_rejects("exchange_plan", moe_ops.exchange_plan, GOOD, changes, error, message)


def test_exchange_plan_rejects_id_out_of_range_in_capacity_mode() -> None:
    ids_TK = torch.tensor([[0, 8]])
    with pytest.raises(RuntimeError, match=r"exchange_plan: ids_TK must be in -1 \.\. E-1 = 7"):
        moe_ops.exchange_plan(ids_TK, group=None, **CAPACITY.kwargs())


@pytest.mark.parametrize("group", ["nobody", 3])
def test_exchange_plan_rejects_group_that_does_not_exist(group) -> None:
    error = ValueError if isinstance(group, str) else TypeError
    with pytest.raises(error, match=r"group:? must .*got"):
        moe_ops.exchange_plan(GOOD["ids_TK"], 4, group=group)
    if group == "nobody":
        with pytest.raises(
            ValueError, match="exchange_plan: group must name an initialised process group"
        ):
            torch.ops.moe_ops.exchange_plan(GOOD["ids_TK"], 4, group)


def _one_rank_is_wrong(rank: int, changes: dict) -> None:
    arguments = {**GOOD, "group": world(), **(changes if rank == 1 else {})}
    moe_ops.exchange_plan(**arguments)


@pytest.mark.dist
@pytest.mark.parametrize(("changes", "error", "message"), REJECTED)
def test_exchange_plan_rejects_bad_input_on_every_rank(changes, error, message) -> None:
    errors = expect_error_on_ranks(2, _one_rank_is_wrong, changes)
    for name, text in errors:
        assert name in ("TypeError", "ValueError")
        assert "exchange_plan: " in text
        assert "got" in text


@pytest.mark.dist
@pytest.mark.parametrize(
    "changes",
    [{"num_experts": 8}, {"ids_TK": torch.zeros(3, 1).int()}, FULL, {"max_tokens": 5}],
    ids=["num_experts", "top_k", "mode", "max_tokens"],
)
def test_exchange_plan_rejects_settings_that_differ(changes) -> None:
    for name, text in expect_error_on_ranks(2, _one_rank_is_wrong, changes):
        assert name == "ValueError"
        assert text.startswith("exchange_plan: every rank of group")
        assert "rank 0: " in text
        assert "rank 1: " in text


def _experts_do_not_divide(rank: int) -> None:
    moe_ops.exchange_plan(GOOD["ids_TK"], 5, group=world())


def _capacity_mode_id_is_wrong(rank: int) -> None:
    ids_TK = torch.tensor([[0, 8 * rank]])
    moe_ops.exchange_plan(ids_TK, group=world(), **CAPACITY.kwargs())


@pytest.mark.dist
def test_exchange_plan_rejects_experts_that_do_not_divide() -> None:
    for name, text in expect_error_on_ranks(2, _experts_do_not_divide):
        assert name == "ValueError"
        assert "positive multiple of the group's 2 ranks, got 5" in text


@pytest.mark.dist
def test_exchange_plan_rejects_id_out_of_range_in_capacity_mode_on_every_rank() -> None:
    for name, text in expect_error_on_ranks(2, _capacity_mode_id_is_wrong):
        assert name == "RuntimeError"
        assert "exchange_plan: ids_TK must be in -1 .. E-1 = 7" in text


def test_splits_of_a_group_with_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are as long as these allow, whatever `max_tokens` is, and nothing holds that."""
    monkeypatch.setattr(nvlink, "workspace", {"": mock.Mock(max_tokens=6)}.get)
    ids_TK = torch.tensor([[2, 0], [0, 1], [2, -1], [0, 2]])
    limits = {"max_tokens": 4, "copy_capacity": 4, "row_capacity": 8}
    plan = exchange_plan(ids_TK, 3, group=None, **limits)
    on_gpu = dataclasses.replace(plan, splits_4P=plan.splits_4P.to("meta"))
    assert read_splits(on_gpu, "") == [[6], [6], [12], [12]]
    exact = exchange_plan(ids_TK, 3, group=None)
    assert read_splits(exact, "") == [[4], [4], [7], [7]]
    x_TH = torch.arange(8.0).view(4, 2)
    run = {op: _library.info(op).reference for op in ("dispatch", "combine")}
    rows_DH, _ = run["dispatch"](x_TH, None, on_gpu.tensors(), "", "full")
    assert rows_DH.equal(x_TH)
    back_TH, _ = run["combine"](rows_DH, None, None, on_gpu.tensors(), "")
    assert back_TH.equal(x_TH)
    with pytest.raises(ValueError, match=r"max_tokens must be at most 6, with which comm\.setup"):
        exchange_plan(ids_TK, 3, group=None, **{**limits, "max_tokens": 7})
