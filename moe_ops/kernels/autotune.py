"""Which kernel is fastest where several serve: measured times, and the tuner that takes them.

`timings.json` beside this file holds what was measured on the shapes of `benchmarks.workloads` (by
`python -m benchmarks.time_kernels`); the user's own table, ~/.cache/moe_ops/timings.json or the
file that MOE_OPS_TIMINGS names, comes before it. A case of neither runs the first kernel that takes
it, unless MOE_OPS_AUTOTUNE=1: then its first call is timed and added to the user's table.

    {"NVIDIA H200": {"grouped_mm bfloat16 C<=262144 I2048 L128 O1536": {"csrc/grouped_mm.cuh": 2530,
                                                                        "torch._grouped_mm": 2850}}}

A case is an operator with a dtype and sizes, by the letters of its arguments' names. The numbers of
rows, tokens and slots (C, T, S), which differ from step to step, are rounded up to powers of two;
"transposed" says that an argument is a transposed view. Times are microseconds a call.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.benchmark import Timer

from .. import _library
from .kernel import Kernel

_log = logging.getLogger(__name__)
_SHIPPED = Path(__file__).with_name("timings.json")
_VARYING = ("C", "T", "S")
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


def enabled() -> bool:
    """Whether unknown cases are timed when they are first called."""
    return os.environ.get("MOE_OPS_AUTOTUNE") == "1"


def user_table() -> Path:
    """The user's table."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("MOE_OPS_TIMINGS") or Path(cache) / "moe_ops" / "timings.json")


def ranking(op: str, args: Sequence[Any]) -> list[str]:
    """Names of the kernels that were timed in this case, the fastest first."""
    tensors = tuple(arg if isinstance(arg, torch.Tensor) else None for arg in args)
    shapes = tuple(None if tensor is None else tuple(tensor.shape) for tensor in tensors)
    if not all(type(size) is int for shape in shapes if shape for size in shape):
        return []  # sizes of a graph that is dynamic
    first = next(tensor for tensor in tensors if tensor is not None)
    views = tuple(tensor is not None and _is_transposed(tensor) for tensor in tensors)
    return _ranking(op, first.device, first.dtype, shapes, views)


def tune(op: str, args: Sequence[Any], kernels: Sequence[Kernel]) -> dict[str, float]:
    """Time the kernels that take these arguments, add that to the user's table; microseconds.

    A kernel whose result is not the reference's, to `_TOLERANCE` of the largest value, gets no
    time and is logged as an error. One that is far slower than another is called once.
    """
    expected = (_library.OPS.get(op) or _library.PRIVATE_OPS[op]).reference(*args)
    times: dict[str, float] = {}
    for kernel in kernels:
        if not kernel.takes(*args):
            continue
        if wrong := _difference(kernel.run(*args), expected):
            _log.error("%s: kernel %s is wrong: %s", op, kernel.name, wrong)
            continue
        timer = Timer("run(*args)", globals={"run": kernel.run, "args": args})
        seconds = timer.timeit(1).median
        if seconds * 1e6 < _FAR_SLOWER * min(times.values(), default=math.inf):
            seconds = timer.blocked_autorange(min_run_time=_MEASURED_S).median
        times[kernel.name] = round(seconds * 1e6, 1)
    first = next(arg for arg in args if isinstance(arg, torch.Tensor))
    case = case_of(op, args)
    _log.info("%s: %s", case, times)
    _add(user_table(), {device_name(first.device): {case: times}})
    _tables.cache_clear()
    _ranking.cache_clear()
    return times


def case_of(op: str, args: Sequence[Any]) -> str:
    """The case's name in a table."""
    names = _names(op)
    tensors = [(name, arg) for name, arg in zip(names, args) if isinstance(arg, torch.Tensor)]
    shapes = tuple(tuple(arg.shape) if isinstance(arg, torch.Tensor) else None for arg in args)
    views = any(_is_transposed(tensor) for _, tensor in tensors)
    return _case(op, tensors[0][1].dtype, shapes, views)


@functools.cache
def device_name(device: torch.device) -> str:
    """As the tables have it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.lru_cache(maxsize=4096)
def _ranking(
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    shapes: tuple[tuple[int, ...] | None, ...],
    views: tuple[bool, ...],
) -> list[str]:
    case = _case(op, dtype, shapes, any(views))
    for table in _tables():
        if times := table.get(device_name(device), {}).get(case):
            return sorted(times, key=times.__getitem__)
    return []


def _case(
    op: str, dtype: torch.dtype, shapes: tuple[tuple[int, ...] | None, ...], transposed: bool
) -> str:
    sizes: dict[str, int] = {}
    for name, shape in zip(_names(op), shapes):
        letters = re.findall(r"\d*[A-Z]", name.rpartition("_")[2])
        if shape is not None and len(letters) == len(shape):
            sizes.update(zip(letters, shape))
    words = [
        f"{letter}<={1 << (size - 1).bit_length()}"
        if letter in _VARYING and size > 0
        else f"{letter}{size}"
        for letter, size in sorted(sizes.items())
    ]
    return " ".join([op, str(dtype).removeprefix("torch."), *words, *["transposed"] * transposed])


@functools.cache
def _names(op: str) -> list[str]:
    return [argument.name for argument in getattr(torch.ops.moe_ops, op).default._schema.arguments]


def _is_transposed(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and not tensor.is_contiguous() and tensor.mT.is_contiguous()


@functools.cache
def _tables() -> list[Timings]:
    """The user's, then the shipped one."""
    return [_read(path) for path in (user_table(), _SHIPPED)]


def _read(path: Path) -> Timings:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("no timings of kernels from %s: %s", path, error)
        return {}


def _add(path: Path, more: Timings) -> None:
    """Another process may do the same: the file is replaced, never half written."""
    timings = _read(path)
    for device, cases in more.items():
        timings.setdefault(device, {}).update(cases)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        json.dump(timings, file, indent=1, sort_keys=True)
    os.replace(file.name, path)


def _difference(result: Any, expected: Any) -> str | None:
    """What is wrong with a kernel's result, if anything."""
    for number, (got, wanted) in enumerate(zip(*map(pytree.tree_leaves, (result, expected)))):
        largest = wanted.abs().max().item() if wanted.numel() else 0.0
        try:
            torch.testing.assert_close(
                got, wanted, rtol=0, atol=_TOLERANCE.get(wanted.dtype, 0) * largest, equal_nan=True
            )
        except AssertionError as error:
            return f"output {number}: {error}"
    return None
