"""Exchanges of up to eight ranks that share one GPU and one process: each has a workspace and a
stream of its own, and its kernels wait for the others' as on as many GPUs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_ops.comm.nvlink import DTYPES, Workspace
from moe_ops.comm.wire import FORMATS, dequantize, quantize
from moe_ops.kernels import exchange_nvlink as kernels
from moe_ops.layout import Plan
from moe_ops.testing import assert_equal
from tests.gpu import captured, skip_without_library
from tests.ops.plan_loop import Settings, plan_loop

pytestmark = pytest.mark.gpu

MAX_TOKENS, MAX_HIDDEN = 100, 256

fp8_wires = pytest.mark.parametrize("wire", [wire for wire in FORMATS if wire != "full"])


class World:
    """`num_ranks` ranks on one GPU."""

    def __init__(self, num_ranks: int, window_bytes: int, max_tokens: int = MAX_TOKENS) -> None:
        skip_without_library()
        num_plan_ctas = -(-16 // num_ranks) * num_ranks  # few: all ranks' run on one GPU at once
        self.spaces = [
            Workspace(
                rank,
                num_ranks,
                max_tokens=max_tokens,
                row_bytes=MAX_HIDDEN * 4,
                num_sms=4,
                timeout_s=5,
                num_plan_ctas=num_plan_ctas,
            )
            for rank in range(num_ranks)
        ]
        size = self.spaces[0].num_bytes() + window_bytes
        memories = [torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in self.spaces]
        self.streams = [torch.cuda.Stream() for _ in self.spaces]
        for space, memory in zip(self.spaces, memories):
            space.use(memory, [other.data_ptr() for other in memories])

    def on_all(self, call: Callable[..., Any], *args_of_rank: list[Any]) -> list[Any]:
        """`call(workspace, ...)` on every rank's stream."""
        torch.cuda.synchronize()
        results = []
        for space, stream, *args in zip(self.spaces, self.streams, *args_of_rank):
            with torch.cuda.stream(stream):
                results.append(call(space, *args))
        torch.cuda.synchronize()
        return results

    def plans(self, ids: list[torch.Tensor], settings: Settings) -> list[Plan]:
        """As `kernels.launch_plan`, of which exact mode would wait for ranks not yet launched."""
        experts = settings.num_experts

        def at_once(space: Workspace, ids_TK: torch.Tensor) -> list[torch.Tensor]:
            sizes = (settings.copy_capacity, settings.row_capacity)
            return kernels.launch_plan(space, ids_TK, experts, *sizes)

        def rest(space: Workspace, ids_TK: torch.Tensor) -> list[torch.Tensor]:
            splits = kernels.read_totals(space, ids_TK, experts)
            plan = kernels.new_plan(space, ids_TK, experts, sum(splits[1]), sum(splits[3]))
            kernels.launch_place(space, None, experts, plan)
            return [*plan, torch.tensor(splits)]

        if settings.copy_capacity is not None:
            return [Plan(*plan) for plan in self.on_all(at_once, ids)]
        self.on_all(lambda space, mine: kernels.launch_count(space, mine, experts), ids)
        return [Plan(*plan) for plan in self.on_all(rest, ids)]


@functools.cache
def load_plan_kernels() -> None:
    """All of exchange_plan's, for chunks of any length. A kernel is loaded at its first launch, and
    that waits for those that run, which may wait for this launch.
    """
    for num_tokens in (512, 1024, 2048):
        settings = Settings(num_experts=1, max_tokens=num_tokens, copy_capacity=1, row_capacity=1)
        ids_TK = torch.zeros(num_tokens, 32, dtype=torch.int32, device="cuda")
        World(1, 0, num_tokens).plans([ids_TK], settings)


def random_ids(tokens: list[int], top_k: int, experts: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-1, experts, (number, top_k), generator=generator) for number in tokens]


def settings_of(mode: str, experts: int, tokens: list[int], top_k: int) -> Settings:
    if mode == "exact":
        return Settings(num_experts=experts, max_tokens=MAX_TOKENS)
    copies = sum(tokens) + 3 if mode == "capacity" else max(sum(tokens) // 2, 1)
    return Settings(
        num_experts=experts,
        max_tokens=MAX_TOKENS,
        copy_capacity=copies,
        row_capacity=copies * top_k // 2 + 1,
    )


def check_plans(world: World, ids: list[torch.Tensor], settings: Settings) -> list[Plan]:
    plans = world.plans([mine.cuda() for mine in ids], settings)
    for rank, plan in enumerate(plans):
        expected = plan_loop(ids, rank, settings)
        for field in dataclasses.fields(Plan):
            if field.name != "splits_4P" or settings.copy_capacity is None:  # or nobody reads them
                found, wanted = getattr(plan, field.name).cpu(), getattr(expected, field.name)
                assert_equal(f"rank {rank}: {field.name}", found, wanted)
    return plans


def in_window(space: Workspace, rows_DH: torch.Tensor) -> torch.Tensor:
    """Where it has room: combine then pulls these rows."""
    place = space.window.empty(tuple(rows_DH.shape), rows_DH.dtype)
    return rows_DH if place is None else place.copy_(rows_DH)


def check_rows(world: World, plans: list[Plan], width: int, dtype: torch.dtype) -> None:
    """dispatch gives each copy its token's row, combine adds the copies' rows in rank order."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    top_k = plans[0].ids_DK.shape[1]
    tokens = [plan.copy_of_token_TP.shape[0] for plan in plans]
    xs, weights = [random(t, width).to(dtype) for t in tokens], [random(t, top_k) for t in tokens]
    sent = world.on_all(kernels.launch_dispatch, xs, weights, plans)
    rows = [
        in_window(space, random(plan.num_copies, width).to(dtype))
        for space, plan in zip(world.spaces, plans)
    ]
    grads = [random(plan.num_copies, top_k) for plan in plans]
    addends = [random(t, width).to(dtype) for t in tokens]
    back = world.on_all(kernels.launch_combine, rows, grads, addends, plans)
    for rank, plan in enumerate(plans):
        x_DH, weights_DK = torch.zeros_like(rows[rank]), torch.zeros_like(grads[rank])
        for copy, (source, token) in enumerate(plan.source_of_copy_D2.tolist()):
            if source >= 0:
                x_DH[copy], weights_DK[copy] = xs[source][token], weights[source][token]
        weights_DK[plan.ids_DK < 0] = 0
        assert_equal(f"rank {rank}: rows_DH", sent[rank][0], x_DH)
        assert_equal(f"rank {rank}: weights_DK", sent[rank][1], weights_DK)

        sums, weight_sums = torch.zeros_like(xs[rank]).float(), torch.zeros_like(weights[rank])
        for token, copies in enumerate(plan.copy_of_token_TP.tolist()):
            for other, copy in enumerate(copies):
                if copy >= 0:
                    held = plans[other].ids_DK[copy] >= 0
                    sums[token] += rows[other][copy].float()
                    weight_sums[token] += torch.where(held, grads[other][copy], 0)
        x_TH = (sums + addends[rank].float()).to(dtype)
        assert_equal(f"rank {rank}: x_TH", back[rank][0], x_TH)
        assert_equal(f"rank {rank}: weights_TK", back[rank][1], weight_sums)


@pytest.mark.parametrize("window_bytes", [0, 1 << 20], ids=["inbox", "window"])
@pytest.mark.parametrize("mode", ["exact", "capacity", "half"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_exchange_matches_reference(num_ranks: int, mode: str, window_bytes: int) -> None:
    load_plan_kernels()
    world = World(num_ranks, window_bytes)
    for number, top_k in enumerate([1, 2, 3, 4, 8, 32]):
        tokens = [(31 * number + 17 * rank) % (MAX_TOKENS + 1) for rank in range(num_ranks)]
        experts = num_ranks * (1, 4, 9)[number % 3]
        ids = random_ids(tokens, top_k, experts, seed=number)
        settings = settings_of(mode, experts, tokens, top_k)
        plans = check_plans(world, ids, settings)
        for dtype in DTYPES:
            check_rows(world, plans, width=(64, MAX_HIDDEN)[number % 2], dtype=dtype)


@pytest.mark.parametrize("mode", ["exact", "capacity"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_exchange_handles_no_tokens_and_one_expert(num_ranks: int, mode: str) -> None:
    world = World(num_ranks, 1 << 20)
    none, one, full = [0] * num_ranks, [0] * (num_ranks - 1) + [7], [MAX_TOKENS] * num_ranks
    for tokens in (none, one, full):
        for expert in (-1, 0, num_ranks - 1):
            ids = [torch.full((number, 2), expert) for number in tokens]
            settings = settings_of(mode, num_ranks, tokens, top_k=2)
            check_rows(world, check_plans(world, ids, settings), width=64, dtype=torch.bfloat16)


def test_exchange_handles_long_and_short_rows() -> None:
    """A row longer than a stage, and as many as a warp takes at once."""
    skip_without_library()
    for width in (8, 16, 8192 + 8, 26_000):
        space = Workspace(0, 1, max_tokens=70, row_bytes=width * 2, num_sms=3, timeout_s=5)
        memory = torch.zeros(space.num_bytes(), dtype=torch.uint8, device="cuda")
        space.use(memory, [memory.data_ptr()])
        ids_TK = torch.randint(-1, 4, (70, 2), device="cuda")
        plan = Plan(*kernels.launch_plan(space, ids_TK, 4, 80, 200))
        x_TH = torch.randn(70, width, device="cuda").bfloat16()
        rows_DH, _ = kernels.launch_dispatch(space, x_TH, None, plan)
        y_TH, _ = kernels.launch_combine(space, rows_DH, None, None, plan)
        reached = (plan.copy_of_token_TP >= 0).any(1, keepdim=True)
        assert_equal("y_TH", y_TH, torch.where(reached, x_TH, 0))
        assert (rows_DH[int(reached.sum()) :] == 0).all()


def test_exchange_takes_tensors_at_odd_addresses() -> None:
    world = World(1, 0)
    (space,) = world.spaces
    ids_TK = torch.zeros(6, 4, dtype=torch.int32, device="cuda")
    plan = Plan(*kernels.launch_plan(space, ids_TK, 1, 6, 24))

    def odd(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return torch.randn(size + 1, device="cuda").to(dtype)[1:].view(shape)

    x_TH, weights_TK = odd(6, 64, dtype=torch.bfloat16), odd(6, 4, dtype=torch.float32)
    rows_DH, weights_DK = kernels.launch_dispatch(space, x_TH, weights_TK, plan)
    assert_equal("rows_DH", rows_DH, x_TH)
    assert_equal("weights_DK", weights_DK, weights_TK)
    y_TH, _ = kernels.launch_combine(space, x_TH, weights_TK, x_TH, plan)
    assert_equal("y_TH", y_TH, x_TH * 2)


def rows_of_all_kinds(num_rows: int, width: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Zeros, denormals, the largest, what is not finite, ties between codes; then random sizes."""
    stream, limits = torch.Generator().manual_seed(seed), torch.finfo(dtype)
    rows = torch.randn(num_rows + 2, width, generator=stream, dtype=torch.float64)
    ties = torch.arange(width) % 897 - 448.0
    first = [
        torch.zeros(width),
        torch.full((width,), -0.0),
        rows[0] * limits.tiny * limits.eps,
        rows[0] * limits.tiny,
        ties,
        ties * 0.5 / 512 + 448 * (torch.arange(width) % 128 == 5),
        (ties > 0) * limits.max,
    ]
    for special in (torch.inf, -torch.inf, torch.nan):
        some = torch.arange(width) % 7 == 3
        first += [torch.full((width,), special), torch.where(some, special, rows[1] * 100)]
    rows *= torch.exp2(torch.randint(-140, 120, (num_rows + 2, 1), generator=stream).double())
    for row, values in zip(rows, first):
        row.copy_(values)
    return rows[:num_rows].to(dtype)


def check_coded_rows(
    world: World, plans: list[Plan], width: int, dtype: torch.dtype, wire: str
) -> None:
    """Each copy is its token's row as `wire` makes it, on the CPU and on the GPU."""
    tokens = [plan.copy_of_token_TP.shape[0] for plan in plans]
    xs = [rows_of_all_kinds(number, width, dtype, rank) for rank, number in enumerate(tokens)]
    arrive = [dequantize(*quantize(x_TH, wire == "fp8_pow2"), dtype) for x_TH in xs]
    weights = [torch.randn(number, plans[0].ids_DK.shape[1], device="cuda") for number in tokens]
    on_gpu = [x_TH.cuda() for x_TH in xs]
    sent = world.on_all(
        lambda *args: kernels.launch_dispatch(*args, wire=wire), on_gpu, weights, plans
    )
    for rank, plan in enumerate(plans):
        on_the_gpu = dequantize(*quantize(on_gpu[rank], wire == "fp8_pow2"), dtype)
        assert_equal(f"rank {rank}: on CPU and GPU", on_the_gpu, arrive[rank])
        rows_DH = torch.zeros(plan.num_copies, width, dtype=dtype)
        weights_DK = torch.zeros(plan.ids_DK.shape, device="cuda")
        for copy, (source, token) in enumerate(plan.source_of_copy_D2.tolist()):
            if source >= 0:
                rows_DH[copy], weights_DK[copy] = arrive[source][token], weights[source][token]
        weights_DK[plan.ids_DK < 0] = 0
        found = sent[rank][0].cpu()
        assert_equal(f"rank {rank}: rows_DH", found, rows_DH)
        number = ~rows_DH.isnan()
        assert_equal(f"rank {rank}: signs", found[number].signbit(), rows_DH[number].signbit())
        assert_equal(f"rank {rank}: weights_DK", sent[rank][1], weights_DK)


@fp8_wires
@pytest.mark.parametrize("mode", ["exact", "capacity", "half"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_fp8_wires_match_reference(num_ranks: int, mode: str, wire: str) -> None:
    """Between exchanges of whole rows, which use the same inbox."""
    world = World(num_ranks, 1 << 20)
    for number, (top_k, width) in enumerate([(1, 8), (3, 136), (4, 256), (8, 64)]):
        tokens = [(31 * number + 17 * rank + 40) % (MAX_TOKENS + 1) for rank in range(num_ranks)]
        ids = random_ids(tokens, top_k, num_ranks * 4, seed=number)
        plans = check_plans(world, ids, settings_of(mode, num_ranks * 4, tokens, top_k))
        for dtype in DTYPES:
            check_coded_rows(world, plans, width, dtype, wire)
        check_rows(world, plans, width, torch.bfloat16)


@fp8_wires
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fp8_wires_handle_long_and_short_rows(dtype: torch.dtype, wire: str) -> None:
    """From a vector to the longest that fit, with one scale too many and one too few for a warp."""
    most = kernels._MAX_ROW_BYTES // dtype.itemsize
    for width in (16 // dtype.itemsize, 120, 1016, 1032, 2048, 2056, 2880, 7168, most - 8, most):
        space = Workspace(0, 1, max_tokens=70, row_bytes=most * dtype.itemsize, num_sms=3)
        memory = torch.zeros(space.num_bytes(), dtype=torch.uint8, device="cuda")
        space.use(memory, [memory.data_ptr()])
        ids_TK = torch.randint(-1, 4, (70, 2), device="cuda")
        plan = Plan(*kernels.launch_plan(space, ids_TK, 4, 80, 200))
        x_TH = rows_of_all_kinds(70, width, dtype, seed=width).cuda()
        arrive_TH = dequantize(*quantize(x_TH, wire == "fp8_pow2"), dtype)
        token_D = plan.source_of_copy_D2[:, 1]
        expected = torch.where(token_D[:, None] >= 0, arrive_TH[token_D], 0)
        rows_DH, _ = kernels.launch_dispatch(space, x_TH, None, plan, wire)
        assert_equal(f"rows_DH of {width} values", rows_DH, expected)


@fp8_wires
def test_fp8_wires_are_captured(wire: str) -> None:
    world = World(1, 1 << 20)
    (space,) = world.spaces
    ids_TK = torch.zeros(64, 4, dtype=torch.int32, device="cuda")
    plan = Plan(*kernels.launch_plan(space, ids_TK, 1, 64, 256))
    x_TH = torch.zeros(64, MAX_HIDDEN, dtype=torch.bfloat16, device="cuda")
    (rows_DH, _), replay = captured(lambda: kernels.launch_dispatch(space, x_TH, None, plan, wire))
    for seed in range(3):
        x_TH.copy_(rows_of_all_kinds(64, MAX_HIDDEN, torch.bfloat16, seed))
        replay()
        arrive_TH = dequantize(*quantize(x_TH, wire == "fp8_pow2"), torch.bfloat16)
        assert_equal("rows_DH", rows_DH, arrive_TH)
