"""CUDA kernels of grouped_mm and grouped_mm_wgrad that never wait for the device.

Both use the same letters as `moe_ops.ops.grouped_mm`.
"""

from __future__ import annotations

import torch

from ..layout import expert_of_row, held_rows
from .kernel import Kernel, always


def _torch_takes(a: torch.Tensor, b: torch.Tensor, offsets_L: torch.Tensor) -> bool:
    """`torch._grouped_mm` has a kernel without host sync for bf16 on compute capability 9 and
    up.
    """
    if a.dtype != torch.bfloat16 or torch.cuda.get_device_capability(a.device) < (9, 0):
        return False
    sizes_aligned = all(size % 8 == 0 and size > 0 for t in (a, b) for size in t.shape[1:])
    return sizes_aligned and a.shape[0] > 0 and offsets_L.shape[0] > 0


def _mask_tail(rows: torch.Tensor, offsets_L: torch.Tensor) -> torch.Tensor:
    return torch.where(held_rows(offsets_L, rows.shape[0])[:, None], rows, 0)


def torch_grouped_mm(
    a_CI: torch.Tensor, w_LOI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    """`torch._grouped_mm`, whose rows past the last offset are uninitialised."""
    dense = w_LOI.is_contiguous() or w_LOI.mT.is_contiguous()
    w_LIO = (w_LOI if dense else w_LOI.contiguous()).mT
    return _mask_tail(torch._grouped_mm(a_CI.contiguous(), w_LIO, offs=offsets_L), offsets_L)


def torch_grouped_mm_wgrad(
    g_CO: torch.Tensor, a_CI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    """`torch._grouped_mm` over groups of the shared dimension; an empty group gives zeros."""
    return torch._grouped_mm(g_CO.contiguous().mT, a_CI.contiguous(), offs=offsets_L)


def masked_grouped_mm(
    a_CI: torch.Tensor, w_LOI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    """One full-height matmul an expert: L times the flops, but any dtype and no host sync."""
    expert_C = expert_of_row(offsets_L, a_CI.shape[0])
    c_CO = a_CI.new_zeros(a_CI.shape[0], w_LOI.shape[1])
    for expert, w_OI in enumerate(w_LOI.unbind(0)):
        c_CO = torch.where((expert_C == expert)[:, None], a_CI @ w_OI.mT, c_CO)
    return c_CO


def masked_grouped_mm_wgrad(
    g_CO: torch.Tensor, a_CI: torch.Tensor, offsets_L: torch.Tensor
) -> torch.Tensor:
    """One full-height matmul an expert with the other experts' rows set to zero."""
    expert_C = expert_of_row(offsets_L, a_CI.shape[0])
    wgrads = []
    for expert in range(offsets_L.shape[0]):
        mine = (expert_C == expert)[:, None]
        wgrads.append(torch.where(mine, g_CO, 0).mT @ torch.where(mine, a_CI, 0))
    return torch.stack(wgrads)


KERNELS: dict[str, list[Kernel]] = {
    "grouped_mm": [
        Kernel("torch._grouped_mm", _torch_takes, torch_grouped_mm),
        Kernel("masked matmuls", always, masked_grouped_mm),
    ],
    "grouped_mm_wgrad": [
        Kernel("torch._grouped_mm", _torch_takes, torch_grouped_mm_wgrad),
        Kernel("masked matmuls", always, masked_grouped_mm_wgrad),
    ],
}
