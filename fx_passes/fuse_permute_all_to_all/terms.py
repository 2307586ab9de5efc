"""What a tensor holds, written as a term: an operator and what it was applied to.

Different spellings of one thing give one term: views of views are one view, copies and waits are
what they copy, `x[i]`, `index_select` and `gather` are `take`; a write in place gives the tensor
that is written a new term. `term_rules` and `number_rules` have the spellings, `Terms` writes down
what runs.

    ids.view(-1)[order]  ->  take(view(ids), argsort(ids)), shapes beside it
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..compat import is_wait_with_backward, open_fakes, storage_of
from ..graph import is_call
from .elements import elements_of, total
from .number_rules import RULES
from .term import Term
from .term_rules import Rule

# Sizes that a graph leaves open get numbers so unusual that nothing equals them by chance, and that
# can be divided into ranks, heads and the like.
_OPEN_SIZE = 5040


class Terms(TorchDispatchMode):
    """Terms of tensors and of numbers read from them, while operators run."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[Any, Term] = {}
        self._term_of: dict[int, Term] = {}
        self._tensors: list[torch.Tensor] = []
        self._numbers: dict[int, tuple[Any, Term]] = {}
        self.written: set[int] = set()

    def make(self, op: str, *args: Any, shape: Any = (), dtype: torch.dtype | None = None) -> Term:
        """The one term of this kind; `shape` and `dtype` are of what it stands for."""
        key = op, args, shape, dtype
        if key not in self._made:
            self._made[key] = Term(op, args, tuple(shape), dtype)
        return self._made[key]

    def of(self, value: Any) -> Any:
        """What stands for an operator's argument in a term."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._term_of:
                self.set(value, self.unknown(value))
            return self._term_of[id(value)]
        if isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat):
            known = self._numbers.get(id(value.node))
            return known[1] if known else _plain(value)
        if isinstance(value, list | tuple):
            return tuple(map(self.of, value))
        return value if _is_hashable(value) else id(value)

    def set(self, tensor: torch.Tensor, term: Term) -> None:
        """From now on `tensor` holds `term`."""
        self._tensors.append(tensor)
        self._term_of[id(tensor)] = term

    def count(self, number: torch.SymInt, term: Term) -> None:
        """`number` was read from `term`; it may have other names once its size is known."""
        self._numbers[id(number.node)] = number.node, self.make("item", term)

    def add(self, number: torch.SymInt, parts: list[Any]) -> None:
        """`number` is the sum of `parts`."""
        found = [
            elements_of(self.of(part)) for part in parts if isinstance(part, torch.SymInt) or part
        ]
        known = [each for each in found if each is not None]
        term = total(self.make, list(itertools.chain.from_iterable(known)))
        if len(known) == len(found) and term is not None:
            self.count(number, term)

    def unknown(self, tensor: torch.Tensor) -> Term:
        """A term like no other."""
        number = len(self._made)
        return self.make("unknown", number, shape=_shape(tensor), dtype=tensor.dtype)

    def sorts(self, x: Term) -> int:
        """In how many ways `x` is sorted."""
        keys = (key for key in self._made if key[0] == "argsort" and key[1][0] is x)
        return len({args for _, args, *_ in keys})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and write down what its outputs are."""
        values = _all_arguments(func, args, kwargs or {})
        terms = [self.of(value) for value in values]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.SymInt):
            self.count(out, *terms)
        elif func._schema.is_mutable:
            self._write(func, values, terms)
        else:
            self._name(func, terms, out)
        return out

    def _name(self, func: Any, terms: list[Any], out: Any) -> None:
        random = torch.Tag.nondeterministic_seeded in func.tags
        outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        for index, tensor in enumerate(outputs):
            found = None if random else self._ruled(_rule_of(func), terms, tensor, index)
            if found is None:
                args = (*terms, len(self._made)) if random else terms
                shape, dtype = _shape(tensor), tensor.dtype
                found = self.make(str(func), *args, index, shape=shape, dtype=dtype)
            self.set(tensor, found)

    def _ruled(
        self, rule: Rule | None, args: list[Any], out: torch.Tensor, index: int
    ) -> Term | None:
        """The term that a rule gives an operator's output, if one does."""
        if rule is None:
            return None

        def make(op: str, *parts: Any, shape: Any = None, dtype: Any = None) -> Term:
            shape = _shape(out) if shape is None else shape
            return self.make(op, *parts, shape=shape, dtype=dtype or out.dtype)

        return rule(make, args, index)

    def _write(self, func: Any, values: list[Any], terms: list[Any]) -> None:
        targets = [
            (position, values[position])
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for position, target in targets:
            found = self._ruled(_rule_of(func), terms, target, 0) if position == 0 else None
            found = found or self.unknown(target)
            self.written.add(storage_of(target))
            for tensor in list(self._tensors):
                if storage_of(tensor) == storage_of(target):
                    same = _place(tensor) == _place(target)
                    self.set(tensor, found if same else self.unknown(tensor))


def _rule_of(func: Any) -> Rule | None:
    namespace, name = func._schema.name.split("::")
    if namespace not in ("aten", "_c10d_functional"):
        return None
    return RULES.get(name.removesuffix("_") if func._schema.is_mutable else name)


def _place(tensor: torch.Tensor) -> str:
    return str((tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype))


def _shape(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(_plain(n) for n in tensor.shape)


def _plain(number: Any) -> Any:
    """A number, or the name of an open one."""
    if isinstance(number, torch.SymInt):
        expr = number.node.expr
        return int(expr) if expr.is_Integer else str(expr)
    return number if isinstance(number, int) else str(number)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _all_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    rest = func._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(a.name, a.default_value) for a in rest)]


class UnreadableError(Exception):
    """Why a graph has no terms, naming the node."""


@dataclasses.dataclass
class Reading:
    """The terms of a graph.

    `used[node][input]`: what an input holds when `node` runs; `made[node]`, `tensors[node]`: what a
    node returns, if that is one tensor; `writes[node]`: storages that it writes.
    """

    terms: Terms
    used: dict[Node, dict[Node, Term]] = dataclasses.field(default_factory=dict)
    made: dict[Node, Term] = dataclasses.field(default_factory=dict)
    tensors: dict[Node, torch.Tensor] = dataclasses.field(default_factory=dict)
    writes: dict[Node, set[int]] = dataclasses.field(default_factory=dict)

    def note(self, node: Node, like: Node, term: Term) -> None:
        """`node`, which is new, makes `term` in memory of its own, as did `like`."""
        self.made[node], self.tensors[node] = term, self.tensors[like].clone()

    def update(self, graph: Graph, erased: set[Node]) -> None:
        """Nodes are `erased`, others added."""
        for facts in (self.used, self.made, self.tensors, self.writes):
            for node in erased & facts.keys():
                del facts[node]
        before, self.used = self.used, {}
        for node in graph.nodes:
            old = before.get(node, {})
            terms = {i: old.get(i, self.made.get(i)) for i in node.all_input_nodes}
            self.used[node] = {i: term for i, term in terms.items() if term is not None}


def read(graph: Graph) -> Reading:
    """Run `graph`, as Dynamo leaves it, on tensors without data.

    Raises:
        UnreadableError: a node cannot be run so.
    """
    assert isinstance(graph.owning_module, GraphModule)
    with open_fakes(), torch.no_grad(), _autocast_restored():
        reader = _Reader(graph.owning_module, graph)
        with reader.reading.terms:
            reader.run()
    return reader.reading


class _Reader(Interpreter):
    """Runs every node and notes what it read, wrote and returned."""

    def __init__(self, module: GraphModule, graph: Graph) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self.reading = Reading(Terms())
        self.sizes: dict[str, int] = {}

    def run_node(self, node: Node) -> Any:
        reading, terms = self.reading, self.reading.terms
        tensors = {i: t for i in node.all_input_nodes if isinstance(t := self.env[i], torch.Tensor)}
        reading.used[node] = {i: terms.of(tensor) for i, tensor in tensors.items()}
        terms.written = set()
        try:
            value = self._value(node)
        except Exception as error:
            if not _is_functional(node) or "example_value" not in node.meta:
                raise UnreadableError(f"{node.name} cannot be read ({error})") from error
            value = pytree.tree_map(self._example, node.meta["example_value"])
        reading.writes[node] = terms.written
        if isinstance(value, torch.Tensor):
            reading.made[node], reading.tensors[node] = terms.of(value), value
        if isinstance(value, torch.SymInt) and is_call(node, operator.add, torch.sym_sum):
            terms.add(value, pytree.tree_leaves(self.map_nodes_to_values(node.args, node)))
        return value

    def _value(self, node: Node) -> Any:
        if node.op == "placeholder" or (node.op == "get_attr" and "example_value" in node.meta):
            return self._example(node.meta.get("example_value"))
        if node.op in ("get_attr", "output"):
            return None
        if is_call(node, torch._C._set_grad_enabled):
            return None
        if is_wait_with_backward(node):
            tensors = self.reading.tensors
            return tuple(self.env[i] for i in node.all_input_nodes if i in tensors)
        if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
            return pytree.tree_map(self._example, node.meta.get("example_value"))
        return super().run_node(node)

    def _example(self, value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return self._number(value)
        if not isinstance(value, torch.Tensor):
            return value
        size, stride = map(self._number, value.shape), map(self._number, value.stride())
        tensor = torch.empty_strided(
            list(size), list(stride), dtype=value.dtype, device=value.device
        )
        self.reading.terms.set(tensor, self.reading.terms.unknown(tensor))
        return tensor

    def _number(self, size: int | torch.SymInt) -> int:
        if isinstance(size, int):
            return size
        expr = size.node.expr
        for symbol in sorted(expr.free_symbols, key=str):
            self.sizes.setdefault(str(symbol), _OPEN_SIZE * (1009 + len(self.sizes)))
        return int(expr.subs({symbol: self.sizes[str(symbol)] for symbol in expr.free_symbols}))


def _is_functional(node: Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable


@contextlib.contextmanager
def _autocast_restored() -> Iterator[None]:
    """Leave autocast as it was, even when a graph stops between entering and leaving it."""
    devices = ("cpu", "cuda")
    before = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    try:
        yield
    finally:
        for device, (enabled, dtype) in zip(devices, before, strict=True):
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
