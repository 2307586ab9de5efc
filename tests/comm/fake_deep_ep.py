"""A stand-in for the package `deep_ep`: class `Buffer` over a group's plain all-to-alls, as
particular about its arguments as DeepEP V1 within a host, and with NaN where DeepEP writes nothing.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed as dist

topk_idx_t = torch.int64


class Config:
    def __init__(self, num_sms: int) -> None:
        self.num_sms = num_sms

    def get_nvl_buffer_size_hint(self, row_bytes: int, num_ranks: int) -> int:
        return self.num_sms * num_ranks * row_bytes


class Buffer:
    num_sms = 20
    alive: ClassVar[list[Buffer]] = []

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int,
        num_rdma_bytes: int,
        explicitly_destroy: bool = False,
    ) -> None:
        assert num_rdma_bytes == 0 and explicitly_destroy
        self.group, self.num_bytes = group, num_nvl_bytes
        self.alive.append(self)

    def destroy(self) -> None:
        self.alive.remove(self)

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        assert num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    def _all_to_all(
        self, rows: torch.Tensor, send: list[int], receive: list[int], length: int
    ) -> torch.Tensor:
        """Received chunks in rank order, then NaN (in bytes: the greatest) up to `length` rows."""
        bits = torch.uint8 if rows.element_size() == 1 else rows.dtype
        rows = rows.view(bits)
        received = rows.new_full((length, *rows.shape[1:]), 255 if bits == torch.uint8 else 0)
        if bits.is_floating_point:
            received.fill_(torch.nan)
        dist.all_to_all_single(received[: sum(receive)], rows, receive, send, group=self.group)
        return received

    def _check_rows(self, rows: torch.Tensor, config: Config, *dtypes: torch.dtype) -> None:
        # While DeepEP writes to fresh tensors, PyTorch would fill them.
        assert not torch.utils.deterministic.fill_uninitialized_memory
        row_bytes = rows.shape[1] * rows.element_size()
        assert rows.is_contiguous() and rows.data_ptr() % 16 == 0 and rows.dtype in dtypes
        assert row_bytes % 32 == 0 and row_bytes // 2 + 8 <= 8192
        assert config.get_nvl_buffer_size_hint(row_bytes, self.group.size()) <= self.num_bytes

    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_worst_tokens: int = 0,
        config: Any = None,
    ) -> tuple[Any, ...]:
        rows, *scales = x if isinstance(x, tuple) else (x,)
        self._check_rows(rows, config, torch.float8_e4m3fn if scales else torch.bfloat16)
        if handle is None:
            assert num_tokens_per_rank is not None and is_token_in_rank is not None
            assert num_tokens_per_expert is not None and num_tokens_per_expert.sum() >= 0
            assert topk_idx is not None and topk_weights is not None
            assert topk_idx.dtype == topk_idx_t and topk_weights.dtype == torch.float32
            assert topk_idx.shape == topk_weights.shape and len(topk_idx) == len(rows)
            assert is_token_in_rank.dtype == torch.bool and is_token_in_rank.is_contiguous()
            assert num_tokens_per_rank.dtype == torch.int32
            assert num_tokens_per_rank.tolist() == is_token_in_rank.sum(0).tolist()
            handle = self._handle(is_token_in_rank, num_worst_tokens)
        else:
            assert num_tokens_per_rank is None and topk_idx is None and topk_weights is None
        sent, send, receive, length = handle
        token = sent.T.nonzero()[:, 1]  # rank by rank
        assert len(sent) == len(rows)
        received, *rest = (
            self._all_to_all(values[token], send, receive, length) for values in (rows, *scales)
        )
        return (received.view(rows.dtype), *rest) if scales else received, *[None] * 3, handle, None

    def _handle(self, sent: torch.Tensor, num_worst_tokens: int) -> tuple[Any, ...]:
        send = sent.sum(0)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        length = num_worst_tokens or int(receive.sum())
        assert receive.sum() <= length, f"{receive.tolist()} copies arrive, {length} fit"
        return sent, send.tolist(), receive.tolist(), length

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        config: Any = None,
    ) -> tuple[Any, ...]:
        self._check_rows(x, config, torch.bfloat16)
        sent, send, receive, length = handle
        assert len(x) == length

        def back(values: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
            valid = values[: sum(receive)].contiguous()
            returned = self._all_to_all(valid, receive, send, sum(send)).float()
            total = start.float()
            for column, chunk in zip(sent.T, returned.split(send)):
                total[column] += chunk
            return total

        zero = x.new_zeros(len(sent), x.shape[1]) if bias is None else bias.clone()
        weights = None
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and len(topk_weights) == length
            weights = back(topk_weights, topk_weights.new_zeros(len(sent), topk_weights.shape[1]))
        return back(x, zero).to(x.dtype), weights, None
