"""The one place where an operator's kernel is chosen, for eager CUDA calls and for the `lower` pass
alike.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from .. import _library
from .kernel import Kernel

# Modules with a dict KERNELS: operator -> its kernels, best first. Those of the second list are
# written in Triton and serve only where it is installed.
_MODULES = ["grouped_mm"]
_TRITON_MODULES: list[str] = []


@functools.cache
def _kernels() -> dict[str, list[Kernel]]:
    """Operator -> its kernels, best first; the reference takes what they do not."""
    names = _MODULES + (_TRITON_MODULES if importlib.util.find_spec("triton") else [])
    kernels: dict[str, list[Kernel]] = {}
    for name in names:
        for op, more in importlib.import_module(f"{__name__}.{name}").KERNELS.items():
            kernels.setdefault(op, []).extend(more)
    return kernels


def choose(op: str, *args: Any) -> Callable[..., Any]:
    """The fastest kernel of operator `op` that takes these arguments (device, dtypes, shapes)."""
    for kernel in _kernels().get(op, []):
        if kernel.takes(*args):
            return kernel.run
    return _library.OPS[op].reference


def table() -> dict[str, list[str]]:
    """Operator -> names of its kernels, best first."""
    return {
        op: [kernel.name for kernel in _kernels().get(op, [])] + ["reference"]
        for op in _library.OPS
    }
