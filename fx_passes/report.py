"""What `explain` found, as text, picture and trace."""

from __future__ import annotations

import dataclasses
import itertools
import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from . import timeline
from .graph import name_of
from .journal import Decision, Journal
from .timeline import COMPUTE, EXCHANGE, EXPOSED, Event, seconds_of, span_of

_WIDTH = 100
_NOTABLE = ("moe_ops", "_c10d_functional")  # namespaces


@dataclasses.dataclass(frozen=True)
class Variant:
    """A model compiled in one way. `graphs`, and what happens in them, by "forward" and "backward";
    `kept_bytes`: between the two, beside inputs and parameters.
    """

    graphs: dict[str, Graph]
    events: dict[str, list[Event]]
    kept_bytes: int

    def seconds(self, *lanes: str) -> float:
        """Time of all events of some lanes."""
        return sum(seconds_of(events, *lanes) for events in self.events.values())

    @property
    def span(self) -> float:
        """Time of forward and backward."""
        return sum(span_of(events) for events in self.events.values())


@dataclasses.dataclass(frozen=True)
class Report:
    """`before`: without the passes; `after`: with them, as the `journal` tells. `source` of the
    times: the cost model, or the name of the device that was measured.
    """

    before: Variant
    after: Variant
    journal: Journal
    source: str

    @property
    def text(self) -> str:
        """For a person."""
        lines = [*self._passes(), "", *self._times(), "", *self._calls()]
        return "\n".join(line.rstrip() for line in lines)

    def __str__(self) -> str:
        return self.text

    @property
    def timelines(self) -> timeline.Timelines:
        """Of both variants and each graph."""
        return {"before": self.before.events, "after": self.after.events}

    def save_picture(self, path: str | os.PathLike[str]) -> None:
        """Draw the timelines before and after as a PNG.

        Raises:
            ModuleNotFoundError: matplotlib is not there.
        """
        before, after = (_time(variant.seconds(EXPOSED)) for variant in (self.before, self.after))
        title = f"exchanges exposed: {before} before the passes, {after} after ({self.source})"
        timeline.save_picture(self.timelines, path, title)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the timelines as JSON that https://ui.perfetto.dev reads."""
        timeline.save_trace(self.timelines, path)

    def _passes(self) -> Iterator[str]:
        yield _row("pass", "changed", "bytes written")
        yield "    + rewritten    - left alone, and why"
        for name, count in self.journal.changes.items():
            own = [d for d in self.journal.decisions if d.pass_name == name]
            saved = sum(decision.bytes_saved for decision in own)
            less = f"{_bytes(abs(saved))} {'less' if saved > 0 else 'more'}" if saved else ""
            yield _row(f"  {name}", str(count), less)
            yield from _decisions(own)

    def _times(self) -> Iterator[str]:
        before, after = self.before, self.after
        yield _row("", "before", "after")
        yield _row("kept for backward", _bytes(before.kept_bytes), _bytes(after.kept_bytes))
        yield f"times: {self.source}"
        for kind in after.events:
            events = [variant.events[kind] for variant in (before, after)]
            yield _row(f"  {kind}", *(_time(span_of(e)) for e in events))
            for title, lane in (("computing", COMPUTE), ("exchanging", EXCHANGE)):
                yield _row(f"    {title}", *(_time(seconds_of(e, lane)) for e in events))
            yield _row("    exposed", *(_share(seconds_of(e, EXPOSED), span_of(e)) for e in events))
        total = [_share(v.seconds(EXPOSED), v.span) for v in (before, after)]
        yield _row("  exposed in all", *total)

    def _calls(self) -> Iterator[str]:
        yield "calls after the passes"
        for kind, graph in self.after.graphs.items():
            yield from _wrapped(f"  {kind:<9} ", ", ".join(_runs(_names(graph))))


def _decisions(decisions: list[Decision]) -> Iterator[str]:
    """Equal ones once."""
    for (text, reason), number in Counter((d.match, d.reason) for d in decisions).items():
        times = f"{number} x " if number > 1 else ""
        yield from _wrapped(f"    {'-' if reason else '+'} ", times + text, max_lines=2)
        if reason:
            yield from _wrapped("      ", reason)


def _row(title: str, left: str, right: str) -> str:
    return f"{title:<30}{left:>20}{right:>20}"


def _bytes(number: int) -> str:
    amount, units = float(number), iter(("B", "kB", "MB", "GB"))
    unit = next(units)
    while amount >= 1000 and unit != "GB":
        amount, unit = amount / 1000, next(units)
    return f"{amount:.4g} {unit}" if unit != "B" else f"{number} B"


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us"


def _share(part: float, whole: float) -> str:
    return f"{_time(part)} ({part / whole if whole else 0:.0%})"


def _names(graph: Graph) -> list[str]:
    """Operators of this library, matmuls, attention and collectives."""
    return [name_of(node) for node in graph.nodes if _is_notable(node)]


def _is_notable(node: Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace in _NOTABLE or target.overloadpacket in flop_registry


def _runs(names: Iterable[str]) -> Iterator[str]:
    """Equal neighbours once, with their number."""
    for name, equal in itertools.groupby(names):
        count = len(list(equal))
        yield f"{count} x {name}" if count > 1 else name


def _wrapped(start: str, text: str, max_lines: int | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        max_lines=max_lines,
        placeholder=" ...",
    )
