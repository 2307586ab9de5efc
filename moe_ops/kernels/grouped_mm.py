"""CUDA kernels of grouped_mm, its wgrad, and their gathered forms, none of which waits for the
device: csrc/grouped_mm.cuh on compute capability 9.0, else `torch._grouped_mm`, else Triton
(`grouped_mm_triton`, `grouped_mm_wgrad_triton`), else, or in float64, a masked matmul an expert.

Letters as in `moe_ops.ops.grouped_mm`.
"""

from __future__ import annotations

import torch

from ..comm import in_flight
from ..layout import expert_of_row, held_rows
from . import native
from .kernel import Kernel, capability, has_triton

_MOST_ROWS = 1 << 30  # that csrc/maps.h can address
_ALIGNMENT = 16  # bytes, of rows and of the first element, for the copy engine

# A gathering matmul is 18 to 26 % slower than a plain one (H200, 2026-11-30), the copy it saves
# costs as much as this many columns of output (OLMoE, Qwen3: even at 1024).
_GATHERED_COLUMNS = 1024


def _sizes_are_aligned(operands: tuple[torch.Tensor, ...]) -> bool:
    """All sizes but the number of rows are multiples of 8, and none is zero."""
    widths = all(size % 8 == 0 and size > 0 for t in operands for size in t.shape[1:])
    return widths and 0 < operands[0].shape[0] <= _MOST_ROWS


def native_takes(*operands: torch.Tensor) -> bool:
    """csrc/ takes bf16 and fp16 with sizes, but for the number of rows, that are multiples of 8."""
    first = operands[0]
    return (
        first.dtype in (torch.bfloat16, torch.float16)
        and capability(first.device) == (9, 0)
        and _sizes_are_aligned(operands)
        and native.available()
    )


def aligned(rows: torch.Tensor) -> torch.Tensor:
    """`rows`, contiguous and aligned for the copy engine."""
    rows = rows.contiguous()
    rows = rows if rows.data_ptr() % _ALIGNMENT == 0 else rows.clone()
    return rows.view(-1).view(rows.shape)  # a dimension of size 1 may have had any stride


def aligned_weights(w_LOI: torch.Tensor) -> torch.Tensor:
    """The same for weights, of which a transposed view may stay one."""
    if w_LOI.mT.is_contiguous() and not w_LOI.is_contiguous():
        return aligned(w_LOI.mT).mT
    return aligned(w_LOI)


def tickets(like: torch.Tensor) -> torch.Tensor | None:
    """int32 [1] of which csrc/grouped_mm.cuh draws its tiles beside an exchange. Those of its
    clusters that find their multiprocessors taken start when the exchange is over; a share of their
    own would then come on top of the others' time (Qwen3, wgrad: 1372 us instead of 856). Gathered
    rows know their tiles ahead and are not drawn.
    """
    beside = in_flight.runs_beside(like.device)
    return like.new_zeros(1, dtype=torch.int32) if beside else None


def native_grouped_mm(
    a_CI: torch.Tensor, w_LOI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    """csrc/grouped_mm.cuh."""
    return _native(a_CI, None, 1, w_LOI, offsets_L)


def native_gather_grouped_mm(
    x_TI: torch.Tensor,
    slot_of_row_C: torch.Tensor,
    top_k: int,
    w_LOI: torch.Tensor,
    offsets_L: torch.Tensor,
) -> torch.Tensor:
    """csrc/grouped_mm.cuh; its producers copy rows of x, 16 bytes at a time."""
    return _native(x_TI, slot_of_row_C.contiguous(), top_k, w_LOI, offsets_L)


def _native(
    a: torch.Tensor,
    slots: torch.Tensor | None,
    top_k: int,
    w_LOI: torch.Tensor,
    offsets_L: torch.Tensor,
) -> torch.Tensor:
    num_rows = (a if slots is None else slots).shape[0]
    c_CO = a.new_empty(num_rows, w_LOI.shape[1])
    torch.ops.moe_ops_native.grouped_mm(
        aligned(a),
        slots,
        top_k,
        aligned_weights(w_LOI),
        offsets_L.contiguous(),
        tickets(a) if slots is None else None,
        c_CO,
    )
    return c_CO


def native_wgrad(g_CO: torch.Tensor, a_CI: torch.Tensor, offsets_L: torch.Tensor) -> torch.Tensor:
    """csrc/grouped_mm.cuh; an empty group gives zeros."""
    return _native_wgrad(g_CO, a_CI, offsets_L, g_CO.dtype)


def native_wgrad_f32(
    g_CO: torch.Tensor, a_CI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    """The same without rounding the sums."""
    return _native_wgrad(g_CO, a_CI, offsets_L, torch.float32)


def _native_wgrad(
    g_CO: torch.Tensor, a_CI: torch.Tensor, offsets_L: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    w_LOI = g_CO.new_empty(offsets_L.shape[0], g_CO.shape[1], a_CI.shape[1], dtype=dtype)
    torch.ops.moe_ops_native.grouped_mm_wgrad(
        aligned(g_CO), aligned(a_CI), offsets_L.contiguous(), tickets(a_CI), w_LOI, False
    )
    return w_LOI


def _takes_matmul(a_CI: torch.Tensor, w_LOI: torch.Tensor, offsets_L: torch.Tensor) -> bool:
    return native_takes(a_CI, w_LOI)


def _takes_gather(
    x_TI: torch.Tensor,
    slot_of_row_C: torch.Tensor,
    top_k: int,
    w_LOI: torch.Tensor,
    offsets_L: torch.Tensor,
) -> bool:
    few_columns = w_LOI.shape[1] <= _GATHERED_COLUMNS
    some_rows = 0 < slot_of_row_C.shape[0] <= _MOST_ROWS
    return few_columns and some_rows and native_takes(x_TI, w_LOI)


def _takes_wgrad(g_CO: torch.Tensor, a_CI: torch.Tensor, offsets_L: torch.Tensor) -> bool:
    return native_takes(g_CO, a_CI)


def _torch_takes(a: torch.Tensor, b: torch.Tensor, offsets_L: torch.Tensor) -> bool:
    """`torch._grouped_mm` has a kernel without host sync for bf16 on compute capability 9 and
    up.
    """
    return (
        a.dtype == torch.bfloat16
        and capability(a.device) >= (9, 0)
        and _sizes_are_aligned((a, b))
        and offsets_L.shape[0] > 0
    )


def torch_grouped_mm(
    a_CI: torch.Tensor, w_LOI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    """`torch._grouped_mm`, whose rows past the last offset are uninitialised."""
    w_LIO = aligned_weights(w_LOI).mT
    c_CO = torch._grouped_mm(aligned(a_CI), w_LIO, offs=offsets_L)
    return torch.where(held_rows(offsets_L, c_CO.shape[0])[:, None], c_CO, 0)


def torch_wgrad(g_CO: torch.Tensor, a_CI: torch.Tensor, offsets_L: torch.Tensor) -> torch.Tensor:
    """`torch._grouped_mm` over groups of the shared dimension; an empty group gives zeros."""
    return torch._grouped_mm(aligned(g_CO).mT, aligned(a_CI), offs=offsets_L)


def _masked_takes(a: torch.Tensor, *others: torch.Tensor) -> bool:
    """What Triton's matmuls, which come later in the list, do not take."""
    return a.dtype == torch.float64 or not has_triton()


def masked_grouped_mm(
    a_CI: torch.Tensor, w_LOI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    """One full-height matmul an expert: L times the flops, but any dtype and no host sync."""
    expert_C = expert_of_row(offsets_L, a_CI.shape[0])
    c_CO = a_CI.new_zeros(a_CI.shape[0], w_LOI.shape[1])
    for expert, w_OI in enumerate(w_LOI.unbind(0)):
        c_CO = torch.where((expert_C == expert)[:, None], a_CI @ w_OI.mT, c_CO)
    return c_CO


def masked_wgrad(g_CO: torch.Tensor, a_CI: torch.Tensor, offsets_L: torch.Tensor) -> torch.Tensor:
    """One full-height matmul an expert with the other experts' rows set to zero."""
    expert_C = expert_of_row(offsets_L, a_CI.shape[0])
    wgrads = []
    for expert in range(offsets_L.shape[0]):
        mine = (expert_C == expert)[:, None]
        wgrads.append(torch.where(mine, g_CO, 0).mT @ torch.where(mine, a_CI, 0))
    return torch.stack(wgrads)


KERNELS: dict[str, list[Kernel]] = {
    "grouped_mm": [
        Kernel("csrc/grouped_mm.cuh", _takes_matmul, native_grouped_mm),
        Kernel("torch._grouped_mm", _torch_takes, torch_grouped_mm),
        Kernel("masked matmuls", _masked_takes, masked_grouped_mm),
    ],
    "grouped_mm_wgrad": [
        Kernel("csrc/grouped_mm.cuh", _takes_wgrad, native_wgrad),
        Kernel("torch._grouped_mm", _torch_takes, torch_wgrad),
        Kernel("masked matmuls", _masked_takes, masked_wgrad),
    ],
    "grouped_mm_wgrad_f32": [Kernel("csrc/grouped_mm.cuh", _takes_wgrad, native_wgrad_f32)],
    "gather_grouped_mm": [Kernel("csrc/grouped_mm.cuh", _takes_gather, native_gather_grouped_mm)],
}
