"""What tests on several GPUs share: cases of an exchange, and all that its operators give.

Letters: T tokens here, K top-k, E experts, P ranks, L = E / P experts here, D copies, C rows, H
hidden.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_ops
from moe_ops import comm, kernels
from moe_ops.layout import Plan
from moe_ops.testing import DTYPE_NAMES, SKEWS, assert_equal, make_ids

from .ranks import NUM_RANKS, groups

OPS = torch.ops.moe_ops
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GUARD_BYTES = 8192
MODES = ("exact", "capacity", "full", "copies over", "rows over", "half")

needs_two_gpus = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < NUM_RANKS, reason="no GPU pair"),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """What one rank brings."""

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    addend_TH: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """An exchange, the same on all ranks but for their tokens.

    `mode`: "exact"; "capacity" holds every routing; "full" holds exactly this one, "copies over"
    and "rows over" one less on the fullest rank, "half" half of the copies and of the rows.
    """

    tokens: tuple[int, int] = (33, 64)
    top_k: int = 4
    num_experts: int = 16
    hidden_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    mode: str = "exact"
    skew: str = "uniform"
    none_fraction: float = 0.1
    repeats: bool = False
    ids_dtype: torch.dtype = torch.int32
    seed: int = 0

    def __str__(self) -> str:
        first, second = self.tokens
        return (
            f"T{first}_{second}-K{self.top_k}-E{self.num_experts}-H{self.hidden_size}-"
            f"{DTYPE_NAMES[self.dtype]}-{self.mode}-{self.skew}-none{self.none_fraction}-"
            f"repeats{self.repeats:d}-seed{self.seed}"
        ).replace(" ", "_")

    def ids(self, rank: int) -> torch.Tensor:
        """ids_TK of `rank`, on the CPU; of its first token none, if there may be none at all."""
        stream = torch.Generator().manual_seed(1000 * self.seed + rank)
        tokens, top_k, experts = self.tokens[rank], self.top_k, self.num_experts
        if self.repeats:
            return torch.randint(-1, experts, (tokens, top_k), generator=stream).to(self.ids_dtype)
        ids_TK = make_ids(
            tokens, top_k, experts, self.skew, self.none_fraction, stream, NUM_RANKS, self.ids_dtype
        )
        if self.none_fraction > 0:
            ids_TK[:1] = -1
        return ids_TK

    def needs(self) -> tuple[list[int], list[int]]:
        """Copies and rows by rank."""
        experts_here = self.num_experts // NUM_RANKS
        ids = torch.cat([self.ids(rank) for rank in range(NUM_RANKS)])
        here = [(ids >= 0) & (ids // experts_here == rank) for rank in range(NUM_RANKS)]
        return [int(h.any(1).sum()) for h in here], [int(h.sum()) for h in here]

    def capacities(self) -> tuple[int | None, int | None]:
        """D and C."""
        most_copies, most_rows = map(max, self.needs())
        slots = NUM_RANKS * max(self.tokens) * self.top_k
        return {
            "exact": (None, None),
            "capacity": (NUM_RANKS * max(self.tokens), slots),
            "full": (most_copies, most_rows),
            "copies over": (max(most_copies - 1, 0), most_rows),
            "rows over": (most_copies, max(most_rows - 1, 0)),
            "half": (most_copies // 2, most_rows // 2),
        }[self.mode]

    def settings(self) -> dict[str, Any]:
        """Keyword arguments of `exchange_plan`."""
        copies, rows = self.capacities()
        return {
            "num_experts": self.num_experts,
            "max_tokens": 0 if copies is None else max(*self.tokens, 1),
            "copy_capacity": copies,
            "row_capacity": rows,
        }

    def inputs(self, rank: int) -> Inputs:
        """Whole numbers, so that every dtype holds them, on the GPU."""
        stream = torch.Generator().manual_seed(1000 * self.seed + 500 + rank)
        shape = (self.tokens[rank], self.hidden_size)

        def whole(*shape: int) -> torch.Tensor:
            return torch.randint(-9, 10, shape, generator=stream).cuda()

        gate_dtype = torch.promote_types(self.dtype, torch.float32)
        return Inputs(
            x_TH=whole(*shape).to(self.dtype),
            ids_TK=self.ids(rank).cuda(),
            weights_TK=torch.rand(shape[0], self.top_k, generator=stream).cuda().to(gate_dtype),
            addend_TH=whole(*shape).to(self.dtype),
        )

    def outputs(self, plan: Plan, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [D, H] and weights [D, K] to combine; NaN past the valid copies."""
        stream = torch.Generator("cuda").manual_seed(1000 * self.seed + 700 + rank)
        copies, gate_dtype = plan.num_copies, torch.promote_types(self.dtype, torch.float32)
        y_DH = torch.randn(copies, self.hidden_size, generator=stream, device="cuda")
        v_DK = torch.rand(copies, self.top_k, generator=stream, device="cuda")
        held_D1 = plan.source_of_copy_D2[:, :1] >= 0
        y_DH = torch.where(held_D1, y_DH, torch.nan).to(self.dtype)
        return y_DH, torch.where(held_D1, v_DK, torch.nan).to(gate_dtype)


def random_case(choices: random.Random, seed: int) -> Case:
    num_experts = choices.choice((2, 4, 6, 16, 64, 256, 512))
    top_k = choices.randint(1, 32)
    most = choices.choice((0, 1, 40, 40, 40, 300))
    return Case(
        tokens=(choices.randint(0, most), choices.randint(0, most)),
        top_k=top_k,
        num_experts=num_experts,
        hidden_size=choices.choice((8, 16, 136, 512, 2048)),
        dtype=choices.choice(DTYPES),
        mode=choices.choice(MODES),
        skew=choices.choice(SKEWS),
        none_fraction=choices.choice((0, 0.2, 0.9)),
        repeats=top_k > num_experts or choices.random() < 0.2,
        ids_dtype=choices.choice((torch.int32, torch.int64)),
        seed=seed,
    )


def plan_of(case: Case, rank: int, group: dist.ProcessGroup) -> Plan:
    return moe_ops.exchange_plan(case.ids(rank).cuda(), group=group, **case.settings())


def run_op(op: str, group: dist.ProcessGroup, *args: Any) -> Any:
    """The bare operator `op`; that the group's engine carries it is asserted."""
    kernel, engine = kernels.name_of(op, *args), comm.engine(group)
    assert (kernel != "reference") == (engine == "nvlink"), f"{op} on {engine} runs {kernel}"
    return getattr(OPS, op)(*args)


def results_of(case: Case, rank: int, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """All that plan, dispatch and combine give over `group`, by name. Every operator runs twice, to
    the same bits, and leaves the plan as it was.
    """
    given, name, settings = case.inputs(rank), comm.group_name_of(group), case.settings()
    arguments = given.ids_TK, settings.pop("num_experts"), name, *settings.values()
    plan = Plan(*run_op("exchange_plan", group, *arguments))
    tensors = plan.tensors()
    before = [tensor.clone() for tensor in tensors]
    y_DH, v_DK = case.outputs(plan, rank)
    calls: dict[str, tuple[Any, ...]] = {
        "dispatch": (given.x_TH, given.weights_TK, tensors, name, "full"),
        "dispatch without weights": (given.x_TH, None, tensors, name, "full"),
        "combine": (y_DH, v_DK, given.addend_TH, tensors, name),
        "combine of rows alone": (y_DH, None, None, tensors, name),
    }
    results = dict(zip((field.name for field in dataclasses.fields(plan)), tensors))
    for what, args in calls.items():
        op = what.split()[0]
        outputs = run_op(op, group, *args)
        for number, (first, second) in enumerate(zip(outputs, getattr(OPS, op)(*args))):
            assert_equal(f"{what}, output {number}, again", second, first)
            results[f"{what}, output {number}"] = first
    for what, tensor, was in zip(results, tensors, before):
        assert_equal(f"{what} after its use", tensor, was)
    if not plan.splits_4P.is_cpu:
        assert case.mode != "exact", "it holds nothing"
        del results["splits_4P"]
    return results


def check_overflow(case: Case, rank: int, plan: Plan) -> None:
    """What did not fit is reported with numbers."""
    copies, rows = plan.overflow_2.tolist()
    wanted_copies, wanted_rows = (needs[rank] for needs in case.needs())
    num_copies, num_rows = plan.num_copies, plan.slot_of_row_C.shape[0]
    assert copies == max(wanted_copies - num_copies, 0), f"{case}: copies left out"
    if copies == 0:
        assert rows == max(wanted_rows - num_rows, 0), f"{case}: rows left out"


def check_engines_agree(rank: int, case: Case, group: str = "nvlink") -> dict[str, torch.Tensor]:
    """All results of the named group of `groups()` are NCCL's, bit for bit; and what is summed is
    finite, whatever lies past the valid copies.
    """
    found = results_of(case, rank, getattr(groups(), group))
    expected = results_of(case, rank, groups().nccl)
    for name, value in found.items():
        assert_equal(f"{case}: {name}", value, expected[name])
        if name.startswith("combine"):
            assert value.isfinite().all(), f"{case}: {name}"
    plan = Plan(*list(expected.values())[: len(dataclasses.fields(Plan))])
    check_overflow(case, rank, plan)
    return found


@contextlib.contextmanager
def guarded() -> Iterator[list[torch.Tensor]]:
    """Tensors on the GPU that `new_empty` gives lie between guards, which nothing may write to."""
    buffers: list[torch.Tensor] = []
    sizes_in_bytes: list[int] = []

    def new_empty(like: torch.Tensor, *shape: Any, dtype: torch.dtype | None = None) -> Any:
        sizes = shape if not shape or isinstance(shape[0], int) else tuple(shape[0])
        dtype = dtype or like.dtype
        num_bytes = math.prod(sizes) * dtype.itemsize
        whole = torch.full(
            (num_bytes + 2 * GUARD_BYTES,), 77, dtype=torch.uint8, device=like.device
        )
        buffers.append(whole)
        sizes_in_bytes.append(num_bytes)
        return whole[GUARD_BYTES : GUARD_BYTES + num_bytes].view(dtype).view(sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", new_empty, raising=False)
        yield buffers
    torch.cuda.synchronize()
    for number, (whole, num_bytes) in enumerate(zip(buffers, sizes_in_bytes)):
        guards = torch.cat([whole[:GUARD_BYTES], whole[GUARD_BYTES + num_bytes :]])
        assert (guards == 77).all(), f"tensor {number} of {num_bytes} bytes: a guard was written"
