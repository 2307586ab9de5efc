"""What Inductor must know of operators that several ranks call together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

COLLECTIVE: set[torch._ops.OpOverload] = set()


@functools.cache
def keep_collectives() -> None:
    """Have Inductor call the operators of `COLLECTIVE` though nothing reads their results, and in
    the order of the graph, with PyTorch's own collectives among them.

    A rank without tokens compiles a graph of its own: kernels of no elements read nothing, so an
    exchange before them looks dead, and one after them free to go first. The others would wait.
    """
    from torch._inductor import lowering  # noqa: PLC0415 - takes seconds

    exact_strides = lowering.tag_to_layout_constraint(torch.Tag.needs_exact_strides)
    for op in COLLECTIVE:
        lowering.make_fallback(op, layout_constraint=exact_strides, warn=False)
    for target, lower in list(lowering.lowerings.items()):
        if target in COLLECTIVE or getattr(target, "namespace", "") == "_c10d_functional":
            lowering.lowerings[target] = _in_order(lower)


def _in_order(lower: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor import ir  # noqa: PLC0415 - takes seconds
    from torch._inductor.virtualized import V  # noqa: PLC0415

    def is_ours(operation: Any) -> bool:
        return getattr(operation, "op_overload", None) in COLLECTIVE

    def is_theirs(operation: Any) -> bool:
        is_call = isinstance(operation, ir._CollectiveKernel)
        return is_call and not isinstance(operation, ir._WaitKernel)

    @functools.wraps(lower)
    def lower_in_order(*args: Any, **kwargs: Any) -> Any:
        operations: list[Any] = V.graph.operations
        earlier = operations[::-1]
        result = lower(*args, **kwargs)
        for call in operations[len(earlier) :]:
            if is_ours(call):
                call.has_side_effects = lambda: True
            elif not is_theirs(call):
                continue
            for operation in earlier:
                if is_ours(operation) or (is_ours(call) and is_theirs(operation)):
                    V.graph.additional_buffer_deps[call.operation_name].add(operation.get_name())
                if is_ours(operation):
                    break
        return result

    return lower_in_order
