"""What goes wrong on one rank ends in an error on every rank that waits for it, and says why.

A fault found by a kernel kills the CUDA context, so those tests have processes of their own.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import moe_ops
from moe_ops import comm
from moe_ops.comm import nvlink
from moe_ops.layout import Plan

from . import OPS, check_engines_agree, needs_two_gpus
from .ranks import (
    MAX_TOKENS,
    NUM_RANKS,
    Ended,
    expect_error_on_gpus,
    groups,
    leave,
    run_alone,
    run_on_gpus,
    set_up,
)
from .test_exchange import CASES

pytestmark = needs_two_gpus

TIMEOUT_S = 3  # of an exchange
SOON_S = 10
NUM_TOKENS, TOP_K, NUM_EXPERTS, HIDDEN = 32, 4, 8, 64
EXACT: dict[str, Any] = {"num_experts": NUM_EXPERTS}
CAPACITY = {
    **EXACT,
    "max_tokens": NUM_TOKENS,
    "copy_capacity": 2 * NUM_TOKENS,
    "row_capacity": 2 * NUM_TOKENS * TOP_K,
}
KILLED = 9  # exit code of the rank that dies


def ids_of(rank: int, top_k: int = TOP_K) -> torch.Tensor:
    """Every token goes to both ranks."""
    experts = torch.arange(top_k) % 2 * (NUM_EXPERTS // NUM_RANKS) + rank
    return experts.int().repeat(NUM_TOKENS, 1).cuda()


def plan(rank: int, top_k: int = TOP_K, **changes: Any) -> Plan:
    settings = {**CAPACITY, **changes}
    return moe_ops.exchange_plan(ids_of(rank, top_k), group=dist.group.WORLD, **settings)


def dispatch(
    planned: Plan,
    hidden_size: int = HIDDEN,
    dtype: torch.dtype = torch.bfloat16,
    wire: str = "full",
) -> Any:
    x_TH = torch.ones(NUM_TOKENS, hidden_size, dtype=dtype, device="cuda")
    name = comm.group_name_of(dist.group.WORLD)
    return OPS.dispatch(x_TH, None, planned.tensors(), name, wire)[0]


def combine(planned: Plan, rows_DH: torch.Tensor) -> torch.Tensor:
    return moe_ops.combine(rows_DH, planned, group=dist.group.WORLD)[0]


def begin() -> None:
    """The world exchanges over NVLink, and has done so once."""
    dist.barrier()  # NCCL's own start may take longer than an exchange
    set_up(dist.group.WORLD, NUM_TOKENS, 128, timeout_s=TIMEOUT_S)
    for settings in (EXACT, CAPACITY):
        planned = moe_ops.exchange_plan(ids_of(0), group=dist.group.WORLD, **settings)
        combine(planned, dispatch(planned))
    torch.cuda.synchronize()
    dist.barrier()


def check_fails_soon(exchange: Callable[[], Any], reason: str) -> None:
    """`exchange` fails within `SOON_S` seconds; the workspace knows the reason, a pattern."""

    def exchange_and_wait() -> None:
        exchange()
        torch.cuda.synchronize()

    started = time.monotonic()
    with pytest.raises(RuntimeError):  # CUDA's, when the host next hears of the device
        exchange_and_wait()
    seconds = time.monotonic() - started
    assert seconds < SOON_S, f"failed after {seconds:.1f} s"
    space = nvlink.workspace(comm.group_name_of(dist.group.WORLD))
    assert space is not None and re.search(reason, space.why()), space and space.why()


def await_other_rank() -> None:
    """Until the other rank has called `let_other_rank_go`, with the GPU at rest."""
    c10d._get_default_store().wait(["over"], datetime.timedelta(seconds=40))


def let_other_rank_go() -> None:
    c10d._get_default_store().set("over", "")


def check_ended(ended: Ended, exitcode: int, *patterns: str) -> None:
    assert ended.exitcode == exitcode, ended.output
    for pattern in patterns:
        assert re.search(pattern, ended.output), f"{pattern} is not in\n{ended.output}"


def printed(op: str, rank: int) -> str:
    """A pattern of what the GPU of `rank` prints: rank, peer, expected and seen."""
    return rf"{op} on rank {rank} .*rank {1 - rank}: expected \d+, seen \d+"


LATE = ("exchange_plan", "exchange_plan, exact", "dispatch", "combine")


@pytest.mark.parametrize("where", LATE)
def test_a_rank_that_never_arrives(where: str) -> None:
    first, second = run_alone(_never_arrives, where)
    check_ended(first, 0, printed(where.split(",")[0], 0))
    check_ended(second, 0)


def _never_arrives(rank: int, where: str) -> None:
    begin()
    planned, rows_DH = None, None
    if where in ("dispatch", "combine"):
        planned = plan(rank)
    if where == "combine":
        rows_DH = dispatch(planned)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        await_other_rank()
        return
    exchange = {
        "exchange_plan": lambda: plan(rank),
        "exchange_plan, exact": lambda: moe_ops.exchange_plan(
            ids_of(rank), group=dist.group.WORLD, **EXACT
        ),
        "dispatch": lambda: dispatch(planned),
        "combine": lambda: combine(planned, rows_DH),
    }[where]
    try:
        check_fails_soon(exchange, r"rank 1 .*expected \d+, seen \d+")
    finally:
        let_other_rank_go()


def test_a_rank_that_dies_between_plan_and_dispatch() -> None:
    first, second = run_alone(_dies)
    check_ended(first, 0, printed("dispatch", 0))
    check_ended(second, KILLED)


def _dies(rank: int) -> None:
    begin()
    planned = plan(rank)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 1:
        leave(KILLED)
    check_fails_soon(lambda: dispatch(planned), r"rank 1 .*expected \d+, seen \d+")


CHANGES: dict[str, dict[str, Any]] = {
    "H": {"hidden_size": 32},
    "dtype": {"dtype": torch.float16},
    "wire": {"wire": "fp8"},
    "K": {"top_k": 2},
    "operator": {},
}


@pytest.mark.parametrize("what", CHANGES)
def test_ranks_whose_settings_part_after_agreement(what: str) -> None:
    """Settings that all ranks have used before are compared by the kernels alone."""
    ended = run_alone(_parted, what)
    for rank in range(NUM_RANKS):
        check_ended(ended[rank], 0, printed(r"\w+", rank))
    outputs = "".join(each.output for each in ended)
    assert "other settings" in outputs, outputs


def _parted(rank: int, what: str) -> None:
    begin()
    planned, changes = plan(rank), CHANGES[what]
    rows_DH = dispatch(planned)
    if what == "K":
        exchanges = [lambda: plan(rank), lambda: plan(rank, **changes)]
    elif what == "operator":
        exchanges = [lambda: dispatch(planned), lambda: combine(planned, rows_DH)]
    else:
        exchanges = [lambda: dispatch(planned), lambda: dispatch(planned, **changes)]
    for exchange in exchanges:
        exchange()
    torch.cuda.synchronize()
    dist.barrier()
    check_fails_soon(exchanges[rank], "rank")


def test_capacity_mode_with_ids_that_are_no_experts() -> None:
    for rank, ended in enumerate(run_alone(_bad_ids)):
        check_ended(ended, 0, rf"exchange_plan on rank {rank} .*no experts")


def _bad_ids(rank: int) -> None:
    begin()
    ids_TK = ids_of(rank)
    ids_TK[3, 1] = NUM_EXPERTS if rank == 1 else 0

    def exchange() -> Plan:
        return moe_ops.exchange_plan(ids_TK, group=dist.group.WORLD, **CAPACITY)

    check_fails_soon(exchange, "neither -1 nor experts")


# Each with settings that no rank has used before: such are compared before the exchange.
DISAGREEING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "num_experts": ({"num_experts": 10}, {"num_experts": 12}),
    "max_tokens": ({"max_tokens": 101}, {"max_tokens": 102}),
    "copy_capacity": ({"copy_capacity": 203}, {"copy_capacity": 204}),
    "row_capacity": ({"row_capacity": 205}, {"row_capacity": 206}),
    "K": ({"top_k": 5}, {"top_k": 6}),
    "fewer max_tokens than tokens": ({"max_tokens": 107}, {"max_tokens": NUM_TOKENS - 1}),
}


def check_all_raise(function: Callable[..., Any], *args: Any, text: str) -> None:
    """ValueError on every rank; afterwards the group works on."""
    for kind, message in expect_error_on_gpus(function, *args):
        assert kind == "ValueError" and re.search(text, message), f"{kind}: {message}"
    run_on_gpus(_still_works)


def _still_works(rank: int) -> None:
    check_engines_agree(rank, CASES["plain"])


@pytest.mark.parametrize("what", DISAGREEING)
def test_ranks_with_other_plans(what: str) -> None:
    check_all_raise(_plan_otherwise, what, text="exchange_plan: .*got")


def _plan_otherwise(rank: int, what: str) -> None:
    groups()
    plan(rank, **DISAGREEING[what][rank])


@pytest.mark.parametrize("what", ["H", "dtype"])
def test_ranks_with_other_rows(what: str) -> None:
    check_all_raise(_dispatch_otherwise, what, text="dispatch: .*same settings")


def _dispatch_otherwise(rank: int, what: str) -> None:
    groups()
    planned = plan(rank)
    if what == "H":
        dispatch(planned, hidden_size=(1016, 1024)[rank])
    else:
        dispatch(planned, 1032, (torch.bfloat16, torch.float16)[rank])


def test_more_tokens_than_the_group_was_set_up_for() -> None:
    check_all_raise(_too_many_tokens, text=f"exchange_plan: .*max_tokens = {MAX_TOKENS}")


def _too_many_tokens(rank: int) -> None:
    ids_TK = torch.zeros(MAX_TOKENS + rank, 1, dtype=torch.int32, device="cuda")
    moe_ops.exchange_plan(ids_TK, NUM_EXPERTS, group=groups().nvlink)


@pytest.mark.parametrize("wrong", [NUM_EXPERTS, -2, 1 << 16, (1 << 16) + 1])
def test_exact_mode_with_ids_that_are_no_experts(wrong: int) -> None:
    check_all_raise(_wrong_id, wrong, text=r"ids_TK must be in .*\{1: 1\}")


def _wrong_id(rank: int, wrong: int) -> None:
    groups()
    ids_TK = ids_of(rank)
    ids_TK[3, 1] = wrong if rank == 1 else 0
    moe_ops.exchange_plan(ids_TK, group=dist.group.WORLD, **EXACT)


def test_a_group_with_other_workspaces() -> None:
    for kind, message in expect_error_on_gpus(_set_up_otherwise):
        assert kind == "ValueError" and "setup" in message, f"{kind}: {message}"


def _set_up_otherwise(rank: int) -> None:
    groups()
    set_up(dist.new_group(list(range(NUM_RANKS))), 64 + rank, 64)
