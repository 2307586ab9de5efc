"""Expert tensors in checkpoints: the ranks of a group hold different experts under the same
names.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .. import comm
from .experts import Experts
from .moe import MoE
from .router import Router


def _plain(name: str) -> str:
    """The name without what torch.compile puts into it."""
    return name.replace("_orig_mod.", "")


def _experts_by_name(module: nn.Module) -> dict[str, Experts]:
    """Name of each parameter of `Experts` -> those."""
    return {
        f"{prefix}.{name}" if prefix else name: experts
        for prefix, experts in module.named_modules()
        if isinstance(experts, Experts)
        for name, _ in experts.named_parameters()
    }


def per_rank_names(module: nn.Module) -> list[str]:
    """Parameters and buffers that differ by rank: experts spread over a group, and counters.

    What DistributedDataParallel must leave alone.
    """
    counters = [
        f"{prefix}.{name}" if prefix else name
        for prefix, part in module.named_modules()
        if isinstance(part, MoE | Router)
        for name in part._non_persistent_buffers_set
    ]
    spread = [name for name, its in _experts_by_name(module).items() if its.groups.both]
    return [*spread, *sorted(counters)]


def shard_experts(module: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` with each expert tensor as a DTensor [E, ...] sharded over its expert-parallel group,
    if it has one.

    torch.distributed.checkpoint takes plain tensors for replicas and would keep one rank's experts
    only. The DTensors share storage with `state`, so loading into them loads the module; a
    checkpoint loads under any number of ranks, on a mesh and off it: w13 is [E, 2, F, H] and b13
    [E, 2, F] (1 for 2 with "relu2"). What is a DTensor stays as it is.

    Args:
        module: holds `Experts` anywhere.
        state: by fully qualified parameter name: `module.state_dict()`, or a moment of an
            optimizer; prefixes that torch.compile puts into names do not matter.

    Raises:
        ValueError: `state` names none of the module's experts.
    """
    owners = {_plain(name): experts for name, experts in _experts_by_name(module).items()}
    if owners and state and not owners.keys() & {_plain(name) for name in state}:
        raise ValueError(
            "shard_experts: state must name the module's parameters, such as "
            f"{next(iter(owners))}, got {list(state)[:3]}"
        )
    meshes: dict[tuple[str, str], DeviceMesh] = {}

    def shard(name: str, tensor: torch.Tensor) -> torch.Tensor:
        experts = owners.get(_plain(name))
        if experts is None or isinstance(tensor, DTensor):
            return tensor
        if name.endswith(("w13", "b13")):
            tensor = tensor.unflatten(1, (-1, experts.w2.shape[2]))
        key = experts.groups.ep, tensor.device.type
        if not key[0]:
            return tensor
        if key not in meshes:
            meshes[key] = DeviceMesh.from_group(comm.resolve(key[0]), key[1])
        return DTensor.from_local(tensor, meshes[key], [Shard(0)], run_check=False)

    return {name: shard(name, tensor) for name, tensor in state.items()}
