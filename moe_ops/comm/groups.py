"""Process groups by name. The empty name is the group of this process alone and needs no
torch.distributed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh


def group_name_of(group: dist.ProcessGroup | str | None) -> str:
    """The name under which operators and graphs hold `group`; None = this process alone.

    A name is not looked up: that is not traceable, and the operator that gets it does so.

    Raises:
        TypeError: `group` is no ProcessGroup, name or None.
    """
    if group is None:
        return ""
    if isinstance(group, str):
        return group
    if isinstance(group, dist.ProcessGroup):
        return str(group.group_name)
    raise TypeError(
        f"group: must be a ProcessGroup of which this rank is a member, a group name or None, "
        f"got {group!r}"
    )


def flatten(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """One axis of those of a mesh's that are named, in the mesh's order; makes a group if they are
    several. Collective then.
    """
    part = mesh[tuple(axis for axis in mesh.mesh_dim_names or () if axis in names)]
    held = part.mesh_dim_names or ()
    if part.ndim == 1:
        return part
    return part._flatten("_".join(name for name in names if name in held))


def resolve(group_name: str, op: str = "comm") -> dist.ProcessGroup:
    """The initialised process group called `group_name`; `op` asks for it.

    Raises:
        ValueError: no such group.
    """
    try:
        if not dist.is_initialized():
            raise LookupError("torch.distributed is not initialised")
        return c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    except (LookupError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"{op}: group must name an initialised process group, got {group_name!r} ({error}); "
            "call torch.distributed.init_process_group first"
        ) from error


def group_size(group_name: str, op: str = "comm") -> int:
    """P: ranks of the group; `op` asks for it."""
    return resolve(group_name, op).size() if group_name else 1


def group_rank(group_name: str) -> int:
    """This process's rank in the group."""
    return resolve(group_name).rank() if group_name else 0


def backend_of(group: dist.ProcessGroup) -> str:
    """Name of the backend that carries the group's exchanges: the one for CUDA where it has both.

    `dist.get_backend` says "undefined" or "cpu:gloo,cuda:nccl" of a group with a backend a device.
    """
    pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
    backend_of_device = dict(pairs)
    device = "cuda" if torch.cuda.is_available() and "cuda" in backend_of_device else "cpu"
    return backend_of_device.get(device, dist.get_backend(group))


def device_of(group: dist.ProcessGroup) -> torch.device:
    """The device whose tensors the group's collectives take."""
    if backend_of(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
