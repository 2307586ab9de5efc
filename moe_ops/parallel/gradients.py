"""Gradients, their norm and the optimizer's state, where experts have other replicas than the rest.

Each rank calls backward on its part of the loss of its replica of attention: the sum over its
tokens, divided by the tokens of all its ranks of "tp". The gradient of the mean over the dp * cp
replicas is then, for every parameter,

    sum of the gradients of the ranks that hold copies of it / (dp * cp)

over "edp" for an expert, to which the exchange has brought every token of its replica; over dp and
cp for a DTensor, whose layer gathers what "tp" has apart; over dp, cp and tp for all else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ..nn.experts import Experts
from .parallel_layout import ParallelMeshes

_BUCKET_NUMEL = 2**25  # elements of an all-reduce


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

    Raises:
        ValueError: experts are on no mesh, or on another one; or `fully_shard` wraps a module.
    """
    if any(isinstance(part, FSDPModule) for part in module.modules()):
        raise ValueError("reduce_gradients: module must not be sharded, got what fully_shard wraps")
    experts, edp = _experts(module, meshes), meshes.experts["edp"]
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
        grad = _local(_summed(parameter))
        buckets.setdefault((mesh, grad.dtype), []).append(grad)
    for (mesh, _), grads in buckets.items():
        while grads:
            bucket = [grads.pop()]
            while grads and sum(map(torch.numel, bucket)) + grads[-1].numel() <= _BUCKET_NUMEL:
                bucket.append(grads.pop())
            flat = torch.cat([grad.flatten() for grad in bucket]).div_(meshes.dp_cp.size())
            dist.all_reduce(flat, group=mesh.get_group())
            parts = flat.split([grad.numel() for grad in bucket])
            torch._foreach_copy_(bucket, [part.view_as(x) for part, x in zip(parts, bucket)])


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[nn.Parameter], max_norm: float, meshes: ParallelMeshes
) -> torch.Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; the norm before, [] float64 on
    every rank.

    Each element counts once, whatever holds it: plain tensors are copies, DTensors are summed over
    the axes that spread them, stages over "pp". Collective over all ranks.
    """
    grads = [_summed(parameter) for parameter in parameters if parameter.grad is not None]
    spread: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for grad in grads:
        spread.setdefault(_groups_that_spread(grad), []).append(_local(grad))
    total = torch.zeros((), device=meshes.stage.device_type, dtype=torch.float64)
    for groups, parts in spread.items():
        norms = torch._foreach_norm(parts, dtype=torch.float64)
        square = torch.stack(norms).square().sum()
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

    So is the state of an optimizer made afterwards. Gradients follow the rule above. As with
    `fully_shard`, call it on the blocks of a model first, then on the model.

    Args:
        module: its `Experts` are on `meshes.experts`.
        meshes: as `ParallelLayout.meshes` made them.
        options: of `fully_shard`; reshard_after_forward=False gathers parameters once a step.

    Raises:
        ValueError: experts are on no mesh, or on another one; `module` was sharded before; or it
            holds DTensors beside experts, as of tensor parallelism.
    """
    if isinstance(module, FSDPModule):
        raise ValueError("fully_shard_moe: module must not be sharded yet, got it twice")
    experts, edp = _experts(module, meshes), meshes.experts["edp"]
    whole = list(_not_sharded(module))
    for part in whole:
        for name, parameter in part.named_parameters(recurse=False):
            if isinstance(parameter, DTensor) and parameter not in experts:
                raise ValueError(
                    f"fully_shard_moe: parameters beside experts must be plain tensors, got {name} "
                    f"of {type(part).__name__} as a DTensor; shard that with `fully_shard` first"
                )

    def placement(parameter: nn.Parameter) -> Shard:
        """The first dimension that divides evenly and that no other axis spreads."""
        taken = {p.dim for p in getattr(parameter, "placements", ()) if isinstance(p, Shard)}
        sizes = _local(parameter).shape
        even = [d for d in range(len(sizes)) if sizes[d] % edp.size() == 0 and d not in taken]
        return Shard(even[0] if even else 0)

    policy = options.get("mp_policy", MixedPrecisionPolicy())
    # Rows come in the dtype they travelled in, weights in float32.
    of_experts = dataclasses.replace(policy, cast_forward_inputs=False, output_dtype=None)
    for part in whole:
        if isinstance(part, Experts):
            its_options = {**options, "mp_policy": of_experts, "shard_placement_fn": placement}
            _shard(part, edp, meshes, its_options)
    if not isinstance(module, Experts):
        _shard(module, meshes.stage, meshes, options)
    return module


def _not_sharded(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not isinstance(child, FSDPModule):
            yield from _not_sharded(child)


def _shard(
    module: nn.Module, mesh: DeviceMesh, meshes: ParallelMeshes, options: dict[str, Any]
) -> None:
    """fully_shard, with gradients summed, then divided by dp * cp.

    The factor that FSDP would divide by itself counts twice on a mesh of one rank (torch 2.13).
    """
    divisor = meshes.dp_cp.size()

    def divide(grads: torch.Tensor) -> None:
        grads.div_(divisor)

    sharded = fully_shard(module, mesh=mesh, **options)
    sharded.set_gradient_divide_factor(1.0)
    sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
    sharded.set_all_reduce_hook(divide)


def _experts(module: nn.Module, meshes: ParallelMeshes) -> set[nn.Parameter]:
    """Parameters of all `Experts` in a module."""
    found: set[nn.Parameter] = set()
    axes = meshes.experts.mesh_dim_names or ()
    held = meshes.experts[tuple(axis for axis in axes if axis in ("ep", "etp"))]
    for name, part in module.named_modules():
        if isinstance(part, Experts):
            if part.groups.mesh != held:
                raise ValueError(
                    f"{name or 'module'}: experts must be on meshes.experts, got "
                    f"{part.groups.mesh or 'no mesh'}"
                )
            found.update(part.parameters())
    return found


def _summed(parameter: nn.Parameter) -> torch.Tensor:
    """Its gradient; of a DTensor as the parameter lies, also where it came as terms of a sum."""
    grad = parameter.grad
    assert grad is not None
    if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
        placements = parameter.placements  # type: ignore[attr-defined]
        grad = parameter.grad = grad.redistribute(placements=placements)
    return grad


def _groups_that_spread(tensor: torch.Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Those of a DTensor's mesh whose ranks hold different elements."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    # NOTE: not is_shard(), which is false for what `fully_shard` spreads beside another axis.
    return tuple(mesh.get_group(i) for i, p in enumerate(tensor.placements) if not p.is_replicate())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
