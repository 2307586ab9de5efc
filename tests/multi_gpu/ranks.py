"""Run a function on two processes of one GPU each, joined over NCCL.

`run_on_gpus(function, *args)` uses processes that stay, so that only the first call pays for their
start and for the groups of `groups()`; `run_alone` starts two of its own, for what may kill them. A
function is pickled by name: it must be at a module's top level. Results are pickled whole, so
tensors come back on the CPU.
"""

from __future__ import annotations

import atexit
import ctypes
import dataclasses
import datetime
import faulthandler
import functools
import multiprocessing
import os
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from moe_ops import comm
from moe_ops.comm import in_flight
from moe_ops.testing import fill_empty_with_nan
from tests.ranks import COLLECTIVE_TIMEOUT_S, GRACE_S, Pool, RankError

NUM_RANKS = 2
MAX_TOKENS, MAX_HIDDEN = 4096, 7168  # of every exchange over `groups()`
EXCHANGE_TIMEOUT_S = 30

_pool: Pool | None = None


@dataclasses.dataclass(frozen=True)
class Groups:
    """Three groups of the same ranks; `nvlink` is the world. `inbox` has a workspace of its own
    without a window, so that all rows go through its inbox.
    """

    nvlink: dist.ProcessGroup
    inbox: dist.ProcessGroup
    nccl: dist.ProcessGroup


@functools.cache
def groups() -> Groups:
    """Of this process. Collective at its first call."""
    ranks = list(range(NUM_RANKS))
    made = Groups(dist.group.WORLD, dist.new_group(ranks), dist.new_group(ranks))
    set_up(made.nvlink, MAX_TOKENS, MAX_HIDDEN)
    set_up(made.inbox, MAX_TOKENS, MAX_HIDDEN, window_bytes=0)
    assert comm.engine(made.nccl) == "nccl"
    return made


def set_up(
    group: dist.ProcessGroup | None, max_tokens: int, hidden_size: int, **settings: Any
) -> None:
    """From now on `group` exchanges over NVLink: rows of up to `hidden_size` float32 values."""
    name = comm.setup(
        group,
        engine="nvlink",
        max_tokens=max_tokens,
        hidden_size=hidden_size,
        dtype=torch.float32,
        **{"timeout_s": EXCHANGE_TIMEOUT_S, **settings},
    )
    assert name == comm.engine(group) == "nvlink"


def run_on_gpus(function: Callable[..., Any], *args: Any, timeout_s: float = 240) -> list[Any]:
    """`function(rank, *args)` on every rank; the results in rank order.

    An exception on a rank is raised here as RankError with that rank's traceback; a rank that does
    not answer in time, with what it was doing. The next call then starts new processes.
    """
    answers = _call(function, args, timeout_s)
    failed = [rank for rank, (kind, *_) in enumerate(answers) if kind != "result"]
    if failed:
        _close()
        raise RankError("\n".join(f"rank {rank}: {answers[rank][-1]}" for rank in failed))
    return [answer[1] for answer in answers]


def expect_error_on_gpus(
    function: Callable[..., Any], *args: Any, timeout_s: float = 60
) -> list[tuple[str, str]]:
    """(type name, message) of the exception that `function(rank, *args)` raises on every rank."""
    answers = _call(function, args, timeout_s)
    for rank, (kind, *rest) in enumerate(answers):
        if kind != "error":
            _close()
            raise RankError(f"rank {rank} must raise, got {kind}: {rest[-1]}; all: {answers}")
    run_on_gpus(_in_step, timeout_s=GRACE_S)
    return [(answer[1], answer[2]) for answer in answers]


def _in_step(rank: int) -> None:
    """No rank is inside or past another one's collective."""
    dist.barrier(groups().nccl)


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> list[tuple[Any, ...]]:
    global _pool
    request = pickle.dumps((_finished, (function, *args)))
    if _pool is None:
        # Spawned: a process that was forked from one with a CUDA context has none.
        _pool = Pool(NUM_RANKS, multiprocessing.get_context("spawn"), _join_world)
    answers = _pool.call(request, timeout_s)
    if any(kind == "lost" for kind, *_ in answers):
        _close()
    return answers


def _finished(rank: int, function: Callable[..., Any], *args: Any) -> Any:
    """The result of `function`, once the GPU is through with it as well."""
    result = function(rank, *args)
    torch.cuda.synchronize()
    assert in_flight.num_in_flight() == 0
    return result


@atexit.register
def _close() -> None:
    global _pool
    pool, _pool = _pool, None
    if pool:
        pool.close()


def _join_world(rank: int, world_size: int, port: int) -> None:
    torch.set_num_threads(1)
    torch.cuda.set_device(rank)
    fill_empty_with_nan()
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=world_size, timeout=timeout)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended, and all that it and its GPU printed."""

    exitcode: int | None
    output: str


def run_alone(function: Callable[..., Any], *args: Any, timeout_s: float = 90) -> list[Ended]:
    """`function(rank, *args)` on two processes of their own, by rank.

    The exit code is 0 if it returned, 1 if it raised, or, with the stacks of all threads in the
    output, if it did not end within `timeout_s`.
    """
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"rank{rank}.txt") for rank in range(NUM_RANKS)]
        processes = []
        for rank, path in enumerate(paths):
            arguments = (rank, store.port, path, timeout_s, function, args)
            processes.append(context.Process(target=_work_alone, args=arguments, daemon=True))
            processes[-1].start()
        for process in processes:
            process.join(timeout_s + GRACE_S)
            process.kill()
            process.join()
        outputs = [path.read_text() if path.exists() else "" for path in paths]
    return [Ended(process.exitcode, output) for process, output in zip(processes, outputs)]


def _work_alone(
    rank: int,
    port: int,
    path: Path,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> NoReturn:
    with open(path, "w") as output:
        os.dup2(output.fileno(), 1)  # where a GPU's printf goes
        os.dup2(output.fileno(), 2)
    # NCCL's watchdog would abort the process over a dead context, before it can tell why.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"] = "0"
    faulthandler.dump_traceback_later(timeout_s, exit=True)
    exitcode = 1
    try:
        _join_world(rank, NUM_RANKS, port)
        function(rank, *args)
        exitcode = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the parent reads it
        traceback.print_exc()
    leave(exitcode)


def leave(exitcode: int) -> NoReturn:
    """End this process at once, with what it printed: a dead context may hang in a destructor."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(exitcode)
