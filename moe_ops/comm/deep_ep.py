"""The engine `deep_ep`: an installed DeepEP (V1, class `Buffer`) carries the rows of a group of
GPUs of one host (moe_ops/kernels/exchange_deep_ep.py). It runs only where it is asked for by name.

The plan stays ours, over NCCL. DeepEP has its own limit on how long a rank waits for another, of
minutes; `setup`'s does not hold for its kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .groups import resolve

NUM_RANKS = (2, 4, 8)  # that DeepEP has kernels for
DTYPE = torch.bfloat16
_MIN_ROW_BYTES = 128  # 32 weights a token travel as a row, too


class Workspace(NamedTuple):
    """A group's `deep_ep.Buffer` and how its kernels run, on rows of up to `row_bytes` bytes."""

    buffer: Any
    dispatch_config: Any
    combine_config: Any
    ids_dtype: torch.dtype
    row_bytes: int


# By group: names are used again after a group is destroyed.
_workspaces: weakref.WeakKeyDictionary[dist.ProcessGroup, Workspace] = weakref.WeakKeyDictionary()


def workspace(group_name: str) -> Workspace | None:
    """The workspace of a group that `create` was called for."""
    return _workspaces.get(resolve(group_name)) if group_name and _workspaces else None


def drop(group_name: str) -> None:
    """Free the group's buffers, if it has them. Collective."""
    if space := workspace(group_name):
        del _workspaces[resolve(group_name)]
        space.buffer.destroy()


def create(group_name: str, *, hidden_size: int, num_sms: int | None) -> None:
    """Allocate the group's buffers and map them. Collective, after `obstacle` said None.

    Raises:
        ValueError: on every rank, if one of them could not; if it is out of memory, the others wait
            for the group's timeout.
    """
    group, made, why_not = resolve(group_name), None, None
    try:
        made = _make(group, hidden_size * DTYPE.itemsize, num_sms)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        why_not = f"{type(error).__name__}: {error}"
    if reasons := _gather(group, why_not):
        raise ValueError(f"setup: engine 'deep_ep' cannot carry group {group_name!r}: {reasons}")
    assert made is not None
    _workspaces[group] = made


def _make(group: dist.ProcessGroup, row_bytes: int, num_sms: int | None) -> Workspace:
    package = load()
    kind, before = package.Buffer, package.Buffer.num_sms
    try:
        if num_sms is not None:
            kind.set_num_sms(num_sms)  # of all buffers: read by the next line
        configs = kind.get_dispatch_config(group.size()), kind.get_combine_config(group.size())
    finally:
        kind.set_num_sms(before)
    longest = max(row_bytes, _MIN_ROW_BYTES)
    num_bytes = max(c.get_nvl_buffer_size_hint(longest, group.size()) for c in configs)
    buffer = kind(group, num_bytes, 0, explicitly_destroy=True)
    return Workspace(buffer, *configs, getattr(package, "topk_idx_t", torch.int64), row_bytes)


def obstacle(group_name: str, dtype: torch.dtype) -> str | None:
    """Why the engine cannot carry the group's rows, the same on every rank, or None. Collective."""
    group = resolve(group_name)
    reasons = [why_not] if (why_not := _gather(group, unavailable())) else []
    if group.size() not in NUM_RANKS:
        reasons.append(f"it has {group.size()} ranks, not one of {NUM_RANKS}")
    if dtype != DTYPE:
        reasons.append(f"rows are {dtype}, not {DTYPE}")
    return "; ".join(reasons) or None


def _gather(group: dist.ProcessGroup, why_not: str | None) -> str:
    """The reasons of all ranks, "" if none has one."""
    told: list[str | None] = [why_not] * group.size()
    dist.all_gather_object(told, why_not, group=group)
    return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(told) if reason)


def unavailable() -> str | None:
    """Why this process cannot take part in any such group, or None."""
    if not torch.cuda.is_available():
        return "no GPU"
    try:
        package = load()
    except Exception as error:  # noqa: BLE001 - whatever it is, every rank must hear of it
        return f"package deep_ep cannot be imported ({error})"
    return None if hasattr(package, "Buffer") else "package deep_ep has no class Buffer"


def load() -> ModuleType:
    """The package `deep_ep`, after NVSHMEM's library, which it may not find by itself."""
    with contextlib.suppress(ModuleNotFoundError):
        found = importlib.util.find_spec("nvidia.nvshmem")
        for folder in (found and found.submodule_search_locations) or ():
            library = Path(folder, "lib", "libnvshmem_host.so.3")
            if library.exists():
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return importlib.import_module("deep_ep")
