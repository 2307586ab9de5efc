"""What one kernel of an operator is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Kernel(NamedTuple):
    """`run` takes the operator's arguments, on CUDA, whenever `takes` says so of them.

    `takes` looks at devices, dtypes and shapes alone, so a pass may ask it of fake tensors.
    `composes`: of a fused operator, it still writes the tensors that fusing is to save, so that
    passes leave the plain operators alone.
    """

    name: str
    takes: Callable[..., bool]
    run: Callable[..., Any]
    composes: bool = False


def always(*args: Any) -> bool:
    """`takes` of a kernel that serves every argument the operator's check lets through."""
    return True
