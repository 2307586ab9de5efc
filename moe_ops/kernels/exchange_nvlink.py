"""CUDA kernels of exchange_plan, dispatch and combine for groups on the engine `nvlink`:
csrc/exchange_plan.cu, csrc/exchange_dispatch.cu and csrc/exchange_combine.cu.

Letters as in `moe_ops.ops.exchange_plan`.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import checks, layout
from ..comm import nvlink
from ..comm.wire import FORMATS
from .kernel import Kernel, aligned, has_triton

MAX_TOP_K = 32
_MAX_COLUMNS = 1024  # experts here and a few more are counted by the threads of a CTA
_MAX_ROW_BYTES = 53 * 1024  # three rows of a warp must fit into shared memory


def exchange_plan(
    ids_TK: torch.Tensor,
    num_experts: int,
    group_name: str,
    max_tokens: int = 0,
    copy_capacity: int | None = None,
    row_capacity: int | None = None,
) -> list[torch.Tensor]:
    """The operator `exchange_plan`."""
    space = _workspace(group_name)
    return launch_plan(space, ids_TK, num_experts, copy_capacity, row_capacity)


def launch_plan(
    space: nvlink.Workspace,
    ids_TK: torch.Tensor,
    num_experts: int,
    copy_capacity: int | None,
    row_capacity: int | None,
) -> list[torch.Tensor]:
    """The plan's tensors in the order of `layout.Plan`. Waits for the device unless both capacities
    are given.
    """
    if copy_capacity is None or row_capacity is None:
        launch_count(space, ids_TK, num_experts)
        splits = read_totals(space, ids_TK, num_experts)
        plan = new_plan(space, ids_TK, num_experts, sum(splits[1]), sum(splits[3]))
        launch_place(space, None, num_experts, plan)
        return [*plan, torch.tensor(splits)]
    plan = new_plan(space, ids_TK, num_experts, copy_capacity, row_capacity)
    launch_place(space, ids_TK, num_experts, plan)
    return [*plan, ids_TK.new_empty(4, space.num_ranks, dtype=torch.int64)]


def _num_columns(space: nvlink.Workspace, num_experts: int) -> int:
    """What a chunk of tokens is counted by: `Problem::num_columns` of csrc/exchange_plan.cu."""
    return num_experts // space.num_ranks + 2 * space.num_ranks + 1


def launch_count(space: nvlink.Workspace, ids_TK: torch.Tensor, num_experts: int) -> None:
    """Send ids to all ranks and count those of all ranks, for the plan's other kernels."""
    torch.ops.moe_ops_native.exchange_plan_count(ids_TK.contiguous(), space.enter(), num_experts)


def read_totals(space: nvlink.Workspace, ids_TK: torch.Tensor, num_experts: int) -> list[list[int]]:
    """splits_4P as lists: the one read of exact mode, right behind `launch_count` on its stream.

    Raises:
        ValueError: on every rank, if one of them has ids that are no experts, or too many tokens.
    """
    totals_6P = ids_TK.new_empty(6, space.num_ranks, dtype=torch.int64)
    torch.ops.moe_ops_native.exchange_plan_totals(
        space.world, ids_TK.shape[1], num_experts, totals_6P
    )
    *splits, outside, tokens = totals_6P.tolist()
    checks.no_ids_outside("exchange_plan", num_experts, outside)
    if max(tokens) > space.max_tokens:
        raise ValueError(
            f"exchange_plan: ids_TK must have at most max_tokens = {space.max_tokens} rows (of "
            f"comm.setup), got {tokens} by rank"
        )
    return splits


def new_plan(
    space: nvlink.Workspace,
    ids_TK: torch.Tensor,
    num_experts: int,
    num_copies: int,
    num_rows: int,
) -> list[torch.Tensor]:
    """`layout.Plan`'s tensors without splits_4P, int32, not filled, of D copies and C rows."""
    num_tokens, top_k = ids_TK.shape
    experts_here = num_experts // space.num_ranks
    shapes: list[tuple[int, ...]] = [
        (num_tokens, space.num_ranks),
        (num_copies, 2),
        (num_copies, top_k),
        (num_rows,),
        (num_copies, top_k),
        (experts_here,),
        (space.num_ranks, experts_here),
        (2,),
    ]
    return [ids_TK.new_empty(shape, dtype=torch.int32) for shape in shapes]


def launch_place(
    space: nvlink.Workspace,
    ids_TK: torch.Tensor | None,
    num_experts: int,
    plan: list[torch.Tensor],
) -> None:
    """Fill `plan`: with ids all by itself, else after `launch_count`."""
    own_ids = None if ids_TK is None else ids_TK.contiguous()
    torch.ops.moe_ops_native.exchange_plan_place(own_ids, space.enter(), num_experts, *plan)


def dispatch(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    tensors: list[torch.Tensor],
    group_name: str,
    wire: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator `dispatch`."""
    space = _workspace(group_name)
    return launch_dispatch(space, x_TH, weights_TK, layout.Plan(*tensors), wire)


def launch_dispatch(
    space: nvlink.Workspace,
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    plan: layout.Plan,
    wire: str = "full",
) -> tuple[torch.Tensor, torch.Tensor]:
    """rows_DH [D, H], in the window where that has room for what peers write, and weights_DK [D, K]
    ([0] if none).
    """
    world = space.enter()  # before the window's memory is taken
    shape = (plan.num_copies, x_TH.shape[1])
    rows_DH = None
    if wire == "full":  # no peer writes decoded rows
        rows_DH = space.window.empty(shape, x_TH.dtype)
    if rows_DH is None:
        rows_DH = x_TH.new_empty(shape)
    weights_DK = x_TH.new_empty(0 if weights_TK is None else plan.ids_DK.shape, dtype=torch.float32)
    torch.ops.moe_ops_native.exchange_dispatch(
        aligned(x_TH),
        aligned(weights_TK),
        aligned(plan.copy_of_token_TP),
        aligned(plan.source_of_copy_D2),
        aligned(plan.ids_DK),
        world,
        space.memory.numel(),
        FORMATS.index(wire),
        rows_DH,
        weights_DK,
    )
    return rows_DH, weights_DK


def combine(
    rows_DH: torch.Tensor,
    weights_DK: torch.Tensor | None,
    addend_TH: torch.Tensor | None,
    tensors: list[torch.Tensor],
    group_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator `combine`."""
    space = _workspace(group_name)
    return launch_combine(space, rows_DH, weights_DK, addend_TH, layout.Plan(*tensors))


def launch_combine(
    space: nvlink.Workspace,
    rows_DH: torch.Tensor,
    weights_DK: torch.Tensor | None,
    addend_TH: torch.Tensor | None,
    plan: layout.Plan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x_TH [T, H] and weights_TK [T, K] float32 ([0] if none)."""
    num_tokens, top_k = plan.copy_of_token_TP.shape[0], plan.ids_DK.shape[1]
    x_TH = rows_DH.new_empty(num_tokens, rows_DH.shape[1])
    weights_TK = rows_DH.new_empty(
        0 if weights_DK is None else (num_tokens, top_k), dtype=torch.float32
    )
    torch.ops.moe_ops_native.exchange_combine(
        aligned(rows_DH),
        aligned(weights_DK),
        aligned(addend_TH),
        aligned(plan.copy_of_token_TP),
        aligned(plan.source_of_copy_D2),
        aligned(plan.ids_DK),
        space.enter(),
        space.memory.numel(),
        x_TH,
        weights_TK,
    )
    return x_TH, weights_TK


def unpermute_in_window(
    rows_CH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
    group: str,
) -> torch.Tensor:
    """The operator `unpermute_in_window`, into the window where that has room."""
    from . import permute  # noqa: PLC0415 - needs Triton

    space = _workspace(group)
    space.check()
    x_TH = space.window.empty((row_of_slot_TK.shape[0], rows_CH.shape[1]), rows_CH.dtype)
    return permute.unpermute(rows_CH, weights_TK, slot_of_row_C, row_of_slot_TK, x_TH)


def _workspace(group_name: str) -> nvlink.Workspace:
    found = nvlink.workspace(group_name)
    assert found is not None
    return found


def _takes_unpermute(rows_CH: torch.Tensor, *args: Any) -> bool:
    *_, group = args
    return nvlink.workspace(group) is not None and has_triton() and rows_CH.dtype in nvlink.DTYPES


def _takes_plan(ids_TK: torch.Tensor, num_experts: int, group_name: str, *sizes: Any) -> bool:
    space = nvlink.workspace(group_name)
    if space is None:
        return False
    return 0 < ids_TK.shape[1] <= MAX_TOP_K and _num_columns(space, num_experts) <= _MAX_COLUMNS


def _takes_rows(values: torch.Tensor, tensors: list[torch.Tensor], group_name: str) -> bool:
    space = nvlink.workspace(group_name)
    if space is None or values.dtype not in nvlink.DTYPES:
        return False
    row_bytes = values.shape[1] * values.dtype.itemsize
    fits = 0 < row_bytes <= min(space.row_bytes, _MAX_ROW_BYTES) and row_bytes % 16 == 0
    return fits and 0 < tensors[2].shape[1] <= MAX_TOP_K  # ids_DK


def _takes_dispatch(x_TH: torch.Tensor, *args: Any) -> bool:
    _, tensors, group_name, _ = args
    return _takes_rows(x_TH, tensors, group_name)


def _takes_combine(rows_DH: torch.Tensor, *args: Any) -> bool:
    *_, tensors, group_name = args
    return _takes_rows(rows_DH, tensors, group_name)


KERNELS: dict[str, list[Kernel]] = {
    "exchange_plan": [Kernel("csrc/exchange_plan.cu", _takes_plan, exchange_plan)],
    "dispatch": [Kernel("csrc/exchange_dispatch.cu", _takes_dispatch, dispatch)],
    "combine": [Kernel("csrc/exchange_combine.cu", _takes_combine, combine)],
    "unpermute_in_window": [Kernel("triton, window", _takes_unpermute, unpermute_in_window)],
}
