"""How long the device is busy with what a node does, and how many bytes its outputs have.

    matmuls       launch + max(flops / FLOP/s, bytes read and written / memory bandwidth)
    exchanges     latency + max(bytes that leave the rank / link, bytes here / memory bandwidth);
                  shifts, too
    plans         a latency
    views, getitem, sizes, waits    0
    the rest      launch + bytes / memory bandwidth; what Inductor fuses, a pointwise node into
                  its readers that are pointwise or reductions, is neither written nor launched

The figures are those of `fx_passes.devices`, unknown sizes those of `fx_passes.expected_sizes`. A
matmul is what `torch.utils.flop_counter` has a formula for; here it gets those of our operators.

grouped_mm of 4 tokens, K = 2, 6 experts, I = 8, O = 6 in bfloat16: 2 * 8 * 8 * 6 = 768 flops and
128 + 576 + 24 + 96 = 824 bytes, of which the output is 96.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import flop_registry, register_flop_formula

from moe_ops import comm

from .devices import Figures, device_name, figures_of
from .expected_sizes import ExpectedSizes, argument, expected_copies, expected_sizes, plan_of
from .graph import arguments, is_call, name_of

_OPS = torch.ops.moe_ops
_ATEN = torch.ops.aten
_C10D = torch.ops._c10d_functional

_EXCHANGES = (
    _OPS.dispatch.default,
    _OPS.dispatch_start.default,
    _OPS.combine.default,
    _OPS.combine_start.default,
)
_SHIFTS = (_OPS.cp_shift.default, _OPS.cp_shift_start.default)
_PLANS = (_OPS.exchange_plan.default, _OPS.gather_plan.default)
_COLLECTIVES = (
    _OPS.all_to_all.default,
    _OPS.all_gather_rows.default,
    _OPS.reduce_scatter_rows.default,
)
# Started before, or no more than another name for their input.
_FREE = (
    _OPS.dispatch_wait.default,
    _OPS.combine_wait.default,
    _OPS.cp_shift_wait.default,
    _C10D.wait_tensor.default,
    _ATEN._unsafe_view.default,
)
# They read as many elements as they write, of however large a table.
_LOOKUPS = (
    _ATEN.index.Tensor,
    _ATEN.index_select.default,
    _ATEN.gather.default,
    _ATEN.embedding.default,
)
_FP8_RUN = 128  # values that share a float32 scale on the wire


class CostModel:
    """Of one device. Its repr says all that it depends on. `expected_rows`: C, rows of a rank's
    experts, instead of one share of all.
    """

    def __init__(self, figures: Figures, expected_rows: int | None = None) -> None:
        self.figures, self.expected_rows = figures, expected_rows

    def __repr__(self) -> str:
        """All that it depends on, for `uuid()`."""
        return f"{type(self).__name__}({self.figures}, {self.expected_rows})"

    def __eq__(self, other: object) -> bool:
        """Whether both depend on the same."""
        return isinstance(other, CostModel) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))

    def seconds(self, node: Node) -> float:
        """Device time of a call; of an exchange, a shift or the start of one, until it is over."""
        if _is_free(node):
            return 0.0
        if is_call(node, *_PLANS):
            return self.figures.plan_s
        sizes = self._sizes(node)
        if is_call(node, *_EXCHANGES):
            return self._exchange(node, sizes)
        if is_call(node, *_SHIFTS):
            return self._shift(node, sizes)
        if _is_collective(node):
            return self._collective(node, sizes)
        written = self.num_bytes(node) if _writes(node) else 0
        launch_s = self.figures.launch_s if _writes(node) else 0.0
        in_memory_s = self._in_memory(written + _num_read(node, sizes))
        return launch_s + max(in_memory_s, self._multiplying(node, sizes))

    def num_bytes(self, node: Node) -> int:
        """Bytes of a node's outputs, unknown sizes replaced by expected ones."""
        return self._sizes(node).num_bytes(node.meta.get("val"))

    def _sizes(self, node: Node) -> ExpectedSizes:
        return expected_sizes(node.graph, self.expected_rows)

    def _exchange(self, node: Node, sizes: ExpectedSizes) -> float:
        """Rows leave for other ranks while those that stay, and those that arrive, are written."""
        plan = plan_of(node)
        assert plan is not None
        rows, weights, *_ = arguments(node)
        num_tokens, top_k = sizes.tokens_and_choices(plan)
        copies = expected_copies(num_tokens, top_k, plan.num_ranks)
        gate_bytes = 0 if weights is None else top_k * weights.meta["val"].dtype.itemsize
        row_bytes = rows.meta["val"].shape[1] * rows.meta["val"].dtype.itemsize
        sent_bytes = copies * (_on_wire(node, row_bytes) + gate_bytes)
        return self._between_ranks(
            _even(plan.num_ranks, sent_bytes, 2 * copies * (row_bytes + gate_bytes)),
            self.figures.exchange_s,
            self.figures.exchange_bytes_per_s,
        )

    def _collective(self, node: Node, sizes: ExpectedSizes) -> float:
        read, written = _num_read(node, sizes), self.num_bytes(node)
        times = 2 if name_of(node).startswith("all_reduce") else 1
        return self._between_ranks(
            _even(_num_ranks(node), times * max(read, written), read + written),
            self.figures.collective_s,
            self.figures.collective_bytes_per_s,
        )

    def _shift(self, node: Node, sizes: ExpectedSizes) -> float:
        """All of the buffer leaves for one rank, if there is another."""
        num_bytes, num_ranks = sizes.num_bytes(arguments(node)[0].meta["val"]), _num_ranks(node)
        return self._between_ranks(
            _Traffic(num_ranks, num_bytes if num_ranks > 1 else 0, 2 * num_bytes),
            self.figures.collective_s,
            self.figures.collective_bytes_per_s,
        )

    def _between_ranks(self, traffic: _Traffic, latency_s: float, bytes_per_s: float) -> float:
        latency_s = latency_s if traffic.num_ranks > 1 else self.figures.launch_s
        on_link_s = traffic.off_rank_bytes / bytes_per_s
        return latency_s + max(on_link_s, self._in_memory(traffic.moved_bytes))

    def _in_memory(self, num_bytes: float) -> float:
        return num_bytes / self.figures.memory_bytes_per_s

    def _multiplying(self, node: Node, sizes: ExpectedSizes) -> float:
        formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if formula is None:
            return 0.0
        args, kwargs, out = (
            sizes.example(map_arg(part, lambda node: node.meta.get("val")))
            for part in (node.args, node.kwargs, node.meta["val"])
        )
        flops = formula(*args, **kwargs, out_val=out)
        used = sizes.shares.get(getattr(argument(node, "offsets_L"), "name", ""), 1.0)
        dtype = next(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
        return used * flops / self.figures.flops_of(dtype)


class FixedCosts(CostModel):
    """A stub for tests: seconds by operator's name (`graph.name_of`), else `default`; still 0 for
    what costs nothing.
    """

    def __init__(self, seconds: Mapping[str, float], default: float = 0.0) -> None:
        super().__init__(figures_of("cpu"))
        self.table, self.default = dict(seconds), default

    def __repr__(self) -> str:
        """The table."""
        return f"FixedCosts({self.table}, default={self.default})"

    def seconds(self, node: Node) -> float:
        """What the table says."""
        return 0.0 if _is_free(node) else self.table.get(name_of(node), self.default)


def cost_model(device: str | None = None, expected_rows: int | None = None) -> CostModel:
    """Of a device by its name in the table, by default the current one."""
    return CostModel(figures_of(device or device_name()), expected_rows)


@dataclasses.dataclass(frozen=True)
class _Traffic:
    """`off_rank_bytes` leave for others of `num_ranks`; `moved_bytes` are read or written here."""

    num_ranks: float
    off_rank_bytes: float
    moved_bytes: float


def _even(num_ranks: float, sent_bytes: float, moved_bytes: float) -> _Traffic:
    """Each rank gets an equal share of what is sent, this one too."""
    return _Traffic(num_ranks, sent_bytes * (1 - 1 / num_ranks), moved_bytes)


def _is_free(node: Node) -> bool:
    """Whether the device does nothing."""
    if node.op != "call_function" or is_call(node, *_FREE) or _is_view(node):
        return True
    values = pytree.tree_leaves(node.meta.get("val"))
    return not any(isinstance(value, torch.Tensor) for value in values)


def _is_view(node: Node) -> bool:
    if is_call(node, operator.getitem):
        return True
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _is_collective(node: Node) -> bool:
    namespace = getattr(node.target, "namespace", "")
    return namespace.startswith("_c10d_functional") or is_call(node, *_COLLECTIVES)


def _num_ranks(node: Node) -> float:
    """P; without end where the graph holds no group because it serves every rank."""
    group = argument(node, "group_name")
    return math.inf if isinstance(group, Node) else comm.group_size(comm.group_name_of(group))


def _on_wire(node: Node, row_bytes: int) -> int:
    """Bytes of a row between ranks."""
    if argument(node, "wire") in (None, "full"):
        return row_bytes
    width = arguments(node)[0].meta["val"].shape[1]
    return width + 4 * -(-width // _FP8_RUN)


def _num_read(node: Node, sizes: ExpectedSizes) -> int:
    num_bytes = {
        value: sizes.num_bytes(value.meta.get("val"))
        for value in node.all_input_nodes
        if not _fuses(_origin(value), node)
    }
    if is_call(node, *_LOOKUPS) and (table := node.all_input_nodes[0]) in num_bytes:
        num_bytes[table] = min(num_bytes[table], sizes.num_bytes(node.meta["val"]))
    return sum(num_bytes.values())


def _writes(node: Node) -> bool:
    """Whether Inductor has a kernel end here."""
    readers = list(_readers(node))
    return not readers or not all(_fuses(node, reader) for reader in readers)


def _fuses(producer: Node, consumer: Node) -> bool:
    tags = getattr(consumer.target, "tags", ())
    return _is_pointwise(producer) and (torch.Tag.pointwise in tags or torch.Tag.reduction in tags)


def _is_pointwise(node: Node) -> bool:
    """Constants are, too."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    reads = any(isinstance(x.meta.get("val"), torch.Tensor) for x in node.all_input_nodes)
    return torch.Tag.pointwise in node.target.tags or not reads


def _origin(node: Node) -> Node:
    """What a view shows."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _readers(node: Node) -> Iterator[Node]:
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user


def _grouped_mm_flops(a: Any, w: Any, *rest: Any, **more: Any) -> int:
    return 2 * a[0] * w[1] * w[2]


def _gathering_flops(a: Any, slots: Any, top_k: int, w: Any, *rest: Any, **more: Any) -> int:
    return _grouped_mm_flops(a if slots is None else slots, w)


def _wgrad_flops(g: Any, a: Any, *rest: Any, **more: Any) -> int:
    return 2 * g[0] * g[1] * a[1]


def _gathering_wgrad_flops(g: Any, g_slots: Any, a: Any, *rest: Any, **more: Any) -> int:
    return 2 * (g if g_slots is None else g_slots)[0] * g[1] * a[1]


def _router_flops(x: Any, weight: Any, **more: Any) -> int:
    return 2 * x[0] * weight[0] * weight[1]


def _router_backward_flops(grad: Any, x: Any, weight: Any, **more: Any) -> int:
    return 2 * _router_flops(x, weight)


def _stock_grouped_mm_flops(a: Any, b: Any, *rest: Any, **more: Any) -> int:
    groups = a[0] if len(a) == len(b) == 3 else 1  # else each row or column meets one group
    return 2 * groups * a[-2] * a[-1] * b[-1]


def _register_flop_formulas() -> None:
    """Unless PyTorch has one itself."""
    formulas: dict[Any, Any] = {
        _OPS.grouped_mm: _grouped_mm_flops,
        _OPS.gather_grouped_mm: _gathering_flops,
        _OPS.grouped_mm_swiglu: _gathering_flops,
        _OPS.grouped_mm_swiglu_backward: _gathering_flops,
        _OPS.grouped_mm_wgrad: _wgrad_flops,
        _OPS.grouped_mm_wgrad_f32: _wgrad_flops,
        _OPS.gather_grouped_mm_wgrad: _gathering_wgrad_flops,
        _OPS.router_linear: _router_flops,
        _OPS.router_linear_backward: _router_backward_flops,
        _ATEN._grouped_mm: _stock_grouped_mm_flops,
    }
    for op, formula in formulas.items():
        if op not in flop_registry:
            register_flop_formula(op)(formula)


_register_flop_formulas()
