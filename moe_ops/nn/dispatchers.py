"""Four ways to bring tokens to the experts that own them and back, with one interface and equal
results.

    dispatcher                 forward
    local (one process)        sort_slots, permute | experts | unpermute
    alltoall                   exchange_plan, sort_slots, permute, all_to_all, sort_chunks
                               | experts | sort_chunks, all_to_all, unpermute
    flex                       exchange_plan, dispatch, permute | experts | unpermute, combine
    allgather                  gather_plan, all_gather_rows, sort_slots, permute
                               | experts | unpermute, reduce_scatter_rows

Where each expert's F is spread over ranks ("etp"), these gather what each of them got and sum what
each made of it: alltoall its rows, flex its copies; allgather gathers tokens from all of them.

Letters: T tokens here, K top-k, S = T * K slots, E experts, P ranks, L experts here, C rows here, H
hidden.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.nn import functional

from .. import comm, layout
from ..ops.all_gather_rows import all_gather_rows
from ..ops.all_to_all import all_to_all
from ..ops.dispatch import combine, dispatch
from ..ops.exchange_plan import exchange_plan
from ..ops.sort_chunks import sort_chunks
from ..ops.sort_slots import sort_slots
from .config import MoEConfig
from .expert_groups import ExpertGroups
from .token_dispatcher import Dispatched, Gathered, Rows, TokenDispatcher, add


class LocalDispatcher(TokenDispatcher):
    """Every expert is here: nothing is exchanged and no size is read."""

    def __call__(
        self,
        x_TH: torch.Tensor,
        weights_TK: torch.Tensor,
        ids_TK: torch.Tensor,
        expert_capacity: int | None,
    ) -> Dispatched:
        rows = Rows(*sort_slots(ids_TK, self.config.num_experts, expert_capacity=expert_capacity))
        overflow_2 = None if expert_capacity is None else rows.overflow_2(ids_TK)
        return self._dispatched(x_TH, weights_TK, rows, overflow_2, add)


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
        ids_DK, parts = plan.ids_DK, None
        if self.groups.etp:
            parts = Gathered(copies_DH, self.groups.etp, self.copy_capacity)
            copies_DH, weights_DK = parts.gather(copies_DH), parts.gather(weights_DK)
            ids_DK = parts.gather_ids(ids_DK)
        overflow_2 = None if self.copy_capacity is None else plan.overflow_2.long()
        if parts is None and expert_capacity is None:
            rows = Rows(plan.slot_of_row_C, plan.row_of_slot_DK, plan.offsets_L)
        else:
            rows = self._sort(ids_DK, expert_capacity)
            if overflow_2 is not None or expert_capacity is not None:
                overflow_2 = rows.overflow_2(ids_DK, plan.overflow_2[0])

        def way_back(z_DH: torch.Tensor, addend_TH: torch.Tensor | None) -> torch.Tensor:
            z_DH = z_DH if parts is None else parts.sum(z_DH)
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
        padded_to = None if self.copy_capacity is None else self.config.max_tokens
        everyone = Gathered(x_TH, self.groups.both, padded_to)
        ids_GK = everyone.gather_ids(ids_TK)
        first = self.rank * self.num_experts_here
        here = (ids_GK >= first) & (ids_GK < first + self.num_experts_here)
        ids_GK = torch.where(here, ids_GK - first, -1)
        copies_left_out = None
        if self.copy_capacity is not None:
            held_G = here.any(1)
            fits_G = held_G & (held_G.cumsum(0) <= self.groups.num_parts * self.copy_capacity)
            ids_GK = torch.where(fits_G[:, None], ids_GK, -1)
            copies_left_out = held_G.sum() - fits_G.sum()
        rows = self._sort(ids_GK, expert_capacity)
        overflow_2 = None
        if self.copy_capacity is not None or expert_capacity is not None:
            overflow_2 = rows.overflow_2(ids_GK, copies_left_out)

        def way_back(z_GH: torch.Tensor, addend_TH: torch.Tensor | None) -> torch.Tensor:
            return add(everyone.sum(z_GH), addend_TH)

        x_GH, weights_GK = everyone.gather(x_TH), everyone.gather(weights_TK)
        return self._dispatched(x_GH, weights_GK, rows, overflow_2, way_back)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chunks:
    """What an all-to-all of rows needs: the order before, the sizes, the order after, and the rows
    to keep.
    """

    slots: Rows
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
        here = self._dispatched(x_TH, weights_TK, chunks.slots, chunks.overflow_2, add)
        row_weights_C = here.row_weights_C
        if row_weights_C is not None:
            row_weights_C = self._send(row_weights_C[:, None], chunks).reshape(-1)

        def back(rows_CH: torch.Tensor, addend_TH: torch.Tensor | None) -> torch.Tensor:
            return here.combine(self._return(rows_CH, chunks), addend_TH)

        rows_CH = self._send(here.rows_CH, chunks)
        found = Dispatched(rows_CH, row_weights_C, chunks.offsets_L, chunks.overflow_2, back)
        if not self.groups.etp:
            return found
        equal = self.row_capacity is not None or expert_capacity is not None
        return self._of_all_parts(found, rows_CH.shape[0] if equal else None)

    def _of_all_parts(self, own: Dispatched, num_rows: int | None) -> Dispatched:
        """The rows of all ranks of "etp", by expert; each rank's tail of unused rows last.
        `num_rows`: that each of them has, None: each its own number.
        """
        parts = Gathered(own.rows_CH, self.groups.etp, num_rows)
        ends = functional.pad(own.offsets_L, (1, 1))
        ends[-1] = own.rows_CH.shape[0]
        num_parts = self.groups.num_parts
        counts = all_gather_rows(
            ends.diff()[None],
            torch.ones(num_parts, dtype=torch.int64, device="cpu"),
            num_parts,
            group=self.groups.etp,
        )

        def gather(rows: torch.Tensor) -> torch.Tensor:
            return sort_chunks(parts.gather(rows), counts)

        def back(rows_GH: torch.Tensor, addend_TH: torch.Tensor | None) -> torch.Tensor:
            return own.combine(parts.sum(sort_chunks(rows_GH, counts.T)), addend_TH)

        weights_C = own.row_weights_C
        if weights_C is not None:
            weights_C = gather(weights_C[:, None]).reshape(-1)
        offsets_L = counts[:, :-1].sum(0).cumsum(0).int()
        return Dispatched(gather(own.rows_CH), weights_C, offsets_L, own.overflow_2, back)

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
            slots = Rows(*sort_slots(ids_TK, config.num_experts))
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
        slots = Rows(
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
        slots = Rows(*sort_slots(ids_TK, num_experts, expert_capacity=expert_capacity))
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


def make_dispatcher(config: MoEConfig, groups: ExpertGroups) -> TokenDispatcher:
    """The config's dispatcher; the local one where there is nothing to exchange and no capacity to
    respect.

    Raises:
        ValueError: a capacity of 0 with "etp".
    """
    if groups.etp and 0 in (config.copy_capacity, config.row_capacity):
        raise ValueError("MoE: copy_capacity and row_capacity must be positive with 'etp', got 0")
    bounded = config.copy_capacity is not None or config.row_capacity is not None
    if comm.group_size(groups.both) == 1 and not bounded:
        return LocalDispatcher(config, groups)
    return _DISPATCHERS[config.dispatcher](config, groups)
