"""Simulated timelines against ones drawn by hand, and the files made of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import moe_ops
from fx_passes import timeline
from fx_passes.cost_model import FixedCosts
from fx_passes.split_exchange import split_exchange_pass
from fx_passes.timeline import COMPUTE, EXCHANGE, EXPOSED, Event
from moe_ops.testing import make_ids

from .captured import fake_ranks

CAPACITY = {"num_experts": 4, "max_tokens": 7, "copy_capacity": 7, "row_capacity": 14}
SECONDS = {"exchange_plan": 2.0, "mm": 1.0, "dispatch": 3.0, "combine": 0.5}
SECONDS |= {"dispatch_start": 3.0, "combine_start": 0.5, "all_reduce": 4.0}


def events_of(function: Any, split: bool = True) -> list[Event]:
    torch.manual_seed(0)
    args = torch.randn(7, 8), make_ids(7, 2, 4), torch.randn(8, 8)
    graph = make_fx(function, tracing_mode="fake")(*args).graph
    if split:
        split_exchange_pass(graph)
    return timeline.timeline(graph, FixedCosts(SECONDS))


def there_and_back(x, ids, w):
    before = x @ w
    rows, _, plan = moe_ops.dispatch(x, ids, group=None, **CAPACITY)
    between = before @ w
    back, _ = moe_ops.combine(rows * 2, plan, group=None)
    return back + between @ w


def test_a_wait_is_exposed_as_far_as_nothing_else_runs() -> None:
    assert events_of(there_and_back) == [
        Event("mm", COMPUTE, 0.0, 1.0),
        Event("exchange_plan", EXCHANGE, 1.0, 2.0),
        Event("exchange_plan", EXPOSED, 1.0, 2.0),
        Event("dispatch", EXCHANGE, 3.0, 3.0),
        Event("mm", COMPUTE, 3.0, 1.0),
        Event("dispatch", EXPOSED, 4.0, 2.0),
        Event("combine", EXCHANGE, 6.0, 0.5),
        Event("mm", COMPUTE, 6.0, 1.0),
    ]


def test_a_whole_exchange_is_exposed() -> None:
    events = events_of(there_and_back, split=False)
    assert timeline.seconds_of(events, COMPUTE) == 3.0
    assert timeline.seconds_of(events, EXCHANGE) == timeline.seconds_of(events, EXPOSED) == 5.5
    assert timeline.span_of(events) == 8.5


def test_exchanges_run_one_at_a_time() -> None:
    def two(x, ids, w):
        first, _, plan = moe_ops.dispatch(x, ids, group=None, **CAPACITY)
        second, _ = torch.ops.moe_ops.dispatch(x * 2, None, plan.tensors(), "", "full")
        return first @ w, second @ w

    assert [e for e in events_of(two) if e.name in ("dispatch", "mm")] == [
        Event("dispatch", EXCHANGE, 2.0, 3.0),
        Event("dispatch", EXCHANGE, 5.0, 3.0),
        Event("dispatch", EXPOSED, 2.0, 3.0),
        Event("mm", COMPUTE, 5.0, 1.0),
        Event("dispatch", EXPOSED, 6.0, 2.0),
        Event("mm", COMPUTE, 8.0, 1.0),
    ]


def test_collectives_of_torch_run_until_their_wait() -> None:
    with fake_ranks(2) as group:

        def reduce(x, ids, w):
            op = torch.ops._c10d_functional
            pending = op.all_reduce(x, "sum", group.group_name)
            y = x @ w
            return op.wait_tensor(pending) + y

        events = events_of(reduce)
    assert events == [
        Event("all_reduce", EXCHANGE, 0.0, 4.0),
        Event("mm", COMPUTE, 0.0, 1.0),
        Event("all_reduce", EXPOSED, 1.0, 3.0),
    ]


@pytest.mark.parametrize(
    ("busy", "exchanges", "expected"),
    [
        pytest.param([(0, 9)], [(1, 5)], [], id="hidden"),
        pytest.param([], [(1, 5)], [(1, 5)], id="alone"),
        pytest.param([(0, 2), (3, 4)], [(1, 6)], [(2, 3), (4, 6)], id="gaps"),
        pytest.param([(0, 3), (1, 2)], [(1, 4)], [(3, 4)], id="two streams"),
        pytest.param([(8, 9)], [(0, 4), (2, 6)], [(0, 4), (4, 6)], id="exchanges overlap"),
        pytest.param([], [(0, 6), (2, 4)], [(0, 6)], id="one exchange within another"),
    ],
)
def test_exposed_of_measured_events(
    busy: list[Any], exchanges: list[Any], expected: list[Any]
) -> None:
    lanes = {COMPUTE: busy, EXCHANGE: exchanges}
    events = [Event(lane, lane, b, e - b) for lane, spans in lanes.items() for b, e in spans]
    assert [(e.start, e.end) for e in timeline.exposed(events)] == expected


def sample() -> dict[str, dict[str, list[Event]]]:
    forward = [Event("mm", COMPUTE, 0.0, 2e-6), Event("dispatch", EXCHANGE, 1e-6, 3e-6)]
    backward = [Event("mm", COMPUTE, 0.0, 1e-6), Event("combine", EXPOSED, 1e-6, 1e-6)]
    return {"before": {"forward": forward, "backward": backward}, "after": {"forward": forward}}


def test_trace_holds_every_event_in_its_place(tmp_path: Path) -> None:
    timeline.save_trace(sample(), tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    names: dict[Any, str] = {}
    events = []
    for record in trace["traceEvents"]:
        place = record["pid"], record["tid"]
        if record["ph"] == "M":
            key = place[:1] if record["name"] == "process_name" else place
            names[key] = record["args"]["name"]
        else:
            assert record["ph"] == "X"
            where = names[place[:1]], names[place]
            events.append((*where, record["name"], record["ts"], record["dur"]))
    assert sorted(name for key, name in names.items() if len(key) == 1) == ["after", "before"]
    assert [(*e[:3], *map(pytest.approx, e[3:])) for e in events] == [
        ("before", "compute", "mm", 0, 2),
        ("before", "exchange", "dispatch", 1, 3),
        ("before", "compute", "mm", 4, 1),  # backward, when all of forward is over
        ("before", "exposed", "combine", 5, 1),
        ("after", "compute", "mm", 0, 2),
        ("after", "exchange", "dispatch", 1, 3),
    ]


def test_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="optional package matplotlib is not installed")
    timeline.save_picture(sample(), tmp_path / "picture.png", "title")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_picture_names_the_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib; run: pip install") as error:
        timeline.save_picture(sample(), tmp_path / "picture.png", "title")
    assert error.value.name == "matplotlib"
    assert not (tmp_path / "picture.png").exists()
