"""Gradients, their norm and the optimizer's state, where experts have other replicas than the rest.

Each rank calls backward on its part of the loss of its replica of attention: the sum over its
tokens, divided by the tokens of all its ranks of "tp". The gradient of the mean over the dp * cp
replicas is then, for every parameter,

    sum of the gradients of the ranks that hold copies of it / (dp * cp)

over "edp" for an expert, to which the exchange has brought every token of its replica; over dp and
cp for a DTensor, whose layer gathers what "tp" has apart; over dp, cp and tp for all else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import get_total_norm

from .. import layout
from ..nn.experts import Experts
from .parallel_layout import ParallelMeshes


def parameter_groups(module: nn.Module) -> list[dict[str, list[nn.Parameter]]]:
    """By mesh, plain tensors by themselves: an optimizer takes no two meshes in one group."""
    groups: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


@torch.no_grad()
def reduce_gradients(module: nn.Module, meshes: ParallelMeshes, *, dense: bool = True) -> None:
    """Make every gradient that of the mean loss, in place, once a step, after its last backward.
    Collective over a pipeline stage.

    Not for what `fully_shard` wraps. A parameter without a gradient gets one of zeros.

    Args:
        module: its `Experts` are on `meshes.experts`.
        meshes: as `ParallelLayout.meshes` made them.
        dense: False: experts alone. DistributedDataParallel over `meshes.dp_cp` does the rest, if
            tp is 1; first let it ignore `moe_ops.nn.per_rank_names(module)`.
    """
    experts, edp = _experts(module), meshes.experts["edp"]
    buckets: dict[tuple[DeviceMesh, torch.dtype], list[torch.Tensor]] = {}
    for parameter in module.parameters():
        if not parameter.requires_grad or not (dense or parameter in experts):
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter in experts:
            mesh = edp
        else:
            mesh = meshes.dp_cp if isinstance(parameter, DTensor) else meshes.stage
        grad = _local(parameter.grad)
        buckets.setdefault((mesh, grad.dtype), []).append(grad)
    for (mesh, _), grads in buckets.items():
        flat = torch.cat([grad.flatten() for grad in grads]).div_(meshes.dp_cp.size())
        dist.all_reduce(flat, group=mesh.get_group())
        torch._foreach_copy_(
            grads, [g.view_as(x) for x, g in zip(grads, flat.split([x.numel() for x in grads]))]
        )


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float, meshes: ParallelMeshes
) -> torch.Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; the norm before, [] on every
    rank.

    Each element counts once, whatever holds it: plain tensors are copies, DTensors are summed over
    the axes that spread them, stages over "pp". Collective over all ranks.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    spread: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for grad in grads:
        spread.setdefault(_groups_that_spread(grad), []).append(_local(grad))
    total = torch.zeros((), device=meshes.stage.device_type)
    for groups, parts in spread.items():
        norm = get_total_norm(parts)
        square = norm.to(layout.accumulate_dtype(norm.dtype)).square()
        for group in groups:
            dist.all_reduce(square, group=group)
        total = total + square
    dist.all_reduce(total, group=meshes.attention["pp"].get_group())
    norm = total.sqrt()
    if grads:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1)
        torch._foreach_mul_([_local(grad) for grad in grads], scale)
    return norm


def fully_shard_moe(module: nn.Module, meshes: ParallelMeshes, **options: Any) -> nn.Module:
    """`module` with `fully_shard` applied: experts over "edp", all else over dp, cp and tp.

    So is the state of an optimizer made afterwards. Gradients follow the rule above.

    Args:
        module: its `Experts` are on `meshes.experts`.
        meshes: as `ParallelLayout.meshes` made them.
        options: of `fully_shard`; reshard_after_forward=False gathers parameters once a step.
    """
    edp, divisor = meshes.experts["edp"], float(meshes.dp_cp.size())

    def placement(parameter: nn.Parameter) -> Shard:
        """The first dimension that divides evenly and that no other axis spreads."""
        taken = {p.dim for p in getattr(parameter, "placements", ()) if isinstance(p, Shard)}
        sizes = _local(parameter).shape
        whole = [d for d in range(len(sizes)) if sizes[d] % edp.size() == 0 and d not in taken]
        return Shard(whole[0] if whole else 0)

    alone: set[nn.Parameter] = set()
    if edp.size() > 1:
        for part in module.modules():
            if isinstance(part, Experts):
                fully_shard(part, mesh=edp, shard_placement_fn=placement, **options)
    else:  # nothing to shard; there fully_shard would divide twice (torch 2.13)
        alone = _experts(module)
        for parameter in alone:
            parameter.register_hook(lambda grad: grad / divisor)
    fully_shard(module, mesh=meshes.stage, ignored_params=alone, **options)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(divisor)
            part.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return module


def _experts(module: nn.Module) -> set[nn.Parameter]:
    return {p for part in module.modules() if isinstance(part, Experts) for p in part.parameters()}


def _groups_that_spread(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Those of a DTensor's mesh whose ranks hold different elements."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    # NOTE: not is_shard(), which is false for what `fully_shard` spreads beside another axis.
    return tuple(mesh.get_group(i) for i, p in enumerate(tensor.placements) if not p.is_replicate())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
