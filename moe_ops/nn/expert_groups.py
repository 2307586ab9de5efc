"""Over which ranks experts are spread: whole ones over `ep`, each one's F over `etp`."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import comm
from ..comm.groups import flatten


@dataclasses.dataclass(frozen=True)
class ExpertGroups:
    """Names of groups, "" for one rank alone.

    `ep`: ranks among which the experts are spread; `etp`: the `num_parts` ranks that hold a part
    each of the same experts; `both`: all of these; `balanced`: with "edp", too: those whose tokens
    a router balances together. `mesh`: of "ep" and "etp", in its order, None if only a group was
    given.
    """

    ep: str
    etp: str
    both: str
    balanced: str
    num_parts: int
    mesh: DeviceMesh | None

    @staticmethod
    def of(group: dist.ProcessGroup | DeviceMesh | str | None) -> ExpertGroups:
        """Of a group or its name, or of a mesh's axes "ep" and, if there are such, "etp" and "edp".

        Raises:
            ValueError: a mesh without "ep" or this rank, or whose ranks do not ascend.
        """
        if not isinstance(group, DeviceMesh):
            name = comm.group_name_of(group)
            return ExpertGroups(name, "", name, name, 1, None)
        axes = group.mesh_dim_names or ()
        if "ep" not in axes:
            raise ValueError(f"group: a mesh must have an axis 'ep', got axes {axes}")
        if group.get_coordinate() is None:
            raise ValueError(f"group: the mesh must hold this rank, got {group}")
        if any((group.mesh.diff(dim=axis) <= 0).any() for axis in range(group.ndim)):
            # A group's ranks ascend: it would hold other experts than the mesh says.
            raise ValueError(f"group: a mesh's ranks must ascend along each axis, got {group}")

        def name_of(*names: str) -> str:
            return comm.group_name_of(flatten(group, *names).get_group())

        ep, both = name_of("ep"), name_of("ep", "etp")
        balanced = name_of("edp", "ep", "etp")
        num_parts = group.size(axes.index("etp")) if "etp" in axes else 1
        etp = name_of("etp") if num_parts > 1 else ""
        mesh = group[tuple(axis for axis in axes if axis in ("ep", "etp"))]
        return ExpertGroups(ep, etp, both, balanced, num_parts, mesh)

    def part_of(self, whole: torch.Tensor, dim: int | None) -> torch.Tensor:
        """This rank's part of an expert's tensor, spread in dimension `dim`, if in any."""
        return whole if dim is None else whole.chunk(self.num_parts, dim)[comm.group_rank(self.etp)]

    def is_sharded(self, parameter: nn.Parameter) -> bool:
        """Whether `fully_shard` has the parameter, and this rank holds a shard of its part."""
        return isinstance(parameter, DTensor) and parameter.device_mesh != self.mesh

    def fill(self, parameter: nn.Parameter, expert: int, part: torch.Tensor) -> None:
        """Set one of this rank's experts in a parameter, as far as this rank holds it if
        `fully_shard` has the parameter.
        """
        local: torch.Tensor = parameter
        if isinstance(parameter, DTensor):
            local, mesh = parameter.to_local(), parameter.device_mesh
            names = mesh.mesh_dim_names or ("",) * mesh.ndim
            for axis, placement in enumerate(parameter.placements):
                is_ours = self.mesh is not None and names[axis] in ("ep", "etp")
                if is_ours or placement.is_replicate():
                    continue
                size, rank = mesh.size(axis), mesh.get_local_rank(axis)
                dim = placement.dim  # type: ignore[attr-defined]
                if dim == 0:  # as torch.chunk: the last may hold fewer, or none
                    num_ranks = 1 if self.mesh is None else comm.group_size(self.ep)
                    experts_here = parameter.shape[0] // num_ranks
                    expert -= rank * -(-experts_here // size)
                else:
                    part = part.chunk(size, dim - 1)[rank]
        if 0 <= expert < local.shape[0]:
            local[expert] = part.reshape(local.shape[1:])

    def parameter(self, local: torch.Tensor, dim: int | None) -> nn.Parameter:
        """Of this rank's experts' parts, spread in dimension `dim`; a DTensor if there is a mesh.

        None: the same on all ranks of `etp`.
        """
        if self.mesh is None:
            return nn.Parameter(local)
        parts: Placement = Replicate() if dim is None else Shard(dim)
        axes = self.mesh.mesh_dim_names or ()
        placements = [Shard(0) if axis == "ep" else parts for axis in axes]
        return nn.Parameter(DTensor.from_local(local, self.mesh, placements, run_check=False))
