"""Argument checks and their wording: `<op>: <what must hold>, got <value>[; <what to do>]`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GATES = (torch.float32, torch.float64)
IDS = (torch.int32, torch.int64)
INDICES = (torch.int32,)


def tensor(
    op: str,
    name: str,
    value: torch.Tensor,
    dim: int,
    dtypes: Sequence[torch.dtype] | None = None,
    like: torch.Tensor | None = None,
) -> None:
    """`value` has `dim` dimensions, one of `dtypes`, and the device of `like`."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if value.dim() != dim:
        raise ValueError(f"{op}: {name} must have {dim} dimensions, got shape {tuple(value.shape)}")
    if dtypes is not None and value.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{op}: {name} must be {allowed}, got {value.dtype}")
    if like is not None and value.device != like.device:
        raise ValueError(
            f"{op}: {name} must be on {like.device} like the other tensors, got {value.device}"
        )


def on_cpu(op: str, name: str, value: torch.Tensor) -> None:
    """`value` lies on the CPU, where its numbers are read without waiting for a device."""
    if value.device.type != "cpu":
        raise ValueError(f"{op}: {name} must be on the CPU, got {value.device}")


def same_size(op: str, what: str, left: int | torch.SymInt, right: int | torch.SymInt) -> None:
    """Two sizes are equal; sizes known only at run time are asserted there."""
    if type(left) is type(right) is int and left == right:  # at every call of an operator: fast
        return
    torch._check_value(left == right, lambda: f"{op}: {what}, got {left} and {right}")


def holds(op: str, condition: bool | torch.SymBool, message: Callable[[], str]) -> None:
    """`condition` about sizes is true; `message` says what must hold and what was given."""
    torch._check_value(condition, lambda: f"{op}: {message()}")


def one_of(op: str, name: str, value: object, allowed: Sequence[object]) -> None:
    """`value` is among `allowed`."""
    if value not in allowed:
        raise ValueError(f"{op}: {name} must be one of {list(allowed)}, got {value!r}")


def whole_number(op: str, name: str, value: object) -> None:
    """`value` is an int."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{op}: {name} must be a whole number, got {value!r}")


def positive(op: str, name: str, value: int) -> None:
    """`value` is at least 1."""
    if value < 1:
        raise ValueError(f"{op}: {name} must be positive, got {value}")


def capacity(op: str, name: str, value: int | torch.SymInt | None) -> None:
    """`value` is None or not negative."""
    if value is not None:
        holds(op, value >= 0, lambda: f"{name} must not be negative, got {value}")


def rows(op: str, name: str, value: torch.Tensor) -> None:
    """`value` has rows: at least one dimension."""
    if value.dim() < 1:
        raise ValueError(f"{op}: {name} must have at least 1 dimension, got {tuple(value.shape)}")


def weights(
    op: str,
    name: str,
    value: torch.Tensor,
    shape: Sequence[int | torch.SymInt],
    like: torch.Tensor,
) -> None:
    """Gate weights have the `shape` of the slots [T, K] or rows [C] they are of; float32, or
    float64 if `like`, the values to be weighted, is.
    """
    tensor(op, name, value, len(shape), GATES, like=like)
    if value.dtype == torch.float64 and like.dtype != torch.float64:
        raise TypeError(
            f"{op}: {name} may be torch.float64 only if the values are, got {like.dtype} values"
        )
    rule = f"{name} must have one weight a {'slot' if len(shape) == 2 else 'row'}"
    for dim, size in enumerate(shape):
        same_size(op, rule, value.shape[dim], size)


def row_weights(op: str, row_weights_C: torch.Tensor | None, rows: torch.Tensor) -> None:
    """Row weights, if any, are `weights` of `rows`."""
    if row_weights_C is not None:
        weights(op, "row_weights_C", row_weights_C, rows.shape[:1], like=rows)


def activation(op: str, act: str, limit: float | None, alpha: float) -> None:
    """Options of `swiglu`."""
    one_of(op, "act", act, ("silu", "gelu"))
    if limit is not None and not 0 < limit < math.inf:
        raise ValueError(f"{op}: limit must be positive and finite, or None, got {limit}")
    if act == "gelu" and alpha != 1.0:
        raise ValueError(f"{op}: alpha must be 1 with act='gelu', got {alpha}")


def ids_in_range(op: str, name: str, ids: torch.Tensor, num_experts: int) -> None:
    """Ids are experts or -1: an error at once on the CPU, an assertion on the device elsewhere."""
    inside = ((ids >= -1) & (ids < num_experts)).all()
    rule = f"{name} must be in -1 .. E-1 = {num_experts - 1}"
    torch._assert_async(inside, f"{op}: {rule}, got ids outside")


def experts(op: str, num_experts: int, num_ranks: int) -> None:
    """The experts spread evenly over the ranks."""
    if num_experts < 1 or num_experts % num_ranks:
        raise ValueError(
            f"{op}: num_experts must be a positive multiple of the group's {num_ranks} "
            f"ranks, got {num_experts}"
        )


def no_ids_outside(op: str, num_experts: int, outside_P: list[int]) -> None:
    """No rank has ids that are neither -1 nor experts; `outside_P` says how many each has."""
    if outside := {rank: number for rank, number in enumerate(outside_P) if number}:
        raise ValueError(
            f"{op}: ids_TK must be in -1 .. E-1 = {num_experts - 1}, "
            f"got ids outside on ranks (rank: how many) {outside}"
        )
