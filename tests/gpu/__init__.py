"""What tests on a GPU share: the native library, steps without waiting, CUDA graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest
import torch

from moe_ops.kernels import native

Outputs = TypeVar("Outputs", bound=Sequence[torch.Tensor])


def skip_without_library() -> None:
    """Skip where the native library is not built or is off; one that does not load is a failure."""
    if native.status().startswith(("not built", "off")):
        pytest.skip(f"no compiler's library is in use: {native.status()}")
    assert native.available(), native.status()


@contextlib.contextmanager
def never_waiting() -> Iterator[None]:
    """What waits for the device within raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step: Callable[[], Outputs]) -> tuple[Outputs, Callable[[], None]]:
    """What `step`, which must not wait for the device, returns from a CUDA graph of it, and what
    replays the graph.
    """
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    with never_waiting():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return outputs, graph.replay
