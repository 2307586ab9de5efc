"""Grouped matmuls read tokens through the slots of their rows where a kernel does; then no expanded
rows exist.

    rows = permute(x, None, slots, _)                gather_grouped_mm(x, slots, K, w, offsets)
    grouped_mm(rows, w, offsets)                     gather_grouped_mm_wgrad(g, None, x, slots, K,
    grouped_mm_wgrad(g, rows, offsets)         ->                            offsets)
    grouped_mm_swiglu(rows, None, 1, ...)            grouped_mm_swiglu(x, slots, K, ...)

and likewise grouped_mm_swiglu_backward and the gradient's rows in grouped_mm_wgrad. It refuses a
permute with weights, a top_k that is not a number, a permute of which a consumer needs the rows, so
that nothing would be saved, and a consumer that no kernel of the device gathers for.

Before that, in the joint graph, `recompute_rows_pass` has backward compute again the rows that a
weight's gradient reads, so that only x is kept, gathered or not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import Graph, Node

from .graph import (
    add_call,
    add_outputs,
    arguments,
    find_calls,
    fuses,
    is_call,
    mark_recomputed,
    name_of,
    replace,
    replace_outputs,
    rewrite_matches,
)

_OPS = torch.ops.moe_ops
_PERMUTE = _OPS.permute.default
_GROUPED_MM = _OPS.grouped_mm.default
_WGRAD = _OPS.grouped_mm_wgrad.default
_GATHER = _OPS.gather_grouped_mm.default
_GATHER_WGRAD = _OPS.gather_grouped_mm_wgrad.default
_WITH_SWIGLU = (_OPS.grouped_mm_swiglu.default, _OPS.grouped_mm_swiglu_backward.default)


@dataclasses.dataclass(frozen=True)
class Match:
    """`permute`, whose users read its rows."""

    permute: Node

    @property
    def top_k(self) -> Any:
        """K, at least 1: an int, unless it is symbolic."""
        top_k = arguments(self.permute)[3].meta["val"].shape[1]
        return max(top_k, 1) if isinstance(top_k, int) else top_k


def find_permutes(graph: Graph) -> list[Match]:
    """Permutes that feed a grouped matmul."""
    permutes = [Match(permute) for permute in find_calls(graph, _PERMUTE)]
    return [m for m in permutes if any(_folded(m, user) for user in m.permute.users)]


def why_not(match: Match) -> str | None:
    """Why the rows must exist, if they must."""
    permute = match.permute
    if arguments(permute)[1] is not None:
        return "the permute has weights"
    if not isinstance(match.top_k, int):
        return f"top_k must be a number, got {match.top_k}"
    for user in permute.users:
        folded = _folded(match, user)
        if folded is None:
            return f"{name_of(user)} needs the rows"
        if not fuses(*folded):
            return f"no kernel of {name_of(user)} gathers"
    return None


def _folded(match: Match, user: Node) -> tuple[Any, list[Any]] | None:
    """The call that reads x in place of a user's rows; None if there is none."""
    permute, top_k = match.permute, match.top_k
    x, _, slots, _ = arguments(permute)
    args = arguments(user) if isinstance(user.target, torch._ops.OpOverload) else []
    if args.count(permute) != 1:
        return None
    if user.target is _GROUPED_MM and args[0] is permute:
        return _GATHER, [x, slots, top_k, *args[1:]]
    if user.target is _WGRAD:
        g, a, offsets = args
        if g is permute:
            return _GATHER_WGRAD, [x, slots, a, None, top_k, offsets]
        return _GATHER_WGRAD, [g, None, x, slots, top_k, offsets]
    if user.target is _GATHER_WGRAD and isinstance(top_k, int) and args[4] == top_k:
        g, g_slots, a, a_slots, *rest = args
        if g is permute and g_slots is None:
            return _GATHER_WGRAD, [x, slots, a, a_slots, *rest]
        if a is permute and a_slots is None:
            return _GATHER_WGRAD, [g, g_slots, x, slots, *rest]
    if user.target in _WITH_SWIGLU and args[0] is permute and args[1] is None:
        return user.target, [x, slots, top_k, *args[3:]]
    return None


def rewrite(match: Match) -> None:
    """Let every user read x."""
    for user in list(match.permute.users):
        folded = _folded(match, user)
        assert folded is not None
        call = add_call(user, *folded, like=user, value=user.meta["val"])
        if user.target in _WITH_SWIGLU:
            replace_outputs(user, add_outputs(call, user))
        else:
            replace(user, call)
    match.permute.graph.erase_node(match.permute)


def fold_permute_grouped_mm_pass(graph: Graph) -> int:
    """The rewrite; number of permutes that are gone."""
    matches = find_permutes(graph)
    return rewrite_matches("fold_permute_grouped_mm", graph, matches, why_not, rewrite)


def recompute_rows_pass(graph: Graph) -> int:
    """Mark what backward computes again; number of nodes marked."""
    rows = [
        permute
        for permute in find_calls(graph, _PERMUTE)
        if arguments(permute)[1] is None
        and all(is_call(user, _GROUPED_MM, _WGRAD) for user in permute.users)
        and any(is_call(user, _WGRAD) and arguments(user)[1] is permute for user in permute.users)
    ]
    return sum(mark_recomputed(node) for node in rows)
