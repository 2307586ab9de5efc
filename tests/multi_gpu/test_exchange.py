"""The engine `nvlink` gives what NCCL gives, bit for bit; and what it alone can do.

Letters: T tokens here, K top-k, E experts, P ranks, D copies, H hidden.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import DeviceType

import fx_passes
import moe_ops
from moe_ops import comm
from moe_ops.comm import in_flight
from moe_ops.layout import Plan
from moe_ops.nn import MoE
from moe_ops.testing import assert_close, assert_equal
from tests.nn.layers import (
    capacity_fields,
    check_layer,
    check_never_syncs,
    inputs_of_rank,
    make_config,
    make_layer,
)
from tests.ops.plan_loop import Settings, plan_loop

from . import (
    DTYPES,
    MODES,
    OPS,
    Case,
    check_engines_agree,
    guarded,
    needs_two_gpus,
    plan_of,
    random_case,
    results_of,
)
from .ranks import MAX_HIDDEN, MAX_TOKENS, NUM_RANKS, groups, run_on_gpus

pytestmark = needs_two_gpus

CASES = {
    "plain": Case(),
    "other rank empty": Case(tokens=(5, 0)),
    "own rank empty": Case(tokens=(0, 7)),
    "no tokens": Case(tokens=(0, 0)),
    "rank 0 only": Case(tokens=(200, 33), skew="rank0 only", none_fraction=0),
    "one expert": Case(skew="one expert", none_fraction=0),
    "zipf": Case(tokens=(300, 17), skew="zipf", num_experts=64, top_k=8),
    "some none": Case(none_fraction=0.3),
    "all none": Case(none_fraction=1.0),
    "repeated": Case(top_k=3, num_experts=4, repeats=True),
    "int64": Case(ids_dtype=torch.int64),
    "K1": Case(top_k=1),
    "K3": Case(top_k=3, hidden_size=8),
    "K32": Case(top_k=32, num_experts=64),
    "K32-E2": Case(top_k=32, num_experts=2, repeats=True),
    "E2": Case(num_experts=2, top_k=1),
    "E512": Case(num_experts=512, top_k=8),
    "many tokens": Case(tokens=(MAX_TOKENS, MAX_TOKENS - 1), hidden_size=256),
    "many to one": Case(tokens=(MAX_TOKENS, MAX_TOKENS), skew="one expert", none_fraction=0),
    "wide": Case(tokens=(65, 31), hidden_size=MAX_HIDDEN),
}
FALLBACKS = {
    "odd rows": Case(hidden_size=5),
    "float64": Case(dtype=torch.float64),
    "K40": Case(top_k=40, num_experts=64),
}
CAPACITY = Case(mode="capacity", hidden_size=512, tokens=(128, 96))


def test_groups_name_their_engines() -> None:
    assert run_on_gpus(_engines) == [["nvlink", "nvlink", "nccl"]] * NUM_RANKS


def _engines(rank: int) -> list[str]:
    return [comm.engine(getattr(groups(), f.name)) for f in dataclasses.fields(groups())]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_engines_agree(name: str, mode: str) -> None:
    run_on_gpus(_engines_agree, dataclasses.replace(CASES[name], mode=mode))


def _engines_agree(rank: int, case: Case) -> None:
    for dtype in DTYPES:
        check_engines_agree(rank, dataclasses.replace(case, dtype=dtype))
    check_engines_agree(rank, case, "inbox")


@pytest.mark.parametrize("name", FALLBACKS)
def test_rows_that_the_engine_does_not_take(name: str) -> None:
    """NCCL carries them, on a plan of the engine's."""
    run_on_gpus(_falls_back, FALLBACKS[name])


def _falls_back(rank: int, case: Case) -> None:
    given, group = case.inputs(rank), groups().nvlink
    plan, expected_plan = plan_of(case, rank, group), plan_of(case, rank, groups().nccl)
    for wire in ("full", "fp8"):
        found, expected = (
            OPS.dispatch(given.x_TH, given.weights_TK, p.tensors(), comm.group_name_of(g), wire)
            for p, g in ((plan, group), (expected_plan, groups().nccl))
        )
        for number, (value, wanted) in enumerate(zip(found, expected)):
            assert_equal(f"{case}: {wire}, output {number}", value, wanted)


def test_ctas_that_start_late() -> None:
    """While matmuls fill rank 0's GPU, rank 1 is through with one exchange and in the next."""
    run_on_gpus(_late_ctas)


def _late_ctas(rank: int) -> None:
    case = Case(mode="capacity", tokens=(40, 8), hidden_size=7168, none_fraction=0)
    given, group, nccl = case.inputs(rank), groups().nvlink, groups().nccl
    plan, expected_plan = plan_of(case, rank, group), plan_of(case, rank, nccl)

    def step(plan: Plan, group: dist.ProcessGroup) -> list[torch.Tensor]:
        name = comm.group_name_of(group)
        rows_DH, _ = OPS.dispatch(given.x_TH, None, plan.tensors(), name, "full")
        if rank == 1:
            rows_DH = rows_DH.clone()  # outside the window: nobody can pull it
        x_TH, _ = OPS.combine(rows_DH, None, None, plan.tensors(), name)
        return [x_TH, *OPS.dispatch(given.x_TH, given.weights_TK, plan.tensors(), name, "full")]

    expected = step(expected_plan, nccl)
    beside, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for number in range(100):
        if rank == 0:
            with torch.cuda.stream(beside):
                for _ in range(4):
                    torch.mm(a, a)
        for output, (value, wanted) in enumerate(zip(step(plan, group), expected, strict=True)):
            assert_equal(f"round {number}: output {output}", value, wanted)


@pytest.mark.parametrize("seed", range(5))
def test_engines_agree_on_random_rounds(seed: int) -> None:
    run_on_gpus(_random_rounds, seed, 100)


def _random_rounds(rank: int, seed: int, rounds: int) -> None:
    """Sizes, dtype, mode and skew change from one exchange to the next."""
    choices = random.Random(seed)  # the same on all ranks
    for number in range(rounds):
        case = random_case(choices, 1000 * (seed + 1) + number)
        group = choices.choice(("nvlink", "nvlink", "inbox"))
        try:
            check_engines_agree(rank, case, group)
        except Exception as error:
            raise AssertionError(f"round {number} of seed {seed}, {case}: {error}") from error


@pytest.mark.parametrize("mode", MODES)
def test_plan_is_what_tokens_say_one_by_one(mode: str) -> None:
    run_on_gpus(_plan_by_loop, Case(tokens=(33, 20), mode=mode, skew="zipf"))


def _plan_by_loop(rank: int, case: Case) -> None:
    found = plan_of(case, rank, groups().nvlink)
    everyone = [case.ids(source) for source in range(NUM_RANKS)]
    expected = plan_loop(everyone, rank, Settings(**case.settings()))
    for field in dataclasses.fields(Plan):
        if field.name != "splits_4P":  # of capacity mode: sizes of messages
            assert_equal(
                field.name, getattr(found, field.name).cpu(), getattr(expected, field.name)
            )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["exact", "capacity", "half"])
def test_combine_of_dispatch_counts_ranks(mode: str, dtype: torch.dtype) -> None:
    run_on_gpus(_there_and_back, Case(mode=mode, dtype=dtype, tokens=(100, 7)))


def _there_and_back(rank: int, case: Case) -> None:
    given, group = case.inputs(rank), groups().nvlink
    rows_DH, _, plan = moe_ops.dispatch(
        given.x_TH, given.ids_TK, given.weights_TK, group=group, **case.settings()
    )
    reached_T1 = (plan.copy_of_token_TP >= 0).sum(1, keepdim=True)
    back_TH, _ = moe_ops.combine(rows_DH, plan, group=group)
    assert_equal("x_TH", back_TH, (given.x_TH * reached_T1).to(case.dtype))


@pytest.mark.parametrize("group", ["nvlink", "inbox"])
@pytest.mark.parametrize("mode", MODES)
def test_exchange_touches_no_memory_around_its_tensors(mode: str, group: str) -> None:
    run_on_gpus(_guarded_exchange, Case(mode=mode, tokens=(300, 77)), group)


def _guarded_exchange(rank: int, case: Case, group: str) -> None:
    expected = results_of(case, rank, groups().nccl)
    with guarded() as buffers:
        found = results_of(case, rank, getattr(groups(), group))
    assert len(buffers) > len(dataclasses.fields(Plan)), "the plan's tensors and weights at least"
    for name, value in found.items():
        assert_equal(f"{case}: {name}", value, expected[name])


def test_exchanges_in_flight() -> None:
    run_on_gpus(_in_flight)


def _in_flight(rank: int) -> None:
    group, name = groups().nvlink, comm.group_name_of(groups().nvlink)
    cases = [CAPACITY, Case(mode="capacity", dtype=torch.float32, seed=1)]
    inputs = [case.inputs(rank) for case in cases]
    plans = [plan_of(case, rank, group) for case in cases]
    expected = [results_of(case, rank, groups().nccl) for case in cases]
    for number in range(20):
        num_sms = (0, 3, 32, 64)[number % 4]
        starts = [(i.x_TH, i.weights_TK, plan.tensors()) for i, plan in zip(inputs, plans)]
        tickets = [OPS.dispatch_start(*args, name, "full", num_sms) for args in starts]
        assert in_flight.num_in_flight() == len(cases)
        for ticket, args, wanted in zip(tickets, starts, expected):
            rows_DH, weights_DK = OPS.dispatch_wait(ticket, *args)
            assert_equal("rows_DH", rows_DH, wanted["dispatch, output 0"])
            assert_equal("weights_DK", weights_DK, wanted["dispatch, output 1"])
        ends = [
            (*case.outputs(plan, rank), given.addend_TH, plan.tensors())
            for case, plan, given in zip(cases, plans, inputs)
        ]
        tickets = [OPS.combine_start(*args, name, num_sms) for args in ends]
        for ticket, args, wanted in zip(tickets, ends, expected):
            out_TH, weights_TK = OPS.combine_wait(ticket, *args)
            assert_equal("out_TH", out_TH, wanted["combine, output 0"])
            assert_equal("weights_TK", weights_TK, wanted["combine, output 1"])


LONG = 20_000_000  # cycles, about 10 ms


def test_two_groups_on_two_streams() -> None:
    run_on_gpus(_two_groups)


def _two_groups(rank: int) -> None:
    cases = [CAPACITY, Case(mode="capacity", dtype=torch.float32, seed=1)]
    expected = [results_of(case, rank, groups().nccl) for case in cases]
    inputs = [case.inputs(rank) for case in cases]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for number in range(50):
        if number % 5 == rank:  # this rank's second exchange finds the first one waiting
            with torch.cuda.stream(streams[0]):
                torch.cuda._sleep(LONG)
        results = []
        for case, given, stream, group in zip(
            cases, inputs, streams, (groups().nvlink, groups().inbox)
        ):
            with torch.cuda.stream(stream):
                results.append(_exchange(case, given, group))
        torch.cuda.synchronize()
        for found, wanted in zip(results, expected):
            _check_exchange(found, wanted)


def _exchange(case: Case, given: Any, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Dispatch and what comes back of its rows as they are."""
    rows_DH, weights_DK, plan = moe_ops.dispatch(
        given.x_TH, given.ids_TK, given.weights_TK, group=group, **case.settings()
    )
    out_TH, _ = moe_ops.combine(rows_DH, plan, group=group)
    reached_T1 = (plan.copy_of_token_TP >= 0).sum(1, keepdim=True)
    return [rows_DH, weights_DK, out_TH - (given.x_TH * reached_T1).to(case.dtype)]


def _check_exchange(found: list[torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    rows_DH, weights_DK, difference_TH = found
    assert_equal("rows_DH", rows_DH, wanted["dispatch, output 0"])
    assert_equal("weights_DK", weights_DK, wanted["dispatch, output 1"])
    assert_equal("out_TH", difference_TH, torch.zeros_like(difference_TH))


def test_two_dtypes_share_a_workspace() -> None:
    run_on_gpus(_two_dtypes)


def _two_dtypes(rank: int) -> None:
    cases = [dataclasses.replace(CAPACITY, dtype=d) for d in (torch.float32, torch.bfloat16)]
    expected = [results_of(case, rank, groups().nccl) for case in cases]
    inputs = [case.inputs(rank) for case in cases]
    for _ in range(20):
        results = [_exchange(c, given, groups().nvlink) for c, given in zip(cases, inputs)]
        for found, wanted in zip(results, expected):
            _check_exchange(found, wanted)


def test_exchange_beside_an_all_reduce() -> None:
    run_on_gpus(_beside_all_reduce)


def _beside_all_reduce(rank: int) -> None:
    given, total = CAPACITY.inputs(rank), torch.empty(1 << 20, device="cuda")
    expected = results_of(CAPACITY, rank, groups().nccl)["dispatch, output 0"]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(200):
        total.fill_(step)
        work = dist.all_reduce(total, group=groups().nccl, async_op=True)
        rows_DH, _, difference_TH = _exchange(CAPACITY, given, groups().nvlink)
        work.wait()
        wrong += (total != NUM_RANKS * step).sum()
        wrong += (rows_DH != expected).sum() + (difference_TH != 0).sum()
    assert wrong.item() == 0


LAYER = {"hidden_size": 16, "ffn_hidden_size": 8}
SIZE_MODES = {"exact": {}, "capacity": capacity_fields(64)}


@pytest.mark.parametrize("mode", SIZE_MODES)
def test_layer_matches_oracle(mode: str) -> None:
    run_on_gpus(_layer, mode)


def _layer(rank: int, mode: str) -> None:
    config = make_config(dispatcher="flex", **LAYER, **SIZE_MODES[mode])
    assert comm.engine(groups().nvlink) == "nvlink" and groups().nvlink is dist.group.WORLD
    for tokens in ((7, 13), (5, 0), (0, 0), (33, 64)):
        for dtype in (torch.float32, torch.bfloat16):
            check_layer(rank, config, tokens, dtype, device="cuda")
    check_layer(rank, config, (33, 64), torch.float32, compiled="inductor", device="cuda")


def test_layers_with_exchanges_in_flight_match_eager() -> None:
    run_on_gpus(_two_layers)


class _TwoLayers(torch.nn.Module):
    """Neither layer needs the other."""

    def __init__(self, first: MoE, second: MoE) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x)


def _two_layers(rank: int) -> None:
    config = make_config(dispatcher="flex", **LAYER, **SIZE_MODES["capacity"])
    pair = (make_layer(config, groups().nvlink, torch.float32, "cuda") for _ in range(2))
    layers = _TwoLayers(*pair)
    x, grad, _ = (t.cuda() for t in inputs_of_rank(rank, 33 + rank, config, torch.float32))
    torch._dynamo.reset()
    results = []
    for step in (layers, torch.compile(layers, fullgraph=True, options=fx_passes.options())):
        leaf = x.clone().requires_grad_()
        y = step(leaf)
        leaves = [leaf, *layers.parameters()]
        results.append([y.detach(), *torch.autograd.grad(y, leaves, grad)])
    for number, (plain, found) in enumerate(zip(*results, strict=True)):
        assert_close(f"result {number}", found, plain)


def test_capacity_mode_never_syncs() -> None:
    run_on_gpus(_never_syncs)


def _never_syncs(rank: int) -> None:
    config = make_config(dispatcher="flex", **LAYER, **SIZE_MODES["capacity"])
    check_never_syncs(make_layer(config, groups().nvlink, torch.bfloat16, "cuda"), rank)


def test_no_nccl_kernel_runs() -> None:
    for on_nvlink, on_nccl in run_on_gpus(_profiled):
        assert any("nccl" in kernel.lower() for kernel in on_nccl), on_nccl
        assert not any("nccl" in kernel.lower() for kernel in on_nvlink), on_nvlink
        for word in ("plan", "dispatch", "combine"):
            assert any(word in kernel for kernel in on_nvlink), f"{word} is not in {on_nvlink}"


def _profiled(rank: int) -> list[list[str]]:
    given = CAPACITY.inputs(rank)
    return [
        _kernels_of(lambda group=group: _exchange(CAPACITY, given, group))
        for group in (groups().nvlink, groups().nccl)
    ]


def _kernels_of(step: Callable[[], Any]) -> list[str]:
    """Names of what runs on the GPU, past a warm-up."""
    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    return sorted({e.name for e in profile.events() if e.device_type == DeviceType.CUDA})
