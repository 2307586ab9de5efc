"""Exchanges of up to eight ranks that share one GPU and one process: each has a workspace and a
stream of its own, and its kernels wait for the others' as on as many GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_ops.comm.nvlink import DTYPES, Workspace
from moe_ops.kernels import exchange_nvlink as kernels
from moe_ops.layout import Plan
from moe_ops.testing import assert_equal
from tests.gpu import skip_without_library
from tests.ops.plan_loop import Settings, plan_loop

pytestmark = pytest.mark.gpu

MAX_TOKENS, MAX_HIDDEN = 100, 256


class World:
    """`num_ranks` ranks on one GPU."""

    def __init__(self, num_ranks: int, window_bytes: int) -> None:
        skip_without_library()
        self.spaces = [
            Workspace(
                rank,
                num_ranks,
                max_tokens=MAX_TOKENS,
                row_bytes=MAX_HIDDEN * 4,
                num_sms=4,
                timeout_s=5,
                num_plan_ctas=-(-16 // num_ranks)
                * num_ranks,  # the fewest: all must fit on one GPU
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
        experts, top_k = settings.num_experts, ids[0].shape[1]

        def at_once(space: Workspace, ids_TK: torch.Tensor) -> list[torch.Tensor]:
            sizes = (settings.max_tokens, settings.copy_capacity, settings.row_capacity)
            return kernels.launch_plan(space, ids_TK, experts, *sizes)

        def rest(space: Workspace, ids_TK: torch.Tensor, counts: Any) -> list[torch.Tensor]:
            splits = kernels.read_totals(space, counts, top_k, experts)
            plan = kernels.new_plan(space, ids_TK, experts, sum(splits[1]), sum(splits[3]))
            kernels.launch_place(space, None, counts, experts, plan)
            return [*plan, torch.tensor(splits)]

        if settings.copy_capacity is not None:
            return [Plan(*plan) for plan in self.on_all(at_once, ids)]
        counts = self.on_all(lambda space, mine: kernels.launch_count(space, mine, experts), ids)
        return [Plan(*plan) for plan in self.on_all(rest, ids, counts)]


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
        plan = Plan(*kernels.launch_plan(space, ids_TK, 4, 70, 80, 200))
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
    plan = Plan(*kernels.launch_plan(space, ids_TK, 1, 6, 6, 24))

    def odd(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return torch.randn(size + 1, device="cuda").to(dtype)[1:].view(shape)

    x_TH, weights_TK = odd(6, 64, dtype=torch.bfloat16), odd(6, 4, dtype=torch.float32)
    rows_DH, weights_DK = kernels.launch_dispatch(space, x_TH, weights_TK, plan)
    assert_equal("rows_DH", rows_DH, x_TH)
    assert_equal("weights_DK", weights_DK, weights_TK)
    y_TH, _ = kernels.launch_combine(space, x_TH, weights_TK, x_TH, plan)
    assert_equal("y_TH", y_TH, x_TH * 2)
