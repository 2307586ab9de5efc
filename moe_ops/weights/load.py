"""Weights of a Hugging Face checkpoint's layer into a `MoE`, on every rank its own.

Letters: E experts, L experts here, N experts of a tensor, H hidden, F ffn.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from .. import checks, comm
from ..nn import Experts, MoE
from .families import FAMILIES, Family
from .layouts import unpack_weights

_OP = "load_experts"
_FUSED = {
    "w13": "experts.gate_up_proj",
    "w2": "experts.down_proj",
    "b13": "experts.gate_up_proj_bias",
    "b2": "experts.down_proj_bias",
}


@torch.no_grad()
def load_experts(
    module: MoE | Experts,
    state_dict: Mapping[str, torch.Tensor],
    *,
    prefix: str = "",
    family: str,
) -> None:
    """Copy a layer's weights from a transformers checkpoint, in the module's dtype and device.

    A `MoE` takes experts, router and shared expert, `Experts` the names under "experts." alone.
    Experts are fused tensors (`experts.gate_up_proj`, as transformers 5 keeps them) or apart
    (`experts.3.gate_proj.weight`, as files have them). Each rank reads the experts that it holds,
    on a mesh its part of each; those of other ranks may be missing where experts are apart. Nothing
    is exchanged. With an error nothing is changed.

    Args:
        module: of a config as `config_of` makes it, before torch.compile and `fully_shard`; not on
            the meta device.
        state_dict: floating tensors by name; any mapping, only what is needed is read from it.
            Quantized ones (FP8 with scales, MXFP4 blocks) must be dequantized before.
        prefix: of the layer's names, such as "model.layers.3.mlp.".
        family: one of `FAMILIES`, a config's `model_type`.

    Raises:
        TypeError, ValueError: a name is missing or superfluous, a tensor has the wrong shape or
            dtype, or `module` is not of this family.
    """
    checks.one_of(_OP, "family", family, tuple(FAMILIES))
    _check_module(module, family)
    its = FAMILIES[family]
    prefix = f"{prefix.removesuffix('.')}." if prefix else ""
    experts = module.experts if isinstance(module, MoE) else module
    names = {name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)}
    if isinstance(module, MoE) and module.shared_experts is None and its.shared_gate:
        # transformers keeps a shared expert of width 0, which adds 0, and its gate.
        shared = {name for name in names if name.startswith((f"{its.shared}.", its.shared_gate))}
        if all(0 in state_dict[prefix + n].shape for n in shared if n.startswith(f"{its.shared}.")):
            names -= shared
    if isinstance(module, Experts):
        names = {name for name in names if name.startswith("experts.")}
    apart = bool(its.projections) and any(re.match(r"experts\.\d+\.", name) for name in names)
    dense = _dense_targets(module, its) if isinstance(module, MoE) else {}
    shapes = {name: tuple(target.shape) for name, target in dense.items()}
    shapes |= _expert_shapes(experts, its, apart, _here(experts))
    known = _expert_shapes(experts, its, apart, range(experts.num_experts))
    _check_names(prefix, family, names, shapes.keys(), shapes.keys() | known.keys())
    values = {name: _checked(state_dict, prefix + name, shape) for name, shape in shapes.items()}
    if apart:
        _copy_apart(experts, its, values)
    else:
        fused = {ours: values[name] for ours, name in _FUSED.items() if name in values}
        _copy_fused(experts, its, fused)
    for name, target in dense.items():
        target.copy_(values[name])


def _check_module(module: Any, family: str) -> None:
    """`module` can hold weights of the family, and is neither on the meta device nor sharded."""
    if not isinstance(module, MoE | Experts):
        raise TypeError(f"{_OP}: module must be MoE or Experts, got {type(module).__name__}")
    experts, its = module.experts if isinstance(module, MoE) else module, FAMILIES[family]
    activations = ("swiglu_clamped",) if its.biases else ("swiglu", "geglu")
    checks.one_of(_OP, f"the activation for {family!r}", experts.activation, activations)
    checks.one_of(_OP, f"bias of experts for {family!r}", experts.b13 is not None, (its.biases,))
    if isinstance(module, MoE):
        has_bias = module.router.bias is not None
        checks.one_of(_OP, f"logit_bias for {family!r}", has_bias, (its.biases,))
    mesh = experts.groups.mesh
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{_OP}: {name} must not be on the meta device; call to_empty before")
        own = mesh if name.removeprefix("experts.") in ("w13", "w2", "b13", "b2") else None
        if (parameter.device_mesh if isinstance(parameter, DTensor) else None) != own:
            raise ValueError(f"{_OP}: {name} must not be sharded any further; load before that")
    shared = module.shared_experts if isinstance(module, MoE) else None
    if shared is not None:
        if not its.shared:
            raise ValueError(f"{_OP}: module must have no shared expert for {family!r}, got one")
        gate = shared.gate is not None
        checks.one_of(_OP, f"shared_gate for {family!r}", gate, (bool(its.shared_gate),))


def _here(experts: Experts) -> range:
    """The experts of this rank."""
    group = experts.groups.ep
    num_here = experts.num_experts // comm.group_size(group)
    first = comm.group_rank(group) * num_here
    return range(first, first + num_here)


def _expert_shapes(
    experts: Experts, its: Family, apart: bool, ids: Iterable[int]
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the experts' tensors: of `ids` where they are apart, else fused ones."""
    w2 = experts._local()[1]
    num_experts, hidden, ffn = experts.num_experts, w2.shape[1], w2.shape[2]
    ffn *= experts.groups.num_parts
    if apart:
        per_projection = zip(its.projections, ((ffn, hidden), (ffn, hidden), (hidden, ffn)))
        of_one = {f"{name}.weight": shape for name, shape in per_projection}
        return {f"experts.{e}.{name}": shape for e in ids for name, shape in of_one.items()}
    matrices = {"w13": (2 * ffn, hidden), "w2": (hidden, ffn)}
    turn = -1 if its.layout.endswith("transposed") else 1
    shapes = {_FUSED[name]: (num_experts, *shape[::turn]) for name, shape in matrices.items()}
    if its.biases:
        shapes |= {_FUSED["b13"]: (num_experts, 2 * ffn), _FUSED["b2"]: (num_experts, hidden)}
    return shapes


def _dense_targets(moe: MoE, its: Family) -> dict[str, torch.Tensor]:
    """Where what is no expert's goes, by its name there."""
    targets: dict[str, torch.Tensor] = {f"{its.router}.weight": moe.router.weight}
    if moe.router.bias is not None:
        targets[f"{its.router}.bias"] = moe.router.bias
    if its.correction_bias and moe.router.expert_bias is not None:
        targets[f"{its.router}.e_score_correction_bias"] = moe.router.expert_bias
    if moe.shared_experts is not None:
        gate, up = moe.shared_experts.up.weight.chunk(2)
        weights = gate, up, moe.shared_experts.down.weight
        names = "gate_proj", "up_proj", "down_proj"
        targets |= {f"{its.shared}.{name}.weight": w for name, w in zip(names, weights)}
        if moe.shared_experts.gate is not None:
            targets[f"{its.shared_gate}.weight"] = moe.shared_experts.gate.weight
    return targets


def _check_names(
    prefix: str, family: str, names: set[str], needed: Collection[str], allowed: Collection[str]
) -> None:
    missing, superfluous = sorted(set(needed) - names), sorted(names - set(allowed))
    if missing:
        raise ValueError(
            f"{_OP}: state_dict must have every name of this {family!r} layer, got none of "
            f"{_some(prefix, missing)}"
        )
    if superfluous:
        raise ValueError(
            f"{_OP}: state_dict must have under prefix {prefix!r} the names of this {family!r} "
            f"layer alone, got {_some(prefix, superfluous)}"
        )


def _some(prefix: str, names: list[str]) -> str:
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(prefix + name for name in names[:4]) + more


def _checked(
    state_dict: Mapping[str, torch.Tensor], name: str, shape: tuple[int, ...]
) -> torch.Tensor:
    value = state_dict[name]
    checks.tensor(_OP, name, value, len(shape), checks.FLOATS)
    if value.is_meta or value.layout != torch.strided:
        found = "meta" if value.is_meta else value.layout
        raise ValueError(f"{_OP}: {name} must hold values, in rows, got it {found}")
    if value.shape != shape:
        raise ValueError(f"{_OP}: {name} must have shape {shape}, got {tuple(value.shape)}")
    return value


def _copy_apart(experts: Experts, its: Family, values: Mapping[str, torch.Tensor]) -> None:
    for index, expert in enumerate(_here(experts)):
        gate, up, down = (values[f"experts.{expert}.{name}.weight"] for name in its.projections)
        whole = {"w13": torch.cat([gate, up])[None], "w2": down[None]}
        _copy(experts, slice(index, index + 1), whole)


def _copy_fused(experts: Experts, its: Family, fused: Mapping[str, torch.Tensor]) -> None:
    here = _here(experts)
    mine = {name: tensor[here.start : here.stop] for name, tensor in fused.items()}
    _copy(experts, slice(None), unpack_weights(mine, layout=its.layout))


def _copy(experts: Experts, at: slice, whole: Mapping[str, torch.Tensor]) -> None:
    """This rank's part of whole experts, N of them in our layout, into those `at` of the L here."""
    groups = experts.groups
    local = dict(zip(("w13", "w2", "b13", "b2"), experts._local()))
    for name, tensor in whole.items():
        if name.endswith("13"):
            part = groups.part_of(tensor.unflatten(1, (2, -1)), 2).flatten(1, 2)
        else:
            part = groups.part_of(tensor, 2 if name == "w2" else None)
        local[name][at].copy_(part)
