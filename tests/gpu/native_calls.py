"""Calls of the native grouped matmuls, as operators and bare, and the same in plain PyTorch.

`python -m tests.gpu.native_calls` makes every bare call once, for compute-sanitizer to watch.

Letters as in `moe_ops.ops.grouped_mm_swiglu`, of which F is O here: I features are summed over, O
come out of each half. T tokens, K top-k.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree

from moe_ops import kernels
from moe_ops.kernels import native
from moe_ops.testing import DTYPE_NAMES, assert_close
from tests.gpu import skip_without_library

DEVICE = "cuda"
NATIVE = "csrc/grouped_mm.cuh"
FORMS = {
    "silu": ("silu", None, 1.0, 0.0),
    "gelu": ("gelu", None, 1.0, 0.0),
    "limited": ("silu", 7.0, 1.702, 1.0),
    "scaled": ("silu", None, 1.702, 0.0),
    "limited_gelu": ("gelu", 2.0, 1.0, 0.5),
}
OUTPUTS = {
    "grouped_mm": ["c_CO"],
    "gather_grouped_mm": ["c_CO"],
    "grouped_mm_wgrad": ["w_LOI"],
    "grouped_mm_wgrad_f32": ["w_LOI"],
    "grouped_mm_swiglu": ["h_C2F", "a_CF"],
    "grouped_mm_swiglu_backward": ["grad_h_C2F", "a_CF", "grad_row_weights_C"],
}
# What a float32 output may differ by, in TOLERANCE: tensor cores round sums towards zero, and a row
# weight's gradient sums values that were rounded to 16 bits, a few of them the other way.
FLOAT32_SCALES = {"w_LOI": 20.0, "grad_row_weights_C": 200.0}

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=DTYPE_NAMES.get)


def skip_without_native() -> None:
    skip_without_library()
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no GPU of compute capability 9.0, for which the library is made")


def values(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int().to(DEVICE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Experts' `counts` of rows, then a `tail` that holds NaN."""

    counts: list[int]
    tail: int = 70
    width_o: int = 136
    width_i: int = 72
    top_k: int = 4
    dtype: torch.dtype = torch.bfloat16
    size_of_h: float = 3.0  # standard deviation: some values pass the limit

    @property
    def num_rows(self) -> int:
        return sum(self.counts) + self.tail

    def rows(self, width: int, seed: int, scale: float = 1.0) -> torch.Tensor:
        rows = values(self.num_rows, width, dtype=self.dtype, seed=seed).mul_(scale)
        rows[sum(self.counts) :] = torch.nan
        return rows

    def row_weights(self) -> torch.Tensor:
        weights_C = values(self.num_rows, dtype=torch.float32, seed=1)
        weights_C[sum(self.counts) :] = torch.nan
        return weights_C

    def weights(self, num_rows: int, num_columns: int, scale: float = 1.0) -> torch.Tensor:
        """Of such a size that products with rows of 1 have that of `scale`."""
        shape = len(self.counts), num_rows, num_columns
        return values(*shape, dtype=self.dtype, seed=2).mul_(scale * self.width_i**-0.5)

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x_TI and slot_of_row_C, where every seventh row has none."""
        num_tokens = self.num_rows // self.top_k + 3
        stream = torch.Generator().manual_seed(3)
        slots = torch.randperm(num_tokens * self.top_k, generator=stream)[: self.num_rows]
        slots[::7], slots[sum(self.counts) :] = -1, -1
        x_TI = values(num_tokens, self.width_i, dtype=self.dtype, seed=4)
        return x_TI, slots.int().to(DEVICE)


@dataclasses.dataclass(frozen=True)
class Call:
    """An operator with one kind of arguments."""

    op: str
    transposed: bool = False
    form: str = "silu"
    weighted: bool = True
    keep_h: bool = True

    def arguments(self, sizes: Sizes) -> tuple[Any, ...]:
        width_o, width_i = sizes.width_o, sizes.width_i
        offsets_L = offsets_of(sizes.counts)
        if self.op.startswith("grouped_mm_wgrad"):
            return sizes.rows(width_o, 5), sizes.rows(width_i, 6), offsets_L
        if "swiglu" not in self.op:
            x_TI, slots = sizes.tokens() if self.op.startswith("gather") else (None, None)
            first = (sizes.rows(width_i, 6),) if x_TI is None else (x_TI, slots, sizes.top_k)
            transposed = self.transposed
            w = (
                sizes.weights(width_i, width_o).mT
                if transposed
                else sizes.weights(width_o, width_i)
            )
            return (*first, w, offsets_L)
        row_weights_C = sizes.row_weights() if self.weighted else None
        rest = row_weights_C, offsets_L, *FORMS[self.form]
        if self.op == "grouped_mm_swiglu":
            w13 = sizes.weights(2 * width_o, width_i, scale=sizes.size_of_h)
            return sizes.rows(width_i, 6), None, 1, w13, *rest, self.keep_h
        w2 = sizes.weights(width_i, width_o).mT
        h = sizes.rows(2 * width_o, 7, scale=sizes.size_of_h)
        return sizes.rows(width_i, 6), None, 1, w2, h, *rest


CALLS = {
    "forward": Call("grouped_mm"),
    "dgrad": Call("grouped_mm", transposed=True),
    "wgrad": Call("grouped_mm_wgrad"),
    "wgrad_f32": Call("grouped_mm_wgrad_f32"),
    "gather": Call("gather_grouped_mm"),
    "gather_dgrad": Call("gather_grouped_mm", transposed=True),
    "swiglu": Call("grouped_mm_swiglu"),
    "swiglu_alone": Call("grouped_mm_swiglu", weighted=False, keep_h=False),
    "geglu": Call("grouped_mm_swiglu", form="gelu"),
    "limited": Call("grouped_mm_swiglu", form="limited", weighted=False),
    "swiglu_backward": Call("grouped_mm_swiglu_backward"),
    "swiglu_backward_alone": Call("grouped_mm_swiglu_backward", weighted=False),
    "geglu_backward": Call("grouped_mm_swiglu_backward", form="gelu"),
    "limited_backward": Call("grouped_mm_swiglu_backward", form="limited"),
}
all_calls = pytest.mark.parametrize("call", CALLS)


def run(op: str, *args: Any) -> list[torch.Tensor]:
    return pytree.tree_leaves(getattr(torch.ops.moe_ops, op)(*args))


def plain(op: str, *args: Any) -> list[torch.Tensor]:
    """The operator, and those that it calls, by their references alone."""
    with mock.patch.object(kernels, "_kernels", dict):
        return run(op, *args)


def plain_f64(op: str, *args: Any) -> list[torch.Tensor]:
    def widened(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double() if tensor.is_floating_point() else tensor

    return plain(op.removesuffix("_f32"), *pytree.tree_map_only(torch.Tensor, widened, args))


def argument(op: str, name: str, args: tuple[Any, ...]) -> torch.Tensor:
    schema = getattr(torch.ops.moe_ops, op).default._schema
    return args[[a.name for a in schema.arguments].index(name)]


def is_native(op: str, *args: Any) -> bool:
    return kernels.name_of(op, *args) == NATIVE


def check(op: str, *args: Any, by_native: bool = True) -> None:
    """At most twice the error of plain PyTorch in the same dtype; zeros in tails and for experts
    without rows.
    """
    assert is_native(op, *args) == by_native, kernels.name_of(op, *args)
    offsets_L = argument(op, "offsets_L", args)
    found, same, exact = run(op, *args), plain(op, *args), plain_f64(op, *args)
    for name, value, same_dtype, f64 in zip(OUTPUTS[op], found, same, exact, strict=True):
        assert value.dtype == same_dtype.dtype and value.is_contiguous(), name
        scale = 0.0
        if value.dtype == torch.float32 and value.numel():
            scale = FLOAT32_SCALES[name] * f64.abs().max().item()
        assert_close(name, value, f64, same_dtype, scale=scale)
        if name == "w_LOI":
            unused = offsets_L.diff(prepend=offsets_L.new_zeros(1)) == 0
            assert not value[unused].count_nonzero(), f"{name} of an expert without rows"
        else:
            assert not value[offsets_L[-1] :].count_nonzero(), f"tail of {name}"


Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


def launch(
    empty: Empty, op: str, *args: Any, tickets: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """What the operator returns, by the bare call behind it, with outputs that `empty` makes."""
    library = torch.ops.moe_ops_native
    if op.startswith("grouped_mm_wgrad"):
        g, a, offsets = args
        dtype = torch.float32 if op.endswith("_f32") else a.dtype
        w = empty((offsets.shape[0], g.shape[1], a.shape[1]), dtype)
        library.grouped_mm_wgrad(g, a, offsets, tickets, w, False)
        return [w]
    if "swiglu" not in op:
        a, *gather, w, offsets = args
        slots, top_k = gather or (None, 1)
        c = empty(((a if slots is None else slots).shape[0], w.shape[1]), a.dtype)
        library.grouped_mm(a, slots, top_k, w, offsets, tickets, c)
        return [c]
    if op == "grouped_mm_swiglu":
        return _launch_swiglu(empty, tickets, *args)
    return _launch_swiglu_backward(empty, tickets, *args)


def _launch_swiglu(empty: Empty, tickets: torch.Tensor | None, *args: Any) -> list[torch.Tensor]:
    a, _, _, w13, row_weights, offsets, act, limit, *scales, keep_h = args
    num_rows, width = a.shape[0], w13.shape[1]
    h, out = (
        empty((num_rows if keep_h else 0, width), a.dtype),
        empty((num_rows, width // 2), a.dtype),
    )
    limit = torch.inf if limit is None else limit
    torch.ops.moe_ops_native.grouped_mm_swiglu(
        *(a, w13, row_weights, offsets, tickets, act, limit, *scales),
        *(h if keep_h else None, out),
    )
    return [h, out]


def _launch_swiglu_backward(
    empty: Empty, tickets: torch.Tensor | None, *args: Any
) -> list[torch.Tensor]:
    g, _, _, w, h, row_weights, offsets, act, limit, *scales = args
    num_rows, width = h.shape[0], w.shape[1]
    grad_h, out = empty(tuple(h.shape), h.dtype), empty((num_rows, width), h.dtype)
    parts = empty((num_rows if row_weights is not None else 0, -(-width // 256)), torch.float32)
    limit = torch.inf if limit is None else limit
    torch.ops.moe_ops_native.grouped_mm_swiglu_backward(
        *(g, w, h, row_weights, offsets, tickets, act, limit, *scales),
        *(grad_h, out, None if row_weights is None else parts),
    )
    return [grad_h, out, parts.clone().sum(1)]


def main() -> None:
    """Every bare call once: full and partial tiles, odd numbers of them, an expert without rows."""
    if not native.available():
        raise SystemExit(native.status())
    sizes = Sizes(counts=[1, 260, 0, 3], tail=2, width_o=264)

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=DEVICE)

    for call in CALLS.values():
        for tickets in (None, torch.zeros(1, dtype=torch.int32, device=DEVICE)):
            launch(empty, call.op, *call.arguments(sizes), tickets=tickets)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
