"""Other libraries, each behind the few calls that the benchmarks make.

- DeepGEMM: `sgl-deep-gemm` with `apache-tvm-ffi`; compiles its kernels with CUDA_HOME's nvcc.
- `moe-ops` 0.1.0, whose package is called `moe_ops` too: it is imported under another name.
- SonicMoE: `sonic-moe` with `quack-kernels` and `nvidia-cutlass-dsl`; see `benchmarks.bench_layer`.

`python -m benchmarks.peers` compiles DeepGEMM's kernels for all shapes, several at a time.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .harness import Backend, reason
from .workloads import ALIGNMENT, MATMULS, SHAPES, WGRADS, Scene


class Peers:
    """The peers that are wanted and installed; why the others are missing stands in `missing`."""

    def __init__(self, *wanted: str) -> None:
        self.missing: dict[str, str] = {}
        self._wanted = wanted
        self.moe_ops = self._load("moe-ops", _import_moe_ops)
        self.deep_gemm = self._load("DeepGEMM", _import_deep_gemm)
        self.sonic = self._load("SonicMoE", _import_sonic)

    def _load(self, name: str, load: Callable[[], ModuleType]) -> Any:
        if name not in self._wanted:
            return None
        try:
            return load()
        except Exception as error:  # noqa: BLE001 - a peer that does not import is reported
            self.missing[name] = reason(error)
            return None


def _import_deep_gemm() -> ModuleType:
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    return importlib.import_module("deep_gemm")


def _import_sonic() -> ModuleType:
    return importlib.import_module("sonicmoe.functional")


def _import_moe_ops() -> ModuleType:
    name = "peer_moe_ops"
    if name in sys.modules:
        return sys.modules[name]
    distribution = importlib.metadata.distribution("moe-ops")
    path = str(distribution.locate_file("moe_ops/__init__.py"))
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[os.path.dirname(path)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@dataclasses.dataclass(frozen=True)
class Padding:
    """Groups as DeepGEMM wants them: each starts at a multiple of `ALIGNMENT` rows.

    `source_P` [P] i64: row that lies at each padded place, 0 at places of no row (`gaps`).
    `place_C` [C] i64: its inverse; None if the groups are aligned as they are.
    `expert_P` [P] i32: expert of each place, -1 none.
    """

    sizes: list[int]
    source_P: torch.Tensor
    gaps: torch.Tensor
    place_C: torch.Tensor | None
    expert_P: torch.Tensor

    @classmethod
    def of(cls, counts: list[int], device: str) -> Padding:
        count_E = torch.tensor(counts)
        size_E = (count_E + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        expert_C = torch.arange(len(counts)).repeat_interleave(count_E)
        shift_E = (size_E.cumsum(0) - size_E) - (count_E.cumsum(0) - count_E)
        place_C = torch.arange(len(expert_C)) + shift_E[expert_C]
        expert_P = torch.full((int(size_E.sum()),), -1, dtype=torch.int32)
        expert_P[place_C] = expert_C.int()
        source_P = torch.zeros(len(expert_P), dtype=torch.int64)
        source_P[place_C] = torch.arange(len(place_C))
        aligned = len(place_C) == len(expert_P)
        return cls(
            sizes=size_E.tolist(),
            source_P=source_P.to(device),
            gaps=(expert_P < 0).nonzero().reshape(-1).to(device),
            place_C=None if aligned else place_C.to(device),
            expert_P=expert_P.to(device),
        )

    def copier(self, rows: torch.Tensor, *, zero_gaps: bool) -> Callable[[], torch.Tensor]:
        """What copies `rows` to their padded places, or returns them if they lie there already."""
        if self.place_C is None:
            return lambda: rows
        padded = rows.new_empty(len(self.source_P), rows.shape[1])

        def copy() -> torch.Tensor:
            torch.index_select(rows, 0, self.source_P, out=padded)
            return padded.index_fill_(0, self.gaps, 0) if zero_gaps else padded

        return copy

    def unpad(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.place_C is None else rows[self.place_C]

    @property
    def name(self) -> str:
        return "DeepGEMM" if self.place_C is None else "DeepGEMM + padding copy"


def deep_gemm_forward(
    module: Any, scene: Scene, a_CI: torch.Tensor, w_LOI: torch.Tensor
) -> Backend:
    """m-grouped contiguous bf16; the copy to padded places counts, one back does not."""
    padding = Padding.of(scene.counts, scene.device)
    copy = padding.copier(a_CI, zero_gaps=False)
    out_PO = a_CI.new_empty(len(padding.source_P), w_LOI.shape[1])

    def run() -> torch.Tensor:
        if w_LOI.is_contiguous():
            module.m_grouped_bf16_gemm_nt_contiguous(copy(), w_LOI, out_PO, padding.expert_P)
        else:
            module.m_grouped_bf16_gemm_nn_contiguous(copy(), w_LOI.mT, out_PO, padding.expert_P)
        return out_PO

    return Backend(padding.name, run, padding.unpad)


def deep_gemm_wgrad(module: Any, scene: Scene, g_CO: torch.Tensor, a_CI: torch.Tensor) -> Backend:
    """k-grouped bf16, which adds to a float32 result: zero before the first call alone."""
    padding = Padding.of(scene.counts, scene.device)
    copies = [padding.copier(rows, zero_gaps=True) for rows in (g_CO, a_CI)]
    sizes_E = torch.tensor(padding.sizes, dtype=torch.int32, device=scene.device)
    out_LOI = torch.zeros(
        len(padding.sizes), g_CO.shape[1], a_CI.shape[1], device=scene.device, dtype=torch.float32
    )

    def run() -> torch.Tensor:
        g_PO, a_PI = (copy() for copy in copies)
        module.k_grouped_bf16_gemm_tn_contiguous(
            g_PO, a_PI, out_LOI, padding.sizes, sizes_E, out_LOI
        )
        return out_LOI

    return Backend(padding.name + ", adds in float32", run)


def moe_ops_permute(module: Any, scene: Scene, x_TH: torch.Tensor) -> Backend:
    """Sorts as well; within an expert its order of rows is not fixed."""
    num_experts, (slot_of_row_C, _, _) = scene.shape.num_experts, scene.maps

    def view(result: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
        rows_CH, row_of_choice, _ = result
        row_of_slot = row_of_choice.reshape(scene.shape.top_k, -1).T.reshape(-1)
        return rows_CH[row_of_slot[slot_of_row_C.long()].long()]

    return Backend(
        "moe-ops 0.1.0, sort included",
        lambda: module.permute(x_TH, scene.ids_TK, E=num_experts),
        view,
    )


def moe_ops_unpermute(module: Any, scene: Scene, rows_CH: torch.Tensor) -> Backend:
    row_of_choice = scene.maps[1].T.reshape(-1).contiguous()
    num_tokens, top_k = scene.weights_TK.shape
    return Backend(
        "moe-ops 0.1.0",
        lambda: module.unpermute_forward(
            rows_CH, row_of_choice, scene.weights_TK, num_tokens, top_k
        ),
    )


def moe_ops_topk(module: Any, scene: Scene) -> Backend:
    return Backend(
        "moe-ops 0.1.0", lambda: module.fused_topk_softmax(scene.logits_TE, scene.shape.top_k)
    )


def moe_ops_topk_backward(module: Any, scene: Scene, grad_TK: torch.Tensor) -> Backend:
    backward = torch.ops.tg.fused_topk_softmax_bwd
    num_tokens, num_experts = scene.logits_TE.shape
    arguments = (grad_TK, scene.weights_TK, scene.ids_TK, num_tokens, num_experts)
    return Backend("moe-ops 0.1.0", lambda: backward(*arguments, scene.shape.top_k))


def _warm(job: tuple[str, str, str]) -> str:
    """Compile DeepGEMM's kernel of one matmul by running it once."""
    shape_name, routing, matmul = job
    start = time.perf_counter()
    specs = importlib.import_module("benchmarks.specs_matmul")
    scene = Scene(SHAPES[shape_name], routing, "cuda")
    try:
        torch.cuda.set_per_process_memory_fraction(0.15)
        specs.deep_gemm_backend(_import_deep_gemm(), scene, matmul).run()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - the other kernels still count
        return f"{job}: {reason(error)}"
    return f"{job}: {time.perf_counter() - start:.0f} s"


def main(names: list[str]) -> None:
    shapes = names or [name for name, shape in SHAPES.items() if shape.main]
    jobs = [
        (shape, routing, matmul)
        for routing in ("random", "aligned")
        for matmul in MATMULS + WGRADS
        for shape in shapes
    ]
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(12, os.cpu_count() or 1)) as pool:
        for result in pool.imap_unordered(_warm, jobs):
            print(result, flush=True)
    print(f"{len(jobs)} matmuls in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
