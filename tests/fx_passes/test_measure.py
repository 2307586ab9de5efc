"""What a profile of a GPU is read as."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fx_passes import measure
from fx_passes.timeline import COMPUTE, EXCHANGE, EXPOSED, Event

NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
DISPATCH = "void moe_ops::exchange::(anonymous namespace)::dispatch_kernel<true, 8>(Exchange)"
GROUPED_MM = "void moe_ops::grouped_mm_kernel<__nv_bfloat16, (Form)1>(Maps, Arguments)"


def record(category: str, name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin}


def test_profile_becomes_events_of_its_phases() -> None:
    records = [
        record("kernel", NCCL, 5, 9),  # before the phases
        record("user_annotation", "explain: forward", 10, 100),
        record("user_annotation", "something else", 10, 100),
        record("cpu_op", "aten::mm", 11, 12),
        record("kernel", DISPATCH, 20, 50),
        record("kernel", GROUPED_MM, 30, 40),
        record("gpu_memcpy", "Memcpy HtoD", 45, 46),
        record("user_annotation", "explain: backward", 100, 200),
        record("kernel", NCCL, 150, 160),
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    ]
    found = measure.events_of_trace({"traceEvents": records})
    expected = {
        "forward": [
            Event("dispatch_kernel", EXCHANGE, 0, 30),
            Event("grouped_mm_kernel", COMPUTE, 10, 10),
            Event("Memcpy HtoD", COMPUTE, 25, 1),
            Event("dispatch_kernel", EXPOSED, 0, 10),
            Event("dispatch_kernel", EXPOSED, 20, 5),
            Event("dispatch_kernel", EXPOSED, 26, 4),
        ],
        "backward": [
            Event("ncclDevKernel_SendRecv", EXCHANGE, 0, 10),
            Event("ncclDevKernel_SendRecv", EXPOSED, 0, 10),
        ],
    }
    assert found.keys() == expected.keys()
    for phase, events in expected.items():
        assert [(e.name, e.lane) for e in found[phase]] == [(e.name, e.lane) for e in events]
        for event, wanted in zip(found[phase], events):
            assert (1e6 * event.start, 1e6 * event.seconds) == pytest.approx(
                (wanted.start, wanted.seconds)
            )


@pytest.mark.gpu
def test_measures_kernels_of_each_phase_on_gpu() -> None:
    a = torch.randn(1024, 1024, device="cuda")
    calls: list[str] = []

    def step(phase: measure.Phase) -> None:
        with phase("forward"):
            calls.append("forward")
            a @ a
        with phase("backward"):
            a.add(1).add(1)

    found = measure.measure(step)
    assert len(calls) > 2, "warmed up"
    assert found.keys() == {"forward", "backward"}
    assert all(e.lane == COMPUTE and e.seconds > 0 for events in found.values() for e in events)
    assert found["forward"] and len(found["backward"]) == 2
