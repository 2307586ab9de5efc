"""Exchanges and their plans run once: what they return is kept for backward, not computed again.

Activation checkpointing, and a low `activation_memory_budget`, compute forward's values again in
backward. Of an exchange that costs its time once more, and an ill-timed wait for the other ranks.
This marks every operator that talks to other ranks, before the partitioner decides.

With `activation_memory_budget = 0` the partitioner would heed no mark, so such a graph gets a
budget that is only nearly nothing.
"""

from __future__ import annotations

import operator

import torch
from torch._functorch import config as functorch_config
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from .graph import is_call

_OPS = torch.ops.moe_ops
EXCHANGES = (
    _OPS.exchange_plan.default,
    _OPS.dispatch.default,
    _OPS.combine.default,
    _OPS.gather_plan.default,
    _OPS.all_to_all.default,
    _OPS.all_gather_rows.default,
    _OPS.reduce_scatter_rows.default,
)

# Of what autograd would keep anyway: as good as nothing.
_LEAST_BUDGET = 1e-9


def protect_exchange_pass(graph: Graph) -> int:
    """Mark exchanges and plans in a joint graph; number of nodes marked, outputs not counted."""
    exchanges = [node for node in graph.nodes if is_call(node, *EXCHANGES)]
    for exchange in exchanges:
        outputs = [user for user in exchange.users if is_call(user, operator.getitem)]
        for node in (exchange, *outputs):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if exchanges and functorch_config.activation_memory_budget == 0:
        # The first node with a budget of its own speaks for the graph.
        exchanges[0].meta["memory_budget"] = _LEAST_BUDGET
    return len(exchanges)
