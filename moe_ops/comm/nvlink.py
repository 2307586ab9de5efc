"""The engine `nvlink`: GPUs of one host write to each other's memory (csrc/exchange*.cu).

Every rank of a group owns a workspace, symmetric memory of PyTorch's that all ranks have mapped:
flags and small messages, an inbox for rows, and a window. There `dispatch` places its outputs, so
that peers write rows where they stay, and peers read there what `combine` adds up. Where it has no
room, rows go through the inbox: a copy more.
"""

from __future__ import annotations

import contextlib
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from .._library import tag_compile_caches
from .groups import group_rank, resolve
from .window import Window

MAX_RANKS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAN_CTAS = 128  # that must run at once
# dispatch, two H200: 353 us with 14, 389 with 16, which crowd the link (2026-11-30)
DEFAULT_SMS = 14
MAX_SMS = 64  # exchanges of two groups still fit
MAX_TOKENS = (1 << 24) - 2  # and one more, for "too many", fits IdsArrived of csrc/exchange.cuh
DEFAULT_WINDOW_OUTPUTS = 4  # of the greatest size
_NUMBERS = 8  # of `World` in csrc/exchange.cuh, before the addresses
_NUM_SMS = 4  # the place of `num_sms` among them
_FAULTS = {
    1: "rank {peer} did not arrive: of its exchanges or parts expected {expected}, seen {seen}",
    2: "rank {peer} called another operator, or with other settings",
    3: "rank {peer} has more tokens than max_tokens = {expected} of setup",
    4: "rank {peer} has ids that are neither -1 nor experts, {seen} in all",
}


class Workspace:
    """What this rank's kernels need to exchange with the group's other ranks.

    `row_bytes` is that of the longest row. A plan's `num_plan_ctas` CTAs, an equal number for each
    rank, run at once. `world` is an int64 tensor on the CPU that kernels read: `World` of
    csrc/exchange.cuh. `fault`, pinned, is what a kernel that gave up says of it: code, peer,
    expected, seen.
    """

    memory: torch.Tensor
    window: Window

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        max_tokens: int,
        row_bytes: int,
        num_sms: int = DEFAULT_SMS,
        timeout_s: float = 60,
        num_plan_ctas: int = PLAN_CTAS,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self.max_tokens, self.row_bytes = max_tokens, row_bytes
        self.num_plan_ctas = num_plan_ctas
        self.fault = torch.zeros(4, dtype=torch.int64, pin_memory=True)
        sizes = [rank, num_ranks, max_tokens, row_bytes, num_sms, num_plan_ctas]
        rest = [int(timeout_s * 1e9), self.fault.data_ptr(), *[0] * num_ranks]
        self.world = torch.tensor([*sizes, *rest], dtype=torch.int64)
        self._last: _Launch | None = None

    def num_bytes(self) -> int:
        """Bytes of a rank's memory, without a window."""
        return int(torch.ops.moe_ops_native.exchange_workspace_bytes(self.world))

    def use(self, memory: torch.Tensor, addresses: list[int]) -> None:
        """Start with `memory`, uint8, on this rank, and the addresses of all ranks' as seen from
        here. A window is what it has beyond `num_bytes()`.
        """
        inbox_bytes = self.num_ranks * self.max_tokens * self.row_bytes
        memory[: self.num_bytes() - inbox_bytes].zero_()
        self.memory = memory
        self.window = Window(memory[self.num_bytes() :])
        self.world[_NUMBERS:] = torch.tensor(addresses)

    def enter(self) -> torch.Tensor:
        """`world`, for a kernel that is launched next: it runs after the group's earlier ones, on
        whatever stream these were launched.

        Raises:
            RuntimeError: an earlier exchange failed.
        """
        self.check()
        stream = torch.cuda.current_stream(self.memory.device)
        captured, last = torch.cuda.is_current_stream_capturing(), self._last
        # NOTE: a stream that is being captured cannot wait for work outside its graph, nor the
        # other way round; what runs before and after a replay is up to who replays.
        together = last and last.captured == captured and (not captured or _captures(last.stream))
        if last and last.stream != stream and together:
            stream.wait_stream(last.stream)
        self._last = _Launch(stream, captured)
        return self.world

    def check(self) -> None:
        """Raise RuntimeError if an earlier exchange failed."""
        if self.fault[0].item():
            raise RuntimeError(f"nvlink: an exchange of rank {self.rank} failed: {self.why()}")

    def why(self) -> str:
        """The fault that a kernel recorded."""
        code, peer, expected, seen = self.fault.tolist()
        return _FAULTS[code].format(peer=peer, expected=expected, seen=seen)


class _Launch(NamedTuple):
    stream: torch.cuda.Stream
    captured: bool


def _captures(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


# By group: names are used again after a group is destroyed.
_workspaces: weakref.WeakKeyDictionary[dist.ProcessGroup, Workspace] = weakref.WeakKeyDictionary()


def workspace(group_name: str) -> Workspace | None:
    """The workspace of a group that `create` was called for."""
    return _workspaces.get(resolve(group_name)) if group_name and _workspaces else None


@contextlib.contextmanager
def on_sms(group_name: str, num_sms: int) -> Iterator[None]:
    """Have dispatch and combine, if the group has workspaces, run on `num_sms` multiprocessors, on
    all ranks alike, when they are launched within the block; 0: on as many as otherwise.
    """
    space = workspace(group_name) if num_sms else None
    if space is None:
        yield
        return
    before = space.world[_NUM_SMS].item()
    space.world[_NUM_SMS] = num_sms  # a launch copies the numbers
    try:
        yield
    finally:
        space.world[_NUM_SMS] = before


def group_names() -> list[str]:
    """Groups that `create` was called for, sorted."""
    return sorted(str(group.group_name) for group in _workspaces)


def drop(group_name: str) -> None:
    """Forget the group's workspaces, if it has them. Collective. CUDA graphs that were captured
    with them must not be replayed any more.
    """
    if workspace(group_name):
        group = resolve(group_name)
        torch.cuda.synchronize()
        dist.barrier(group, device_ids=[torch.cuda.current_device()])  # nobody writes to them now
        del _workspaces[group]
        tag_compile_caches(*group_names())


def create(
    group_name: str,
    *,
    max_tokens: int,
    row_bytes: int,
    num_sms: int | None,
    timeout_s: float,
    window_bytes: int | None,
) -> None:
    """Allocate the group's workspaces and map them. Collective, after `obstacle` said None."""
    import torch.distributed._symmetric_memory as symmetric  # noqa: PLC0415 - for GPUs alone

    group = resolve(group_name)
    space = Workspace(
        group_rank(group_name),
        group.size(),
        max_tokens=max_tokens,
        row_bytes=row_bytes,
        num_sms=num_sms or DEFAULT_SMS,
        timeout_s=timeout_s,
    )
    if window_bytes is None:
        window_bytes = DEFAULT_WINDOW_OUTPUTS * group.size() * max_tokens * row_bytes
    device = torch.device("cuda", torch.cuda.current_device())
    memory = symmetric.empty(space.num_bytes() + window_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, group)
    space.use(memory, list(handle.buffer_ptrs))
    torch.cuda.synchronize(device)
    dist.barrier(group, device_ids=[device.index])
    _workspaces[group] = space
    tag_compile_caches(*group_names())  # plans of these groups differ: see layout.Plan


class _Told(NamedTuple):
    """What a rank tells the others of itself."""

    why_not: str | None
    host: str
    gpu: str
    num_sms: int
    out_of_reach: tuple[str, ...]  # GPUs whose memory it cannot map


def obstacle(group_name: str, dtype: torch.dtype) -> str | None:
    """Why the engine cannot carry the group's rows, the same on every rank, or None. Collective."""
    group = resolve(group_name)
    told: list[_Told] = [_about_this_rank()] * group.size()
    dist.all_gather_object(told, told[0], group=group)
    reasons = [f"rank {rank}: {its.why_not}" for rank, its in enumerate(told) if its.why_not]
    fewest = min(its.num_sms for its in told)
    if not reasons and fewest < PLAN_CTAS:
        reasons.append(f"a GPU has {fewest} multiprocessors, fewer than {PLAN_CTAS}")
    if group.size() > MAX_RANKS:
        reasons.append(f"it has {group.size()} ranks, more than {MAX_RANKS}")
    if dtype not in DTYPES:
        reasons.append(f"rows are {dtype}, not one of {DTYPES}")
    gpus = [its.gpu for its in told]
    if (num_hosts := len({its.host for its in told})) > 1:
        reasons.append(f"its ranks are on {num_hosts} hosts")
    elif not reasons and len(set(gpus)) < group.size():
        reasons.append("two ranks share a GPU")
    elif not reasons:
        reasons += [
            f"the GPU of rank {rank} cannot map the memory of rank {gpus.index(gpu)}'s"
            for rank, its in enumerate(told)
            for gpu in its.out_of_reach
            if gpu in gpus
        ]
    return "; ".join(reasons) or None


def unavailable() -> str | None:
    """Why this process cannot take part in any such group, or None."""
    from ..kernels import native  # noqa: PLC0415 - kernels import this module

    if not torch.cuda.is_available():
        return "no GPU"
    if (capability := torch.cuda.get_device_capability()) != (9, 0):
        return "the GPU's compute capability must be 9.0, got {}.{}".format(*capability)
    return None if native.available() else f"no kernels ({native.status()})"


def _about_this_rank() -> _Told:
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''}"
    if (why_not := unavailable()) is not None:
        return _Told(why_not, host, "", 0, ())
    here, number = torch.cuda.current_device(), torch.cuda.device_count()
    gpus = [str(torch.cuda.get_device_properties(there).uuid) for there in range(number)]
    out_of_reach = (
        gpu
        for there, gpu in enumerate(gpus)
        if there != here and not torch.cuda.can_device_access_peer(here, there)
    )
    num_sms = torch.cuda.get_device_properties(here).multi_processor_count
    return _Told(None, host, gpus[here], num_sms, tuple(out_of_reach))
