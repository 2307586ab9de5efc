"""What a rank sends back is summed where its peers can read it, so that nothing need be sent.

    combine(unpermute(rows, w, ...), ..., group)
        ->  combine(unpermute_in_window(rows, w, ..., group), ..., group)

It refuses sums that something else reads too, which the window would be full of for longer, and
does nothing where no kernel writes to a window.
"""

from __future__ import annotations

import dataclasses

import torch
from torch.fx import Graph, Node

from .graph import add_call, arguments, find_calls, fuses, is_call, replace, rewrite_matches

_OPS = torch.ops.moe_ops
_COMBINE, _UNPERMUTE = _OPS.combine.default, _OPS.unpermute.default
_IN_WINDOW = _OPS.unpermute_in_window.default


@dataclasses.dataclass(frozen=True)
class Match:
    """`combine` sends the sums of `unpermute` on."""

    unpermute: Node
    combine: Node


def find_partial_sums(graph: Graph) -> list[Match]:
    """Every unpermute whose sums a combine takes."""
    pairs = [(arguments(combine)[0], combine) for combine in find_calls(graph, _COMBINE)]
    return [Match(rows, combine) for rows, combine in pairs if is_call(rows, _UNPERMUTE)]


def why_not(match: Match) -> str | None:
    """Why the sums stay where they are."""
    if len(match.unpermute.users) > 1:
        return "something else reads the sums"
    if not fuses(_IN_WINDOW, _arguments_in_window(match)):
        return "no kernel places sums in a window"
    return None


def _arguments_in_window(match: Match) -> list[object]:
    return [*arguments(match.unpermute), arguments(match.combine)[-1]]


def rewrite(match: Match) -> None:
    """The same sums, written to the window."""
    old, args = match.unpermute, _arguments_in_window(match)
    replace(old, add_call(old, _IN_WINDOW, args, old, old.meta["val"]))


def place_in_window_pass(graph: Graph) -> int:
    """The rewrite; number of sums."""
    matches = find_partial_sums(graph)
    return rewrite_matches("lower", graph, matches, why_not, rewrite)
