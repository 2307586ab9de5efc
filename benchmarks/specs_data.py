"""Memory-bound operators: inputs, baselines, bytes.

Letters: T tokens, K top-k, E experts, H hidden, F ffn, C rows. Bytes are the fewest possible: each
input read once, each output written once.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from moe_ops import _library, kernels

from . import peers as peer_calls
from .harness import Backend, Work, relative_error
from .peers import Peers
from .workloads import Scene

# Largest error of bf16 results: rounding alone is 2e-3, sums of rounded terms twice that.
BF16_LIMIT = 1e-2
F32_LIMIT = 1e-5


def ours(op: str, *arguments: Any) -> Backend:
    return Backend("moe_ops", lambda: getattr(torch.ops.moe_ops, op)(*arguments))


def kernel_name(op: str, *arguments: Any) -> str:
    """The kernel that serves these arguments; on the CPU that is the reference."""
    on_cpu = arguments[0].device.type == "cpu"
    return "reference" if on_cpu else kernels.name_of(op, *arguments)


def work(op: str, scene: Scene, arguments: tuple[Any, ...], **fields: Any) -> Work:
    """Work of operator `op`; `fields` are those of `Work`, `backends` without ours."""
    name = fields.pop("name", op)
    return Work(
        op=name,
        shape=scene.shape.name,
        routing=scene.routing,
        backends=[ours(op, *arguments), *fields.pop("backends")],
        kernel=kernel_name(op, *arguments),
        **fields,
    )


def reference(op: str, *arguments: Any) -> Any:
    return _library.OPS[op].reference(*arguments)


def _some(size: int, device: str, number: int = 2048) -> torch.Tensor:
    return torch.linspace(0, size - 1, min(size, number), device=device).long()


def _finite(values: torch.Tensor) -> bool:
    return bool(values.isfinite().all())


def _error_at(index: torch.Tensor, found: torch.Tensor, expected: torch.Tensor) -> float:
    """Error of some rows; the others must at least be finite."""
    return relative_error(found[index], expected) if _finite(found) else math.inf


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _gate(scene: Scene) -> torch.Tensor:
    return scene.normal(scene.shape.num_experts, scene.shape.hidden, std=0.02)


def router_linear(scene: Scene, peers: Peers) -> Work:
    x_TH, weight_EH = scene.tokens(), _gate(scene)
    tokens = _some(len(x_TH), scene.device)
    expected = reference("router_linear", x_TH[tokens].double(), weight_EH)
    return work(
        "router_linear",
        scene,
        (x_TH, weight_EH),
        backends=[Backend("float32 matmul", lambda: x_TH.float() @ weight_EH.float().T)],
        error_of=lambda logits_TE: _error_at(tokens, logits_TE, expected),
        limit=F32_LIMIT,
        num_bytes=_bytes(x_TH, weight_EH) + 4 * len(x_TH) * len(weight_EH),
    )


def router_linear_backward(scene: Scene, peers: Peers) -> Work:
    x_TH, weight_EH = scene.tokens(), _gate(scene)
    grad_TE = scene.normal(len(x_TH), len(weight_EH), std=1.0, dtype=torch.float32)
    arguments = (grad_TE, x_TH, weight_EH)
    expected = reference("router_linear_backward", *arguments)

    def stock() -> tuple[torch.Tensor, torch.Tensor]:
        grad_x_TH, grad_weight_EH = grad_TE @ weight_EH.float(), grad_TE.T @ x_TH.float()
        return grad_x_TH.to(x_TH.dtype), grad_weight_EH.to(weight_EH.dtype)

    return work(
        "router_linear_backward",
        scene,
        arguments,
        backends=[Backend("float32 matmuls", stock)],
        error_of=lambda result: max(map(relative_error, result, expected)),
        limit=BF16_LIMIT,
        num_bytes=_bytes(*arguments, *expected),
    )


def topk_route(scene: Scene, peers: Peers) -> Work:
    logits_TE, top_k = scene.logits_TE, scene.shape.top_k

    def stock() -> tuple[torch.Tensor, torch.Tensor]:
        weights_TK, ids_TK = logits_TE.softmax(1).topk(top_k, dim=1)
        return weights_TK / weights_TK.sum(1, keepdim=True), ids_TK

    def error_of(result: tuple[torch.Tensor, torch.Tensor]) -> float:
        weights_TK, ids_TK = result
        best = logits_TE.topk(top_k, dim=1).values
        distinct = ids_TK.long().sort(1).values.diff(dim=1).ne(0).all()
        if not distinct or not logits_TE.gather(1, ids_TK.long()).equal(best):
            return math.inf
        return relative_error(weights_TK, best.double().softmax(1))

    backends = [Backend("stock softmax, topk", stock)]
    if peers.moe_ops is not None:
        backends.append(peer_calls.moe_ops_topk(peers.moe_ops, scene))
    return work(
        "topk_route",
        scene,
        (logits_TE, None, None, None, top_k),
        backends=backends,
        error_of=error_of,
        limit=F32_LIMIT,
        num_bytes=_bytes(logits_TE) + 8 * scene.shape.num_rows,
    )


def topk_route_backward(scene: Scene, peers: Peers) -> Work:
    logits_TE, ids_TK = scene.logits_TE, scene.ids_TK
    grad_TK = scene.normal(*ids_TK.shape, std=1.0, dtype=torch.float32)
    arguments = (grad_TK, logits_TE, ids_TK, "softmax", True, True, 1.0)
    tokens = _some(len(ids_TK), scene.device)
    expected = reference(
        "topk_route_backward",
        grad_TK[tokens].double(),
        logits_TE[tokens].double(),
        ids_TK[tokens],
        *arguments[3:],
    )
    backends = [Backend("reference", lambda: reference("topk_route_backward", *arguments))]
    if peers.moe_ops is not None:
        backends.append(peer_calls.moe_ops_topk_backward(peers.moe_ops, scene, grad_TK))
    return work(
        "topk_route_backward",
        scene,
        arguments,
        backends=backends,
        error_of=lambda grad_TE: _error_at(tokens, grad_TE, expected),
        limit=F32_LIMIT,
        num_bytes=2 * _bytes(logits_TE) + _bytes(grad_TK, ids_TK),
    )


def sort_slots(scene: Scene, peers: Peers) -> Work:
    ids_TK, num_experts = scene.ids_TK, scene.shape.num_experts
    maps = scene.maps

    def stock() -> tuple[torch.Tensor, ...]:
        sorted_ids, slots = ids_TK.reshape(-1).sort(stable=True)
        rows = torch.empty_like(slots).scatter_(
            0, slots, torch.arange(len(slots), device=slots.device)
        )
        experts = torch.arange(num_experts, device=slots.device, dtype=sorted_ids.dtype)
        offsets = torch.searchsorted(sorted_ids, experts, right=True)
        return slots.int(), rows.int().view_as(ids_TK), offsets.int()

    def error_of(result: tuple[torch.Tensor, ...]) -> float:
        return 0.0 if all(a.equal(b) for a, b in zip(result, maps, strict=True)) else math.inf

    return work(
        "sort_slots",
        scene,
        (ids_TK, num_experts, None, None),
        backends=[Backend("stock sort, scatter, searchsorted", stock)],
        error_of=error_of,
        limit=0.0,
        num_bytes=_bytes(ids_TK, *maps),
    )


def permute(scene: Scene, peers: Peers) -> Work:
    slot_of_row_C, row_of_slot_TK, _ = scene.maps
    x_TH = scene.tokens()
    token_of_row_C = slot_of_row_C.long() // scene.shape.top_k
    rows = _some(len(slot_of_row_C), scene.device)
    expected = x_TH[token_of_row_C[rows]]

    def error_of(rows_CH: torch.Tensor) -> float:
        return 0.0 if rows_CH[rows].equal(expected) and _finite(rows_CH) else math.inf

    backends = [Backend("stock index_select", lambda: x_TH.index_select(0, token_of_row_C))]
    if peers.moe_ops is not None:
        backends.append(peer_calls.moe_ops_permute(peers.moe_ops, scene, x_TH))
    return work(
        "permute",
        scene,
        (x_TH, None, slot_of_row_C, row_of_slot_TK),
        backends=backends,
        error_of=error_of,
        limit=0.0,
        num_bytes=_bytes(x_TH) * (1 + scene.shape.top_k) + _bytes(slot_of_row_C),
    )


def unpermute(scene: Scene, peers: Peers) -> Work:
    slot_of_row_C, row_of_slot_TK, _ = scene.maps
    rows_CH, weights_TK = scene.rows(scene.shape.hidden), scene.weights_TK
    token_of_row_C = slot_of_row_C.long() // scene.shape.top_k
    row_weights_C1 = scene.row_weights_C[:, None].to(rows_CH.dtype)
    size_TH = (scene.shape.num_tokens, scene.shape.hidden)
    tokens = _some(scene.shape.num_tokens, scene.device, 512)
    terms = rows_CH[row_of_slot_TK[tokens].long()].double()
    expected = (terms * weights_TK[tokens].double()[..., None]).sum(1)

    def stock() -> torch.Tensor:
        return rows_CH.new_zeros(size_TH).index_add_(0, token_of_row_C, rows_CH * row_weights_C1)

    backends = [Backend("stock multiply, index_add", stock)]
    if peers.moe_ops is not None:
        backends.append(peer_calls.moe_ops_unpermute(peers.moe_ops, scene, rows_CH))
    return work(
        "unpermute",
        scene,
        (rows_CH, weights_TK, slot_of_row_C, row_of_slot_TK),
        backends=backends,
        error_of=lambda x_TH: _error_at(tokens, x_TH, expected),
        limit=BF16_LIMIT,
        num_bytes=_bytes(rows_CH) // scene.shape.top_k * (1 + scene.shape.top_k)
        + _bytes(row_of_slot_TK, weights_TK),
    )


def row_dot(scene: Scene, peers: Peers) -> Work:
    slot_of_row_C, row_of_slot_TK, _ = scene.maps
    rows_CH, x_TH = scene.rows(scene.shape.hidden), scene.tokens()
    index_TK = row_of_slot_TK.long()
    tokens = _some(scene.shape.num_tokens, scene.device, 512)
    expected = (rows_CH[index_TK[tokens]].double() * x_TH[tokens].double()[:, None]).sum(2)
    stock = Backend(
        "stock gather, einsum", lambda: torch.einsum("tkh,th->tk", rows_CH[index_TK], x_TH)
    )
    return work(
        "row_dot",
        scene,
        (rows_CH, x_TH, slot_of_row_C, row_of_slot_TK),
        backends=[stock],
        error_of=lambda dots_TK: _error_at(tokens, dots_TK, expected),
        limit=BF16_LIMIT,
        num_bytes=_bytes(rows_CH, x_TH, row_of_slot_TK) + 4 * scene.shape.num_rows,
    )


def swiglu(scene: Scene, peers: Peers) -> Work:
    h_C2F, weights_C, offsets_E = (
        scene.rows(2 * scene.shape.ffn),
        scene.row_weights_C,
        scene.maps[2],
    )
    rows = _some(len(h_C2F), scene.device)
    everything = offsets_E.new_tensor([len(rows)])
    expected = reference("swiglu", h_C2F[rows].double(), weights_C[rows].double(), everything)

    def stock() -> torch.Tensor:
        gate, up = h_C2F.chunk(2, dim=1)
        return torch.nn.functional.silu(gate) * up * weights_C[:, None].to(gate.dtype)

    return work(
        "swiglu",
        scene,
        (h_C2F, weights_C, offsets_E),
        backends=[Backend("stock silu, multiply", stock)],
        error_of=lambda a_CF: _error_at(rows, a_CF, expected),
        limit=BF16_LIMIT,
        num_bytes=_bytes(h_C2F) * 3 // 2 + _bytes(weights_C),
    )


def swiglu_backward(scene: Scene, peers: Peers) -> Work:
    h_C2F, weights_C, offsets_E = (
        scene.rows(2 * scene.shape.ffn),
        scene.row_weights_C,
        scene.maps[2],
    )
    grad_CF = scene.rows(scene.shape.ffn)
    arguments = (grad_CF, h_C2F, weights_C, offsets_E)
    rows = _some(len(h_C2F), scene.device)
    expected = reference(
        "swiglu_backward",
        grad_CF[rows].double(),
        h_C2F[rows].double(),
        weights_C[rows].double(),
        offsets_E.new_tensor([len(rows)]),
    )

    def error_of(result: tuple[torch.Tensor, torch.Tensor]) -> float:
        return max(_error_at(rows, found, want) for found, want in zip(result, expected))

    return work(
        "swiglu_backward",
        scene,
        arguments,
        backends=[Backend("reference", lambda: reference("swiglu_backward", *arguments))],
        error_of=error_of,
        limit=BF16_LIMIT,
        num_bytes=_bytes(h_C2F) * 5 // 2 + 2 * _bytes(weights_C),
    )


def swiglu_backward_with_output(scene: Scene, peers: Peers) -> Work:
    h_C2F, weights_C = scene.rows(2 * scene.shape.ffn), scene.row_weights_C
    grad_CF, offsets_E = scene.rows(scene.shape.ffn), scene.maps[2]
    arguments = (grad_CF, h_C2F, weights_C, offsets_E, "silu", None, 1.0, 0.0)
    rows = _some(len(h_C2F), scene.device)
    sampled = (h_C2F[rows].double(), weights_C[rows].double(), offsets_E.new_tensor([len(rows)]))
    grad_h, grad_weights = reference("swiglu_backward", grad_CF[rows].double(), *sampled)
    expected = (grad_h, reference("swiglu", *sampled), grad_weights)

    def apart() -> tuple[torch.Tensor, ...]:
        grad_h_C2F, grad_weights_C = torch.ops.moe_ops.swiglu_backward(*arguments)
        return grad_h_C2F, torch.ops.moe_ops.swiglu(*arguments[1:]), grad_weights_C

    def error_of(result: tuple[torch.Tensor, ...]) -> float:
        return max(_error_at(rows, found, want) for found, want in zip(result, expected))

    return work(
        "swiglu_backward_with_output",
        scene,
        arguments,
        backends=[Backend("swiglu_backward, swiglu", apart)],
        error_of=error_of,
        limit=BF16_LIMIT,
        num_bytes=_bytes(h_C2F) * 3 + 2 * _bytes(weights_C),
    )


SPECS = {
    "router_linear": router_linear,
    "router_linear_backward": router_linear_backward,
    "topk_route": topk_route,
    "topk_route_backward": topk_route_backward,
    "sort_slots": sort_slots,
    "permute": permute,
    "unpermute": unpermute,
    "row_dot": row_dot,
    "swiglu": swiglu,
    "swiglu_backward": swiglu_backward,
    "swiglu_backward_with_output": swiglu_backward_with_output,
}
