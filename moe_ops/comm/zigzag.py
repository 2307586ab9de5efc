"""The zigzag order of `cp_split`: the group in it, to heads and back, packed documents.

Each of N documents is split by itself. `cu_seqlens_N1` says where each begins in the whole sequence
and where the last one ends; all are multiples of 2P. A chunk of the sequence is a chunk of each
document; documents lie one after another outside, chunks inside of what attends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from .. import checks
from . import groups
from .agreement import agree


# NOTE: the compiler must see numbers, not a look-up: they decide the graph and the key it is cached
# under.
@torch.compiler.assume_constant_result
def group_rank(group_name: str) -> int:
    """This process's rank in the group, a constant of the graph."""
    return groups.group_rank(group_name)


@torch.compiler.assume_constant_result
def group_size(group_name: str) -> int:
    """P: ranks of the group, a constant of the graph."""
    return groups.group_size(group_name)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The group as seen from this rank, and what is attended to at each step, or of the whole."""

    causal: bool
    group_name: str

    @property
    def num_steps(self) -> int:
        """P."""
        return group_size(self.group_name)

    def is_last(self, step: int) -> bool:
        """Whether nothing is handed on."""
        return step == self.num_steps - 1

    def ranges(self, step: int, num_tokens: int) -> tuple[int, int, bool]:
        """First query, number of keys, and whether they are this rank's own under the mask."""
        if not self.causal or step == 0:
            return 0, num_tokens, self.causal
        if step <= group_rank(self.group_name):
            return 0, num_tokens // 2, False
        return num_tokens // 2, num_tokens, False

    def pieces(
        self, both: torch.Tensor, dep: torch.Tensor | None
    ) -> list[tuple[int, torch.Tensor, bool]]:
        """Of the keys and values of all ranks, gathered after `dep` exists: first query, those that
        are seen from there on, and whether they are this rank's own under the mask.
        """
        whole = torch.ops.moe_ops.cp_unsplit.default(both, 3, self.group_name, dep)
        if not self.causal:
            return [(0, whole, False)]
        half, rank = both.shape[3] // 2, group_rank(self.group_name)
        before = whole.narrow(3, 0, rank * half)
        between = whole.narrow(3, (rank + 1) * half, 2 * (self.num_steps - 1 - rank) * half)
        return [(0, both, True), (0, before, False), (half, between, False)]

    def start(self, buf: torch.Tensor, dep: torch.Tensor) -> torch.Tensor:
        """Hand on `buf`, after `dep` exists; what `wait` makes of the result comes from before."""
        if torch.compiler.is_compiling():  # a graph pass makes halves of it, after the partitioner
            return torch.ops.moe_ops.cp_shift.default(buf, dep, 1, self.group_name)
        return torch.ops.moe_ops.cp_shift_start.default(buf, dep, 1, self.group_name)

    def wait(self, started: torch.Tensor, buf: torch.Tensor) -> torch.Tensor:
        """What comes of starting to hand on `buf`."""
        if torch.compiler.is_compiling():
            return started
        return torch.ops.moe_ops.cp_shift_wait.default(started, buf)


def to_heads(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """[B, heads, S, D], a part of the sequence, to [B, heads / P, P * S, D]."""
    rows = x.unflatten(1, (group_size(group_name), -1)).movedim(1, 0)
    first, last = _exchange(rows, group_name).movedim(0, 2).chunk(2, 3)
    return torch.cat([first, last.flip(2)], 2).flatten(2, 3)


def from_heads(x: torch.Tensor, group_name: str) -> torch.Tensor:
    """[B, heads / P, P * S, D] to [B, heads, S, D], what `to_heads` made it of."""
    first, last = x.unflatten(2, (2 * group_size(group_name), -1)).chunk(2, 2)
    rows = torch.cat([first, last.flip(2)], 3).movedim(2, 0)
    return _exchange(rows, group_name).movedim(0, 1).flatten(1, 2)


def _exchange(rows: torch.Tensor, group_name: str) -> torch.Tensor:
    """A row to each rank, and from each."""
    one_P = torch.ones(rows.shape[0], dtype=torch.int64)
    return torch.ops.moe_ops.all_to_all.default(rows, one_P, one_P, rows.shape[0], group_name)


def agree_unless_compiling(op: str, group_name: str, check: Callable[[], Any]) -> None:
    """`comm.agree` for what is no operator: a graph's ranks are taken to agree."""
    if torch.compiler.is_compiling():
        check()
    else:
        agree(op, group_name, check)


def check_documents(
    op: str,
    cu_seqlens_N1: torch.Tensor,
    x: torch.Tensor,
    dim: int,
    num_chunks: int,
    group_name: str,
) -> None:
    """Boundaries fit x, of `num_chunks` chunks in dimension `dim`; an error on every rank."""

    def check() -> tuple[object, ...]:
        checks.tensor(op, "cu_seqlens_N1", cu_seqlens_N1, 1, checks.IDS, like=x)
        if cu_seqlens_N1.shape[0] < 2 or not -x.dim() <= dim < x.dim():
            raise ValueError(
                f"{op}: cu_seqlens_N1 must have at least 2 entries, for dimension {dim} of x, got "
                f"{tuple(cu_seqlens_N1.shape)} and {tuple(x.shape)}"
            )
        if x.shape[dim] % num_chunks:
            raise ValueError(
                f"{op}: x must have a multiple of {num_chunks} tokens in dimension {dim}, got "
                f"{x.shape[dim]}; pad the sequence"
            )
        num_ranks = group_size(group_name)
        size = x.shape[dim] // num_chunks * 2 * num_ranks
        right = (cu_seqlens_N1 % (2 * num_ranks) == 0).all() & (cu_seqlens_N1.diff() >= 0).all()
        right = right & (cu_seqlens_N1[0] == 0) & (cu_seqlens_N1[-1] == size)
        rule = f"rise from 0 to all ranks' {size} tokens in multiples of {2 * num_ranks}"
        torch._assert_async(right, f"{op}: cu_seqlens_N1 must {rule}, got others; pad documents")
        return tuple(cu_seqlens_N1.shape), cu_seqlens_N1.dtype

    agree_unless_compiling(op, group_name, check)


def chunk_ends(cu_seqlens_N1: torch.Tensor, group_name: str) -> torch.Tensor:
    """The boundaries within a chunk: [N + 1] int64."""
    return cu_seqlens_N1.long() // (2 * group_size(group_name))


def chunk_order(
    cu_seqlens_N1: torch.Tensor, num_chunks: int, size: int, group_name: str
) -> torch.Tensor:
    """Places of chunk 0 of each document, of chunk 1 of each, ..., among documents of `num_chunks`
    chunks each. [size] int64.
    """
    ends_N1 = chunk_ends(cu_seqlens_N1, group_name)
    place = torch.arange(size // num_chunks, device=ends_N1.device)
    document = torch.searchsorted(ends_N1, place, right=True) - 1
    first = place + (num_chunks - 1) * ends_N1[document]
    chunk = torch.arange(num_chunks, device=ends_N1.device).unsqueeze(1)
    return (first + chunk * ends_N1.diff()[document]).flatten()
