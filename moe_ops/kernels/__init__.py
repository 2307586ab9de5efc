"""The one place where an operator's kernel is chosen, for eager CUDA calls and for the `lower` pass
alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import _library
from . import grouped_mm as _grouped_mm

# operator -> [(kernel's name, whether it takes these arguments, kernel)], best first; the reference
# takes the rest.
_KERNELS: dict[str, list[_grouped_mm.Kernel]] = {
    "grouped_mm": _grouped_mm.FORWARD,
    "grouped_mm_wgrad": _grouped_mm.WGRAD,
}


def choose(op: str, *args: Any) -> Callable[..., Any]:
    """The fastest kernel of operator `op` that takes these arguments (device, dtypes, shapes)."""
    for _, takes, kernel in _KERNELS.get(op, []):
        if takes(*args):
            return kernel
    return _library.OPS[op].reference


def table() -> dict[str, list[str]]:
    """Operator -> names of its kernels, best first."""
    return {
        op: [name for name, _, _ in _KERNELS.get(op, [])] + ["reference"] for op in _library.OPS
    }
