"""Sizes that only the device knows, replaced by what they are on average.

Where T tokens on each of P ranks have K choices, a rank holds

    D = T * P * (1 - (1 - 1 / P) ** K)  copies,    C = T * K  rows,

if every choice falls on each rank alike: of 4 tokens, K = 2, E = 6 and P = 2 that is D = 6, C = 8.
Whoever knows better says what C is.
A graph tells which of its sizes are D and C wherever it makes or takes a plan, forward or backward;
other exchanges of rows bring in as many as they send, or the tokens of all ranks.

Letters: as in `moe_ops.layout`.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from moe_ops.layout import Plan

from .graph import arguments, is_call

_OPS = torch.ops.moe_ops
_EXCHANGE_PLAN = _OPS.exchange_plan.default
_GATHER_PLAN = _OPS.gather_plan.default
_ALL_GATHER = _OPS.all_gather_rows.default
_REDUCE_SCATTER = _OPS.reduce_scatter_rows.default
_ALL_TO_ALL = _OPS.all_to_all.default
_STOCK_ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default

# Of a size that nothing in the graph tells.
_UNKNOWN_SIZE = 8192


def expected_copies(num_tokens: int, top_k: int, num_ranks: int) -> float:
    """D: copies that a rank holds of `num_tokens` tokens on each rank."""
    return num_tokens * num_ranks * (1 - (1 - 1 / num_ranks) ** top_k)


def argument(node: Node, name: str) -> Any:
    """An argument of an operator's call; None if the operator has none of this name."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    return arguments(node)[names.index(name)] if name in names else None


def plan_of(node: Node) -> Plan | None:
    """The fake tensors of the plan that a call makes or takes, if it does."""
    if is_call(node, _EXCHANGE_PLAN):
        return Plan(*node.meta["val"])
    nodes = _plan_nodes(node)
    return Plan(*(tensor.meta["val"] for tensor in nodes)) if nodes else None


def _plan_nodes(node: Node) -> list[Any]:
    is_ours = isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "moe_ops"
    if is_call(node, _EXCHANGE_PLAN):
        outputs = {user.args[1]: user for user in node.users if is_call(user, operator.getitem)}
        return [outputs.get(index) for index in range(len(node.meta["val"]))]
    return list(argument(node, "plan") or ()) if is_ours else []


@dataclasses.dataclass(frozen=True)
class ExpectedSizes:
    """Of one graph. `numbers`: by symbol. `shares`: by the name of the node that holds a plan's
    offsets_L, how much of a capacity of C rows is likely used. `expected_rows`: C, if said.
    """

    numbers: dict[Any, int] = dataclasses.field(default_factory=dict)
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    expected_rows: int | None = None

    def number(self, size: int | torch.SymInt) -> int:
        """The size, or what it is expected to be, at least 1."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        if size.node.has_hint():
            return int(size.node.hint)
        expr = size.node.expr
        numbers = {s: self.numbers.get(s, _UNKNOWN_SIZE) for s in expr.free_symbols}
        return max(1, int(expr.xreplace(numbers)))

    def tokens_and_choices(self, plan: Plan) -> tuple[int, int]:
        """T and K."""
        return self.number(plan.copy_of_token_TP.shape[0]), self.number(plan.ids_DK.shape[1])

    def rows(self, plan: Plan) -> int:
        """C."""
        num_tokens, top_k = self.tokens_and_choices(plan)
        return self.expected_rows or num_tokens * top_k

    def knows(self, size: int | torch.SymInt) -> bool:
        """Whether the graph tells this size."""
        if not isinstance(size, torch.SymInt) or size.node.has_hint():
            return True
        return size.node.expr.free_symbols <= self.numbers.keys()

    def example(self, value: Any) -> Any:
        """What a node computes, with numbers for sizes and tensors that hold nothing."""
        return pytree.tree_map(self._example, value)

    def _example(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            shape = [self.number(size) for size in value.shape]
            return torch.empty(shape, dtype=value.dtype, device="meta")
        return self.number(value) if isinstance(value, torch.SymInt) else value

    def num_bytes(self, value: Any) -> int:
        """Of all tensors that a node computes."""
        return sum(
            self.number(leaf.numel()) * leaf.dtype.itemsize
            for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, torch.Tensor)
        )

    def _learn(self, size: int | torch.SymInt, number: float) -> None:
        if isinstance(size, torch.SymInt) and not self.knows(size) and size.node.expr.is_Symbol:
            self.numbers[size.node.expr] = max(1, round(number))


_found: weakref.WeakKeyDictionary[Graph, tuple[int, ExpectedSizes]] = weakref.WeakKeyDictionary()
# Of forward and backward, whose symbols are the same; only the former may tell what they are. By
# `expected_rows`.
_numbers: weakref.WeakKeyDictionary[Any, dict[int | None, dict[Any, int]]]
_numbers = weakref.WeakKeyDictionary()


def expected_sizes(graph: Graph, expected_rows: int | None = None) -> ExpectedSizes:
    """The sizes of a graph, kept until it grows or shrinks."""
    num_nodes, sizes = _found.get(graph, (-1, ExpectedSizes()))
    if num_nodes != len(graph.nodes) or sizes.expected_rows != expected_rows:
        sizes = _find(graph, expected_rows)
        _found[graph] = len(graph.nodes), sizes
    return sizes


def _find(graph: Graph, expected_rows: int | None) -> ExpectedSizes:
    symbolic = [size for node in graph.nodes for size in _symbolic(node.meta.get("val"))]
    numbers: dict[Any, int] = {}
    if symbolic:
        of_graphs = _numbers.setdefault(symbolic[0].node.shape_env, {})
        numbers = of_graphs.setdefault(expected_rows, numbers)
    sizes = ExpectedSizes(numbers, expected_rows=expected_rows)
    for size in symbolic:
        if size.node.has_hint() and size.node.expr.is_Symbol:
            sizes.numbers[size.node.expr] = int(size.node.hint)
    num_known = -1
    while num_known < len(sizes.numbers):  # one size may tell another, in any order
        num_known = len(sizes.numbers)
        for node in graph.nodes:
            for size, number in _clues(node, sizes):
                sizes._learn(size, number)
    for node in graph.nodes:
        sizes.shares.update(_shares(node, sizes))
    return sizes


def _symbolic(value: Any) -> Iterator[torch.SymInt]:
    for leaf in pytree.tree_leaves(value):
        sizes = leaf.shape if isinstance(leaf, torch.Tensor) else [leaf]
        yield from (size for size in sizes if isinstance(size, torch.SymInt))


def _clues(node: Node, sizes: ExpectedSizes) -> Iterator[tuple[Any, float]]:
    """(size, its expected value) that a call tells."""
    if (plan := plan_of(node)) is not None:
        num_tokens, top_k = sizes.tokens_and_choices(plan)
        yield plan.num_copies, expected_copies(num_tokens, top_k, plan.num_ranks)
        yield plan.slot_of_row_C.shape[0], sizes.rows(plan)
    elif is_call(node, _GATHER_PLAN):
        counts, rank_of_token = node.meta["val"]
        yield rank_of_token.shape[0], _rows(node.args[0], sizes) * counts.shape[0]
    elif is_call(node, _ALL_GATHER):
        num_ranks = arguments(node)[1].meta["val"].shape[0]
        yield node.meta["val"].shape[0], _rows(node.args[0], sizes) * num_ranks
    elif is_call(node, _REDUCE_SCATTER):
        x, counts, *_ = arguments(node)
        yield x.meta["val"].shape[0], _rows(node, sizes) * counts.meta["val"].shape[0]
    elif is_call(node, _ALL_TO_ALL, _STOCK_ALL_TO_ALL):
        yield from _clues_of_all_to_all(node, sizes)


def _rows(node: Any, sizes: ExpectedSizes) -> int:
    return sizes.number(node.meta["val"].shape[0])


def _clues_of_all_to_all(node: Node, sizes: ExpectedSizes) -> Iterator[tuple[Any, float]]:
    sent, received = arguments(node)[0].meta["val"].shape[0], node.meta["val"].shape[0]
    number = next((sizes.number(size) for size in (sent, received) if sizes.knows(size)), None)
    if number is None:
        return
    yield sent, number
    yield received, number
    if is_call(node, _STOCK_ALL_TO_ALL):
        for splits in arguments(node)[1:3]:
            for split in splits:
                size = split.meta["val"] if isinstance(split, Node) else split
                yield size, number / len(splits)


def _shares(node: Node, sizes: ExpectedSizes) -> Iterator[tuple[str, float]]:
    if (plan := plan_of(node)) is None:
        return
    offsets = Plan(*_plan_nodes(node)).offsets_L
    if isinstance(offsets, Node):
        num_rows = sizes.number(plan.slot_of_row_C.shape[0])
        yield offsets.name, min(1.0, sizes.rows(plan) / max(1, num_rows))
