"""Four ways to bring tokens to the experts that own them and back, with one interface and equal
results.

    dispatcher                 forward
    local (one process)        sort_slots, permute | experts | unpermute
    alltoall                   exchange_plan, sort_slots, permute, all_to_all, sort_chunks
                               | experts | sort_chunks, all_to_all, unpermute
    flex                       exchange_plan, dispatch, permute | experts | unpermute, combine
    allgather                  gather_plan, all_gather_rows, sort_slots, permute
                               | experts | unpermute, reduce_scatter_rows

Letters: T tokens here, K top-k, S = T * K slots, E experts, P ranks, L experts here, C rows here, H
hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch.nn import functional

from .. import comm, layout
from ..ops.all_gather_rows import all_gather_rows, reduce_scatter_rows
from ..ops.all_to_all import all_to_all
from ..ops.dispatch import combine, dispatch
from ..ops.exchange_plan import exchange_plan
from ..ops.gather_plan import gather_plan
from ..ops.permute import permute, unpermute
from ..ops.sort_chunks import sort_chunks
from ..ops.sort_slots import sort_slots
from .config import MoEConfig


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
class _Rows:
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


class TokenDispatcher:
    """Moves rows as the config says. Holds no tensors: everything a way back needs is in
    `Dispatched`.
    """

    def __init__(self, config: MoEConfig, group_name: str) -> None:
        self.config = config
        self.group_name = group_name
        self.num_ranks = comm.group_size(group_name)
        self.rank = comm.group_rank(group_name)
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
        rows: _Rows,
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


def _add(out_TH: torch.Tensor, addend_TH: torch.Tensor | None) -> torch.Tensor:
    return out_TH if addend_TH is None else out_TH + addend_TH


class LocalDispatcher(TokenDispatcher):
    """Every expert is here: nothing is exchanged and no size is read."""

    def __call__(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        expert_capacity: int | None,
    ) -> Dispatched:
        rows = _Rows(*sort_slots(ids_TK, self.config.num_experts, expert_capacity=expert_capacity))
        overflow_2 = None if expert_capacity is None else rows.overflow_2(ids_TK)
        return self._dispatched(x_TH, weights_TK, rows, overflow_2, _add)


class FlexDispatcher(TokenDispatcher):
    """The fused exchange: one copy of a token per rank, sorted into rows where it arrives."""

    def __call__(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        expert_capacity: int | None,
    ) -> Dispatched:
        copies_DH, weights_DK, plan = dispatch(
            x_TH,
            ids_TK,
            weights_TK,
            num_experts=self.config.num_experts,
            group=self.group_name,
            max_tokens=self.config.max_tokens,
            copy_capacity=self.copy_capacity,
            row_capacity=self.row_capacity,
            wire=self.config.wire,
        )
        rows = _Rows(plan.slot_of_row_C, plan.row_of_slot_DK, plan.offsets_L)
        overflow_2 = None if self.copy_capacity is None else plan.overflow_2.long()
        if expert_capacity is not None:
            sorted_slots = sort_slots(
                plan.ids_DK, self.num_experts_here, expert_capacity=self.num_ranks * expert_capacity
            )
            rows = _Rows(*sorted_slots)
            overflow_2 = rows.overflow_2(plan.ids_DK, plan.overflow_2[0])

        def way_back(z_DH: torch.Tensor, addend_TH: torch.Tensor | None) -> torch.Tensor:
            return combine(z_DH, plan, group=self.group_name, addend_TH=addend_TH)[0]

        return self._dispatched(copies_DH, weights_DK, rows, overflow_2, way_back)


class AllGatherDispatcher(TokenDispatcher):
    """Every token goes everywhere; each rank keeps what its experts want."""

    def __call__(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        expert_capacity: int | None,
    ) -> Dispatched:
        group = self.group_name
        counts_P, rank_of_token_G = gather_plan(
            x_TH,
            group=group,
            max_tokens=self.config.max_tokens,
            padded=self.copy_capacity is not None,
        )
        num_gathered = rank_of_token_G.shape[0]

        def gather(values: torch.Tensor) -> torch.Tensor:
            return all_gather_rows(values, counts_P, num_gathered, group=group)

        # Shifted by one, so that the zeros of padding tokens mean "no expert".
        ids_GK = gather(ids_TK + 1) - 1
        first = self.rank * self.num_experts_here
        here = (ids_GK >= first) & (ids_GK < first + self.num_experts_here)
        ids_GK = torch.where(here, ids_GK - first, -1)
        copies_left_out = None
        if self.copy_capacity is not None:
            held_G = here.any(1)
            fits_G = held_G & (held_G.cumsum(0) <= self.copy_capacity)
            ids_GK = torch.where(fits_G[:, None], ids_GK, -1)
            copies_left_out = held_G.sum() - fits_G.sum()
        if expert_capacity is None:
            limits = {"row_capacity": self.row_capacity}
        else:
            limits = {"expert_capacity": self.num_ranks * expert_capacity}
        rows = _Rows(*sort_slots(ids_GK, self.num_experts_here, **limits))
        overflow_2 = None
        if self.copy_capacity is not None or expert_capacity is not None:
            overflow_2 = rows.overflow_2(ids_GK, copies_left_out)
        num_tokens = x_TH.shape[0]

        def way_back(z_GH: torch.Tensor, addend_TH: torch.Tensor | None) -> torch.Tensor:
            return _add(reduce_scatter_rows(z_GH, counts_P, num_tokens, group=group), addend_TH)

        return self._dispatched(gather(x_TH), gather(weights_TK), rows, overflow_2, way_back)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunks:
    """What an all-to-all of rows needs: the order before, the sizes, the order after, and the rows
    to keep.
    """

    slots: _Rows
    counts_before: torch.Tensor | None
    send_P: torch.Tensor
    recv_P: torch.Tensor
    num_received: int
    counts_after: torch.Tensor
    num_rows: int
    offsets_L: torch.Tensor
    overflow_2: torch.Tensor | None


class AllToAllDispatcher(TokenDispatcher):
    """One row a slot on the wire: permute, all-to-all, chunk sort, and the exact mirror."""

    def __call__(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        expert_capacity: int | None,
    ) -> Dispatched:
        if expert_capacity is None:
            chunks = self._chunks(ids_TK)
        else:
            chunks = self._padded_chunks(ids_TK, expert_capacity)
        here = self._dispatched(x_TH, weights_TK, chunks.slots, chunks.overflow_2, _add)
        row_weights_C = here.row_weights_C
        if row_weights_C is not None:
            row_weights_C = self._send(row_weights_C[:, None], chunks).reshape(-1)

        def back(rows_CH: torch.Tensor, addend_TH: torch.Tensor | None) -> torch.Tensor:
            return here.combine(self._return(rows_CH, chunks), addend_TH)

        rows_CH = self._send(here.rows_CH, chunks)
        return Dispatched(rows_CH, row_weights_C, chunks.offsets_L, chunks.overflow_2, back)

    def _send(self, rows: torch.Tensor, chunks: _Chunks) -> torch.Tensor:
        if chunks.counts_before is not None:
            rows = sort_chunks(rows, chunks.counts_before)
        rows = all_to_all(
            rows, chunks.send_P, chunks.recv_P, chunks.num_received, group=self.group_name
        )
        return sort_chunks(rows, chunks.counts_after)[: chunks.num_rows]

    def _return(self, rows: torch.Tensor, chunks: _Chunks) -> torch.Tensor:
        if chunks.num_rows != chunks.num_received:
            rows = functional.pad(rows, (0, 0, 0, chunks.num_received - chunks.num_rows))
        rows = sort_chunks(rows, chunks.counts_after.T)
        num_sent = chunks.slots.slot_of_row_C.shape[0]
        rows = all_to_all(rows, chunks.recv_P, chunks.send_P, num_sent, group=self.group_name)
        return rows if chunks.counts_before is None else sort_chunks(rows, chunks.counts_before.T)

    def _chunks(self, ids_TK: torch.Tensor) -> _Chunks:
        config = self.config
        plan = exchange_plan(
            ids_TK,
            config.num_experts,
            group=self.group_name,
            max_tokens=config.max_tokens,
            copy_capacity=self.copy_capacity,
            row_capacity=self.row_capacity,
        )
        if self.row_capacity is None:
            _, _, send_P, recv_P = plan.splits_4P.unbind(0)
            slots = _Rows(*sort_slots(ids_TK, config.num_experts))
            num_rows = plan.slot_of_row_C.shape[0]
            return _Chunks(
                slots=slots,
                counts_before=None,
                send_P=send_P,
                recv_P=recv_P,
                num_received=num_rows,
                counts_after=plan.counts_PL,
                num_rows=num_rows,
                offsets_L=plan.offsets_L,
                overflow_2=None,
            )
        # Chunks of equal size: `chunk_rows` for each pair of ranks, filled up with a chunk of
        # zeros.
        chunk_rows = config.max_tokens * config.top_k
        rank_TK = torch.where(ids_TK >= 0, ids_TK // self.num_experts_here, -1)
        place_TK = plan.copy_of_token_TP.gather(1, rank_TK.clamp(min=0).long())
        sent_TK = (rank_TK >= 0) & (place_TK >= 0)
        num_slots = self.num_ranks * chunk_rows
        slots = _Rows(
            *sort_slots(
                torch.where(sent_TK, ids_TK, -1), config.num_experts, row_capacity=num_slots
            )
        )
        sent_P = layout.count(torch.where(sent_TK, rank_TK, -1), self.num_ranks)
        counts_before = torch.stack([sent_P, chunk_rows - sent_P]).int()
        rest_P = chunk_rows - plan.counts_PL.sum(1, keepdim=True)
        splits_P = torch.full((self.num_ranks,), chunk_rows, device="cpu")
        return _Chunks(
            slots=slots,
            counts_before=counts_before,
            send_P=splits_P,
            recv_P=splits_P,
            num_received=num_slots,
            counts_after=torch.cat([plan.counts_PL, rest_P], dim=1).int(),
            num_rows=min(self.row_capacity, num_slots),
            offsets_L=plan.offsets_L,
            overflow_2=plan.overflow_2.long(),
        )

    def _padded_chunks(self, ids_TK: torch.Tensor, expert_capacity: int) -> _Chunks:
        """Equal chunks for each (rank, expert): no plan, no counts, nothing read."""
        num_experts, num_ranks = self.config.num_experts, self.num_ranks
        slots = _Rows(*sort_slots(ids_TK, num_experts, expert_capacity=expert_capacity))
        num_rows = num_experts * expert_capacity
        splits_P = torch.full((num_ranks,), self.num_experts_here * expert_capacity, device="cpu")
        counts = ids_TK.new_full((num_ranks, self.num_experts_here), expert_capacity)
        offsets_L = counts.sum(0).cumsum(0).int()
        return _Chunks(
            slots=slots,
            counts_before=None,
            send_P=splits_P,
            recv_P=splits_P,
            num_received=num_rows,
            counts_after=counts.int(),
            num_rows=num_rows,
            offsets_L=offsets_L,
            overflow_2=slots.overflow_2(ids_TK),
        )


_DISPATCHERS: dict[str, type[TokenDispatcher]] = {
    "flex": FlexDispatcher,
    "alltoall": AllToAllDispatcher,
    "allgather": AllGatherDispatcher,
}


def make_dispatcher(config: MoEConfig, group_name: str) -> TokenDispatcher:
    """The config's dispatcher; the local one where there is nothing to exchange and no capacity to
    respect.
    """
    bounded = config.copy_capacity is not None or config.row_capacity is not None
    if comm.group_size(group_name) == 1 and not bounded:
        return LocalDispatcher(config, group_name)
    return _DISPATCHERS[config.dispatcher](config, group_name)
