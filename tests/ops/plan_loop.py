"""What `exchange_plan` must return, from the ids of all ranks, one token after another."""

from __future__ import annotations

import dataclasses

import torch

from moe_ops.layout import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Keyword arguments of `exchange_plan`."""

    num_experts: int = 8
    max_tokens: int = 0
    copy_capacity: int | None = None
    row_capacity: int | None = None

    def kwargs(self) -> dict[str, int | None]:
        return dataclasses.asdict(self)


def copies_for(ids_of_rank: list[torch.Tensor], rank: int, experts_here: int) -> list[tuple]:
    """(source rank, token, local ids) of every copy that `rank` is to get, in order."""
    copies = []
    for source, ids_TK in enumerate(ids_of_rank):
        for token, ids in enumerate(ids_TK.tolist()):
            here = [
                e - rank * experts_here if e >= 0 and e // experts_here == rank else -1 for e in ids
            ]
            if any(e >= 0 for e in here):
                copies.append((source, token, here))
    return copies


def plan_loop(ids_of_rank: list[torch.Tensor], rank: int, settings: Settings) -> Plan:
    """The plan of `rank`."""
    num_ranks, top_k = len(ids_of_rank), ids_of_rank[0].shape[1]
    experts_here = settings.num_experts // num_ranks
    everywhere = [copies_for(ids_of_rank, q, experts_here) for q in range(num_ranks)]
    wanted = everywhere[rank]
    exact = settings.copy_capacity is None
    num_copies = len(wanted) if exact else settings.copy_capacity
    held = wanted[:num_copies]

    copy_of_token = torch.full((ids_of_rank[rank].shape[0], num_ranks), -1)
    for q, copies in enumerate(everywhere):
        for place, (source, token, _) in enumerate(copies):
            if source == rank and (exact or place < settings.copy_capacity):
                copy_of_token[token, q] = place
    source_of_copy = torch.full((num_copies, 2), -1)
    ids_DK = torch.full((num_copies, top_k), -1)
    counts = torch.zeros(num_ranks, experts_here, dtype=torch.int64)
    slots_of_expert: list[list[int]] = [[] for _ in range(experts_here)]
    for copy, (source, token, here) in enumerate(held):
        source_of_copy[copy] = torch.tensor([source, token])
        ids_DK[copy] = torch.tensor(here)
        for k, expert in enumerate(here):
            if expert >= 0:
                counts[source, expert] += 1
                slots_of_expert[expert].append(copy * top_k + k)
    order = [slot for slots in slots_of_expert for slot in slots]
    num_rows = len(order) if exact else settings.row_capacity
    row_of_slot = torch.full((num_copies * top_k,), -1)
    for row, slot in enumerate(order[:num_rows]):
        row_of_slot[slot] = row
    ends = torch.tensor([len(slots) for slots in slots_of_expert]).cumsum(0)
    overflow = [len(wanted) - len(held), max(len(order) - num_rows, 0)]
    slot_of_row = (order + [-1] * num_rows)[:num_rows]
    return Plan(
        copy_of_token_TP=copy_of_token.int(),
        source_of_copy_D2=source_of_copy.int(),
        ids_DK=ids_DK.int(),
        slot_of_row_C=torch.tensor(slot_of_row, dtype=torch.int32),
        row_of_slot_DK=row_of_slot.reshape(num_copies, top_k).int(),
        offsets_L=ends.clamp(max=num_rows).int(),
        counts_PL=counts.int(),
        overflow_2=torch.tensor(overflow, dtype=torch.int32),
        splits_4P=splits_loop(everywhere, rank, top_k, settings),
    )


def splits_loop(
    everywhere: list[list[tuple]], rank: int, top_k: int, settings: Settings
) -> torch.Tensor:
    """Copies sent, copies received, slots sent, slots received."""
    num_ranks = len(everywhere)
    if settings.copy_capacity is not None:
        copies = torch.full((2, num_ranks), settings.max_tokens)
        return torch.cat([copies, copies * top_k])

    def number(destination: int, origin: int, of_slots: bool) -> int:
        sizes = [
            sum(e >= 0 for e in here) if of_slots else 1
            for source, _, here in everywhere[destination]
            if source == origin
        ]
        return sum(sizes)

    rows = []
    for of_slots in (False, True):
        rows.append([number(q, rank, of_slots) for q in range(num_ranks)])
        rows.append([number(rank, q, of_slots) for q in range(num_ranks)])
    return torch.tensor(rows)
