"""`explain` says what the passes do to a model: what they matched, what they left alone and why,
what less is kept for backward, and how much of the exchanges nothing hides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.fx import Graph, Node

from . import compat, timeline
from .cost_model import CostModel, cost_model
from .journal import Journal
from .measure import measure, unmeasured
from .pipeline import listened, options
from .report import Report, Variant
from .step import BACKWARD, FORWARD, is_on_gpu, step_of


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
        RuntimeError: the model does not compile as a whole; or refuses the inputs, which it then
            gets once more without the compiler: its own error is the cause.
    """
    on_gpu = is_on_gpu(model, inputs)
    measured = on_gpu if measured is None else measured
    if measured and not on_gpu:
        raise ValueError("explain: measured must be left out without a GPU, got True")
    costs = costs or cost_model()
    journal = Journal(lambda graph: _bytes_written(graph, costs))
    variants = {"before": dict(how.get("inductor") or {}), "after": options(**how)}
    found = {}
    for name, inductor in variants.items():
        with _refusing(model, inputs):
            graphs = _graphs_of(model, inputs, inductor, journal)
            events = {kind: timeline.timeline(graph, costs) for kind, graph in graphs.items()}
            if measured:
                events = measure(step_of(model, inputs, options=inductor))
        found[name] = Variant(graphs, events, _bytes_kept(graphs, costs))
    source = torch.cuda.get_device_name() if measured else "the cost model"
    return Report(found["before"], found["after"], journal, source)


def _graphs_of(
    model: Any, inputs: Any, inductor: Mapping[str, Any], journal: Journal
) -> dict[str, Graph]:
    """By kind, as Inductor has them before it makes code."""
    graphs: dict[str, Graph] = {}
    backend = compat.graph_backend(listened(inductor, journal), graphs.__setitem__)
    step_of(model, inputs, backend=backend)(unmeasured)
    return graphs


@contextlib.contextmanager
def _refusing(model: Any, inputs: Any) -> Iterator[None]:
    try:
        yield
    except TorchDynamoException as error:
        _run_uncompiled(model, inputs)
        reason = str(error).strip().partition("\n")[0]
        raise RuntimeError(
            f"explain: model must compile with fullgraph=True, got {type(error).__name__}: {reason}"
        ) from error


def _run_uncompiled(model: Any, inputs: Any) -> None:
    """The compiler's errors hide those of the model."""
    try:
        with torch.compiler.set_stance("force_eager"):
            step_of(model, inputs)(unmeasured)
    except Exception as error:
        raise RuntimeError(
            f"explain: model must run on the inputs, got {type(error).__name__}: {error}"
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
    if BACKWARD not in graphs:
        return 0
    alive = {node.name for node in graphs[FORWARD].find_nodes(op="placeholder")}
    return sum(
        costs.num_bytes(node)
        for node in graphs[BACKWARD].find_nodes(op="placeholder")
        if node.name not in alive and not node.name.startswith("tangents_")
    )
