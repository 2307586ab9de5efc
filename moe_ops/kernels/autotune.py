"""Which kernel is fastest where several serve: measured times, and the tuner that takes them.

`timings.json` beside this file holds what was measured on the shapes of `benchmarks.workloads` (by
`python -m benchmarks.time_kernels`); the user's own table, ~/.cache/moe_ops/timings.json or the
file that MOE_OPS_TIMINGS names, comes before it. A case of neither runs the first kernel that takes
it, unless MOE_OPS_AUTOTUNE=1: then its first call is timed and added to the user's table.

    {"NVIDIA H200": {"grouped_mm bfloat16 C<=262144 I2048 L128 O1536": {"csrc/grouped_mm.cuh": 2530,
                                                                        "torch._grouped_mm": 2850}}}

A case is an operator with a dtype, sizes by the letters of its arguments' names, and numbers. C
rows and T tokens, which differ from step to step, are rounded up to powers of two; "strided" says
that an argument is not contiguous, such as a transposed view. Times are microseconds a call,
Infinity if a kernel failed or was wrong, which is never chosen.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer

from .. import _library
from .kernel import Kernel

_log = logging.getLogger(__name__)
_SHIPPED = Path(__file__).with_name("timings.json")
_VARYING = ("C", "T")
_MEASURED_S = 0.2
_FAR_SLOWER = 4
# Of the largest value; 0 of integers.
_TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}

Timings = dict[str, dict[str, dict[str, float]]]  # device -> case -> kernel -> microseconds
Key = tuple[Hashable, ...]

_of_this_process: Timings = {}
# What a file that is no table, or may not be touched, raises.
_UNREADABLE = (OSError, ValueError, AttributeError, RecursionError)


def enabled() -> bool:
    """Whether unknown cases are timed when they are first called."""
    return os.environ.get("MOE_OPS_AUTOTUNE") == "1"


def user_table() -> Path:
    """The user's table."""
    if named := os.environ.get("MOE_OPS_TIMINGS"):
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "moe_ops" / "timings.json"


def key_of(args: Sequence[Any]) -> Key:
    """What the case of these arguments depends on. Of a dynamic graph it cannot be hashed."""
    return tuple(
        (arg.device, arg.dtype, arg.shape, arg.is_contiguous())
        if isinstance(arg, torch.Tensor)
        else arg
        for arg in args
    )


def times_of(op: str, key: Key) -> dict[str, float] | None:
    """Microseconds by kernel; None if the case was never timed."""
    device, case = _device_name(key), case_of(op, key)
    return next((t[device][case] for t in _tables() if case in t.get(device, {})), None)


def tune(op: str, args: Sequence[Any], kernels: Sequence[Kernel]) -> dict[str, float]:
    """Time the kernels that take these arguments, add that to the user's table; microseconds.

    A result must be the reference's to `_TOLERANCE` of the largest value. A kernel that is far
    slower than another is called once.
    """
    expected = _library.info(op).reference(*args)
    times: dict[str, float] = {}
    for kernel in kernels:
        if kernel.takes(*args):
            wrong = _what_is_wrong(kernel, args, expected)
            if wrong:
                _log.error("%s: kernel %s is not to be used: %s", op, kernel.name, wrong)
            best = min(times.values(), default=math.inf)
            times[kernel.name] = math.inf if wrong else _measure(kernel, args, best)
    key = key_of(args)
    _log.info("%s: %s", case_of(op, key), times)
    _add(user_table(), {_device_name(key): {case_of(op, key): times}})
    _tables.cache_clear()
    return times


def case_of(op: str, key: Key) -> str:
    """The case's name in a table."""
    sizes: dict[str, int] = {}
    numbers, strided = [], False
    for argument, part in zip(getattr(torch.ops.moe_ops, op).default._schema.arguments, key):
        if isinstance(part, tuple):
            _, _, shape, contiguous = part
            strided |= not contiguous
            letters = re.findall(r"\d*[A-Z]", argument.name.rpartition("_")[2])
            if len(letters) == len(shape):
                sizes.update(zip(letters, shape))
        elif isinstance(part, int):
            numbers.append(f"{argument.name}={part}")
    words = [
        f"{letter}<={1 << (size - 1).bit_length()}"
        if letter in _VARYING and size
        else f"{letter}{size}"
        for letter, size in sorted(sizes.items())
    ]
    dtype = str(_first_tensor(key)[1]).removeprefix("torch.")
    return " ".join([op, dtype, *words, *numbers, *["strided"] * strided])


def _first_tensor(key: Key) -> tuple[Any, ...]:
    return next(part for part in key if isinstance(part, tuple))


def _device_name(key: Key) -> str:
    device = _first_tensor(key)[0]
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.cache
def _tables() -> list[Timings]:
    """What was timed in this process, the user's, the shipped one."""
    return [_of_this_process, *(_read(path) for path in (user_table(), _SHIPPED))]


def _read(path: Path) -> Timings:
    try:
        return _parse(path)
    except _UNREADABLE as error:
        _log.warning("no timings of kernels from %s: %s", path, error)
        return {}


def _parse(path: Path) -> Timings:
    if not path.exists():
        return {}
    timings = json.loads(path.read_text())
    for cases in timings.values():
        for times in cases.values():
            if not all(isinstance(us, (int, float)) for us in times.values()):
                raise ValueError(f"times must be numbers, got {times}")
    return timings


def _add(path: Path, more: Timings) -> None:
    """Other processes may do the same at once."""
    import filelock  # noqa: PLC0415 - needed by those who tune alone

    _merge(_of_this_process, more)
    written = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_name(path.name + ".lock")):
            written.write_text(json.dumps(_merge(_parse(path), more), indent=1, sort_keys=True))
            os.replace(written, path)
    except _UNREADABLE as error:
        _log.warning(
            "timings of kernels are kept for this process only, not in %s: %s", path, error
        )


def _merge(timings: Timings, more: Timings) -> Timings:
    for device, cases in more.items():
        timings.setdefault(device, {}).update(cases)
    return timings


def _what_is_wrong(kernel: Kernel, args: Sequence[Any], expected: Any) -> str | None:
    try:
        result = kernel.run(*args)
        for got, wanted in zip(*map(pytree.tree_leaves, (result, expected)), strict=True):
            largest = wanted.abs().max().item() if wanted.numel() else 0.0
            allowed = _TOLERANCE.get(wanted.dtype, 0) * largest
            torch.testing.assert_close(got, wanted, rtol=0, atol=allowed, equal_nan=True)
    except Exception as error:  # noqa: BLE001 - whatever it is, the kernel does not serve
        return f"{type(error).__name__}: {error}"
    return None


def _measure(kernel: Kernel, args: Sequence[Any], best: float) -> float:
    timer = Timer("run(*args)", globals={"run": kernel.run, "args": args})
    seconds = timer.timeit(1).median
    if seconds * 1e6 < _FAR_SLOWER * best:
        seconds = timer.blocked_autorange(min_run_time=_MEASURED_S).median
    return round(seconds * 1e6, 1)
