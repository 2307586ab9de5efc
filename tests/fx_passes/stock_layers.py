"""Expert-parallel layers as people write them in plain PyTorch: they know nothing of this library.

`TitanLayer` sorts slots, computes the index of the chunk sort on the device and adds rows to their
tokens; `MegatronLayer` cuts and joins chunks by lists of sizes and sends gate weights along.

Letters: T tokens, K top-k, S = T * K slots, E experts, P ranks, L = E / P experts here, C rows,
H hidden, F ffn.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.nn import functional


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a stock layer is made of; `early` = gate weights are applied before the experts."""

    hidden: int = 8
    ffn: int = 6
    num_experts: int = 4
    top_k: int = 2
    early: bool = False


class StockLayer(nn.Module):
    """A router and the experts of this rank; subclasses move the rows."""

    def __init__(self, sizes: Sizes, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes, self.group = sizes, group
        self.num_ranks = group.size()
        self.num_local = sizes.num_experts // self.num_ranks
        stream = torch.Generator().manual_seed(5)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape, generator=stream) / 2).to(dtype))

        self.gate = parameter(sizes.num_experts, sizes.hidden)
        first = group.rank() * self.num_local
        w1 = parameter(sizes.num_experts, sizes.hidden, sizes.ffn)
        w2 = parameter(sizes.num_experts, sizes.ffn, sizes.hidden)
        self.w1, self.w2 = (
            nn.Parameter(w.detach()[first : first + self.num_local].clone()) for w in (w1, w2)
        )

    def route(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """weights_TK in float32 (float64 with float64 tokens) and ids_TK."""
        logits = functional.linear(x_TH, self.gate)
        scores = logits.to(torch.promote_types(x_TH.dtype, torch.float32)).softmax(-1)
        return scores.topk(self.sizes.top_k, dim=-1)

    def experts(
        self, rows_CH: torch.Tensor, counts_L: torch.Tensor, row_weights_C: torch.Tensor | None
    ) -> torch.Tensor:
        """Each row through its expert: every expert sees all rows, masked by where its own lie."""
        ends_L = counts_L.cumsum(0)
        place_C = torch.arange(rows_CH.shape[0], device=rows_CH.device)
        out_CH = torch.zeros_like(rows_CH)
        for expert in range(self.num_local):
            start = ends_L[expert] - counts_L[expert]
            mine = ((place_C >= start) & (place_C < ends_L[expert]))[:, None]
            h = functional.silu(rows_CH @ self.w1[expert])
            if row_weights_C is not None:
                h = (h * row_weights_C[:, None]).to(h.dtype)
            out_CH = out_CH + torch.where(mine, h @ self.w2[expert], 0)
        return out_CH


class TitanLayer(StockLayer):
    """Index arithmetic for the chunk sort, a scatter-add for the sum."""

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        sizes, num_ranks = self.sizes, self.num_ranks
        weights_TK, ids_TK = self.route(x_TH)
        counts_E = torch.histc(
            ids_TK.view(-1).float(), bins=sizes.num_experts, min=0, max=sizes.num_experts
        ).long()
        order_S = torch.argsort(ids_TK.view(-1), stable=True)
        weights_S = weights_TK.view(-1)[order_S]
        token_S = order_S // sizes.top_k
        rows_SH = x_TH[token_S]
        if sizes.early:
            rows_SH = (rows_SH.to(weights_S.dtype) * weights_S.reshape(-1, 1)).to(x_TH.dtype)

        with torch.no_grad():
            received_E = all_to_all_single(counts_E, None, None, group=self.group)
            received_E = torch.ops._c10d_functional.wait_tensor(received_E)
            send = counts_E.view(num_ranks, -1).sum(dim=1).to("cpu", non_blocking=True).tolist()
            receive = received_E.view(num_ranks, -1).sum(dim=1).to("cpu").tolist()
        rows_CH = all_to_all_single_autograd(rows_SH, receive, send, self.group)
        shape = rows_CH.shape
        index_C, counts_L = self._chunk_order(received_E)
        rows_CH = rows_CH[index_C, :]

        out_CH = self.experts(rows_CH, counts_L, None)

        back_CH = out_CH.new_empty(shape)
        back_CH[index_C, :] = out_CH
        rows_SH = all_to_all_single_autograd(back_CH, send, receive, self.group)
        if not sizes.early:
            rows_SH = (rows_SH.to(weights_S.dtype) * weights_S.reshape(-1, 1)).to(rows_SH.dtype)
        index_SH = token_S.reshape(-1, 1).expand(-1, x_TH.shape[-1])
        return torch.zeros_like(x_TH).scatter_add(0, index_SH, rows_SH)

    def _chunk_order(self, received_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where each row in (expert, rank) order lies in (rank, expert) order, and rows by
        expert.
        """
        device = received_E.device
        received_PL = received_E.view(self.num_ranks, self.num_local)
        starts = (received_E.cumsum(0) - received_E).view(self.num_ranks, self.num_local)
        starts = starts.t().reshape(-1)
        lengths = received_PL.t().reshape(-1)
        chunk_C = torch.arange(lengths.shape[0], device=device).repeat_interleave(lengths)
        ends = lengths.cumsum(0)
        place_C = torch.arange(received_E.sum(), device=device)
        index_C = starts[chunk_C] + place_C - (ends - lengths)[chunk_C]
        return index_C, received_PL.sum(0)


class MegatronLayer(StockLayer):
    """Counts by all-gather, chunks cut and joined by lists of sizes, gate weights sent along and
    applied at the activation, a sum in place.
    """

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        sizes, rank, num_local = self.sizes, self.group.rank(), self.num_local
        weights_TK, ids_TK = self.route(x_TH)
        chosen_TE = torch.zeros(
            x_TH.shape[0], sizes.num_experts, dtype=torch.int64, device=x_TH.device
        ).scatter(1, ids_TK, 1)
        counts_E = chosen_TE.sum(dim=0)
        gathered_PE = all_gather_tensor(counts_E, 0, self.group).reshape(-1, sizes.num_experts)
        received_PL = gathered_PE[:, rank * num_local : (rank + 1) * num_local]
        send = counts_E.reshape(-1, num_local).sum(dim=1).tolist()
        receive = received_PL.sum(dim=1).tolist()
        chunks = received_PL.reshape(-1).tolist()

        order_S = torch.argsort(ids_TK.reshape(-1), stable=True)
        rows_SH = x_TH.index_select(0, order_S.div(sizes.top_k, rounding_mode="floor"))
        weights_S = weights_TK.reshape(-1).gather(0, order_S)
        rows_CH = all_to_all_single_autograd(rows_SH, receive, send, self.group)
        weights_C = all_to_all_single_autograd(weights_S, receive, send, self.group)
        rows_CH = self._sort(rows_CH, chunks, self.num_ranks)
        weights_C = self._sort(weights_C, chunks, self.num_ranks)

        out_CH = self.experts(rows_CH, received_PL.sum(dim=0), weights_C)

        sorted_chunks = [
            chunks[p * num_local + e] for e in range(num_local) for p in range(self.num_ranks)
        ]
        out_CH = self._sort(out_CH, sorted_chunks, num_local)
        rows_SH = all_to_all_single_autograd(out_CH, send, receive, self.group)
        out_TH = torch.zeros(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
        out_TH.index_add_(0, order_S // sizes.top_k, rows_SH)
        return out_TH

    def _sort(self, rows: torch.Tensor, chunks: list[int], outer: int) -> torch.Tensor:
        """Chunks in (outer, inner) order to (inner, outer) order."""
        if self.num_local == 1:
            return rows
        inner = len(chunks) // outer
        parts = rows.split(chunks)
        return torch.cat([parts[a * inner + b] for b in range(inner) for a in range(outer)])
