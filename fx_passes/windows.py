"""What the passes share that fill windows: calls that need nothing of an exchange hide it, between
its start and its wait.

    start, wait, ..., call      ->      start, call, wait, ...
    call, ..., start, wait      ->      start, call, wait, ...

What a call brings along moves with it: what it needs, if that stands after the wait; what needs it,
if that stands before. Windows are served in the order of their waits, in rounds. While the cost
model leaves some of the exchange exposed, each takes at first the longest call that is no longer
than that; in the second round, where no such call is left, the shortest. A call that hides part of
a later exchange may go, since others can take its place, and in a third round do.

It refuses a move across anything that has to stay (exchanges, what changes a tensor in place, what
draws random numbers), one that leaves more time exposed in all, and one with which the graph's peak
of live bytes would exceed the peak it came with by more than the bound.
"""

from __future__ import annotations

import dataclasses
import logging
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from .aliases import changed_roots, draws, may_change, roots_of
from .cost_model import CostModel
from .graph import is_call, name_of, reorder
from .journal import Decision, current
from .protect_exchange import EXCHANGES

_log = logging.getLogger(__name__)

_OPS = torch.ops.moe_ops
_ATEN = torch.ops.aten
STARTS = (
    _OPS.dispatch_start.default,
    _OPS.combine_start.default,
    _OPS.cp_shift_start.default,
)
WAITS = (_OPS.dispatch_wait.default, _OPS.combine_wait.default, _OPS.cp_shift_wait.default)
# Inductor makes a kernel of each, though what comes before or after may become a part of it.
_REDUCTIONS = (
    *(_ATEN.sum.default, _ATEN.sum.dim_IntList, _ATEN.mean.default, _ATEN.mean.dim),
    *(_ATEN.amax.default, _ATEN.amin.default, _ATEN.scatter_add.default),
)
_HIDDEN = "the exchange is hidden"
_ROUNDING = 1e-9  # seconds
_REPORT = "windows"  # key of a wait's meta: by pass, what it did for the window


@dataclasses.dataclass(frozen=True)
class Window:
    """What stands between `start` and `wait` runs during the exchange."""

    start: Node
    wait: Node


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """`max_bytes`: by how much the peak of live bytes may grow. `min_us`: shorter calls stay where
    they are, and exchanges exposed for less time count as hidden.
    """

    max_bytes: int = 2**30
    min_us: float = 1.0


@dataclasses.dataclass(frozen=True)
class Filling:
    """What the window of the exchange `name` got: operators of kernels. `reason`: why not more."""

    name: str
    moved: tuple[str, ...]
    exposed_before: float  # seconds
    exposed: float
    reason: str

    def __str__(self) -> str:
        got = f"got {', '.join(self.moved)}; " if self.moved else ""
        before, after = 1e6 * self.exposed_before, 1e6 * self.exposed
        return f"{self.name}: {got}{after:.1f} of {before:.1f} us stay exposed"


def bounds_of(kind: type[Bounds], setting: object) -> Bounds:
    """Of a pass's setting, True or a `kind`."""
    return setting if isinstance(setting, Bounds) else kind()


def find_windows(graph: Graph) -> list[Window]:
    """In the order of their waits."""
    waits = [node for node in graph.nodes if is_call(node, *WAITS)]
    windows = [Window(node.args[0], node) for node in waits]
    return [window for window in windows if is_call(window.start, *STARTS)]


def fillings(graph: Graph) -> list[tuple[str, Filling]]:
    """(pass, what it did for a window), in the order of the windows."""
    waits = [window.wait for window in find_windows(graph)]
    return [pair for wait in waits for pair in wait.meta.get(_REPORT, {}).items()]


def runs_alone(node: Node) -> bool:
    """Whether a kernel is made for a call whatever stands beside it."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return False
    is_own = node.target.namespace not in ("aten", "prims")
    return is_own or multiplies(node) or node.target in _REDUCTIONS


def multiplies(node: Node) -> bool:
    """Whether a call is a matmul."""
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in flop_registry


def fill_windows(
    name: str, graph: Graph, calls: Iterable[Node], costs: CostModel, bounds: Bounds
) -> int:
    """Move some of `calls` into windows that pass `name` has not served yet; number of kernels."""
    windows = [w for w in find_windows(graph) if name not in w.wait.meta.get(_REPORT, {})]
    if not windows:
        return 0
    schedule, journal, count = Schedule(graph, costs), current(), 0
    calls = [call for call in calls if 1e6 * schedule.seconds[call] >= bounds.min_us]
    for window, filling in zip(windows, schedule.fill(windows, calls, bounds)):
        count += len(filling.moved)
        window.wait.meta.setdefault(_REPORT, {})[name] = filling
        _log.debug("%s: %s: %s", name, filling, filling.reason)
        if journal:
            reason = None if filling.moved else filling.reason
            journal.decisions.append(Decision(name, str(filling), reason))
    if count:
        schedule.apply()
    return count


class Schedule:
    """An order of a graph's nodes, and what it costs."""

    def __init__(self, graph: Graph, costs: CostModel) -> None:
        order = list(graph.nodes)
        self.seconds = {node: _compute_seconds(node, costs) for node in order}
        self.lengths = {n: costs.seconds(n) for n in order if is_call(n, *STARTS)}
        self.waits = {node for node in order if is_call(node, *WAITS)}
        self.whole = {node for node in order if is_call(node, *EXCHANGES)}
        takes_time = {node for node, seconds in self.seconds.items() if seconds}
        self.timed = takes_time | self.lengths.keys() | self.waits | self.whole
        self.roots = roots_of(order)
        self.num_bytes = {root: costs.num_bytes(root) for root in set(self.roots.values())}
        for window in find_windows(graph):  # the start makes what the wait hands out
            self.num_bytes[window.start] = costs.num_bytes(window.wait)
        changed = changed_roots(order, self.roots)
        self.staying = {n for n in order if _stays(n) or self._reads(n) & changed}
        self.last_needed, self.first_user = _barriers(order, self.staying)
        self.first_peak = self.peak(order)
        self._take(order)
        self.window_of: dict[Node, Window] = {}  # of each kernel that moved, as they moved

    def _take(self, order: list[Node]) -> None:
        self.order = order
        self.place = {node: number for number, node in enumerate(order)}
        self.timed_order = [node for node in order if node in self.timed]
        self.waited = self.exposed(self.timed_order)

    def _reads(self, node: Node) -> set[Node]:
        return {self.roots[each] for each in node.all_input_nodes}

    def fill(
        self, windows: Sequence[Window], calls: Sequence[Node], bounds: Bounds
    ) -> list[Filling]:
        """Move calls into the windows while that helps; what each got."""
        before = self.waited
        reasons: dict[Window, str] = {}
        for may_exceed in (False, True, True):  # the last one, where a window lost what it had
            for window in windows:
                reasons[window] = self._fill_one(window, calls, bounds, may_exceed)
        found = []
        for window, reason in reasons.items():
            name = name_of(window.start).removesuffix("_start")
            moved = tuple(
                name_of(node) for node, taker in self.window_of.items() if taker == window
            )
            waits = before[window.wait], self.waited[window.wait]
            if reason == _HIDDEN and 1e6 * waits[1] >= bounds.min_us:
                reason = "its calls hide another exchange"
            found.append(Filling(name, moved, *waits, reason))
        return found

    def _fill_one(
        self, window: Window, calls: Sequence[Node], bounds: Bounds, may_exceed: bool
    ) -> str:
        """Move calls into a window; why no more. `may_exceed`: also calls that are longer than the
        exchange is exposed.
        """
        while 1e6 * self.waited[window.wait] >= bounds.min_us:
            candidates = self._candidates(window, calls, may_exceed)
            if reason := self._move_first(window, candidates, bounds):
                return reason
        return _HIDDEN

    def _move_first(
        self, window: Window, candidates: Iterable[tuple[Node, set[Node]]], bounds: Bounds
    ) -> str | None:
        """Move the first call that may, with what comes along; why none does, else None."""
        reason = "nothing else is independent of the exchange"
        for call, unit in candidates:
            from_later = self.place[call] > self.place[window.wait]
            after = self.exposed(_moved(self.timed_order, unit, window.wait))
            if not _improves(after, self.waited, window.wait, from_later):
                reason = "what is independent of the exchange hides another one"
                continue
            order = _moved(self.order, unit, window.wait)
            if (grown := self.peak(order) - self.first_peak) > bounds.max_bytes:
                reason = f"{name_of(call)} would raise the peak by {grown} bytes"
            else:
                before = set(self._between(window))
                self._take(order)
                for node in self._between(window):
                    if runs_alone(node) and node not in before:
                        self.window_of.pop(node, None)
                        self.window_of[node] = window
                return None
        return reason

    def _between(self, window: Window) -> list[Node]:
        return self.order[self.place[window.start] + 1 : self.place[window.wait]]

    def _candidates(
        self, window: Window, calls: Sequence[Node], may_exceed: bool
    ) -> list[tuple[Node, set[Node]]]:
        """Calls outside of a window, each with all that moves with it, in the order to try."""
        place = self.place
        begin, end = place[window.start], place[window.wait]
        found = []
        for call in calls:
            if begin < place[call] < end or not (unit := self._unit(call, window.wait)):
                continue
            new = sum(self.seconds[node] for node in unit if not begin < place[node] < end)
            exceeds = new > self.waited[window.wait] + _ROUNDING
            if may_exceed or not exceeds:
                key = exceeds, new if exceeds else -new, place[call]
                found.append((key, call, unit))
        found.sort(key=lambda candidate: candidate[0])
        return [(call, unit) for _, call, unit in found]

    def _unit(self, call: Node, wait: Node) -> set[Node] | None:
        """`call`, and what has to come along to just before `wait`; None if it cannot."""
        place, end = self.place, self.place[wait]
        if self._is_barred(call, wait):
            return None
        unit, pending = {call}, [call]
        while pending:
            node = pending.pop()
            if node in self.staying:
                return None
            if place[node] > end:
                along = [each for each in node.all_input_nodes if place[each] >= end]
                along += [user for user in node.users if is_call(user, operator.getitem)]
            else:
                along = [user for user in node.users if place[user] <= end]
            new = set(along) - unit
            unit |= new
            pending.extend(new)
        return unit

    def _is_barred(self, call: Node, wait: Node) -> bool:
        """Whether something that stays in between needs `call`, or the other way round."""
        end = self.place[wait]
        if self.place[call] > end:
            return call in self.last_needed and self.place[self.last_needed[call]] >= end
        return call in self.first_user and self.place[self.first_user[call]] <= end

    def exposed(self, order: Iterable[Node]) -> dict[Node, float]:
        """Seconds that nothing hides, under the wait, or the exchange that is whole; exchanges run
        one after the other, beside the rest.
        """
        now = exchange_end = 0.0
        ends: dict[Node, float] = {}
        waited: dict[Node, float] = {}
        for node in order:
            if node in self.lengths:
                exchange_end = ends[node] = max(now, exchange_end) + self.lengths[node]
            elif node in self.waits:
                waited[node] = max(ends.get(node.all_input_nodes[0], now) - now, 0.0)
                now += waited[node]
            elif node in self.whole:
                exchange_end = max(now, exchange_end) + self.seconds[node]
                waited[node], now = exchange_end - now, exchange_end
            else:
                now += self.seconds[node]
        return waited

    def peak(self, order: Sequence[Node]) -> int:
        """Most bytes alive at once: each tensor, inputs too, until its last reader."""
        last = dict.fromkeys(self.num_bytes, 0)
        for number, node in enumerate(order):
            last[self.roots[node]] = number
            last |= dict.fromkeys((self.roots[each] for each in node.all_input_nodes), number)
        dying: defaultdict[int, int] = defaultdict(int)
        for root, number in last.items():
            dying[number] += self.num_bytes[root]
        live = peak = sum(self.num_bytes[node] for node in order if node.op == "placeholder")
        for number, node in enumerate(order):
            if node.op != "placeholder":
                live += self.num_bytes.get(node, 0)
            peak = max(peak, live)
            live -= dying[number]
        return peak

    def apply(self) -> None:
        """Put the graph's nodes in this order."""
        reorder(self.order)


def _moved(order: list[Node], unit: set[Node], wait: Node) -> list[Node]:
    """The order with `unit` right before the wait."""
    rest = [node for node in order if node not in unit]
    end = rest.index(wait)
    return [*rest[:end], *(node for node in order if node in unit), *rest[end:]]


def _improves(
    after: dict[Node, float], before: dict[Node, float], wait: Node, from_later: bool
) -> bool:
    """Whether all exchanges are exposed for less time; or only this one, and all for no more, by a
    call from a later window, which has more to choose from.
    """
    slack = _ROUNDING if from_later else -_ROUNDING
    is_less = after[wait] < before[wait] - _ROUNDING
    return is_less and sum(after.values()) < sum(before.values()) + slack


def _barriers(
    order: Sequence[Node], staying: set[Node]
) -> tuple[dict[Node, Node], dict[Node, Node]]:
    """Of what stays, whose order is always the same: the last that a node needs, and the first that
    needs it, if any.
    """
    place = {node: number for number, node in enumerate(order)}.__getitem__
    last_needed: dict[Node, Node] = {}
    first_user: dict[Node, Node] = {}
    for node in order:
        if found := list(_stayed(node.all_input_nodes, staying, last_needed)):
            last_needed[node] = max(found, key=place)
    for node in reversed(order):
        if found := list(_stayed(node.users, staying, first_user)):
            first_user[node] = min(found, key=place)
    return last_needed, first_user


def _stayed(nodes: Iterable[Node], staying: set[Node], known: dict[Node, Node]) -> Iterator[Node]:
    for node in nodes:
        if node in staying:
            yield node
        elif node in known:
            yield known[node]


def _compute_seconds(node: Node, costs: CostModel) -> float:
    """Of an exchange in two halves, or one in torch.distributed's stream, 0."""
    target = node.target
    is_elsewhere = isinstance(target, OpOverload) and target.namespace == "_c10d_functional"
    if node.op != "call_function" or is_elsewhere or is_call(node, *STARTS, *WAITS):
        return 0.0
    return costs.seconds(node)


def _stays(node: Node) -> bool:
    """Whether a node's place among its like matters, or is not known not to."""
    if node.op != "call_function" or may_change(node):
        return True
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    talks = any(argument.name == "group_name" for argument in target._schema.arguments)
    waits = target in WAITS or target.namespace == "_c10d_functional"
    return talks or waits or draws(node) or "unbacked_bindings" in node.meta
