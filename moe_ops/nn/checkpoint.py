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


def _expert_groups(module: nn.Module) -> dict[str, str]:
    """Name of each parameter of `Experts` spread over a group -> that group's name."""
    return {
        f"{prefix}.{name}" if prefix else name: experts.group_name
        for prefix, experts in module.named_modules()
        if isinstance(experts, Experts) and experts.group_name
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
    return [*_expert_groups(module), *sorted(counters)]


def shard_experts(module: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`state` with each expert tensor as a DTensor [E, ...] sharded over its expert-parallel group.

    torch.distributed.checkpoint takes plain tensors for replicas and would keep one rank's experts
    only. The DTensors share storage with `state`, so loading into them loads the module; a
    checkpoint loads under any number of ranks.

    Args:
        module: holds `Experts` anywhere.
        state: by fully qualified parameter name: `module.state_dict()`, or a moment of an
            optimizer; prefixes that torch.compile puts into names do not matter.

    Raises:
        ValueError: `state` names none of the module's experts.
    """
    groups = {_plain(name): group for name, group in _expert_groups(module).items()}
    if groups and state and not groups.keys() & {_plain(name) for name in state}:
        raise ValueError(
            "shard_experts: state must name the module's parameters, such as "
            f"{next(iter(groups))}, got {list(state)[:3]}"
        )
    meshes: dict[tuple[str, str], DeviceMesh] = {}

    def shard(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if _plain(name) not in groups:
            return tensor
        key = groups[_plain(name)], tensor.device.type
        if key not in meshes:
            meshes[key] = DeviceMesh.from_group(comm.resolve(key[0]), key[1])
        return DTensor.from_local(tensor, meshes[key], [Shard(0)], run_check=False)

    return {name: shard(name, tensor) for name, tensor in state.items()}
