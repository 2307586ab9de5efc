"""Triton kernels: on the CPU, in Triton's interpreter."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from moe_ops import _library
from moe_ops.testing import assert_close, assert_equal

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def on_device(arguments: Any) -> Any:
    """Arguments with their tensors where kernels run, strides kept."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().to(DEVICE), arguments)


def check_kernel(op: str, run: Callable[..., Any], *arguments: Any, exact: bool = False) -> None:
    """run(*arguments) gives what operator `op` gives, twice the same bits; with `exact` also the
    reference's bits.
    """
    arguments = on_device(arguments)
    reference = _library.OPS[op].reference
    in_float64 = pytree.tree_map_only(
        torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, arguments
    )
    results = [
        pytree.tree_leaves(function(*inputs))
        for function, inputs in (
            (run, arguments),
            (run, arguments),
            (reference, arguments),
            (reference, in_float64),
        )
    ]
    for index, (found, again, same, oracle) in enumerate(zip(*results, strict=True)):
        name = f"{op} output {index}"
        assert found.dtype == same.dtype and found.is_contiguous(), name
        assert_equal(f"{name}, second run", again, found)
        if exact:
            assert_equal(name, found, same)
        else:
            assert_close(name, found, oracle, same)


def _let_tensors_bound_loops() -> None:
    """The interpreter's scalars are arrays of shape [1], and numpy 2.4 no longer takes those for
    integers, so `range` over one fails.
    """
    from triton.runtime import interpreter  # noqa: PLC0415 - optional package

    patch = interpreter._patch_lang_tensor

    def patch_again(tensor: type, *args: Any) -> None:
        patch(tensor, *args)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_again


def _let_dot_take_bfloat16() -> None:
    """The interpreter holds bfloat16 as uint16, and its `tl.dot` multiplies these integers."""
    import numpy as np  # noqa: PLC0415 - optional package
    import triton.language as tl  # noqa: PLC0415 - optional package
    from triton.runtime import interpreter  # noqa: PLC0415 - optional package

    create_dot = interpreter.InterpreterBuilder.create_dot

    def to_float32(handle: Any) -> Any:
        if handle.dtype != tl.bfloat16:
            return handle
        values = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(values, tl.float32)

    def dot(self: Any, a: Any, b: Any, *args: Any) -> Any:
        return create_dot(self, to_float32(a), to_float32(b), *args)

    interpreter.InterpreterBuilder.create_dot = dot


if importlib.util.find_spec("triton"):
    _let_tensors_bound_loops()
    _let_dot_take_bfloat16()
