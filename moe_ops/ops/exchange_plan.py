"""Decide where every copy and row of an exchange lies: the one operator that looks at ids and reads
sizes.

A *copy* is a token received by a rank, one per (token, destination rank), sorted by (source rank,
token); a *row* is a place in the buffer that a rank's copies are sorted into by (local expert,
copy, k). `layout.Plan` names the tensors.

Letters: T tokens here, K top-k, E experts, P ranks, L = E / P experts here, D copies held here, C
rows held here.

    ids_TK = [[2, 0], [0, 1], [2, -1], [0, 2]] on the only rank: 4 tokens, K = 2, E = 3, P = 1
    copy_of_token_TP = [[0], [1], [2], [3]], source_of_copy_D2 = [[0, 0], [0, 1], [0, 2], [0, 3]],
    ids_DK = ids_TK, slot_of_row_C, row_of_slot_DK, offsets_L as in sort_slots (C = 7),
    counts_PL = [[3, 1, 3]], overflow_2 = [0, 0], splits_4P = [[4], [4], [7], [7]]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import _library, checks, comm, layout
from ..comm import nvlink
from ..comm.collectives import all_gather, all_to_all_rows


def exchange_plan(
    ids_TK: torch.Tensor,
    num_experts: int,
    *,
    group: dist.ProcessGroup | str | None,
    max_tokens: int = 0,
    copy_capacity: int | None = None,
    row_capacity: int | None = None,
) -> layout.Plan:
    """The plan of an exchange; collective over `group`. T may differ by rank, zero included.

    T tokens here, K choices a token, E experts, L of them here, D copies and C rows held here.

    Exact mode (no capacities) reads all sizes from the device once, here. Capacity mode (both
    given) reads nothing: copies and rows that do not fit are left out on both sides and counted in
    `overflow_2`.

    Args:
        ids_TK: [T, K] int32 or int64 experts, -1 = none. A repeated expert counts as often as it
            occurs.
        num_experts: E, a multiple of the group's size; rank r owns experts r * L .. (r + 1) * L -
            1.
        group: expert-parallel group, or None for this process alone.
        max_tokens: most tokens a rank may hold, the same on all ranks; 0 = no bound (exact mode
            only).
        copy_capacity, row_capacity: D and C, the same on all ranks.

    Raises:
        TypeError, ValueError: on every rank, if one of them gave a wrong dtype, rank or value, more
            tokens than max_tokens, settings that differ, or (exact mode) an id outside -1 .. E-1.
            In capacity mode such an id fails a device-side assertion on every rank. A value of the
            wrong Python type, or another group, is an error on that rank alone; the others wait for
            the group's timeout.
    """
    tensors = _exchange_plan(
        ids_TK, num_experts, comm.group_name_of(group), max_tokens, copy_capacity, row_capacity
    )
    return layout.Plan(*tensors)


def _check(
    ids_TK: torch.Tensor,
    num_experts: int,
    group_name: str,
    max_tokens: int = 0,
    copy_capacity: int | None = None,
    row_capacity: int | None = None,
) -> tuple[object, ...]:
    op = "exchange_plan"
    checks.tensor(op, "ids_TK", ids_TK, 2, checks.IDS)
    checks.experts(op, num_experts, comm.group_size(group_name))
    checks.capacity(op, "max_tokens", max_tokens)
    checks.capacity(op, "copy_capacity", copy_capacity)
    checks.capacity(op, "row_capacity", row_capacity)
    if (copy_capacity is None) != (row_capacity is None):
        raise ValueError(
            f"{op}: copy_capacity and row_capacity must be given together or not at all, "
            f"got {copy_capacity} and {row_capacity}"
        )
    if copy_capacity is not None and max_tokens == 0:
        raise ValueError(f"{op}: max_tokens must be positive with capacities, got {max_tokens}")
    num_tokens, top_k = ids_TK.shape
    space = nvlink.workspace(group_name)
    if space is not None and max_tokens > space.max_tokens:
        raise ValueError(  # on every rank: it is the same on all
            f"{op}: max_tokens must be at most {space.max_tokens}, with which comm.setup was "
            f"called, got {max_tokens}"
        )
    if max_tokens:
        checks.holds(
            op,
            num_tokens <= max_tokens,
            lambda: f"ids_TK must have at most max_tokens = {max_tokens} rows, got {num_tokens}",
        )
    return num_experts, top_k, max_tokens, copy_capacity, row_capacity


def _announce(
    ids_TK: torch.Tensor, num_experts: int, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's (token, rank) choices [T, P], and every rank's header [P, 1 + 2P]:

    ids out of range, copies to each rank, slots to each rank.
    """
    num_ranks = comm.group_size(group_name)
    experts_per_rank = num_experts // num_ranks
    rank_TK = torch.where(ids_TK >= 0, ids_TK // experts_per_rank, -1)
    hits_TKP = rank_TK[:, :, None] == torch.arange(num_ranks, device=ids_TK.device)
    sent_TP = hits_TKP.any(1)
    outside = ((ids_TK < -1) | (ids_TK >= num_experts)).sum()
    header = torch.cat([outside[None], sent_TP.sum(0), hits_TKP.sum((0, 1))])
    return sent_TP, all_gather(header, group_name)


def _read_header(headers: torch.Tensor, rank: int, num_experts: int) -> list[list[int]]:
    """splits_4P as lists: the one read of exact mode."""
    numbers = headers.tolist()
    num_ranks = len(numbers)
    checks.no_ids_outside("exchange_plan", num_experts, [row[0] for row in numbers])
    first, second = slice(1, 1 + num_ranks), slice(1 + num_ranks, None)
    return [
        numbers[rank][first],
        [row[1 + rank] for row in numbers],
        numbers[rank][second],
        [row[1 + num_ranks + rank] for row in numbers],
    ]


def _reference(
    ids_TK: torch.Tensor,
    num_experts: int,
    group_name: str,
    max_tokens: int = 0,
    copy_capacity: int | None = None,
    row_capacity: int | None = None,
) -> list[torch.Tensor]:
    num_ranks, rank = comm.group_size(group_name), comm.group_rank(group_name)
    num_experts_here = num_experts // num_ranks
    splits_on = _device_of_splits(ids_TK, group_name, exact=copy_capacity is None)
    ids_TK = ids_TK.long()
    sent_TP, headers = _announce(ids_TK, num_experts, group_name)
    copies_PP = headers[:, 1 : 1 + num_ranks]

    # Place copies: rank q's buffer holds rank 0's tokens first, then rank 1's, each in token order.
    place_TP = layout.starts_of(copies_PP)[rank] + sent_TP.cumsum(0) - 1
    if copy_capacity is None or row_capacity is None:
        splits = _read_header(headers, rank, num_experts)
        copy_capacity, row_capacity = sum(splits[1]), sum(splits[3])
    else:
        rule = f"exchange_plan: ids_TK must be in -1 .. E-1 = {num_experts - 1}"
        torch._assert_async(headers[:, 0].sum() == 0, f"{rule}, got others on some rank")
        splits = equal_splits(group_name, max_tokens, ids_TK.shape[1])
        sent_TP = sent_TP & (place_TP < copy_capacity)
    copy_of_token_TP = torch.where(sent_TP, place_TP, -1)

    received = _exchange_cards(ids_TK, sent_TP, num_experts_here, splits, group_name)
    arrived_P = copies_PP[:, rank]
    source_D, place_D = _arrivals(arrived_P, splits[1], copy_capacity)
    held_D1 = (source_D >= 0)[:, None]
    token_and_ids_D = torch.where(held_D1, layout.take(received, place_D), -1)
    ids_DK = token_and_ids_D[:, 1:]

    slot_of_row_C, row_of_slot_DK, offsets_L = layout.counting_sort(
        ids_DK, num_experts_here, row_capacity
    )
    chunk_DK = torch.where(ids_DK >= 0, source_D[:, None] * num_experts_here + ids_DK, -1)
    counts_PL = layout.count(chunk_DK, num_ranks * num_experts_here)
    wanted = torch.stack([arrived_P.sum(), counts_PL.sum()])
    fitting = torch.stack([held_D1.sum(), offsets_L[-1].long()])
    return [
        copy_of_token_TP.int(),
        torch.stack([source_D, token_and_ids_D[:, 0]], 1).int(),
        ids_DK.int(),
        slot_of_row_C,
        row_of_slot_DK,
        offsets_L,
        counts_PL.reshape(num_ranks, num_experts_here).int(),
        (wanted - fitting).int(),
        torch.tensor(splits, device=splits_on),
    ]


def _device_of_splits(ids_TK: torch.Tensor, group_name: str, exact: bool) -> torch.device:
    nobody_reads = not exact and nvlink.workspace(group_name) is not None
    return ids_TK.device if nobody_reads else torch.device("cpu")


def equal_splits(group_name: str, max_tokens: int, top_k: int) -> list[list[int]]:
    """splits_4P of capacity mode, as lists; of a group that has workspaces by what these hold."""
    space = nvlink.workspace(group_name)
    most = max_tokens if space is None else space.max_tokens
    return layout.equal_splits(comm.group_size(group_name), most, top_k)


def read_splits(plan: layout.Plan, group_name: str) -> list[list[int]]:
    """splits_4P as lists, without a read from the GPU."""
    if not plan.splits_4P.is_cpu:
        return equal_splits(group_name, 0, plan.ids_DK.shape[1])
    return [layout.read_splits(splits_P) for splits_P in plan.splits_4P]


def _exchange_cards(
    ids_TK: torch.Tensor,
    sent_TP: torch.Tensor,
    num_experts_here: int,
    splits: list[list[int]],
    group_name: str,
) -> torch.Tensor:
    """Tell each rank about its copies: rows of (token, local ids) in chunks of splits[1] rows."""
    num_tokens, num_ranks = sent_TP.shape
    first_P = torch.arange(num_ranks, device=ids_TK.device) * num_experts_here
    local_TPK = ids_TK[:, None, :] - first_P[:, None]
    mine = (local_TPK >= 0) & (local_TPK < num_experts_here)
    token_TP1 = torch.arange(num_tokens, device=ids_TK.device)[:, None, None].expand(
        -1, num_ranks, 1
    )
    cards = torch.cat([token_TP1, torch.where(mine, local_TPK, -1)], dim=2).flatten(0, 1)
    place_TP = layout.places_to_send(sent_TP, splits[0])
    cards = layout.take(cards, layout.invert(place_TP, sum(splits[0])))
    return all_to_all_rows(cards, splits[0], splits[1], group_name)


def _arrivals(
    arrived_P: torch.Tensor, received_P: list[int], num_copies: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Source rank of each of D copies in order, and its place in the received chunks; -1 past the
    last.
    """
    index_D = torch.arange(num_copies, device=arrived_P.device)
    source_D = torch.searchsorted(arrived_P.cumsum(0), index_D, right=True)
    source_D = torch.where(source_D < len(received_P), source_D, -1)
    return source_D, layout.places_received(source_D, received_P)


def _fake(
    ids_TK: torch.Tensor,
    num_experts: int,
    group_name: str,
    max_tokens: int = 0,
    copy_capacity: int | None = None,
    row_capacity: int | None = None,
) -> list[torch.Tensor]:
    num_ranks = comm.group_size(group_name)
    num_tokens, top_k = ids_TK.shape
    num_copies: Any = copy_capacity
    num_rows: Any = row_capacity
    if copy_capacity is None:
        context = torch.library.get_ctx()
        num_copies, num_rows = context.new_dynamic_size(), context.new_dynamic_size()
        if max_tokens:
            torch._check(num_copies <= num_ranks * max_tokens)
            torch._check(num_rows <= num_ranks * max_tokens * top_k)

    def index(*shape: Any) -> torch.Tensor:
        return ids_TK.new_empty(shape, dtype=torch.int32)

    experts_here = num_experts // num_ranks
    return [
        index(num_tokens, num_ranks),
        index(num_copies, 2),
        index(num_copies, top_k),
        index(num_rows),
        index(num_copies, top_k),
        index(experts_here),
        index(num_ranks, experts_here),
        index(2),
        torch.empty(
            *(4, num_ranks),
            dtype=torch.int64,
            device=_device_of_splits(ids_TK, group_name, exact=copy_capacity is None),
        ),
    ]


_exchange_plan = _library.define(
    "exchange_plan(Tensor ids_TK, int num_experts, str group_name, int max_tokens=0, "
    "SymInt? copy_capacity=None, SymInt? row_capacity=None) -> Tensor[]",
    check=_check,
    reference=_reference,
    fake=_fake,
)
