"""Run a function on several gloo processes: `run_on_ranks(2, function, *args)` -> results by rank.

The processes of a world size start with its first use and stay until the tests end, or until they
hold `MAX_GROUPS` groups, each with threads and sockets; so a further call costs a millisecond or
two. A function is pickled by name: it must be at a module's top level.
Results are pickled whole, tensors by value. Sub-groups: the function calls `dist.new_group` itself,
on every rank.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

COLLECTIVE_TIMEOUT_S = 60
PRELOAD = ["tests.warm_up"]
MAX_GROUPS = 32
GRACE_S = 10  # for the other ranks to end once one has failed

_pools: dict[int, Pool] = {}


class RankError(AssertionError):
    """A rank raised, died or did not answer."""


def run_on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120
) -> list[Any]:
    """`function(rank, *args)` on every rank of a gloo world; the results in rank order.

    An exception on a rank is raised here as RankError with that rank's traceback.
    """
    answers = _call(world_size, function, args, timeout_s)
    failed = [rank for rank, (kind, *_) in enumerate(answers) if kind != "result"]
    if failed:
        _close(world_size)
        raise RankError("\n".join(f"rank {rank}: {answers[rank][-1]}" for rank in failed))
    return [answer[1] for answer in answers]


def expect_error_on_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120
) -> list[tuple[str, str]]:
    """(type name, message) of the exception that `function(rank, *args)` raises on every rank."""
    answers = _call(world_size, function, args, timeout_s)
    errors = []
    for rank, (kind, *rest) in enumerate(answers):
        if kind != "error":
            _close(world_size)
            raise RankError(f"rank {rank} must raise, got {kind}: {rest[-1]}; all: {answers}")
        errors.append((rest[0], rest[1]))
    run_on_ranks(world_size, _in_step, timeout_s=GRACE_S)
    return errors


def _in_step(rank: int) -> None:
    """No rank is inside or past another one's collective."""
    dist.barrier()


def _call(
    world_size: int, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
) -> list[tuple[Any, ...]]:
    request = pickle.dumps((function, args))
    if world_size not in _pools:
        # Forked from one clean process that has imported torch and holds no threads, groups or
        # devices: a fresh interpreter a rank takes 3 to 6 s of CPU for the imports.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        _pools[world_size] = Pool(world_size, context, _join_world)
    answers = _pools[world_size].call(request, timeout_s)
    too_many = _pools[world_size].num_groups > MAX_GROUPS
    if too_many or any(kind == "lost" for kind, *_ in answers):
        _close(world_size)
    return answers


def _close(world_size: int) -> None:
    pool = _pools.pop(world_size, None)
    if pool:
        pool.close()


@atexit.register
def _close_all() -> None:
    for world_size in list(_pools):
        _close(world_size)


class Pool:
    """Processes, started by `context`, that first run `join_world(rank, world_size, port)`."""

    def __init__(
        self, world_size: int, context: BaseContext, join_world: Callable[[int, int, int], None]
    ) -> None:
        self.folder = tempfile.TemporaryDirectory()
        # Held by this process: its port is chosen by the system, so no two pools can meet.
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.num_groups = 0
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            here, there = context.Pipe()
            place = (rank, world_size, self.store.port)
            arguments = (join_world, place, there, self._stack_file(rank))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def _stack_file(self, rank: int) -> str:
        return str(Path(self.folder.name, f"rank{rank}.txt"))

    def call(self, request: bytes, timeout_s: float) -> list[tuple[Any, ...]]:
        """By rank: ("result", value), ("error", type, message, traceback) or ("lost", why)."""
        answers: list[tuple[Any, ...] | None] = [None] * len(self.connections)
        for rank, connection in enumerate(self.connections):
            try:
                connection.send_bytes(request)
            except OSError:
                answers[rank] = ("lost", "the process has ended")
        deadline = time.monotonic() + timeout_s
        while waiting := [c for c, answer in zip(self.connections, answers) if answer is None]:
            ready = wait(waiting, max(deadline - time.monotonic(), 0))
            for connection in ready:
                rank = self.connections.index(connection)
                answers[rank] = self._receive(rank)
                if answers[rank][0] != "result":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
            if not ready and time.monotonic() >= deadline:
                late = [rank for rank, answer in enumerate(answers) if answer is None]
                for rank, stack in self._stacks(late).items():
                    answers[rank] = ("lost", f"no answer, stopped in\n{stack}")
        return answers

    def _receive(self, rank: int) -> tuple[Any, ...]:
        try:
            answer = pickle.loads(self.connections[rank].recv_bytes())
            self.num_groups = self.connections[rank].recv()
            return answer
        except (EOFError, OSError):
            self.processes[rank].join(1)
            return ("lost", f"the process ended with exit code {self.processes[rank].exitcode}")

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """What each of `ranks` is doing."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.5)
        paths = {rank: Path(self._stack_file(rank)) for rank in ranks}
        return {
            rank: path.read_text() if path.exists() else "start" for rank, path in paths.items()
        }

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def _serve(
    join_world: Callable[[int, int, int], None],
    place: tuple[int, int, int],
    connection: Connection,
    stack_file: str,
) -> None:
    """A rank: answer requests until the parent closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
        join_world(*place)
        while True:
            try:
                request = connection.recv_bytes()
            except (EOFError, OSError):
                os._exit(0)  # no orderly goodbye: the other ranks are gone, too
            connection.send_bytes(_answer(place[0], request))
            connection.send(len(c10d._world.pg_map))


def _join_world(rank: int, world_size: int, port: int) -> None:
    # In the child only, so that a test process without ranks does not pay for the import.
    from moe_ops.testing import fill_empty_with_nan  # noqa: PLC0415

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    fill_empty_with_nan()
    timeout = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def _answer(rank: int, request: bytes) -> bytes:
    try:
        function, args = pickle.loads(request)
        torch.manual_seed(rank)
        return pickle.dumps(("result", function(rank, *args)))
    except BaseException as error:  # noqa: BLE001 - whatever it is, the parent reports it
        return pickle.dumps(("error", type(error).__name__, str(error), traceback.format_exc()))
