"""Gradients of the mean loss over all ranks, with expert parallelism.

Each rank calls backward on (its loss / number of ranks). A dense parameter then holds this rank's
part of the gradient, so its parts are summed over the ranks. An expert already received, through
the backward of the exchange, what the tokens of every rank contribute: its gradient is complete.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Gradients:
    """The gradients of one model; dense ones are views of one buffer, for one all-reduce a step.

    The buffer ends with `num_extra` places for whatever else a step sums over the ranks.
    """

    def __init__(
        self,
        dense: Sequence[nn.Parameter],
        experts: Sequence[nn.Parameter],
        num_extra: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._dense, self._experts, self._group = list(dense), list(experts), group
        self._size = sum(p.numel() for p in dense)
        # The last place is the square of the norm of all experts' gradients.
        num_extra += 1
        self._buffer = dense[0].new_zeros(self._size + num_extra)
        self._views = [
            part.view_as(p)
            for p, part in zip(dense, self._buffer.split([*(p.numel() for p in dense), num_extra]))
        ]

    def clear(self) -> None:
        """Zero everything; call before each backward."""
        self._buffer.zero_()
        for p, view in zip(self._dense, self._views):
            p.grad = view
        for p in self._experts:
            p.grad = None

    def sum_over_ranks(self, extra: Tensor) -> tuple[Tensor, Tensor]:
        """Finish the gradients; returns extra summed over the ranks and the global norm."""
        experts = self._expert_gradients()
        square = torch.stack([g.square().sum() for g in experts]).sum()
        self._buffer[self._size :] = torch.cat((extra, square[None]))
        if self._group is not None:
            dist.all_reduce(self._buffer, group=self._group)
        *_, square = self._buffer[self._size :]
        norm = (self._buffer[: self._size].square().sum() + square).sqrt()
        return self._buffer[self._size : -1].clone(), norm

    def scale_(self, factor: Tensor) -> None:
        """Multiply every gradient by a scalar, in place."""
        self._buffer[: self._size].mul_(factor)
        torch._foreach_mul_(self._expert_gradients(), factor)

    def _expert_gradients(self) -> list[Tensor]:
        return [p.grad for p in self._experts if p.grad is not None]
