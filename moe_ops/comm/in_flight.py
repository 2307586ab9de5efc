"""Exchanges that have been started and not yet waited for, each under its ticket.

On CUDA an exchange runs on a stream of its own, so that what the caller launches next runs beside
it; but in the CUDA graphs of `torch.compile(mode="reduce-overhead")`, which keep account of the
memory of one stream alone, on the caller's. On the CPU it is over before `start` returns.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch


class _Exchange(NamedTuple):
    outputs: Sequence[torch.Tensor]
    done: torch.cuda.Event | None  # None if the caller's stream, or the CPU, did it


# By the address of the ticket, which exists as long as the exchange.
_in_flight: dict[int, _Exchange] = {}


def start(run: Callable[[], Sequence[torch.Tensor]], like: torch.Tensor) -> torch.Tensor:
    """Start `run`, which returns fresh tensors and reads none that changes before `wait`.

    Returns the ticket, int64 [1] on the device of `like`, whose value means nothing.
    """
    ticket_1 = like.new_empty(1, dtype=torch.int64)
    if like.device.type != "cuda" or in_tree_of_graphs(like.device):
        _in_flight[ticket_1.data_ptr()] = _Exchange(run(), None)
        return ticket_1
    stream, caller = exchange_stream(like.device), torch.cuda.current_stream(like.device)
    stream.wait_stream(caller)
    with torch.cuda.stream(stream):
        outputs, done = run(), torch.cuda.Event()
        done.record(stream)
    _in_flight[ticket_1.data_ptr()] = _Exchange(outputs, done)
    return ticket_1


def wait(op: str, ticket_1: torch.Tensor) -> Sequence[torch.Tensor]:
    """The outputs of the exchange that `ticket_1` was given for; on CUDA the current stream waits,
    not the host.

    Raises:
        RuntimeError: the ticket is no exchange's, or was waited for before.
    """
    exchange = _in_flight.pop(ticket_1.data_ptr(), None)
    if exchange is None:
        raise RuntimeError(
            f"{op}: ticket must come from {op.replace('_wait', '_start')} and be used once, got "
            f"one of no exchange that is in flight ({len(_in_flight)} are)"
        )
    if exchange.done is not None:
        stream = torch.cuda.current_stream(ticket_1.device)
        stream.wait_event(exchange.done)
        for output in exchange.outputs:
            output.record_stream(stream)  # their memory belongs to the exchange's stream
    return exchange.outputs


def in_tree_of_graphs(device: torch.device) -> bool:
    """Whether Inductor warms up or captures a graph of its own: it does so on one stream."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None:
        return False
    with contextlib.suppress(AssertionError):  # a thread that Inductor does not know
        manager = trees.get_manager(device.index, create_if_none_exists=False)
        return manager is not None and torch.cuda.current_stream(device) == manager.stream
    return False


def runs_beside(device: torch.device) -> bool:
    """Whether an exchange of the device that was started, and not waited for, has a stream of its
    own.
    """
    exchanges = list(_in_flight.values())
    return any(e.done is not None and e.outputs[0].device == device for e in exchanges)


def num_in_flight() -> int:
    """Exchanges started and not waited for: 0 after a whole step."""
    return len(_in_flight)


@functools.cache
def exchange_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that a device's exchanges run on, in the order of their starts."""
    return torch.cuda.Stream(device, priority=-1)
