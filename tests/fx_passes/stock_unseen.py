"""Expert-parallel layers by an author who did not know what the pass looks for, in pieces.

`IndexedLayer` sorts with argsort, moves rows by indexing and loops over stacked weights.
`CountedLayer` sorts by counting, scatters and gathers rows, cuts chunks by lists of sizes and joins
them.

Letters: T tokens, K top-k, S = T * K slots, E experts, P ranks, L = E / P experts here, C rows,
H hidden, F ffn.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.nn import functional

from .stock_layers import Sizes, StockLayer

Piece = Callable[..., Any]


class UnseenLayer(StockLayer):
    """What both layers share; set `pieces` before the first call."""

    pieces: Any

    def __init__(self, sizes: Sizes, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__(sizes, group, dtype)
        self.w_up = nn.Parameter(self.w1.detach().flip(-1).clone())

    def expert(self, index: int, rows_CH: torch.Tensor) -> torch.Tensor:
        h_CF = functional.silu(rows_CH @ self.w1[index]) * (rows_CH @ self.w_up[index])
        return h_CF @ self.w2[index]


def tokens_of_slots(x_TH: torch.Tensor, top_k: int) -> torch.Tensor:
    return torch.arange(x_TH.shape[0], device=x_TH.device).repeat_interleave(top_k)


def count_ids(ids_S: torch.Tensor, num_experts: int) -> torch.Tensor:
    return torch.bincount(ids_S, minlength=num_experts)


def sort(ids_S: torch.Tensor) -> torch.Tensor:
    return ids_S.argsort(stable=True)


def sum_by_rank(counts_PL: torch.Tensor) -> list[int]:
    return counts_PL.sum(dim=1).tolist()


def labels(received_PL: torch.Tensor, num_rows: int) -> torch.Tensor:
    local_E = torch.arange(received_PL.shape[1], device=received_PL.device)
    local_E = local_E.repeat(received_PL.shape[0])
    return local_E.repeat_interleave(received_PL.flatten(), output_size=num_rows)


def add_rows(rows_SH: torch.Tensor, tokens_S: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x_TH).index_add(0, tokens_S, rows_SH)


@dataclasses.dataclass(frozen=True)
class IndexedPieces:
    """What `IndexedLayer` is made of."""

    tokens: Piece = tokens_of_slots
    count: Piece = count_ids
    sort: Piece = sort
    gather: Piece = lambda x_TH, tokens_S, order_S: x_TH[tokens_S[order_S]]
    splits: Piece = sum_by_rank
    expert_rows: Piece = lambda received_PL: received_PL.sum(dim=0).tolist()
    arrival: Piece = lambda labels_C: labels_C.argsort(stable=True)
    leave: Piece = lambda rows_CH, order_C, labels_C: rows_CH[order_C.argsort()]
    back: Piece = lambda rows_SH, order_S: rows_SH[order_S.argsort()]
    weigh: Piece = lambda rows_SH, weights_TK: rows_SH * weights_TK.flatten().unsqueeze(-1)
    total: Piece = add_rows


class IndexedLayer(UnseenLayer):
    """Rows move by indexing; experts read how many are theirs."""

    pieces = IndexedPieces()

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        pieces, top_k = self.pieces, self.sizes.top_k
        weights_TK, experts_TK = self.route(x_TH)
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)

        experts_S = experts_TK.flatten()
        tokens_S = pieces.tokens(x_TH, top_k)
        order_S = pieces.sort(experts_S)
        rows_SH = pieces.gather(x_TH, tokens_S, order_S)

        counts_E = pieces.count(experts_S, self.sizes.num_experts)
        received_E = all_to_all_single(counts_E, None, None, self.group)
        received_PL = received_E.view(self.num_ranks, self.num_local)
        send = pieces.splits(counts_E.view(self.num_ranks, self.num_local))
        receive = pieces.splits(received_PL)
        expert_rows = pieces.expert_rows(received_PL)
        for size in send + receive + expert_rows:
            torch._check(size >= 0)
        rows_CH = all_to_all_single_autograd(rows_SH, receive, send, self.group)

        labels_C = labels(received_PL, sum(receive))
        order_C = pieces.arrival(labels_C)
        chunks = rows_CH[order_C].split(expert_rows)
        out_CH = torch.cat([self.expert(e, chunk) for e, chunk in enumerate(chunks)])
        back_CH = pieces.leave(out_CH, order_C, labels_C)

        rows_SH = all_to_all_single_autograd(back_CH, send, receive, self.group)
        rows_SH = pieces.weigh(pieces.back(rows_SH, order_S), weights_TK.to(x_TH.dtype))
        return pieces.total(rows_SH, tokens_S, x_TH)


def count_mask(mask_SE: torch.Tensor, ids_S1: torch.Tensor) -> torch.Tensor:
    return mask_SE.sum(0)


def starts_of(counts_E: torch.Tensor) -> torch.Tensor:
    return counts_E.cumsum(0) - counts_E


def place(mask_SE: torch.Tensor, starts_E: torch.Tensor, ids_S1: torch.Tensor) -> torch.Tensor:
    """Where each slot goes: its expert's start plus its rank in that expert, [S, 1]."""
    return (mask_SE.cumsum(0) - 1 + starts_E).gather(1, ids_S1)


def scatter(rows_SH: torch.Tensor, place_S1: torch.Tensor, ids_S1: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(rows_SH).scatter(0, place_S1.expand(-1, rows_SH.shape[1]), rows_SH)


def gather(rows_SH: torch.Tensor, place_S1: torch.Tensor) -> torch.Tensor:
    return rows_SH.gather(0, place_S1.expand(-1, rows_SH.shape[1]))


def read(counts_E: torch.Tensor, received_E: torch.Tensor) -> list[list[int]]:
    """Both are lists of [rank][local expert], flattened."""
    return torch.stack([counts_E, received_E]).tolist()


def split_sizes(counts: list[int], num_local: int) -> list[int]:
    num_ranks = len(counts) // num_local
    return [sum(counts[r * num_local : (r + 1) * num_local]) for r in range(num_ranks)]


def run_by_chunks(
    layer: CountedLayer, arrived_CH: torch.Tensor, received: list[int]
) -> torch.Tensor:
    num_local = layer.num_local
    chunks = arrived_CH.split(received)
    results: list[Any] = [None] * len(received)
    for e in range(num_local):
        y_CH = layer.expert(e, torch.cat(chunks[e::num_local]))
        results[e::num_local] = y_CH.split(received[e::num_local])
    return torch.cat(results)


def scatter_add(rows_SH: torch.Tensor, tokens_S: torch.Tensor, x_TH: torch.Tensor) -> torch.Tensor:
    index_SH = tokens_S[:, None].expand(-1, x_TH.shape[1])
    return torch.zeros_like(x_TH).scatter_add(0, index_SH, rows_SH)


@dataclasses.dataclass(frozen=True)
class CountedPieces:
    """What `CountedLayer` is made of."""

    tokens: Piece = tokens_of_slots
    count: Piece = count_mask
    starts: Piece = starts_of
    place: Piece = place
    put: Piece = scatter
    read: Piece = read
    split_sizes: Piece = split_sizes
    run: Piece = run_by_chunks
    back: Piece = gather
    weigh: Piece = lambda rows_SH, weights_TK: rows_SH * weights_TK.reshape(-1, 1)
    total: Piece = scatter_add


class CountedLayer(UnseenLayer):
    """Nothing is sorted but by counting; sizes are added up in Python."""

    pieces = CountedPieces()

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        pieces, top_k = self.pieces, self.sizes.top_k
        weights_TK, ids_TK = self.route(x_TH)
        weights_TK = (weights_TK / weights_TK.sum(-1, keepdim=True)).type_as(x_TH)

        ids_S1 = ids_TK.reshape(-1, 1)
        mask_SE = functional.one_hot(ids_S1.squeeze(1), self.sizes.num_experts)
        counts_E = pieces.count(mask_SE, ids_S1)
        place_S1 = pieces.place(mask_SE, pieces.starts(counts_E), ids_S1)
        sorted_SH = pieces.put(x_TH.repeat_interleave(top_k, dim=0), place_S1, ids_S1)

        received_E = all_to_all_single(counts_E, None, None, self.group)
        sent, received = pieces.read(counts_E, received_E)
        send = pieces.split_sizes(sent, self.num_local)
        receive = pieces.split_sizes(received, self.num_local)

        arrived_CH = all_to_all_single_autograd(sorted_SH, receive, send, self.group)
        out_CH = pieces.run(self, arrived_CH, received)
        returned_SH = all_to_all_single_autograd(out_CH, send, receive, self.group)

        rows_SH = pieces.weigh(pieces.back(returned_SH, place_S1), weights_TK)
        return pieces.total(rows_SH, pieces.tokens(x_TH, top_k), x_TH)
