"""Valid arguments of every operator, for the checks that all operators share.

Letters as in the operators. With a group, every rank must build its samples in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from moe_ops import _library, comm
from moe_ops.layout import Plan
from moe_ops.testing import make_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the arguments are made from; one process, or one rank of `group_name`. T <= 8."""

    num_tokens: int = 7
    top_k: int = 2
    num_experts: int = 4
    hidden_size: int = 6
    dtype: torch.dtype = torch.float32
    none_fraction: float = 0.3
    capacity: bool = False
    requires_grad: bool = True
    group_name: str = ""

    @property
    def gate_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def plan_settings(self) -> tuple[int, int | None, int | None]:
        """max_tokens, copy_capacity, row_capacity."""
        if not self.capacity:
            return 0, None, None
        copies = 64 * comm.group_size(self.group_name)
        return 64, copies, copies * self.top_k

    def values(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, dtype=torch.float64).to(dtype or self.dtype)
        return values.requires_grad_(self.requires_grad)

    def ids(self) -> torch.Tensor:
        return make_ids(self.num_tokens, self.top_k, self.num_experts, "zipf", self.none_fraction)

    def weights(self, *shape: int) -> torch.Tensor:
        return self.values(*shape, dtype=self.gate_dtype)

    def plan(self) -> list[torch.Tensor]:
        return torch.ops.moe_ops.exchange_plan(
            self.ids(), self.num_experts, self.group_name, *self.plan_settings
        )

    def maps(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """slot_of_row_C with a tail, row_of_slot_TK, offsets_E."""
        rows = self.num_tokens * self.top_k + 3
        return torch.ops.moe_ops.sort_slots(self.ids(), self.num_experts, rows, None)


Arguments = tuple[Any, ...]


def _router_linear(s: Sizes) -> list[Arguments]:
    x, weight = (
        s.values(s.num_tokens, s.hidden_size),
        s.values(s.num_experts, s.hidden_size),
    )
    wide = s.weights(s.num_experts, s.hidden_size)
    return [(x, weight), (x, wide), (x, weight.detach().bfloat16())]


def _router_linear_backward(s: Sizes) -> list[Arguments]:
    grad = s.weights(s.num_tokens, s.num_experts)
    return [(grad, *arguments) for arguments in _router_linear(s)]


def _topk_route(s: Sizes) -> list[Arguments]:
    logits = s.values(s.num_tokens, s.num_experts)
    mask = torch.arange(s.num_tokens) % 3 > 0
    bias = torch.randn(s.num_experts)
    return [
        (logits, None, None, None, s.top_k),
        (logits, bias, None, mask, s.top_k, "sigmoid", True, True, 2.5),
        (logits, None, s.ids(), None, s.top_k, "softmax", False),
        (logits, None, None, None, s.top_k, "softmax", True, False),
        (logits, bias, None, None, s.top_k, "sqrtsoftplus", True, True, 1.0, 2, 1 + s.top_k // 2),
    ]


def _topk_route_backward(s: Sizes) -> list[Arguments]:
    grad, logits = s.weights(s.num_tokens, s.top_k), s.values(s.num_tokens, s.num_experts)
    grad, logits = grad.detach(), logits.detach()
    return [(grad, logits, s.ids(), "softmax", True, False, 1.0)]


def _exchange_plan(s: Sizes) -> list[Arguments]:
    return [(s.ids(), s.num_experts, s.group_name, *s.plan_settings)]


def _dispatch(s: Sizes) -> list[Arguments]:
    x, weights, plan = (
        s.values(s.num_tokens, s.hidden_size),
        s.weights(s.num_tokens, s.top_k),
        s.plan(),
    )
    return [(x, weights, plan, s.group_name, "full"), (x, None, plan, s.group_name, "full")]


def _combine(s: Sizes) -> list[Arguments]:
    plan = s.plan()
    num_copies = Plan(*plan).num_copies
    rows, weights = s.values(num_copies, s.hidden_size), s.weights(num_copies, s.top_k)
    addend = s.values(s.num_tokens, s.hidden_size)
    return [(rows, weights, addend, plan, s.group_name), (rows, None, None, plan, s.group_name)]


def _sort_slots(s: Sizes) -> list[Arguments]:
    ids = s.ids()
    return [
        (ids, s.num_experts, None, None),
        (ids.long(), s.num_experts, 5, None),
        (ids, s.num_experts, None, 3),
    ]


def _permute(s: Sizes) -> list[Arguments]:
    slot_of_row, row_of_slot, _ = s.maps()
    x, weights = s.values(s.num_tokens, s.hidden_size), s.weights(s.num_tokens, s.top_k)
    return [(x, weights, slot_of_row, row_of_slot), (x, None, slot_of_row, row_of_slot)]


def _unpermute(s: Sizes) -> list[Arguments]:
    slot_of_row, row_of_slot, _ = s.maps()
    rows, weights = (
        s.values(slot_of_row.shape[0], s.hidden_size),
        s.weights(s.num_tokens, s.top_k),
    )
    return [(rows, weights, slot_of_row, row_of_slot), (rows, None, slot_of_row, row_of_slot)]


def _row_dot(s: Sizes) -> list[Arguments]:
    slot_of_row, row_of_slot, _ = s.maps()
    rows, x = s.values(slot_of_row.shape[0], s.hidden_size), s.values(s.num_tokens, s.hidden_size)
    return [(rows, x, slot_of_row, row_of_slot)]


def _rows(s: Sizes, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, their weights, offsets."""
    slot_of_row, _, offsets = s.maps()
    return s.values(slot_of_row.shape[0], width), s.weights(slot_of_row.shape[0]), offsets


def _grouped_mm(s: Sizes) -> list[Arguments]:
    a, _, offsets = _rows(s, s.hidden_size)
    w = s.values(s.num_experts, 5, s.hidden_size)
    transposed = s.values(s.num_experts, s.hidden_size, 5).detach().mT.requires_grad_()
    return [(a, w, offsets), (a, transposed, offsets)]


def _grouped_mm_wgrad(s: Sizes) -> list[Arguments]:
    a, _, offsets = _rows(s, s.hidden_size)
    return [(s.values(a.shape[0], 5), a, offsets)]


def _grouped_bias(s: Sizes) -> list[Arguments]:
    rows, weights, offsets = _rows(s, s.hidden_size)
    bias = s.values(s.num_experts, s.hidden_size)
    return [(rows, bias, weights, offsets), (rows, bias, None, offsets)]


def _swiglu(s: Sizes) -> list[Arguments]:
    h, weights, offsets = _rows(s, 2 * s.hidden_size)
    return [
        (h, weights, offsets),
        (h, None, offsets, "gelu"),
        (h, weights, offsets, "silu", 1.0, 1.702, 1.0),
    ]


def _swiglu_backward(s: Sizes) -> list[Arguments]:
    grad, _, _ = _rows(s, s.hidden_size)
    return [_detached((grad, *arguments)) for arguments in _swiglu(s)]


def _splits(s: Sizes) -> tuple[torch.Tensor, torch.Tensor]:
    """send_P, recv_P: rank r sends r + q + 1 rows to rank q."""
    send = comm.group_rank(s.group_name) + 1 + torch.arange(comm.group_size(s.group_name))
    return send, send.clone()


def _all_to_all(s: Sizes) -> list[Arguments]:
    send, recv = _splits(s)
    rows = s.values(int(send.sum()) + 2, s.hidden_size)
    return [(rows, send, recv, int(recv.sum()) + 3, s.group_name)]


def _sort_chunks(s: Sizes) -> list[Arguments]:
    counts = torch.tensor([[2, 0, 1], [1, 3, 0]], dtype=torch.int32)
    return [
        (s.values(9, s.hidden_size), counts),
        (torch.arange(8), counts),
        (s.values(7, 2, 3), counts.T),
    ]


def _gather_plan(s: Sizes) -> list[Arguments]:
    x = s.values(s.num_tokens, s.hidden_size).detach()
    return [(x, s.group_name, *((64, True) if s.capacity else (0, False)))]


def _all_gather_rows(s: Sizes) -> list[Arguments]:
    counts = torch.arange(comm.group_size(s.group_name)) + 8
    x, total = s.values(s.num_tokens, s.hidden_size), int(counts.sum())
    return [(x, counts, total, s.group_name), (x, counts, total + 2, s.group_name)]


def _reduce_scatter_rows(s: Sizes) -> list[Arguments]:
    counts = torch.arange(comm.group_size(s.group_name)) + 8
    total = int(counts.sum())
    return [(s.values(total + 2, s.hidden_size), counts, s.num_tokens, s.group_name)]


def _cp_tensors(s: Sizes, *shapes: tuple[int, ...]) -> Arguments:
    """Equal in shape on all ranks, which may hold different numbers of tokens."""
    return tuple(s.values(*shape) for shape in shapes)


def _cp_whole(s: Sizes) -> list[Arguments]:
    size = 4 * comm.group_size(s.group_name)
    x, y = _cp_tensors(s, (3, size), (size, 2, 3))
    return [(x, 1, s.group_name), (y, -3, s.group_name)]


def _cp_part(s: Sizes) -> list[Arguments]:
    x, y = _cp_tensors(s, (3, 4), (6, 2, 3))
    return [(x, 1, s.group_name), (y, -3, s.group_name)]


def _cp_shift(s: Sizes) -> list[Arguments]:
    buf, dep = _cp_tensors(s, (6,), (2, 3))
    return [(buf, dep, 1, s.group_name), (buf, buf, -3, s.group_name)]


def _cp_attention(s: Sizes) -> list[Arguments]:
    q, k, v = _cp_tensors(s, (1, 4, 6, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    return [(q, k, v, True, 0.3, s.group_name), (q, q, q, False, 0.3, s.group_name)]


def _cp_attention_backward(s: Sizes) -> list[Arguments]:
    cases = [_detached(arguments) for arguments in _cp_attention(s)]
    return [
        (torch.ones_like(c[0]), *c[:3], *torch.ops.moe_ops.cp_attention(*c), *c[3:]) for c in cases
    ]


def _detached(arguments: Arguments) -> Arguments:
    return tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in arguments)


_BUILDERS: dict[str, Callable[[Sizes], list[Arguments]]] = {
    "router_linear": _router_linear,
    "router_linear_backward": _router_linear_backward,
    "topk_route": _topk_route,
    "topk_route_backward": _topk_route_backward,
    "exchange_plan": _exchange_plan,
    "dispatch": _dispatch,
    "combine": _combine,
    "sort_slots": _sort_slots,
    "permute": _permute,
    "unpermute": _unpermute,
    "row_dot": _row_dot,
    "grouped_mm": _grouped_mm,
    "grouped_mm_wgrad": _grouped_mm_wgrad,
    "grouped_bias": _grouped_bias,
    "grouped_bias_backward": lambda s: [_detached(a) for a in _grouped_bias(s)],
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
    "all_to_all": _all_to_all,
    "sort_chunks": _sort_chunks,
    "gather_plan": _gather_plan,
    "all_gather_rows": _all_gather_rows,
    "reduce_scatter_rows": _reduce_scatter_rows,
    "cp_split": _cp_whole,
    "cp_split_backward": _cp_part,
    "cp_unsplit": _cp_part,
    "cp_unsplit_backward": _cp_whole,
    "cp_shift": _cp_shift,
    "cp_attention": _cp_attention,
    "cp_attention_backward": _cp_attention_backward,
}
OPS = sorted(_library.OPS)
COLLECTIVE_OPS = [op for op in OPS if "str group_name" in _library.OPS[op].schema]


def overload(op: str) -> Any:
    """The operator, e.g. torch.ops.moe_ops.permute.default."""
    return getattr(torch.ops.moe_ops, op).default


def samples(op: str, sizes: Sizes | None = None) -> list[Arguments]:
    """Valid argument tuples of operator `op`; the first one is the plainest."""
    return _BUILDERS[op](sizes or Sizes())
