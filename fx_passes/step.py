"""Whole steps, forward and backward, of a copy of a model, which stays as it is: what `explain` and
`tune` run.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from .measure import Phase, Step

FORWARD, BACKWARD = "forward", "backward"  # phases


def is_on_gpu(model: Any, inputs: Any) -> bool:
    """Whether any of it is."""
    tensors = list(model.parameters()) if isinstance(model, nn.Module) else []
    tensors += pytree.tree_leaves(inputs)
    return any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors)


def step_of(model: Any, inputs: Any, **compiler: Any) -> Step:
    """Forward of `model`, as torch.compile(fullgraph=True, **compiler) makes it, and backward of
    its outputs that require a gradient. Gradients are dropped; random numbers are the same in every
    step, and afterwards those that would have come without it.
    """
    model = getattr(model, "_orig_mod", model)
    own_model, own_inputs = _copy(model), pytree.tree_map(_copy_of_input, inputs)
    leaves = [leaf for leaf in pytree.tree_leaves(own_inputs) if isinstance(leaf, torch.Tensor)]
    leaves += own_model.parameters() if isinstance(own_model, nn.Module) else []

    def call(*args: Any) -> Any:
        return own_model(*args)

    # A code object of its own: the compiler counts how often it compiles one.
    call.__code__ = call.__code__.replace()
    compiled = torch.compile(call, fullgraph=True, dynamic=False, **compiler)

    def step(phase: Phase) -> None:
        with _same_random_numbers():
            with phase(FORWARD):
                outputs = compiled(*own_inputs)
            roots = [root for root in pytree.tree_leaves(outputs) if _needs_grad(root)]
            if roots:
                with phase(BACKWARD):
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        for leaf in leaves:
            leaf.grad = None

    return step


def _copy(model: Any) -> Any:
    """Modules get buffers and gradients of their own, and the same parameters and groups."""
    if not isinstance(model, nn.Module):
        return model
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    groups = (dist.ProcessGroup, dist.DeviceMesh) if dist.is_available() else ()
    for module in model.modules():
        memo |= {id(value): value for value in vars(module).values() if isinstance(value, groups)}
    return copy.deepcopy(model, memo)


def _copy_of_input(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _needs_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


@contextlib.contextmanager
def _same_random_numbers() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield
