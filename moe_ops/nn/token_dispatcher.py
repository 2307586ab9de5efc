"""What all dispatchers share: rows, the way back, and rows of several ranks.

Letters: T tokens here, K top-k, E experts, L experts here, C rows here, H hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from .. import comm
from ..ops.all_gather_rows import all_gather_rows, reduce_scatter_rows
from ..ops.gather_plan import gather_plan
from ..ops.permute import permute, unpermute
from ..ops.sort_slots import sort_slots
from .config import MoEConfig
from .expert_groups import ExpertGroups


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """Rows for the experts of this rank, and the way back.

    `rows_CH` [C, H], `row_weights_C` [C] float32 or None (weights_at="unpermute"), `offsets_L` [L]
    int32; `overflow_2` [2] int64 on the device: copies and rows that did not fit, None if none can
    overflow; `combine(rows_CH, addend_TH) -> out_TH` brings the experts' output back to its tokens.
    """

    rows_CH: torch.Tensor
    row_weights_C: torch.Tensor | None
    offsets_L: torch.Tensor
    overflow_2: torch.Tensor | None
    combine: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where slots lie: what `sort_slots` returns."""

    slot_of_row_C: torch.Tensor
    row_of_slot_TK: torch.Tensor
    offsets_E: torch.Tensor

    def permute_weights(self, weights_TK: torch.Tensor) -> torch.Tensor:
        """[C]: `permute` with K = 1."""
        maps = self.slot_of_row_C, self.row_of_slot_TK.reshape(-1, 1)
        return permute(weights_TK.reshape(-1, 1), None, *maps).reshape(-1)

    def overflow_2(
        self, ids_TK: torch.Tensor, copies_left_out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[2] int64: copies that did not fit (none if not given), slots without a row."""
        rows = ((ids_TK >= 0) & (self.row_of_slot_TK < 0)).sum()
        copies = torch.zeros_like(rows) if copies_left_out is None else copies_left_out.long()
        return torch.stack([copies, rows])


class Gathered:
    """Rows of several ranks in one tensor, and each rank's sum of what they make of its own.

    `max_rows`: each counts as so many, None: as it has.
    """

    def __init__(self, x: torch.Tensor, group_name: str, max_rows: int | None) -> None:
        self.group_name, self.num_rows = group_name, x.shape[0]
        self.counts_P, rank_of_row_G = gather_plan(
            x, group=group_name, max_tokens=max_rows or 0, padded=max_rows is not None
        )
        self.num_gathered = rank_of_row_G.shape[0]

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        return all_gather_rows(values, self.counts_P, self.num_gathered, group=self.group_name)

    def gather_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Shifted by one on the way, so that zeros, where a rank has fewer, mean "no expert"."""
        return self.gather(ids + 1) - 1

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return reduce_scatter_rows(values, self.counts_P, self.num_rows, group=self.group_name)


class TokenDispatcher:
    """Moves rows as the config says. Holds no tensors: everything a way back needs is in
    `Dispatched`.
    """

    def __init__(self, config: MoEConfig, groups: ExpertGroups) -> None:
        self.config = config
        self.groups = groups
        self.group_name = groups.ep
        self.num_ranks = comm.group_size(groups.ep)
        self.rank = comm.group_rank(groups.ep)
        self.num_experts_here = config.num_experts // self.num_ranks
        self.weighs_rows = config.weights_at == "activation"
        self.copy_capacity = self.row_capacity = None
        if config.size_mode == "capacity":
            copies = self.num_ranks * config.max_tokens
            if config.copy_capacity is not None:
                copies = config.copy_capacity
            rows = copies * min(config.top_k, self.num_experts_here)
            self.copy_capacity = copies
            self.row_capacity = rows if config.row_capacity is None else config.row_capacity

    def _sort(self, ids: torch.Tensor, expert_capacity: int | None) -> Rows:
        """Slots of what all ranks of "etp" hold, by expert here."""
        num_parts, limits = self.groups.num_parts, {}
        if expert_capacity is not None:
            limits["expert_capacity"] = num_parts * self.num_ranks * expert_capacity
        elif self.row_capacity is not None:
            limits["row_capacity"] = num_parts * self.row_capacity
        return Rows(*sort_slots(ids, self.num_experts_here, **limits))

    def __call__(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        expert_capacity: int | None,
    ) -> Dispatched:
        """Rows for this rank's experts. `expert_capacity`: pad to that many rows for each (rank,
        expert).
        """
        raise NotImplementedError

    def _dispatched(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        rows: Rows,
        overflow_2: torch.Tensor | None,
        way_back: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
    ) -> Dispatched:
        """Permute tokens that are all here into rows, and the way back to them, which `way_back`
        continues.
        """
        maps = rows.slot_of_row_C, rows.row_of_slot_TK
        late_weights = None if self.weighs_rows else weights_TK

        def back(rows_CH: torch.Tensor, addend_TH: torch.Tensor | None) -> torch.Tensor:
            return way_back(unpermute(rows_CH, late_weights, *maps), addend_TH)

        row_weights_C = rows.permute_weights(weights_TK) if self.weighs_rows else None
        rows_CH = permute(x_TH, None, *maps)
        return Dispatched(rows_CH, row_weights_C, rows.offsets_E, overflow_2, back)


def add(out_TH: torch.Tensor, addend_TH: torch.Tensor | None) -> torch.Tensor:
    """The sum, if there is an addend."""
    return out_TH if addend_TH is None else out_TH + addend_TH
