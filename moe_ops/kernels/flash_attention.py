"""PyTorch's flash attention, on the CPU its counterpart there, with the log-sum-exp that merging
attentions to different keys takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from .. import layout

_ATEN = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Documents:
    """Packed: `ends_N1` is where they begin, and the last one ends, within each `chunk_size` tokens
    of q and of k. A query sees its own document alone.
    """

    ends_N1: torch.Tensor
    chunk_size: int

    def of_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Which one each token is of."""
        place = torch.arange(self.chunk_size, device=x.device)
        documents = torch.searchsorted(self.ends_N1, place, right=True)
        return documents.repeat(x.shape[2] // self.chunk_size)

    def mask(self, q: torch.Tensor, k: torch.Tensor, masked: bool) -> torch.Tensor:
        """To be added to scores."""
        hidden = self.of_tokens(q).unsqueeze(1) != self.of_tokens(k)
        if masked:
            hidden = hidden | torch.ones_like(hidden).triu(1)
        return q.new_zeros(hidden.shape).masked_fill(hidden, -torch.inf)

    def pack(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[B * S, heads, ...] of [B, heads, S, ...], each document in one piece; where they begin;
        the order of tokens.
        """
        order = self.of_tokens(x).argsort(stable=True)
        begin = torch.arange(x.shape[0], device=x.device).unsqueeze(1) * x.shape[2]
        ends = begin + self.ends_N1 * (x.shape[2] // self.chunk_size)
        rows = x.index_select(2, order).transpose(1, 2).flatten(0, 1)
        return rows, ends.flatten().int(), order


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of all attentions that are merged."""

    scale: float
    documents: Documents | None


def _unpack(rows: torch.Tensor, batch: int, order: torch.Tensor) -> torch.Tensor:
    """What `Documents.pack` made rows of."""
    return rows.unflatten(0, (batch, -1)).transpose(1, 2).index_select(2, order.argsort())


def _in_rows(x: torch.Tensor) -> torch.Tensor:
    """x, each head's elements side by side: PyTorch's kernels take that for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masked: bool, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, heads, Sq, D] to k, v [B, fewer or equal heads, Sk, D]; `masked`: up to each query's
    place. out like q; lse [B, heads, Sq], float32 or float64.
    """
    q, k, v = map(_in_rows, (q, k, v))
    scale, documents = settings.scale, settings.documents
    if q.device.type != "cuda":
        mask = documents.mask(q, k, masked) if documents else None
        return _ATEN._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, masked and mask is None, attn_mask=mask, scale=scale
        )
    if documents:
        return _attend_packed(q, k, v, masked, scale, documents)
    out, lse, *_ = _ATEN._scaled_dot_product_flash_attention.default(
        q, k, v, 0.0, masked, False, scale=scale
    )
    return out, lse


def _attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    masked: bool,
    scale: float,
    documents: Documents,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows_q, ends_q, order = documents.pack(q)
    (rows_k, ends_k, _), (rows_v, _, _) = documents.pack(k), documents.pack(v)
    sizes = (ends_q, ends_k, q.shape[2], k.shape[2])
    out, lse, *_ = _ATEN._flash_attention_forward.default(
        rows_q, rows_k, rows_v, *sizes, 0.0, masked, False, scale=scale
    )
    return _unpack(out, q.shape[0], order), _unpack(lse.T, q.shape[0], order)


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    masked: bool,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v; out and lse of these queries are those over all keys."""
    grad, q, k, v, out = map(_in_rows, (grad, q, k, v, out))
    tensors = (grad, q, k, v, out, lse)
    scale, documents = settings.scale, settings.documents
    if q.device.type != "cuda":
        mask = documents.mask(q, k, masked) if documents else None
        return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *tensors, 0.0, masked and mask is None, attn_mask=mask, scale=scale
        )
    if documents:
        return _attend_packed_backward(*tensors, masked, scale, documents)
    sizes = (None, None, q.shape[2], k.shape[2])
    unread = q.new_empty(2, dtype=torch.uint64)  # the random state, without dropout
    return _ATEN._scaled_dot_product_flash_attention_backward.default(
        *tensors, *sizes, 0.0, masked, unread, unread, scale=scale
    )


def _attend_packed_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    masked: bool,
    scale: float,
    documents: Documents,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    packed = [documents.pack(x) for x in (grad, q, k, v, out, lse)]
    *rows, lse = (rows for rows, _, _ in packed)
    (_, ends_q, order_q), (_, ends_k, order_k) = packed[1:3]
    unread = q.new_empty(2, dtype=torch.uint64)  # the random state, without dropout
    grads = _ATEN._flash_attention_backward.default(
        *rows,
        lse.T.contiguous(),
        *(ends_q, ends_k, q.shape[2], k.shape[2]),
        *(0.0, masked, unread, unread),
        scale=scale,
    )
    orders = (order_q, order_k, order_k)
    grad_q, grad_k, grad_v = (_unpack(x, q.shape[0], o) for x, o in zip(grads, orders))
    return grad_q, grad_k, grad_v


def merge(
    sums: tuple[torch.Tensor, ...],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: int,
    masked: bool,
    settings: Settings,
) -> tuple[torch.Tensor, ...]:
    """Out and lse, if any, the queries from `first` on with these keys, too."""
    block, block_lse = attend(_from(q, first), k, v, masked, settings)
    block = block.to(layout.accumulate_dtype(q.dtype))
    if not sums:
        return block, block_lse
    old_out, old_lse = (_from(x, first) for x in sums)
    share = torch.sigmoid(block_lse - old_lse).unsqueeze(-1)
    new = (old_out + share * (block - old_out), torch.logaddexp(old_lse, block_lse))
    if not first:
        return new
    return tuple(torch.cat([x[:, :, :first], y], 2) for x, y in zip(sums, new))


def block_backward(
    of_q: Sequence[torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    first: int,
    masked: bool,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of all queries and of these keys and values; of_q: grad, q, out, lse."""
    grad, q, out, lse = (_from(x, first) for x in of_q)
    grad_q, *grad_kv = attend_backward(grad, q, k, v, out, lse.contiguous(), masked, settings)
    wide = layout.accumulate_dtype(q.dtype)
    return pad(grad_q.to(wide), (0, 0, first, 0)), torch.stack(grad_kv).to(wide)


def _from(x: torch.Tensor, first: int) -> torch.Tensor:
    """The tokens from `first` on."""
    # NOTE: a slice of everything would make the partitioner save x twice.
    return x[:, :, first:] if first else x
