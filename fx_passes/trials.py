"""Trial runs of a model on all ranks of a group, for `tune`: every rank runs the same at the same
time and hears of what fails on another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from moe_ops import comm
from moe_ops.comm.groups import device_of

from .compat import inductor_backend
from .config import PassConfig
from .journal import Journal
from .measure import Step, unmeasured
from .pipeline import listened, options
from .step import step_of


class Ranks:
    """What the ranks of a group tell each other; every answer is the same on all of them. No group:
    all ranks there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        self.group = group
        self.group_name = comm.group_name_of(group)
        self.rank, self.size = (group.rank(), group.size()) if group else (0, 1)

    def most(self, *numbers: float) -> list[float]:
        """Of each number the largest that a rank has."""
        if self.group is None:
            return list(numbers)
        found = torch.tensor(numbers, dtype=torch.float64, device=device_of(self.group))
        dist.all_reduce(found, dist.ReduceOp.MAX, self.group)
        return found.tolist()

    def why_not(self, reason: str | None, num_chunked: int = 0) -> str | None:
        """The reasons of the ranks that have one, or that layers run in chunks on some alone."""
        failed, most, least = self.most(reason is not None, num_chunked, -num_chunked)
        if not failed:
            return (
                None if most == -least else "layers run in chunks on some ranks and not on others"
            )
        if self.group is None:
            return reason
        reasons: list[str | None] = [None] * self.size
        dist.all_gather_object(reasons, reason, self.group)
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text)


class Dropped(Exception):
    """A configuration cannot be used: some rank could not compile or run it. On every rank."""


def first_step(
    ranks: Ranks, model: Any, inputs: Any, inductor: Mapping[str, Any] | None, config: PassConfig
) -> tuple[Step, int]:
    """A step that has been compiled and run once, and how many of its layers run in chunks.

    No rank runs it, and waits in an exchange for the others, before all have compiled it.

    Raises:
        Dropped: on every rank, if one of them fails.
    """
    journal, why_not = Journal(), None
    compiler = inductor_backend(listened(options(config, inductor=inductor), journal))

    def backend(module: Any, example_inputs: Any) -> Any:
        nonlocal why_not
        compiled, reason = attempt(lambda: compiler(module, example_inputs))
        why_not = ranks.why_not(reason, journal.changes["chunk_exchange"])
        if why_not:
            raise Dropped(why_not)
        return compiled

    step, reason = attempt(lambda: step_of(model, inputs, backend=backend))
    if why_not := ranks.why_not(reason):
        raise Dropped(why_not)
    _, reason = attempt(lambda: step(unmeasured))
    if why_not := why_not or ranks.why_not(reason):
        raise Dropped(why_not)
    return step, journal.changes["chunk_exchange"]


def attempt(run: Callable[[], Any]) -> tuple[Any, str | None]:
    """What it returns, or why it fails."""
    try:
        return run(), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        text = str(error).strip().partition("\n")[0]
        return None, f"{type(error).__name__}: {text}"


def seconds_of(step: Step, number: int, on_gpu: bool) -> float:
    """Of one of `number` steps in a row, after one more, with which caches fill."""
    step(unmeasured)
    if not on_gpu:
        begin = time.perf_counter()
        for _ in range(number):
            step(unmeasured)
        return (time.perf_counter() - begin) / number
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(number):
        step(unmeasured)
    end.record()
    end.synchronize()
    return 1e-3 * start.elapsed_time(end) / number
