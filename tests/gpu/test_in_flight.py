"""An exchange on its own stream: nothing reads its outputs early, or its inputs' memory late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_ops.comm import in_flight

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
LONG = 20_000_000  # cycles, about 10 ms


@pytest.fixture(autouse=True)
def _nothing_in_flight() -> Iterator[None]:
    in_flight._in_flight.clear()  # what a failed test left behind
    yield
    assert in_flight.num_in_flight() == 0


def slow_double(x: torch.Tensor, cycles: int = LONG) -> tuple[torch.Tensor, ...]:
    torch.cuda._sleep(cycles)
    return (x * 2,)


def test_wait_orders_the_readers() -> None:
    for step in range(5):
        x = torch.full((1 << 20,), float(step), device=DEVICE)
        ticket = in_flight.start(lambda x=x: slow_double(x), x)
        beside = x + 1
        (doubled,) = in_flight.wait("dispatch_wait", ticket)
        del x  # its memory is free for what comes next
        overwritten = torch.full((1 << 20,), -1.0, device=DEVICE)
        assert (doubled == 2 * step).all() and (beside == step + 1).all()
        assert (overwritten == -1).all()


def test_the_host_and_the_current_stream_go_on() -> None:
    x = torch.ones(8, device=DEVICE)
    (x + 1).sum()  # loads its kernels, which may take longer than the exchange
    in_flight.exchange_stream(x.device)
    torch.cuda.synchronize()
    ticket = in_flight.start(lambda: slow_double(x, 50 * LONG), x)
    beside = torch.cuda.Event()
    (x + 1).sum()
    beside.record()
    beside.synchronize()
    assert not in_flight.exchange_stream(x.device).query(), "the exchange still runs"
    (doubled,) = in_flight.wait("dispatch_wait", ticket)
    assert (doubled == 2).all()


def test_start_and_wait_replay_in_a_cuda_graph() -> None:
    x = torch.zeros(1 << 16, device=DEVICE)

    def step() -> torch.Tensor:
        ticket = in_flight.start(lambda: slow_double(x), x)
        beside = x + 1
        (doubled,) = in_flight.wait("dispatch_wait", ticket)
        return doubled + beside

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    for value in (3.0, -7.0):
        x.fill_(value)
        graph.replay()
        assert (y == 3 * value + 1).all()
