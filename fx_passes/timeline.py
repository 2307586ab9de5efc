"""When each call of a graph runs, and how long the device waits for an exchange.

`timeline` simulates one rank: calls run in the order of the graph on the compute lane; a `*_start`
puts its exchange on the exchange lane, where one runs at a time; a `*_wait`, or a whole exchange,
holds the compute lane until the exchange is over. That time is *exposed*.

    dispatch_start 3 s, mm 1 s, dispatch_wait, grouped_mm 2 s
        compute   mm [0, 1], grouped_mm [3, 5]
        exchange  dispatch [0, 3]
        exposed   dispatch [1, 3]
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from .cost_model import CostModel
from .graph import is_call, name_of
from .protect_exchange import EXCHANGES
from .windows import STARTS, WAITS

COMPUTE, EXCHANGE, EXPOSED = LANES = ("compute", "exchange", "exposed")
_COLOURS = dict(zip(LANES, ("tab:blue", "tab:orange", "tab:red")))


@dataclasses.dataclass(frozen=True)
class Event:
    """`name` runs on a lane from `start` on; times in seconds."""

    name: str
    lane: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


Timelines = Mapping[str, Mapping[str, list[Event]]]
"""Of each variant ("before", "after") the events of each graph ("forward", "backward")."""


def timeline(graph: Graph, costs: CostModel) -> list[Event]:
    """The events of one run of `graph`, in the order in which they begin on each lane."""
    lanes = _Lanes()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        seconds = costs.seconds(node)
        if _is_start(node):
            lanes.exchange(node, seconds)
        elif _is_wait(node):
            lanes.wait(_start_of(node))
        elif is_call(node, *EXCHANGES):
            lanes.exchange(node, seconds)
            lanes.wait(node)
        elif seconds:
            lanes.compute(node, seconds)
    return lanes.events


def _is_start(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    is_collective = target.namespace in ("_c10d_functional", "_c10d_functional_autograd")
    return is_call(node, *STARTS) or (is_collective and not _is_wait(node))


def _is_wait(node: Node) -> bool:
    return is_call(node, *WAITS, torch.ops._c10d_functional.wait_tensor.default)


def _start_of(wait: Node) -> Node:
    """What a wait waits for, perhaps one of several outputs."""
    start = wait.args[0]
    while isinstance(start, Node) and not _is_start(start) and start.all_input_nodes:
        start = start.all_input_nodes[0]
    assert isinstance(start, Node)
    return start


class _Lanes:
    """Both lanes' clocks, and when each exchange is over."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.compute_end = self.exchange_end = 0.0
        self.exchange_of: dict[Node, Event] = {}

    def compute(self, node: Node, seconds: float) -> None:
        self.events.append(Event(name_of(node), COMPUTE, self.compute_end, seconds))
        self.compute_end += seconds

    def exchange(self, node: Node, seconds: float) -> None:
        begin = max(self.compute_end, self.exchange_end)
        event = Event(name_of(node).removesuffix("_start"), EXCHANGE, begin, seconds)
        self.events.append(event)
        self.exchange_of[node], self.exchange_end = event, event.end

    def wait(self, start: Node) -> None:
        exchange = self.exchange_of.get(start)
        if exchange is None or exchange.end <= self.compute_end:
            return
        idle = exchange.end - self.compute_end
        self.events.append(Event(exchange.name, EXPOSED, self.compute_end, idle))
        self.compute_end = exchange.end


def exposed(events: Iterable[Event]) -> list[Event]:
    """Where exchanges run and nothing else does, among events measured on a device."""
    lanes: dict[str, list[Event]] = {lane: [] for lane in LANES}
    for event in sorted(events, key=lambda event: event.start):
        lanes[event.lane].append(event)
    found, covered = [], 0.0
    for exchange in lanes[EXCHANGE]:
        begin = max(exchange.start, covered)
        for busy in lanes[COMPUTE]:
            if busy.end <= begin or busy.start >= exchange.end:
                continue
            if busy.start > begin:
                found.append(Event(exchange.name, EXPOSED, begin, busy.start - begin))
            begin = max(begin, busy.end)
        if begin < exchange.end:
            found.append(Event(exchange.name, EXPOSED, begin, exchange.end - begin))
        covered = max(covered, exchange.end)
    return found


def seconds_of(events: Iterable[Event], *lanes: str) -> float:
    """Time of all events of some lanes."""
    return sum(event.seconds for event in events if event.lane in lanes)


def span_of(events: Iterable[Event]) -> float:
    """When the last event is over."""
    return max((event.end for event in events), default=0.0)


def in_a_row(graphs: Mapping[str, list[Event]]) -> list[Event]:
    """The events of several graphs, one graph after the other."""
    events: list[Event] = []
    for more in graphs.values():
        begin = span_of(events)
        events += (dataclasses.replace(event, start=begin + event.start) for event in more)
    return events


def save_trace(timelines: Timelines, path: str | os.PathLike[str]) -> None:
    """Write JSON trace events, one process a variant and one thread a lane, as Perfetto
    (https://ui.perfetto.dev) and chrome://tracing read them.
    """
    records: list[dict[str, Any]] = []
    for process, (variant, graphs) in enumerate(timelines.items(), start=1):
        names = {"process_name": {0: variant}, "thread_name": dict(enumerate(LANES))}
        for kind, values in names.items():
            for thread, name in values.items():
                args = {"name": name}
                records.append(
                    {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args}
                )
        for event in in_a_row(graphs):
            where = {"pid": process, "tid": LANES.index(event.lane)}
            when = {"ts": 1e6 * event.start, "dur": 1e6 * event.seconds}  # microseconds
            records.append({"ph": "X", "name": event.name, "cat": event.lane, **where, **when})
    trace = {"traceEvents": records, "displayTimeUnit": "ns"}
    Path(path).write_text(json.dumps(trace) + "\n")


def save_picture(timelines: Timelines, path: str | os.PathLike[str], title: str) -> None:
    """Draw each variant's lanes, one graph after the other, as a PNG.

    Raises:
        ModuleNotFoundError: matplotlib is not there.
    """
    height = 0.6 + 1.5 * len(timelines)
    figure = figure_class()(figsize=(12, height), dpi=120, layout="constrained")
    all_axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (variant, graphs) in zip(all_axes, timelines.items()):
        events = in_a_row(graphs)
        for place, lane in enumerate(reversed(LANES)):
            bars = [(1e6 * e.start, 1e6 * e.seconds) for e in events if e.lane == lane]
            edges = [0.5 if length > 5e3 * span_of(events) else 0.0 for _, length in bars]
            axes.broken_barh(
                bars, (place - 0.4, 0.8), color=_COLOURS[lane], edgecolor="white", linewidth=edges
            )
        _label_bars(axes, events)
        begin = 0.0
        for name, more in graphs.items():
            axes.axvline(1e6 * begin, color="grey", linewidth=0.8)
            axes.annotate(
                name,
                (1e6 * begin, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, 2),
                textcoords="offset points",
                fontsize=8,
                color="grey",
            )
            begin += span_of(more)
        axes.set_yticks(range(len(LANES)), reversed(LANES))
        axes.set_ylim(-0.5, len(LANES) - 0.5)
        axes.set_ylabel(variant)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xlabel("microseconds")
    figure.suptitle(title)
    figure.savefig(path, format="png")


def figure_class() -> Any:
    """Of matplotlib.

    Raises:
        ModuleNotFoundError: it is not there.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an optional package
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "explain: a picture needs matplotlib; run: pip install 'moe-graph-ops[demo]'",
            name="matplotlib",
        ) from error
    return Figure


def _label_bars(axes: Any, events: list[Event]) -> None:
    """Write the names into the bars that are wide enough."""
    span = span_of(events)
    for event in events:
        if event.lane != EXPOSED and event.seconds > 0.008 * span * len(event.name):
            middle = 1e6 * (event.start + event.seconds / 2)
            place = len(LANES) - 1 - LANES.index(event.lane)
            axes.text(
                middle, place, event.name, ha="center", va="center", fontsize=7, color="white"
            )
