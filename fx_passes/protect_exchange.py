"""Exchanges and their plans run once: what they return is kept for backward, not computed again.

Activation checkpointing, and a low `activation_memory_budget`, compute forward's values again in
backward. Of an exchange that costs its time once more, and an ill-timed wait for the other ranks.
This marks every operator that talks to other ranks, before the partitioner decides. Of attentions
to the keys of other ranks it marks what they add up to: kept are `out` and `lse`, not every rank's
keys and values.

With `activation_memory_budget = 0` the partitioner would heed no mark, so such a graph gets a
budget that is only nearly nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator

import torch
from torch._functorch import config as functorch_config
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from .graph import arguments, is_call

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

_ATEN = torch.ops.aten
# Attention -> its gradient, which takes (grad, q, k, v, out, lse, ...).
_ATTENTIONS = {
    _ATEN._scaled_dot_product_flash_attention.default: (
        _ATEN._scaled_dot_product_flash_attention_backward.default
    ),
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: (
        _ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default
    ),
    _ATEN._flash_attention_forward.default: _ATEN._flash_attention_backward.default,
}
# What makes parts and other orders of a tensor.
_MOVES = (
    *(_ATEN.slice.Tensor, _ATEN.select.int, _ATEN.index_select.default, _ATEN.clone.default),
    *(_ATEN.transpose.int, _ATEN.permute.default, _ATEN.t.default),
    *(_ATEN.view.default, _ATEN._unsafe_view.default),
)

# Of what autograd would keep anyway: as good as nothing.
_LEAST_BUDGET = 1e-9


def protect_exchange_pass(graph: Graph) -> int:
    """Mark exchanges, plans and sums of attentions in a joint graph; number of them, not of
    outputs.
    """
    exchanges = [node for node in graph.nodes if is_call(node, *EXCHANGES)]
    sums = {node for gradient in graph.nodes for node in _sums_of_attentions(gradient)}
    calls = [*exchanges, *_kept_for(sums, _of_forward(graph))]
    for call in calls:
        outputs = [user for user in call.users if is_call(user, operator.getitem)]
        for node in (call, *outputs):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    if calls and functorch_config.activation_memory_budget == 0:
        # The first node with a budget of its own speaks for the graph.
        calls[0].meta["memory_budget"] = _LEAST_BUDGET
    return len(exchanges) + len(sums)


def _sums_of_attentions(gradient: Node) -> Iterator[Node]:
    """`out` and `lse` of which a call computes an attention's gradient, if others' keys are in."""
    if is_call(gradient, *_ATTENTIONS.values()):
        for part in arguments(gradient)[4:6]:
            if _sees_others(part):
                yield _whole(part)


def _whole(node: Node) -> Node:
    while is_call(node, *_MOVES):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _of_forward(graph: Graph) -> set[Node]:
    """What forward's results need: the partitioner keeps nothing else for backward."""
    of_backward = {n for n in graph.find_nodes(op="placeholder") if "tangents" in str(n.target)}
    for node in graph.nodes:
        if not of_backward.isdisjoint(node.all_input_nodes):
            of_backward.add(node)
    results = [node for node in graph.output_node().all_input_nodes if node not in of_backward]
    return _reached(results, lambda node: node.all_input_nodes)


def _kept_for(sums: Iterable[Node], of_forward: set[Node]) -> set[Node]:
    """The sums, or of what forward has no use for itself, its latest terms that it has."""
    reached = _reached(sums, lambda node: [] if node in of_forward else node.all_input_nodes)
    found = {_whole(node) for node in reached & of_forward}
    return {n.all_input_nodes[0] if is_call(n, operator.getitem) else n for n in found}


def _reached(first: Iterable[Node], following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    seen = set(first)
    pending = list(seen)
    while pending:
        new = set(following(pending.pop())) - seen
        seen |= new
        pending += new
    return seen


def _sees_others(node: Node) -> bool:
    """Whether `node` is computed of several attentions, those that they need not counted, or of one
    whose keys were gathered.
    """
    found = _reached([node], lambda n: [] if is_call(n, *_ATTENTIONS) else n.all_input_nodes)
    attentions = [each for each in found if is_call(each, *_ATTENTIONS)]
    keys = (_whole(arguments(attention)[1]) for attention in attentions)
    return len(attentions) > 1 or any(is_call(key, _OPS.cp_unsplit.default) for key in keys)
