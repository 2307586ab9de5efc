"""Grouped matmuls and the private operators that fuse with them: inputs, baselines, flops.

Letters: T tokens, K top-k, E experts, H hidden, F ffn, C rows, I and O in and out features; the
matmuls' names as in `benchmarks.workloads`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from . import peers as peer_calls
from .harness import Backend, Work, relative_error
from .peers import Peers
from .specs_data import BF16_LIMIT, reference, work
from .workloads import MATMULS, WGRADS, Scene

Tensors = tuple[torch.Tensor, ...]
_OPS = torch.ops.moe_ops
_WGRAD_OF = {wgrad.removeprefix("wgrad_"): wgrad for wgrad in WGRADS}


def forward_operands(scene: Scene, matmul: str) -> tuple[torch.Tensor, torch.Tensor]:
    """a_CI and w_LOI."""
    hidden, ffn = scene.shape.hidden, scene.shape.ffn
    if matmul == "fc1":
        return scene.rows(hidden), scene.w13()
    if matmul == "fc2":
        return scene.rows(ffn), scene.w2()
    if matmul == "dgrad_fc1":
        return scene.rows(2 * ffn), scene.w13().mT
    return scene.rows(hidden), scene.w2().mT


def wgrad_operands(scene: Scene, matmul: str) -> tuple[torch.Tensor, torch.Tensor]:
    """g_CO and a_CI."""
    hidden, ffn = scene.shape.hidden, scene.shape.ffn
    if matmul == "wgrad_fc1":
        return scene.rows(2 * ffn), scene.rows(hidden)
    return scene.rows(hidden), scene.rows(ffn)


def deep_gemm_backend(module: Any, scene: Scene, matmul: str) -> Backend:
    if matmul.startswith("wgrad"):
        return peer_calls.deep_gemm_wgrad(module, scene, *wgrad_operands(scene, matmul))
    return peer_calls.deep_gemm_forward(module, scene, *forward_operands(scene, matmul))


def _sampled(
    scene: Scene, of_rows: Callable[[int, torch.Tensor], Tensors]
) -> Callable[[Tensors], float]:
    """Error of results whose rows, of the sampled experts, should be `of_rows(expert, rows)`."""
    expected = [of_rows(expert, rows) for expert, rows in scene.samples]
    rows_S = torch.cat([rows for _, rows in scene.samples])
    wanted = [torch.cat(parts) for parts in zip(*expected, strict=True)]

    def error_of(results: Tensors) -> float:
        # The rest of a result is not compared, but must not hold NaN.
        if not all(bool(result.isfinite().all()) for result in results):
            return math.inf
        return max(relative_error(r[rows_S], w) for r, w in zip(results, wanted, strict=True))

    return error_of


def _times(rows: torch.Tensor, w_OI: torch.Tensor) -> torch.Tensor:
    return rows.float() @ w_OI.float().T


def _matmul_flops(scene: Scene, factor: int = 1) -> int:
    return 2 * scene.shape.num_rows * scene.shape.hidden * scene.shape.ffn * factor


def _grouped_mm(matmul: str) -> Callable[[Scene, Peers], Work]:
    def spec(scene: Scene, peers: Peers) -> Work:
        a_CI, w_LOI = forward_operands(scene, matmul)
        offsets_L = scene.maps[2]
        error_of = _sampled(scene, lambda e, rows: (_times(a_CI[rows], w_LOI[e]),))
        backends = [
            Backend(
                "torch._grouped_mm",
                lambda: torch._grouped_mm(a_CI, w_LOI.mT, offs=offsets_L),
            )
        ]
        if peers.deep_gemm is not None:
            backends.append(peer_calls.deep_gemm_forward(peers.deep_gemm, scene, a_CI, w_LOI))
        return work(
            "grouped_mm",
            scene,
            (a_CI, w_LOI, offsets_L),
            name=f"grouped_mm/{matmul}",
            backends=backends,
            error_of=lambda c_CO: error_of((c_CO,)),
            limit=BF16_LIMIT,
            num_flops=_matmul_flops(scene, 2 if matmul.endswith("fc1") else 1),
        )

    return spec


def _wgrad_error(
    scene: Scene, g_of: Callable[[torch.Tensor], torch.Tensor], a_of: Callable[..., torch.Tensor]
) -> Callable[[torch.Tensor], float]:
    """Error of a gradient [E, O, I]; `g_of` and `a_of` give the operands of some rows."""
    ends = torch.tensor(scene.counts).cumsum(0).tolist()
    experts = [expert for expert, _ in scene.samples]
    expected = []
    for expert in experts:
        rows = torch.arange(ends[expert] - scene.counts[expert], ends[expert], device=scene.device)
        expected.append(g_of(rows).float().T @ a_of(rows).float())
    wanted = torch.stack(expected)
    empty = [expert for expert, count in enumerate(scene.counts) if not count]

    def error_of(w_LOI: torch.Tensor) -> float:
        if bool(w_LOI[empty].ne(0).any()) or not bool(w_LOI.isfinite().all()):
            return math.inf
        return relative_error(w_LOI[experts], wanted)

    return error_of


def _grouped_mm_wgrad(matmul: str) -> Callable[[Scene, Peers], Work]:
    def spec(scene: Scene, peers: Peers) -> Work:
        g_CO, a_CI = wgrad_operands(scene, matmul)
        offsets_L = scene.maps[2]
        backends = [
            Backend("torch._grouped_mm", lambda: torch._grouped_mm(g_CO.mT, a_CI, offs=offsets_L))
        ]
        if peers.deep_gemm is not None:
            backends.append(peer_calls.deep_gemm_wgrad(peers.deep_gemm, scene, g_CO, a_CI))
        return work(
            "grouped_mm_wgrad",
            scene,
            (g_CO, a_CI, offsets_L),
            name=f"grouped_mm_wgrad/{matmul.removeprefix('wgrad_')}",
            backends=backends,
            error_of=_wgrad_error(scene, g_CO.__getitem__, a_CI.__getitem__),
            limit=BF16_LIMIT,
            num_flops=_matmul_flops(scene, 2 if matmul.endswith("fc1") else 1),
        )

    return spec


def _token_of_row(scene: Scene) -> torch.Tensor:
    return scene.maps[0].long() // scene.shape.top_k


def gather_grouped_mm(scene: Scene, peers: Peers) -> Work:
    slot_of_row_C, row_of_slot_TK, offsets_E = scene.maps
    x_TH, w13_E2FH, token_C = scene.tokens(), scene.w13(), _token_of_row(scene)
    error_of = _sampled(scene, lambda e, rows: (_times(x_TH[token_C[rows]], w13_E2FH[e]),))

    def unfused() -> torch.Tensor:
        rows_CH = _OPS.permute(x_TH, None, slot_of_row_C, row_of_slot_TK)
        return _OPS.grouped_mm(rows_CH, w13_E2FH, offsets_E)

    def stock() -> torch.Tensor:
        return torch._grouped_mm(x_TH.index_select(0, token_C), w13_E2FH.mT, offs=offsets_E)

    return work(
        "gather_grouped_mm",
        scene,
        (x_TH, slot_of_row_C, scene.shape.top_k, w13_E2FH, offsets_E),
        backends=[
            Backend("permute, grouped_mm", unfused),
            Backend("index_select, torch._grouped_mm", stock),
        ],
        error_of=lambda c_CO: error_of((c_CO,)),
        limit=BF16_LIMIT,
        num_flops=_matmul_flops(scene, 2),
    )


def _gather_grouped_mm_wgrad(matmul: str) -> Callable[[Scene, Peers], Work]:
    def spec(scene: Scene, peers: Peers) -> Work:
        slot_of_row_C, row_of_slot_TK, offsets_E = scene.maps
        x_TH, token_C = scene.tokens(), _token_of_row(scene)
        if matmul == "fc1":
            dense_CX = scene.rows(2 * scene.shape.ffn)
            arguments: tuple[Any, ...] = (dense_CX, None, x_TH, slot_of_row_C)
            error_of = _wgrad_error(scene, dense_CX.__getitem__, lambda rows: x_TH[token_C[rows]])
        else:
            dense_CX = scene.rows(scene.shape.ffn)
            arguments = (x_TH, slot_of_row_C, dense_CX, None)
            error_of = _wgrad_error(scene, lambda rows: x_TH[token_C[rows]], dense_CX.__getitem__)

        def unfused() -> torch.Tensor:
            rows_CH = _OPS.permute(x_TH, None, slot_of_row_C, row_of_slot_TK)
            pair = (dense_CX, rows_CH) if matmul == "fc1" else (rows_CH, dense_CX)
            return _OPS.grouped_mm_wgrad(*pair, offsets_E)

        return work(
            "gather_grouped_mm_wgrad",
            scene,
            (*arguments, scene.shape.top_k, offsets_E),
            name=f"gather_grouped_mm_wgrad/{matmul}",
            backends=[Backend("permute, grouped_mm_wgrad", unfused)],
            error_of=error_of,
            limit=BF16_LIMIT,
            num_flops=_matmul_flops(scene, 2 if matmul == "fc1" else 1),
        )

    return spec


def grouped_mm_swiglu(scene: Scene, peers: Peers) -> Work:
    rows_CH, w13_E2FH = scene.rows(scene.shape.hidden), scene.w13()
    weights_C, offsets_E = scene.row_weights_C, scene.maps[2]

    def of_rows(expert: int, rows: torch.Tensor) -> Tensors:
        h = _times(rows_CH[rows], w13_E2FH[expert])
        return h, reference("swiglu", h, weights_C[rows], offsets_E.new_tensor([len(rows)]))

    def unfused() -> Tensors:
        h_C2F = _OPS.grouped_mm(rows_CH, w13_E2FH, offsets_E)
        return h_C2F, _OPS.swiglu(h_C2F, weights_C, offsets_E)

    return work(
        "grouped_mm_swiglu",
        scene,
        (rows_CH, None, 1, w13_E2FH, weights_C, offsets_E, "silu", None, 1.0, 0.0),
        backends=[Backend("grouped_mm, swiglu", unfused)],
        error_of=_sampled(scene, of_rows),
        limit=BF16_LIMIT,
        num_flops=_matmul_flops(scene, 2),
    )


def grouped_mm_swiglu_backward(scene: Scene, peers: Peers) -> Work:
    grad_CH, w2t_EFH, offsets_E = scene.rows(scene.shape.hidden), scene.w2().mT, scene.maps[2]
    h_C2F, weights_C = scene.rows(2 * scene.shape.ffn), scene.row_weights_C
    options = ("silu", None, 1.0, 0.0)

    def of_rows(expert: int, rows: torch.Tensor) -> Tensors:
        grad_a = _times(grad_CH[rows], w2t_EFH[expert])
        shared = (h_C2F[rows].float(), weights_C[rows], offsets_E.new_tensor([len(rows)]))
        grad_h, grad_weights = reference("swiglu_backward", grad_a, *shared)
        return grad_h, reference("swiglu", *shared), grad_weights

    def unfused() -> Tensors:
        grad_CF = _OPS.grouped_mm(grad_CH, w2t_EFH, offsets_E)
        args = (grad_CF, h_C2F, weights_C, offsets_E, *options)
        return _OPS.swiglu_backward_with_output(*args)

    return work(
        "grouped_mm_swiglu_backward",
        scene,
        (grad_CH, None, 1, w2t_EFH, h_C2F, weights_C, offsets_E, *options),
        backends=[Backend("grouped_mm, swiglu_backward_with_output", unfused)],
        error_of=_sampled(scene, of_rows),
        limit=BF16_LIMIT,
        num_flops=_matmul_flops(scene),
    )


SPECS = {
    **{f"grouped_mm/{m}": _grouped_mm(m) for m in MATMULS},
    **{f"grouped_mm_wgrad/{m}": _grouped_mm_wgrad(wgrad) for m, wgrad in _WGRAD_OF.items()},
    "gather_grouped_mm": gather_grouped_mm,
    **{f"gather_grouped_mm_wgrad/{m}": _gather_grouped_mm_wgrad(m) for m in _WGRAD_OF},
    "grouped_mm_swiglu": grouped_mm_swiglu,
    "grouped_mm_swiglu_backward": grouped_mm_swiglu_backward,
}
