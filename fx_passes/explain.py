"""`explain` says what the passes do to a model: what they matched, what they left alone and why,
what less is kept for backward, and how much of the exchanges nothing hides.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from . import compat, timeline
from .cost_model import CostModel, cost_model
from .journal import Journal
from .measure import Phase, Step, measure, unmeasured
from .pipeline import CompositePass, options
from .report import Report, Variant

_FORWARD, _BACKWARD = "forward", "backward"


def explain(
    model: Callable[..., Any],
    *inputs: Any,
    costs: CostModel | None = None,
    measured: bool | None = None,
    **how: Any,
) -> Report:
    """Compile a copy of `model` without the passes and with them, run both forward and, for those
    outputs that require a gradient, backward, and report on it.

    Every rank of the model's groups must call it. The model, its gradients and counters, and the
    inputs stay as they are; parameters are shared, not copied.

    Args:
        model: a module, or a function without parameters, that torch.compile takes with
            fullgraph=True.
        inputs: its arguments; give those `requires_grad` that have one in training.
        costs: what estimates times; by default the table's figures of the current device.
        measured: take times from the profiler instead, as is the default on a GPU.
        how: as for `options`.

    Raises:
        ValueError: no such setting, or times shall be measured without a GPU.
        RuntimeError: the model does not compile as a whole.
    """
    model = getattr(model, "_orig_mod", model)
    on_gpu = _is_on_gpu(model, inputs)
    measured = on_gpu if measured is None else measured
    if measured and not on_gpu:
        raise ValueError("explain: measured must be left out without a GPU, got True")
    costs = costs or cost_model()
    journal = Journal(lambda graph: _bytes_written(graph, costs))
    variants = {"before": dict(how.get("inductor") or {}), "after": options(**how)}
    found = {}
    for name, inductor in variants.items():
        graphs = _graphs_of(model, inputs, inductor, journal)
        events = {kind: timeline.timeline(graph, costs) for kind, graph in graphs.items()}
        if measured:
            events = measure(_step(model, inputs, options=inductor))
        found[name] = Variant(graphs, events, _bytes_kept(graphs, costs))
    source = torch.cuda.get_device_name() if measured else "the cost model"
    return Report(found["before"], found["after"], journal, source)


def _is_on_gpu(model: Any, inputs: Any) -> bool:
    tensors = list(model.parameters()) if isinstance(model, nn.Module) else []
    tensors += pytree.tree_leaves(inputs)
    return any(isinstance(tensor, torch.Tensor) and tensor.is_cuda for tensor in tensors)


def _graphs_of(
    model: Any, inputs: Any, inductor: Mapping[str, Any], journal: Journal
) -> dict[str, Graph]:
    """By kind, as Inductor has them before it makes code."""
    graphs: dict[str, Graph] = {}
    listened = {
        name: dataclasses.replace(value, journal=journal)
        if isinstance(value, CompositePass)
        else value
        for name, value in inductor.items()
    }
    backend = compat.graph_backend(listened, graphs.__setitem__)
    _step(model, inputs, backend=backend)(unmeasured)
    return graphs


def _step(model: Any, inputs: Any, **compiler: Any) -> Step:
    """Forward and backward of a compiled copy."""
    own_model, own_inputs = _copy(model), pytree.tree_map(_copy_of_input, inputs)
    leaves = [leaf for leaf in pytree.tree_leaves(own_inputs) if isinstance(leaf, torch.Tensor)]
    leaves += own_model.parameters() if isinstance(own_model, nn.Module) else []

    def call(*args: Any) -> Any:
        return own_model(*args)

    # A code object of its own: the compiler counts how often it compiles one.
    call.__code__ = call.__code__.replace()
    compiled = torch.compile(call, fullgraph=True, dynamic=False, **compiler)

    def step(phase: Phase) -> None:
        for leaf in leaves:
            leaf.grad = None
        with _same_random_numbers(), _refusing():
            with phase(_FORWARD):
                outputs = compiled(*own_inputs)
            roots = [root for root in pytree.tree_leaves(outputs) if _needs_grad(root)]
            if roots:
                with phase(_BACKWARD):
                    torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])

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
    """In every step, and afterwards those that would have come without it."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        yield


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except TorchDynamoException as error:
        reason = str(error).strip().partition("\n")[0]
        raise RuntimeError(
            f"explain: model must compile with fullgraph=True, got {type(error).__name__}: {reason}"
        ) from error


def _bytes_written(graph: Graph, costs: CostModel) -> int:
    """By all calls, into memory of their own."""
    return sum(costs.num_bytes(node) for node in graph.nodes if _makes_tensors(node))


def _makes_tensors(node: Node) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return not any(value.alias_info for value in node.target._schema.returns)


def _bytes_kept(graphs: Mapping[str, Graph], costs: CostModel) -> int:
    """Between forward and backward, beside inputs and parameters."""
    if _BACKWARD not in graphs:
        return 0
    alive = {node.name for node in graphs[_FORWARD].find_nodes(op="placeholder")}
    return sum(
        costs.num_bytes(node)
        for node in graphs[_BACKWARD].find_nodes(op="placeholder")
        if node.name not in alive and not node.name.startswith("tangents_")
    )
