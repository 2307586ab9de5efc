"""Where the layer ends: overflow, starved ranks, bad input on one rank, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from moe_ops import comm, exchange_plan
from moe_ops.nn import MoE, MoEConfig, per_rank_names, shard_experts
from moe_ops.testing import assert_close
from tests.nn.layers import capacity_fields, inputs_of_rank, make_config, make_layer, oracle_step
from tests.ranks import expect_error_on_ranks, run_on_ranks

DISPATCHERS = ("flex", "alltoall", "allgather")
ALL_BUT_LOCAL = pytest.mark.parametrize("dispatcher", DISPATCHERS)


def _step(rank: int, config: MoEConfig, ids: torch.Tensor | None = None) -> dict[str, Any]:
    moe = make_layer(config, dist.group.WORLD, torch.float64)
    x, grad, default_ids = inputs_of_rank(rank, 6, config, torch.float64)
    x.requires_grad_()
    y = moe(x, router_ids=default_ids if ids is None else ids)
    y.backward(grad)
    error = ""
    try:
        moe.check_overflow()
    except RuntimeError as raised:
        error = str(raised)
    moe.check_overflow()
    grads = {name: p.grad for name, p in moe.named_parameters()}
    return {"y": y.detach(), "x.grad": x.grad, **grads, "error": error}


@pytest.mark.dist
@pytest.mark.parametrize("limits", [(5, 40), (12, 4), (4, 6), (12, 0), (0, 0)], ids=str)
def test_moe_overflow_is_equal_in_every_dispatcher(limits: tuple[int, int]) -> None:
    """Sender and receiver leave out the same copies and rows, and every rank says how many."""
    fields = capacity_fields(6, copy_capacity=limits[0], row_capacity=limits[1])
    runs = [run_on_ranks(2, _step, make_config(dispatcher=d, **fields)) for d in DISPATCHERS]
    for rank in (0, 1):
        flex, *others = (run[rank] for run in runs)
        assert "must fit into" in flex["error"]
        for other in others:
            assert other.pop("error") == flex["error"]
            for name, value in other.items():
                assert_close(name, value, flex[name])


@pytest.mark.dist
@ALL_BUT_LOCAL
def test_moe_capacity_exactly_full(dispatcher: str) -> None:
    """12 tokens choose experts 0 and 1: 12 copies and 24 rows on rank 0; one row less overflows."""
    ids = torch.tensor([[0, 1]] * 6)
    exact = run_on_ranks(2, _step, make_config(dispatcher=dispatcher), ids)
    for rows, left_out in ((24, None), (23, "{0: (0, 1)}")):
        fields = capacity_fields(6, copy_capacity=12, row_capacity=rows)
        answers = run_on_ranks(2, _step, make_config(dispatcher=dispatcher, **fields), ids)
        for answer, expected in zip(answers, exact, strict=True):
            if left_out:
                assert left_out in answer["error"]
            else:
                assert answer["error"] == ""
                assert_close("y", answer["y"], expected["y"])


@pytest.mark.dist
@ALL_BUT_LOCAL
@pytest.mark.parametrize("fields", [{}, capacity_fields(6)], ids=["exact", "capacity"])
def test_moe_starved_rank_takes_part(dispatcher: str, fields: dict[str, Any]) -> None:
    ids = torch.tensor([[0, 3]] * 6)
    config = make_config(dispatcher=dispatcher, bias=True, **fields)
    _, starved = run_on_ranks(2, _step, config, ids)
    for name in ("w13", "w2", "b13", "b2"):
        grad = starved[f"experts.{name}"]
        assert torch.equal(grad, torch.zeros_like(grad))


def _repeated(rank: int, config: MoEConfig) -> None:
    moe = make_layer(config, dist.group.WORLD, torch.float64)
    x, grad, _ = inputs_of_rank(rank, 6, config, torch.float64)
    ids = torch.full((6, 2), 3)
    y = moe(x, router_ids=ids)
    expected, _ = oracle_step(make_layer(config, None, torch.float64), x, grad, ids)
    moe.check_overflow()
    assert_close("y", y, expected)


@pytest.mark.dist
@ALL_BUT_LOCAL
@pytest.mark.parametrize("fields", [{}, capacity_fields(6)], ids=["exact", "capacity"])
def test_moe_sums_a_repeated_expert(dispatcher: str, fields: dict[str, Any]) -> None:
    run_on_ranks(2, _repeated, make_config(dispatcher=dispatcher, **fields))


def _bad_call(rank: int, fault: str) -> None:
    config = make_config(num_experts=8 if fault != "experts" or rank == 0 else 4)
    if fault == "capacity":
        config = make_config(**capacity_fields(8 + 8 * rank))
    if fault == "dispatcher":
        config = make_config(dispatcher="flex" if rank == 0 else "alltoall")
    moe = make_layer(config, dist.group.WORLD, torch.float32)
    x = torch.randn(4, 8)
    ids = None
    if rank == 1:
        if fault == "hidden":
            x = torch.randn(4, 7)
        if fault == "dtype":
            x = x.bfloat16()
        if fault == "id":
            ids = torch.full((4, 2), 8)
        if fault == "ids' shape":
            ids = torch.zeros(3, 2, dtype=torch.int64)
    moe(x, router_ids=ids)


def _limited(rank: int, dispatcher: str, fields: dict[str, Any]) -> None:
    router = {"expert_capacity_factor": 1.0, "drop_policy": "position"}
    config = make_config(router, dispatcher=dispatcher, **fields)
    layer, alone = (make_layer(config, g, torch.float64) for g in (dist.group.WORLD, None))
    x = inputs_of_rank(rank, (4, 16)[rank], config, torch.float64)[0]
    assert_close("y", layer(x), alone(x))
    layer.check_overflow()
    assert int(layer.stats()["dropped"]) > 0


@pytest.mark.dist
@ALL_BUT_LOCAL
@pytest.mark.parametrize("fields", [{}, capacity_fields(16)], ids=["exact", "capacity"])
def test_moe_expert_capacity_is_each_ranks_own(dispatcher: str, fields: dict[str, Any]) -> None:
    """Unequal ranks limit their own tokens; another rank drops nothing of theirs."""
    run_on_ranks(2, _limited, dispatcher, fields)


def _differ(rank: int, what: str) -> None:
    moe = make_layer(make_config(), dist.group.WORLD, torch.float32)
    x = torch.randn(4, 8, requires_grad=what == "x" and rank == 0)
    moe.router.weight.requires_grad_(what != "router" or rank == 0)
    moe.train(what != "training" or rank == 0)
    with torch.set_grad_enabled(what != "grad mode" or rank == 0):
        moe(x if what != "tensor" or rank == 0 else None)


@pytest.mark.dist
@pytest.mark.parametrize("what", ["x", "router", "training", "grad mode", "tensor"])
def test_moe_ranks_must_train_alike(what: str) -> None:
    for _, message in expect_error_on_ranks(2, _differ, what):
        assert "must" in message


def _list_for_ids(rank: int) -> None:
    ids: Any = torch.tensor([[1, 2]])
    exchange_plan([[1, 2]] if rank == 0 else ids, 8, group=dist.group.WORLD)


@pytest.mark.dist
def test_exchange_plan_rejects_a_list_on_every_rank() -> None:
    for _, message in expect_error_on_ranks(2, _list_for_ids):
        assert "exchange_plan" in message
        assert "got list" in message


@pytest.mark.parametrize(
    "fields", [{"max_tokens": 4}, capacity_fields(4)], ids=["exact", "capacity"]
)
def test_moe_rejects_more_than_max_tokens(fields: dict[str, Any]) -> None:
    moe = make_layer(make_config(**fields), None, torch.float32)
    with pytest.raises(ValueError, match="at most max_tokens = 4 tokens, got 5"):
        moe(torch.randn(5, 8))


def _ddp(rank: int) -> None:
    moe = make_layer(make_config(), dist.group.WORLD, torch.float32)
    before = moe.experts.w13.detach().clone()
    parallel = torch.nn.parallel.DistributedDataParallel
    parallel._set_params_and_buffers_to_ignore_for_model(moe, per_rank_names(moe))
    wrapped = parallel(moe)
    wrapped(torch.randn(4 + rank, 8)).sum().backward()
    assert torch.equal(moe.experts.w13, before)
    assert int(moe.stats()["tokens_per_expert"].sum()) == 2 * (4 + rank)
    gathered = comm.all_gather(moe.router.weight.grad, dist.group.WORLD.group_name)
    assert torch.equal(gathered[0], gathered[1])


@pytest.mark.dist
def _mismatched_names(rank: int) -> None:
    moe = make_layer(make_config(), dist.group.WORLD, torch.float32)
    compiled = torch.compile(moe)
    for module, state in ((compiled, moe.state_dict()), (moe, compiled.state_dict())):
        sharded = shard_experts(module, state)
        assert sum(isinstance(value, DTensor) for value in sharded.values()) == 2
    with pytest.raises(ValueError, match="state must name the module's parameters, such as"):
        shard_experts(moe, {"layers.w13": moe.experts.w13})


@pytest.mark.dist
def test_shard_experts_knows_compiled_names_and_rejects_others() -> None:
    run_on_ranks(2, _mismatched_names)


def test_moe_warns_of_a_missing_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(UserWarning, match="group is None, so this process holds all experts"):
        MoE(make_config(), group=None)


def test_per_rank_names_keep_ddp_off_the_experts() -> None:
    run_on_ranks(2, _ddp)


FAULTS = ["experts", "capacity", "dispatcher", "hidden", "dtype", "id", "ids' shape"]


@pytest.mark.dist
@pytest.mark.parametrize("fault", FAULTS)
def test_moe_fault_on_one_rank_is_an_error_on_all(fault: str) -> None:
    for _, message in expect_error_on_ranks(2, _bad_call, fault):
        assert "must" in message
        assert "got" in message


def _bad_setup(rank: int, fields: dict[str, Any], differing: bool) -> None:
    tokens = 4 + (rank if differing else 0)
    good = {"max_tokens": tokens, "hidden_size": 8, "dtype": torch.float32}
    comm.setup(dist.group.WORLD, **{**good, **fields})


@pytest.mark.dist
def test_setup_agrees_or_raises_on_every_rank() -> None:
    run_on_ranks(2, _bad_setup, {}, False)
    for fields, differing, message in (
        ({}, True, "same settings"),
        ({"engine": "pigeon"}, False, "engine must be"),
        ({"engine": "nvlink"}, False, "its backend is 'gloo'"),
        ({"num_sms": 0}, False, "num_sms must be"),
        ({"max_tokens": 0}, False, "max_tokens must be"),
    ):
        for _, text in expect_error_on_ranks(2, _bad_setup, fields, differing):
            assert message in text
    run_on_ranks(2, _bad_setup, {}, False)


def test_setup_of_one_process() -> None:
    assert comm.setup(None, max_tokens=4, hidden_size=8, dtype=torch.float32) == "none"
    assert comm.engine(None) == "none"


def test_moe_rejects_experts_that_do_not_spread() -> None:
    run_on_ranks(4, _uneven)


def _uneven(rank: int) -> None:
    with pytest.raises(ValueError, match="multiple of the group's 4 ranks, got 6"):
        MoE(make_config(num_experts=6), group=dist.group.WORLD)


def _save(rank: int, folder: str) -> dict[str, torch.Tensor]:
    moe = make_layer(make_config(bias=True), dist.group.WORLD, torch.float32)
    dcp.save(shard_experts(moe, moe.state_dict()), checkpoint_id=folder)
    return {name: value.clone() for name, value in moe.state_dict().items()}


@pytest.mark.dist
def test_shard_experts_keeps_every_expert(tmp_path: Path) -> None:
    """Saved by two ranks, loaded by one."""
    first, second = run_on_ranks(2, _save, str(tmp_path))
    moe = make_layer(make_config(bias=True), None, torch.float32)
    expected = {name: value.clone() for name, value in moe.state_dict().items()}
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.zero_()
    dcp.load(shard_experts(moe, moe.state_dict()), checkpoint_id=str(tmp_path))
    for name, value in moe.state_dict().items():
        assert torch.equal(value, expected[name])
        if name.startswith("experts."):
            assert torch.equal(value, torch.cat([first[name], second[name]]))
