"""What one kernel of an operator is."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

TensorOrNone = TypeVar("TensorOrNone", torch.Tensor, torch.Tensor | None)


class Kernel(NamedTuple):
    """`run` takes the operator's arguments, on CUDA, whenever `takes` says so of them.

    `takes` looks at devices, dtypes and shapes alone, so a pass may ask it of fake tensors.
    """

    name: str
    takes: Callable[..., bool]
    run: Callable[..., Any]


def aligned(tensor: TensorOrNone) -> TensorOrNone:
    """Contiguous, and at an address that kernels may read 16 bytes from."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


@functools.cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


@functools.cache
def has_triton() -> bool:
    """Whether Triton, which is optional, is installed."""
    return importlib.util.find_spec("triton") is not None
