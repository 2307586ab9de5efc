"""How many tokens each rank brings to an all-gather.

Letters: T tokens here, P ranks, G tokens of all ranks.

    rank 0 holds 4 tokens (K = 2, E = 3 or any other), rank 1 one:
    counts_P = [4, 1], rank_of_token_G = [0, 0, 0, 0, 1]
    padded, max_tokens = 4: counts_P = [4, 4], rank_of_token_G = [0, 0, 0, 0, 1, 1, 1, 1]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .. import _library, checks, comm
from ..comm.collectives import all_gather


def gather_plan(
    x_TH: torch.Tensor,
    *,
    group: dist.ProcessGroup | str | None,
    max_tokens: int = 0,
    padded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """counts_P [P] int64 on the CPU and rank_of_token_G [G] int32, for `all_gather_rows` and
    `reduce_scatter_rows`.

    Collective over `group`.

    Args:
        x_TH: [T, ...]; only T and the device are used.
        max_tokens: most tokens a rank may hold, equal on all ranks; 0 = no bound.
        padded: capacity mode: every rank counts as max_tokens tokens; no count is exchanged or
            read.

    Raises:
        TypeError, ValueError: on every rank, if T > max_tokens on one, or padded without
            max_tokens.
    """
    counts_P, rank_of_token_G = _gather_plan(x_TH, comm.group_name_of(group), max_tokens, padded)
    return counts_P, rank_of_token_G


def _check(
    x_TH: torch.Tensor, group_name: str, max_tokens: int = 0, padded: bool = False
) -> tuple[object, ...]:
    op = "gather_plan"
    checks.rows(op, "x_TH", x_TH)
    comm.group_size(group_name)
    checks.capacity(op, "max_tokens", max_tokens)
    if padded and max_tokens == 0:
        raise ValueError(f"{op}: max_tokens must be positive if padded, got {max_tokens}")
    if max_tokens:
        checks.holds(
            op,
            x_TH.shape[0] <= max_tokens,
            lambda: f"x_TH must have at most max_tokens = {max_tokens} rows, got {x_TH.shape[0]}",
        )
    return max_tokens, padded


def _reference(
    x_TH: torch.Tensor, group_name: str, max_tokens: int = 0, padded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    num_ranks = comm.group_size(group_name)
    ranks = torch.arange(num_ranks, device=x_TH.device, dtype=torch.int32)
    if padded:
        return torch.full((num_ranks,), max_tokens), ranks.repeat_interleave(max_tokens)
    mine = torch.tensor([x_TH.shape[0]], device=x_TH.device)
    counts = all_gather(mine, group_name).flatten().tolist()
    counts_P = torch.tensor(counts)
    repeats = counts_P.to(x_TH.device)
    return counts_P, ranks.repeat_interleave(repeats, output_size=sum(counts))


def _fake(
    x_TH: torch.Tensor, group_name: str, max_tokens: int = 0, padded: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    num_ranks = comm.group_size(group_name)
    if padded:
        num_gathered: Any = num_ranks * max_tokens
    else:
        num_gathered = torch.library.get_ctx().new_dynamic_size()
        if max_tokens:
            torch._check(num_gathered <= num_ranks * max_tokens)
    counts_P = torch.empty(num_ranks, dtype=torch.int64)
    return counts_P, x_TH.new_empty(num_gathered, dtype=torch.int32)


_gather_plan = _library.define(
    "gather_plan(Tensor x_TH, str group_name, int max_tokens=0, bool padded=False)"
    " -> (Tensor counts_P, Tensor rank_of_token_G)",
    check=_check,
    reference=_reference,
    fake=_fake,
)
