"""How fast a device computes, copies, launches and exchanges: a small table, and its measurement.

`devices.json` beside this file holds figures by the device's name; those that `calibrate` writes to
the user's table, devices.json in the folder of `moe_ops.kernels.autotune.user_table`, come before
it. A device of neither counts as an NVIDIA H200.

Where the shipped figures come from: of the H200, benchmarks/RESULTS.md (hot, two GPUs over NVLink,
engine `nvlink`; collectives: NCCL), but float32 and float64, three quarters of the data sheet,
plan_s and launch_s, which `calibrate` measured, and exchange_bytes_per_s, of exchanges beside the
work of a layer (alone they reach 316e9); of "cpu", `calibrate` on two cores, two processes over
gloo, rounded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moe_ops
from moe_ops.comm import agree, group_name_of, nvlink
from moe_ops.comm.groups import device_of
from moe_ops.kernels import autotune

from .expected_sizes import expected_copies

_log = logging.getLogger(__name__)
_SHIPPED = Path(__file__).with_name("devices.json")
_DEFAULT = "NVIDIA H200"
_BURSTS, _CALLS, _WARM_UP = 5, 4, 3
_HOT_S = 1.0  # a GPU at work is clocked lower than one that was idle
_ROW_UNIT = 16  # bytes; `nvlink` carries rows of a whole number of them
_LEAST_BYTES = 8 << 20  # 25 us of the H200's link, beside a latency of 10 us


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Of one device. `*_s`: seconds that a call takes however little it moves; bytes over the link
    are those that leave a rank.
    """

    matmul_flops: dict[str, float]  # by dtype; floating-point operations a second
    memory_bytes_per_s: float  # read and written
    launch_s: float
    exchange_bytes_per_s: float  # dispatch, combine
    exchange_s: float
    plan_s: float  # exchange_plan, gather_plan
    collective_bytes_per_s: float  # everything else between ranks
    collective_s: float

    def __post_init__(self) -> None:
        """Refuse what is no figure."""
        for name, value in dataclasses.asdict(self).items():
            numbers = value.values() if isinstance(value, dict) else [value]
            if not numbers or not all(isinstance(n, int | float) and n > 0 for n in numbers):
                raise ValueError(f"figures: {name} must be positive, got {value}")

    def flops_of(self, dtype: torch.dtype) -> float:
        """FLOP/s of a matmul; of a dtype that the table lacks, the fastest."""
        known = self.matmul_flops
        return known.get(str(dtype).removeprefix("torch."), max(known.values()))


def device_name() -> str:
    """The current device's name in the table."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def user_table() -> Path:
    """Where `calibrate` writes."""
    return autotune.user_table().with_name("devices.json")


def figures_of(name: str) -> Figures:
    """A device's figures; those of the default if neither table has it."""
    table = _parse(_SHIPPED) | _read(user_table())
    if name not in table:
        _log_default(name)
    return table.get(name, table[_DEFAULT])


@functools.cache
def _log_default(name: str) -> None:
    _log.info(
        "no figures of %s, those of %s stand in; fx_passes.calibrate() measures", name, _DEFAULT
    )


def _parse(path: Path) -> dict[str, Figures]:
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {name: Figures(**row) for name, row in rows.items()}


def _read(path: Path) -> dict[str, Figures]:
    try:
        return _parse(path)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        _log.warning("no figures of devices from %s: %s", path, error)
        return {}


def calibrate(
    path: str | os.PathLike[str] | None = None, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Measure the current device, in a minute or less, and return its figures as they are written.

    Args:
        path: file to write to, other than `user_table()`, where `cost_model` looks; its folder
            exists.
        group: ranks that exchange, all of which call this, after `moe_ops.comm.setup`: messages are
            of 4096 tokens of 8192 bytes, or as long as that allows; rank 0's figures become those
            of all, so that all schedule alike. None: figures of exchanges stay as the table has
            them, also where torch.distributed runs.

    Raises:
        TypeError: the group is no ProcessGroup.
        ValueError: on every rank, before anything is measured, if one cannot write the file, the
            group was set up for less than 8 MiB at once, which tells no bandwidth, or it exchanges
            what lies elsewhere than on the device.
    """
    if not (group is None or isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            "calibrate: group must be a ProcessGroup of which this rank is a member, or None, got "
            f"{group!r}"
        )
    device = device_of(group) if group else torch.device("cpu" if _on_cpu() else "cuda")
    place = Path(path or user_table())
    if not path:
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
    agree("calibrate", group_name_of(group), functools.partial(_check, place, group, device))
    steps = [_matmul, _memory, _launch]
    if group is not None and group.size() > 1:
        message = _message(group, _Bench(device))
        steps += [functools.partial(_exchange, group, *message)]
        steps += [functools.partial(_collective, group)]
    found: dict[str, Any] = {}
    for step in _progress(steps, shown=group is None or group.rank() == 0):
        found |= step(_Bench(device))
    name = device_name()
    row = dataclasses.asdict(dataclasses.replace(figures_of(name), **found))
    if group is not None:
        boxes = [row]
        dist.broadcast_object_list(boxes, group=group, group_src=0)
        row = boxes[0]
    _write(place, name, row)
    return row


def _check(place: Path, group: dist.ProcessGroup | None, device: torch.device) -> None:
    if device.type != ("cpu" if _on_cpu() else "cuda"):
        raise ValueError(f"calibrate: group must exchange what lies on the GPU, got {device.type}")
    if group is not None and group.size() > 1:
        _message(group, _Bench(device))
    if not can_write(place):
        raise ValueError(
            f"calibrate: path must be a file in a folder that can be written, got {str(place)!r}"
        )


def can_write(path: str | os.PathLike[str]) -> bool:
    """Whether it may name a file to write."""
    place = Path(path).absolute()
    return not place.is_dir() and place.parent.is_dir() and os.access(place.parent, os.W_OK)


def _on_cpu() -> bool:
    return not torch.cuda.is_available()


def _progress(steps: list[Any], shown: bool) -> Iterable[Any]:
    try:
        from tqdm import tqdm  # noqa: PLC0415 - optional
    except ImportError:
        return steps
    return tqdm(steps, desc="calibrate", disable=not shown)


def _write(path: Path, name: str, row: dict[str, Any]) -> None:
    """Other processes may do the same at once."""
    import filelock  # noqa: PLC0415 - needed by those who calibrate alone

    with filelock.FileLock(path.with_name(path.name + ".lock")):
        rows = {other: dataclasses.asdict(figures) for other, figures in _read(path).items()}
        written = path.with_name(path.name + ".new")
        written.write_text(json.dumps(rows | {name: row}, indent=1, sort_keys=True))
        os.replace(written, path)


@dataclasses.dataclass(frozen=True)
class _Bench:
    """Times calls on one device; every rank makes as many."""

    device: torch.device

    def seconds(self, run: Callable[[], Any], hot: bool = False) -> float:
        """Device time of a call, without what the host adds: a GPU replays a graph of them."""
        for _ in range(_WARM_UP):
            run()
        calls, repeats = self._captured(run)
        self._burst(calls, repeats)
        if hot and self.device.type == "cuda":
            end = time.perf_counter() + _HOT_S
            while time.perf_counter() < end:
                self._burst(calls, repeats)
        return statistics.median(self._burst(calls, repeats) for _ in range(_BURSTS)) / _CALLS

    def _captured(self, run: Callable[[], Any]) -> tuple[Callable[[], Any], int]:
        """What runs it `_CALLS` times: a function, and how often to call that one."""
        if self.device.type == "cpu":
            return run, _CALLS
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(_CALLS):
                run()
        return graph.replay, 1

    def _burst(self, calls: Callable[[], Any], repeats: int) -> float:
        self._wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            calls()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def size(self, gpu: int, cpu: int) -> int:
        """How much work a device gets."""
        return cpu if self.device.type == "cpu" else gpu


def _matmul(bench: _Bench) -> dict[str, Any]:
    size = bench.size(8192, 256)
    flops = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        a = torch.randn(size, size, device=bench.device).to(dtype)
        seconds = bench.seconds(functools.partial(torch.mm, a, a), hot=True)
        flops[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds
    return {"matmul_flops": flops}


def _memory(bench: _Bench) -> dict[str, Any]:
    x = torch.zeros(bench.size(1 << 28, 1 << 24), device=bench.device)
    y = torch.empty_like(x)
    return {"memory_bytes_per_s": 2 * x.nbytes / bench.seconds(lambda: y.copy_(x))}


def _launch(bench: _Bench) -> dict[str, Any]:
    x = torch.zeros(1, device=bench.device)
    per_call = 64

    def run() -> None:
        for _ in range(per_call):
            x.add_(1)

    return {"launch_s": bench.seconds(run) / per_call}


def _message(group: dist.ProcessGroup, bench: _Bench) -> tuple[int, int]:
    """Tokens of a long exchange and bytes of each: what the engine `nvlink` has no room for would
    go over NCCL.
    """
    num_tokens, row_bytes = bench.size(4096, 512), bench.size(8192, 1024)
    if (space := nvlink.workspace(group.group_name)) is None:
        return num_tokens, row_bytes
    row_bytes = min(row_bytes, space.row_bytes // _ROW_UNIT * _ROW_UNIT)
    num_tokens = min(max(num_tokens, -(-_LEAST_BYTES // row_bytes)), space.max_tokens)
    if num_tokens * row_bytes < _LEAST_BYTES:
        raise ValueError(
            f"calibrate: group must exchange at least {_LEAST_BYTES} bytes at once to tell a "
            f"bandwidth, got {space.max_tokens} tokens of {space.row_bytes} bytes; call comm.setup "
            "with more"
        )
    return num_tokens, row_bytes


def _exchange(
    group: dist.ProcessGroup, num_tokens: int, row_bytes: int, bench: _Bench
) -> dict[str, Any]:
    """dispatch and combine, of few rows and of many; in capacity mode, which GPUs capture."""
    num_ranks, top_k = group.size(), 8
    dtype = torch.float32 if bench.device.type == "cpu" else torch.bfloat16
    width = row_bytes // dtype.itemsize
    stream = torch.Generator().manual_seed(group.rank())

    def times(num_tokens: int) -> tuple[float, float]:
        """Of a plan, and of a dispatch or combine."""
        ids = torch.randint(8 * num_ranks, (num_tokens, top_k), generator=stream)
        ids, x = (
            ids.to(bench.device),
            torch.zeros(num_tokens, width, dtype=dtype, device=bench.device),
        )
        capacities = {
            "max_tokens": num_tokens,
            "copy_capacity": num_tokens * num_ranks,
            "row_capacity": num_tokens * num_ranks * top_k,
        }

        def plan() -> moe_ops.Plan:
            return moe_ops.exchange_plan(ids, 8 * num_ranks, group=group, **capacities)

        tensors = plan().tensors()
        name = group.group_name

        def there_and_back() -> None:
            rows, _ = torch.ops.moe_ops.dispatch(x, None, tensors, name, "full")
            torch.ops.moe_ops.combine(rows, None, None, tensors, name)

        return bench.seconds(plan), bench.seconds(there_and_back) / 2

    plan_s, few_s = times(16)
    _, many_s = times(num_tokens)
    copies = expected_copies(num_tokens, top_k, num_ranks) * (1 - 1 / num_ranks)
    return {
        "plan_s": plan_s,
        "exchange_s": few_s,
        "exchange_bytes_per_s": copies * row_bytes / _rest(many_s, few_s),
    }


def _collective(group: dist.ProcessGroup, bench: _Bench) -> dict[str, Any]:
    """An even all-to-all, of nearly nothing and of much."""

    def seconds(num_bytes: int) -> float:
        x = torch.zeros(num_bytes, dtype=torch.uint8, device=bench.device)
        y = torch.empty_like(x)
        return bench.seconds(lambda: dist.all_to_all_single(y, x, group=group))

    num_ranks = group.size()
    num_bytes = bench.size(1 << 28, 1 << 20) // num_ranks * num_ranks
    few_s, many_s = seconds(num_ranks), seconds(num_bytes)
    off_rank = num_bytes * (1 - 1 / num_ranks)
    return {
        "collective_s": few_s,
        "collective_bytes_per_s": off_rank / _rest(many_s, few_s),
    }


def _rest(many_s: float, few_s: float) -> float:
    """Time that bytes alone take, where noise may have eaten most of it."""
    return max(many_s - few_s, many_s / 10)
