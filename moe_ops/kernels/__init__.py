"""The one place where an operator's kernel is chosen, for eager CUDA calls and for the `lower` pass
alike.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from .. import _library
from . import autotune
from .kernel import Kernel, has_triton

# Modules with a dict KERNELS: operator -> its kernels, best first. Those of the second list are
# written in Triton and serve only where it is installed.
_MODULES = ["grouped_mm", "grouped_mm_swiglu", "router_linear"]
_TRITON_MODULES = [
    "permute",
    "row_dot",
    "swiglu",
    "grouped_bias",
    "sort_chunks",
    "sort_slots",
    "topk_route",
    "topk_route_backward",
]


@functools.cache
def _kernels() -> dict[str, list[Kernel]]:
    """Operator -> its kernels, best first; the reference takes what they do not."""
    names = _MODULES + (_TRITON_MODULES if has_triton() else [])
    kernels: dict[str, list[Kernel]] = {}
    for name in names:
        for op, more in importlib.import_module(f"{__name__}.{name}").KERNELS.items():
            kernels.setdefault(op, []).extend(more)
    return kernels


def choose(op: str, *args: Any) -> Callable[..., Any]:
    """The fastest kernel of operator `op` that takes these arguments (device, dtypes, shapes)."""
    if autotune.enabled():
        _tune_once(op, args)
    kernel = _chosen(op, args)
    if kernel is not None:
        return kernel.run
    return (_library.OPS.get(op) or _library.PRIVATE_OPS[op]).reference


def name_of(op: str, *args: Any) -> str:
    """Name of the kernel that `choose` would give, or "reference"."""
    kernel = _chosen(op, args)
    return "reference" if kernel is None else kernel.name


def fuses(op: str, *args: Any) -> bool:
    """Whether private operator `op` is worth having for these arguments: a kernel does all of it
    without the tensors that it is to save. On the CPU the reference stands for such a kernel.
    """
    if next(arg for arg in args if isinstance(arg, torch.Tensor)).device.type == "cpu":
        return True
    kernel = _chosen(op, args)
    return kernel is not None and not kernel.composes


def tune(op: str, *args: Any) -> dict[str, float]:
    """Time operator `op` on these arguments, kernel by kernel: microseconds by kernel's name.

    The times go into the user's table (`autotune.user_table`), by which `choose` goes from then on.

    Raises:
        ValueError: the tensors are not on a GPU, or no operator has this name.
    """
    if op not in _library.OPS and op not in _library.PRIVATE_OPS:
        raise ValueError(f"tune: op must be an operator of moe_ops, got {op!r}")
    device = next(arg for arg in args if isinstance(arg, torch.Tensor)).device
    if device.type != "cuda":
        raise ValueError(f"tune: tensors must be on a GPU, got {device}")
    return autotune.tune(op, args, _kernels().get(op, []))


def _tune_once(op: str, args: tuple[Any, ...]) -> None:
    several = len(_kernels().get(op, [])) > 1
    if several and not autotune.ranking(op, args) and not _capturing():
        tune(op, *args)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _chosen(op: str, args: tuple[Any, ...]) -> Kernel | None:
    """None: the reference."""
    kernels = _kernels().get(op, [])
    if len(kernels) > 1 and (ranked := autotune.ranking(op, args)):
        rest = len(ranked)
        place = {name: rank for rank, name in enumerate(ranked)}
        kernels = sorted(kernels, key=lambda kernel: place.get(kernel.name, rest))
    return next((kernel for kernel in kernels if kernel.takes(*args)), None)


def table() -> dict[str, list[str]]:
    """Operator -> names of its kernels, best first."""
    return {
        op: [kernel.name for kernel in _kernels().get(op, [])] + ["reference"]
        for op in (*_library.OPS, *_library.PRIVATE_OPS)
    }
