"""An exchange becomes a start and a wait, so that what needs neither runs between them.

    rows, weights = dispatch(x, w, plan, ...)      ticket = dispatch_start(x, w, plan, ..., num_sms)
                                              ->   ...
                                                   rows, weights = dispatch_wait(ticket, x, w, plan)

and likewise combine and cp_shift, which has no num_sms. The start stands right after the last of
its inputs, the wait right before the first that reads its outputs. It refuses an exchange that
nothing reads.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch.fx import Graph, Node

from .graph import (
    add_call,
    add_outputs,
    arguments,
    find_calls,
    replace,
    replace_outputs,
    rewrite_matches,
)

_OPS = torch.ops.moe_ops
# Exchange -> its start and its wait.
_HALVES: dict[Any, tuple[Any, Any]] = {
    _OPS.dispatch.default: (_OPS.dispatch_start.default, _OPS.dispatch_wait.default),
    _OPS.combine.default: (_OPS.combine_start.default, _OPS.combine_wait.default),
    _OPS.cp_shift.default: (_OPS.cp_shift_start.default, _OPS.cp_shift_wait.default),
}


@dataclasses.dataclass(frozen=True)
class Match:
    """`exchange`, a dispatch, combine or shift."""

    exchange: Node

    @property
    def readers(self) -> list[Node]:
        """Nodes that read an output."""
        users = list(self.exchange.users)
        if not self.has_outputs:
            return users
        return [reader for output in users for reader in output.users]

    @property
    def has_outputs(self) -> bool:
        """Whether it has several, each a node of its own."""
        return not isinstance(self.exchange.meta["val"], torch.Tensor)


def find_exchanges(graph: Graph) -> list[Match]:
    """Every exchange, in order of kinds."""
    return [Match(exchange) for op in _HALVES for exchange in find_calls(graph, op)]


def why_not(match: Match) -> str | None:
    """Why the exchange stays whole."""
    return None if match.readers else "nothing reads its outputs"


def rewrite(match: Match, num_sms: int) -> None:
    """Put the halves in its place."""
    exchange = match.exchange
    start_op, wait_op = _HALVES[exchange.target]
    num_tensors = len(wait_op._schema.arguments) - 1  # beside the ticket
    args, outputs = arguments(exchange), exchange.meta["val"]
    like = outputs[0] if match.has_outputs else outputs
    with like.fake_mode:
        ticket = like.new_empty(1, dtype=torch.int64)
    start_args = [*args, num_sms][: len(start_op._schema.arguments)]
    start = add_call(_after_inputs(exchange), start_op, start_args, like=exchange, value=ticket)
    place = {node: number for number, node in enumerate(exchange.graph.nodes)}
    first = min(match.readers, key=place.__getitem__)
    wait = add_call(first, wait_op, [start, *args[:num_tensors]], like=exchange, value=outputs)
    if match.has_outputs:
        replace_outputs(exchange, add_outputs(wait, first))
    else:
        replace(exchange, wait)


def _after_inputs(node: Node) -> Node:
    """The first place for a call with the same inputs."""
    inputs = set(node.all_input_nodes)
    place = next(iter(node.graph.nodes))
    for earlier in node.graph.nodes:
        if earlier is node:
            return place
        if earlier in inputs or earlier.op in ("placeholder", "get_attr"):
            place = earlier.next
    return place


def split_exchange_pass(graph: Graph, num_sms: int = 0) -> int:
    """The rewrite; number of exchanges. `num_sms`: multiprocessors of each; 0: as it was set up."""
    on_sms = functools.partial(rewrite, num_sms=num_sms)
    return rewrite_matches("split_exchange", graph, find_exchanges(graph), why_not, on_sms)
