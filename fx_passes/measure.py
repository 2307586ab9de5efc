"""What a GPU did during a step, from the profiler: the timeline that `explain` else estimates."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .timeline import COMPUTE, EXCHANGE, Event, exposed

Phase = Callable[[str], AbstractContextManager[None]]
"""Surrounds a part of a step, by name."""
Step = Callable[[Phase], None]

_WARM_UPS = 3
_PREFIX = "explain: "  # of the phases' names in the profile
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_BETWEEN_RANKS = re.compile(r"nccl|moe_ops::exchange|deep_ep")


def unmeasured(name: str) -> AbstractContextManager[None]:
    """A phase that nobody watches."""
    return contextlib.nullcontext()


def measure(step: Step) -> dict[str, list[Event]]:
    """The events of each phase of a step; before it the step runs a few times unmeasured."""
    for _ in range(_WARM_UPS):
        step(unmeasured)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step(unmeasured)  # starting the profiler takes each rank another time
        step(_phase)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return events_of_trace(json.loads(path.read_text()))


@contextlib.contextmanager
def _phase(name: str) -> Iterator[None]:
    torch.cuda.synchronize()
    with record_function(_PREFIX + name):
        yield
        torch.cuda.synchronize()


def events_of_trace(trace: Mapping[str, Any]) -> dict[str, list[Event]]:
    """What ran on the device within each phase, whose first event begins at 0."""
    records = [record for record in trace["traceEvents"] if record.get("ph") == "X"]
    found = {}
    for phase in records:
        if phase.get("cat") != "user_annotation" or not phase["name"].startswith(_PREFIX):
            continue
        begin, end = phase["ts"], phase["ts"] + phase["dur"]
        inside = [r for r in records if r.get("cat") in _ON_DEVICE and begin <= r["ts"] < end]
        first = min((record["ts"] for record in inside), default=begin)
        events = [_event(record, first) for record in inside]
        events.sort(key=lambda event: event.start)
        found[phase["name"].removeprefix(_PREFIX)] = events + exposed(events)
    return found


def _event(record: Mapping[str, Any], first: float) -> Event:
    """Times in a trace are microseconds."""
    lane = EXCHANGE if _BETWEEN_RANKS.search(record["name"]) else COMPUTE
    return Event(_short(record["name"]), lane, 1e-6 * (record["ts"] - first), 1e-6 * record["dur"])


def _short(kernel: str) -> str:
    """A kernel's name without types, namespaces and arguments."""
    bare = kernel.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split(r"[<(]", bare, maxsplit=1)[0].rpartition("::")[2] or kernel
