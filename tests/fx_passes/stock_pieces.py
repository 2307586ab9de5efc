"""A stock layer in pieces, each of which can be written in another way, or wrongly.

Letters: T tokens, K top-k, S = T * K slots, E experts, P ranks, L = E / P experts here, C rows, H
hidden.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)
from torch.nn import functional

from .stock_layers import StockLayer

Piece = Callable[..., Any]


def starts_of(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0) - counts


def count(ids_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    return functional.one_hot(ids_TK.flatten(), num_experts).sum(0)


def send_splits(counts_E: torch.Tensor, num_ranks: int) -> list[int]:
    return counts_E.view(num_ranks, -1).sum(1).tolist()


def sort(ids_TK: torch.Tensor) -> torch.Tensor:
    return ids_TK.flatten().argsort(stable=True)


def gather(x_TH: torch.Tensor, order_S: torch.Tensor, top_k: int) -> torch.Tensor:
    return x_TH[order_S // top_k]


def chunk_order(received_PL: torch.Tensor, ids_C: Callable[[], torch.Tensor]) -> torch.Tensor:
    """`ids_C` brings the experts of what arrived."""
    lengths = received_PL.t().flatten()
    starts = starts_of(received_PL.flatten()).view(received_PL.shape).t().flatten()
    chunk_C = torch.repeat_interleave(lengths)
    return torch.arange(received_PL.sum()) + (starts - starts_of(lengths))[chunk_C]


def experts(rows_CH: torch.Tensor, layer: StockLayer) -> torch.Tensor:
    return functional.silu(rows_CH) @ layer.gate.mT @ layer.gate


def unsort(rows_CH: torch.Tensor, order_C: torch.Tensor) -> torch.Tensor:
    out_CH = torch.empty_like(rows_CH)
    out_CH[order_C] = rows_CH
    return out_CH


def total(
    rows_SH: torch.Tensor, order_S: torch.Tensor, weights_TK: torch.Tensor, x_TH: torch.Tensor
) -> torch.Tensor:
    weighted_SH = rows_SH * weights_TK.flatten()[order_S][:, None].to(rows_SH.dtype)
    return torch.zeros_like(x_TH).index_add(0, order_S // weights_TK.shape[1], weighted_SH)


def same(values: Any) -> Any:
    return values


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What the layer is made of."""

    count: Piece = count
    send_splits: Piece = send_splits
    sort: Piece = sort
    gather: Piece = gather
    before: Piece = same
    chunk_order: Piece = chunk_order
    experts: Piece = experts
    unsort: Piece = unsort
    total: Piece = total
    after: Piece = lambda y_TH, x_TH, arrived_CH: y_TH


class PieceLayer(StockLayer):
    """Set `pieces` before the first call."""

    pieces = Pieces()

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        pieces, num_ranks = self.pieces, self.num_ranks
        weights_TK, ids_TK = self.route(x_TH)
        counts_E = pieces.count(ids_TK, self.sizes.num_experts)
        received_E = wait_tensor(all_to_all_single(counts_E, None, None, self.group))
        received_PL = received_E.view(num_ranks, -1)
        send = pieces.send_splits(counts_E, num_ranks)
        receive = received_PL.sum(1).tolist()
        order_S = pieces.sort(ids_TK)
        rows_SH = pieces.before(pieces.gather(x_TH, order_S, self.sizes.top_k))
        arrived_CH = all_to_all_single_autograd(rows_SH, receive, send, self.group)
        order_C = pieces.chunk_order(
            received_PL,
            lambda: all_to_all_single(ids_TK.flatten()[order_S], receive, send, self.group),
        )
        out_CH = pieces.experts(arrived_CH[order_C], self)
        back_CH = pieces.unsort(out_CH, order_C)
        rows_SH = all_to_all_single_autograd(back_CH, send, receive, self.group)
        y_TH = pieces.total(rows_SH, order_S, weights_TK, x_TH)
        return pieces.after(y_TH, x_TH, arrived_CH)


def _count_by_adding(ids_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    ones = torch.ones_like(ids_TK).view(-1)
    return torch.zeros(num_experts, dtype=torch.int64).scatter_add_(0, ids_TK.view(-1), ones)


def _count_by_comparing(ids_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    return (ids_TK.reshape(-1, 1) == torch.arange(num_experts)).sum(dim=0)


def _gather_copies(x_TH: torch.Tensor, order_S: torch.Tensor, top_k: int) -> torch.Tensor:
    return x_TH.repeat_interleave(top_k, dim=0)[order_S]


def _gather_along(x_TH: torch.Tensor, order_S: torch.Tensor, top_k: int) -> torch.Tensor:
    tokens = torch.arange(x_TH.shape[0]).repeat_interleave(top_k)[order_S]
    return torch.gather(x_TH, 0, tokens[:, None].expand(-1, x_TH.shape[1]))


def _chunk_order_by_labels(received_PL: torch.Tensor, ids_C: Any) -> torch.Tensor:
    num_ranks, num_local = received_PL.shape
    labels = torch.arange(num_local).repeat(num_ranks)
    return labels.repeat_interleave(received_PL.flatten()).argsort(stable=True)


def _chunk_order_by_mod(received_PL: torch.Tensor, ids_C: Any) -> torch.Tensor:
    labels = torch.arange(received_PL.numel()) % received_PL.shape[1]
    return torch.sort(labels.repeat_interleave(received_PL.view(-1)), stable=True).indices


def _chunk_order_by_ids(received_PL: torch.Tensor, ids_C: Any) -> torch.Tensor:
    return torch.argsort(wait_tensor(ids_C()), stable=True)


def _unsort_by_inverse(rows_CH: torch.Tensor, order_C: torch.Tensor) -> torch.Tensor:
    return rows_CH[order_C.argsort()]


def _unsort_by_scatter(rows_CH: torch.Tensor, order_C: torch.Tensor) -> torch.Tensor:
    inverse_C = torch.empty_like(order_C)
    inverse_C[order_C] = torch.arange(order_C.shape[0])
    return rows_CH.index_select(0, inverse_C)


def _unsort_by_adding(rows_CH: torch.Tensor, order_C: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(rows_CH).index_add_(0, order_C, rows_CH)


def _total_of_slots(
    rows_SH: torch.Tensor, order_S: torch.Tensor, weights_TK: torch.Tensor, x_TH: torch.Tensor
) -> torch.Tensor:
    slots_TKH = rows_SH[order_S.argsort()].view(*weights_TK.shape, -1)
    return (slots_TKH.float() * weights_TK[..., None]).sum(dim=1).to(rows_SH.dtype)


def _total_by_matmul(
    rows_SH: torch.Tensor, order_S: torch.Tensor, weights_TK: torch.Tensor, x_TH: torch.Tensor
) -> torch.Tensor:
    slots_SH = torch.zeros_like(rows_SH)
    slots_SH = slots_SH.index_copy(0, order_S, rows_SH).view(*weights_TK.shape, -1)
    return torch.bmm(weights_TK[:, None, :].to(rows_SH.dtype), slots_SH).squeeze(1)


def _total_onto_tokens(
    rows_SH: torch.Tensor, order_S: torch.Tensor, weights_TK: torch.Tensor, x_TH: torch.Tensor
) -> torch.Tensor:
    weights_S1 = weights_TK.view(-1).index_select(0, order_S).unsqueeze(1)
    index_SH = (order_S // weights_TK.shape[1])[:, None].expand_as(rows_SH)
    return torch.tanh(x_TH).scatter_add(0, index_SH, (weights_S1 * rows_SH).to(x_TH.dtype))


SPELLINGS = {
    "plain": Pieces(),
    "count-adding": Pieces(count=_count_by_adding, gather=_gather_copies),
    "count-comparing": Pieces(count=_count_by_comparing, gather=_gather_along),
    "labels": Pieces(chunk_order=_chunk_order_by_labels, unsort=_unsort_by_inverse),
    "mod": Pieces(chunk_order=_chunk_order_by_mod, unsort=_unsort_by_scatter),
    "ids": Pieces(chunk_order=_chunk_order_by_ids, unsort=_unsort_by_inverse),
    "adding": Pieces(unsort=_unsort_by_adding, total=_total_of_slots),
    "matmul": Pieces(total=_total_by_matmul),
    "addend": Pieces(total=_total_onto_tokens),
}
