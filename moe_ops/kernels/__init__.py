"""The one place where an operator's kernel is chosen; passes ask here whether fusing has one."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

from .. import _library
from . import autotune
from .kernel import Kernel, has_triton

# Modules with a dict KERNELS: operator -> its kernels, in order of preference. Those of the second
# list are written in Triton and serve only where it is installed.
_MODULES = [
    "exchange_nvlink",
    "exchange_deep_ep",
    "grouped_mm",
    "grouped_mm_swiglu",
    "router_linear",
    "sort_slots",
]
_TRITON_MODULES = [
    "grouped_mm_triton",
    "grouped_mm_wgrad_triton",
    "permute",
    "row_dot",
    "swiglu",
    "grouped_bias",
    "sort_chunks",
    "sort_slots_triton",
    "topk_route",
    "topk_route_backward",
]


@functools.cache
def _kernels() -> dict[str, list[Kernel]]:
    """Operator -> its kernels, in order of preference; the reference takes what they do not."""
    names = _MODULES + (_TRITON_MODULES if has_triton() else [])
    kernels: dict[str, list[Kernel]] = {}
    for name in names:
        for op, more in importlib.import_module(f"{__name__}.{name}").KERNELS.items():
            kernels.setdefault(op, []).extend(more)
    return kernels


def choose(op: str, *args: Any) -> Callable[..., Any]:
    """The kernel of operator `op` that takes these arguments, of tensors on a GPU: the fastest that
    was timed in their case (`autotune`), else the first of the list.
    """
    if autotune.enabled():
        _tune_once(op, args)
    kernel = _chosen(op, args)
    return _library.info(op).reference if kernel is None else kernel.run


def name_of(op: str, *args: Any) -> str:
    """Name of the kernel that `choose` would give, or "reference"."""
    kernel = _chosen(op, args)
    return "reference" if kernel is None else kernel.name


def fuses(op: str, *args: Any) -> bool:
    """Whether private operator `op` is worth having for these arguments: a kernel does all of it
    without the tensors that it is to save. On the CPU the reference stands for such a kernel.
    """
    return _library.first_tensor(args).device.type == "cpu" or _chosen(op, args) is not None


def tune(op: str, *args: Any) -> dict[str, float]:
    """Time operator `op` on these arguments, kernel by kernel: microseconds by kernel's name,
    infinity for one that failed or was wrong.

    `args` are those of `torch.ops.moe_ops.<op>`, in order: `tune("grouped_mm", a_CI, w_LOI,
    offsets_L)`. The times go into the user's table (`autotune.user_table`), by which `choose` goes
    from then on. Backward calls operators, and with `w_LOI.mT`, of their own.

    Raises:
        ValueError: the tensors are not on a GPU, or no operator has this name.
    """
    _library.info(op)
    devices = [arg.device for arg in args if isinstance(arg, torch.Tensor)]
    if not devices or devices[0].type != "cuda":
        raise ValueError(f"tune: tensors must be on a GPU, got them on {devices}")
    with torch.cuda.device(devices[0]):
        times = autotune.tune(op, args, _kernels().get(op, []))
    _in_order.cache_clear()
    return times


def _tune_once(op: str, args: tuple[Any, ...]) -> None:
    kernels = [kernel for kernel in _kernels().get(op, []) if kernel.takes(*args)]
    if len(kernels) < 2 or _capturing(_library.first_tensor(args).device):
        return  # exchanges, which ranks cannot time one by one, have one kernel an engine
    times = autotune.times_of(op, autotune.key_of(args)) or {}
    if any(kernel.name not in times for kernel in kernels):
        tune(op, *args)


def _capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _chosen(op: str, args: tuple[Any, ...]) -> Kernel | None:
    """None: the reference."""
    kernels = [kernel for kernel in _kernels().get(op, []) if kernel.takes(*args)]
    if len(kernels) > 1:
        with contextlib.suppress(TypeError):  # sizes of a dynamic graph are no key
            order = _in_order(op, autotune.key_of(args))
            kernels = [kernel for kernel in order if kernel in kernels]
    return next(iter(kernels), None)


@functools.lru_cache(maxsize=4096)
def _in_order(op: str, key: autotune.Key) -> list[Kernel]:
    """By their times, without those that were wrong. One that was not timed, since it came later,
    goes before those it is preferred to.
    """
    times = autotune.times_of(op, key) or {}
    ranked: list[tuple[float, Kernel]] = []
    least = math.inf
    for kernel in reversed(_kernels()[op]):
        time = times.get(kernel.name, least)
        least = min(least, time)
        if kernel.name not in times or time < math.inf:
            ranked.insert(0, (time, kernel))
    return [kernel for _, kernel in sorted(ranked, key=lambda pair: pair[0])]


def table() -> dict[str, list[str]]:
    """Operator -> names of its kernels, in order of preference where none was timed."""
    return {
        op: [kernel.name for kernel in _kernels().get(op, [])] + ["reference"]
        for op in (*_library.OPS, *_library.PRIVATE_OPS)
    }
