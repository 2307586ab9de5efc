"""Times a whole local layer, forward + backward and forward alone, and measures what it keeps.

    python -m benchmarks.bench_layer --shape Qwen3 OLMoE --peers --json out.json

bf16 parameters and activations, fresh gradients each step, 18 * T * K * H * F flops a step (6 for
the forward). "saved" is what a forward keeps for its backward, beside x and the parameters; its
floor is the output of the first matmul, 4 * T * K * F bytes.

Letters: T tokens, K top-k, E experts, H hidden, F ffn.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

import fx_passes
from moe_ops.nn import MoE, MoEConfig

from .harness import HEADER, Harness, Row, compare, fill, line, reason, relative_error, save
from .peers import Peers
from .workloads import ALL_SHAPES, SHAPES, Scene, Shape

VARIANTS = ("passes", "compiled", "eager", "stock", "stock compiled", "SonicMoE")
OURS = {"passes", "compiled", "eager"}
# Outputs and gradients pass through three bf16 matmuls and as many roundings.
LIMIT = 2e-2


@dataclasses.dataclass(frozen=True)
class Candidate:
    """`forward` maps x to y; `leaves` are its parameters; `grads` their gradients as (router, w13,
    w2), in our layout, None if it chooses experts by other logits than ours. Candidates without
    `grads` are checked on y and grad_x only.
    """

    name: str
    forward: Callable[[torch.Tensor], torch.Tensor]
    leaves: list[torch.nn.Parameter]
    grads: Callable[[], tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None


class StockMoE(torch.nn.Module):
    """The layer as one writes it in PyTorch, on the parameters of another."""

    def __init__(self, moe: MoE, shape: Shape) -> None:
        super().__init__()
        self.gate, self.w13, self.w2 = moe.router.weight, moe.experts.w13, moe.experts.w2
        self.top_k, self.num_experts = shape.top_k, shape.num_experts

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        probabilities = functional.linear(x_TH, self.gate).float().softmax(-1)
        weights_TK, ids_TK = probabilities.topk(self.top_k, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        ids_S, slots_S = ids_TK.reshape(-1).int().sort(stable=True)
        experts = torch.arange(self.num_experts, device=x_TH.device, dtype=torch.int32)
        offsets_E = torch.searchsorted(ids_S, experts, right=True).int()
        tokens_S = slots_S // self.top_k
        h = torch._grouped_mm(x_TH.index_select(0, tokens_S), self.w13.mT, offs=offsets_E)
        gate, up = h.chunk(2, dim=-1)
        z = torch._grouped_mm(functional.silu(gate) * up, self.w2.mT, offs=offsets_E)
        z = z * weights_TK.reshape(-1)[slots_S][:, None].to(z.dtype)
        return torch.zeros_like(x_TH).index_add(0, tokens_S, z)


def make_layer(shape: Shape, device: str) -> MoE:
    """Our layer, its weights drawn with standard deviation 0.02."""
    config = MoEConfig(
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
    )
    moe = MoE(config, device="meta", dtype=torch.bfloat16)
    moe.to_empty(device=device)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.02)
    moe.router.reset_counters()
    moe.overflow_2.zero_()
    return moe


def candidate(name: str, moe: MoE, shape: Shape, peers: Peers) -> Candidate | None:
    """The variant called `name`, None if it is not installed."""
    leaves = list(moe.parameters())
    if name in OURS:
        forward: Any = moe
        if name == "compiled":
            forward = torch.compile(moe, fullgraph=True)
        elif name == "passes":
            forward = torch.compile(moe, fullgraph=True, options=fx_passes.options())

        def grads() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return moe.router.weight.grad, moe.experts.w13.grad, moe.experts.w2.grad  # type: ignore[return-value]

        return Candidate(name, forward, leaves, grads)
    if name.startswith("stock"):
        stock = StockMoE(moe, shape)
        return Candidate(name, torch.compile(stock) if "compiled" in name else stock, leaves)
    return None if peers.sonic is None else _sonic(peers.sonic, moe, shape)


def _sonic(module: Any, moe: MoE, shape: Shape) -> Candidate:
    """SonicMoE wants gate and up rows interleaved."""
    w13 = moe.experts.w13.detach()
    interleaved = w13.unflatten(1, (2, shape.ffn)).transpose(1, 2).reshape(w13.shape)
    w1 = torch.nn.Parameter(interleaved.contiguous())
    gate, w2 = moe.router.weight, moe.experts.w2
    stream = torch.cuda.current_stream().cuda_stream

    def forward(x_TH: torch.Tensor) -> torch.Tensor:
        y_TH, _, _ = module.moe_TC_softmax_topk_layer(
            *(x_TH, gate, w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None),
            *(shape.top_k, stream, "swiglu", False),
        )
        return y_TH

    return Candidate("SonicMoE", forward, [gate, w1, w2])


class Step:
    """A training step of one candidate on fixed inputs."""

    def __init__(self, candidate: Candidate, x_TH: torch.Tensor, grad_TH: torch.Tensor) -> None:
        self.candidate = candidate
        self.x_TH = x_TH
        self.grad_TH = grad_TH

    def forward(self) -> torch.Tensor:
        return self.candidate.forward(self.x_TH)

    def __call__(self) -> torch.Tensor:
        for leaf in (self.x_TH, *self.candidate.leaves):
            leaf.grad = None
        y_TH = self.forward()
        y_TH.backward(self.grad_TH)
        return y_TH.detach()

    def memory(self) -> dict[str, int]:
        """Bytes a forward keeps for the backward, and a step's peak above what was there before."""
        if self.x_TH.device.type == "cpu":
            return {}
        self()
        for leaf in (self.x_TH, *self.candidate.leaves):
            leaf.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y_TH = self.forward()
        torch.cuda.synchronize()
        saved = torch.cuda.memory_allocated() - before - y_TH.nbytes
        y_TH.backward(self.grad_TH)
        torch.cuda.synchronize()
        return {"saved": saved, "peak": torch.cuda.max_memory_allocated() - before}


@dataclasses.dataclass(frozen=True)
class Oracle:
    """In float32: outputs and gradients of a few tokens, gradients of the router and one expert."""

    tokens: torch.Tensor
    y: torch.Tensor
    grad_x: torch.Tensor
    grad_router: torch.Tensor
    expert: int
    grad_w13: torch.Tensor
    grad_w2: torch.Tensor

    @classmethod
    def of(cls, moe: MoE, x_TH: torch.Tensor, grad_TH: torch.Tensor) -> Oracle:
        top_k, gate = moe.config.top_k, moe.router.weight.detach().float()
        x_TH, w13, w2 = x_TH.detach(), moe.experts.w13.detach(), moe.experts.w2.detach()
        logits_TE = x_TH.float() @ gate.T
        # Tokens whose choice is clear, so that a router that rounds makes the same one.
        largest = logits_TE.topk(top_k + 1, dim=1).values
        tokens = (largest[:, -2] - largest[:, -1]).topk(8).indices
        outputs, grads = [], []
        for token in tokens.tolist():
            x_H = x_TH[token].float().requires_grad_()
            weights_K, ids_K = (gate @ x_H).softmax(0).topk(top_k)
            y_H = torch.zeros_like(x_H)
            for weight, expert in zip(weights_K / weights_K.sum(), ids_K.tolist()):
                y_H = y_H + weight * _expert(x_H[None], w13[expert].float(), w2[expert].float())[0]
            grads.append(torch.autograd.grad(y_H, x_H, grad_TH[token].float())[0])
            outputs.append(y_H.detach())
        logits_TE.requires_grad_()
        weights_TK, ids_TK = logits_TE.softmax(1).topk(top_k, dim=1)
        weights_TK = weights_TK / weights_TK.sum(1, keepdim=True)
        grad_weights_TK = _grad_weights(x_TH, w13, w2, ids_TK, grad_TH)
        (grad_logits_TE,) = torch.autograd.grad(weights_TK, logits_TE, grad_weights_TK)
        expert = 0
        rows, k = (ids_TK == expert).nonzero(as_tuple=True)
        leaves = [w[expert].float().requires_grad_() for w in (w13, w2)]
        y = _expert(x_TH[rows].float(), *leaves) * weights_TK.detach()[rows, k][:, None]
        grad_w13, grad_w2 = torch.autograd.grad(y, leaves, grad_TH[rows].float())
        return cls(
            tokens=tokens,
            y=torch.stack(outputs),
            grad_x=torch.stack(grads),
            grad_router=grad_logits_TE.T @ x_TH.float(),
            expert=expert,
            grad_w13=grad_w13,
            grad_w2=grad_w2,
        )

    def errors(self, step: Step) -> dict[str, float]:
        y_TH = step()
        assert step.x_TH.grad is not None
        found = {
            "y": relative_error(y_TH[self.tokens], self.y),
            "grad_x": relative_error(step.x_TH.grad[self.tokens], self.grad_x),
        }
        if step.candidate.grads is not None:
            grad_router, grad_w13, grad_w2 = step.candidate.grads()
            found["grad_router"] = relative_error(grad_router, self.grad_router)
            found["grad_w13"] = relative_error(grad_w13[self.expert], self.grad_w13)
            found["grad_w2"] = relative_error(grad_w2[self.expert], self.grad_w2)
        return found


def _expert(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ w13.T).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ w2.T


def _grad_weights(
    x_TH: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    ids_TK: torch.Tensor,
    grad_TH: torch.Tensor,
) -> torch.Tensor:
    """A gate weight's gradient is its expert's output times the token's gradient."""
    grad_TK = torch.empty(ids_TK.shape, device=ids_TK.device)
    for expert in range(len(w13)):
        rows, k = (ids_TK == expert).nonzero(as_tuple=True)
        y = _expert(x_TH[rows].float(), w13[expert].float(), w2[expert].float())
        grad_TK[rows, k] = (y * grad_TH[rows].float()).sum(1)
    return grad_TK


def _prepare(
    variant: Candidate, oracle: Oracle, inputs: tuple[torch.Tensor, torch.Tensor], row: Row
) -> Step | None:
    """The step, compiled and found correct, or None and the failure in `row`."""
    start = time.perf_counter()
    step = Step(variant, *inputs)
    try:
        errors = oracle.errors(step)
        row.extra |= {"errors": errors, **step.memory()}
    except Exception as error:  # noqa: BLE001 - the others' times are worth having
        row.failure = reason(error)
        return None
    row.extra["prepare_s"] = round(time.perf_counter() - start, 1)
    row.error = max(errors.values(), key=lambda e: math.inf if math.isnan(e) else e)
    if not row.error <= LIMIT:
        row.failure = f"wrong: errors {errors}, at most {LIMIT:.0e}"
        return None
    return step


def bench_shape(shape: Shape, args: argparse.Namespace, harness: Harness) -> list[Row]:
    """Rows of all variants, forward + backward and forward alone."""
    torch._dynamo.reset()
    peers = Peers(*(("SonicMoE",) if args.peers else ()))
    for name, why in peers.missing.items():
        print(f"without {name}: {why}")
    scene = Scene(shape, "random", args.device)
    moe = make_layer(shape, args.device)
    x_TH, grad_TH = scene.tokens().requires_grad_(), scene.tokens()
    oracle = Oracle.of(moe, x_TH, grad_TH)
    rows: dict[str, Row] = {}
    steps: dict[str, Step] = {}
    for name in args.variant:
        variant = candidate(name, moe, shape, peers)
        if variant is None:
            continue
        rows[name] = Row(op="layer", shape=shape.name, routing="random", backend=name)
        step = _prepare(variant, oracle, (x_TH, grad_TH), rows[name])
        if step is not None:
            steps[name] = step
    forward_rows = {
        name: dataclasses.replace(rows[name], op="layer forward", extra={}) for name in steps
    }
    timings = harness.measure(dict(steps), hot=True)
    forward_timings = harness.measure({n: s.forward for n, s in steps.items()}, hot=True)
    for name in steps:
        fill(rows[name], timings[name], num_flops=3 * shape.layer_flops)
        fill(forward_rows[name], forward_timings[name], num_flops=shape.layer_flops)
        if args.profile:
            _profile(f"{shape.name}, {name}", steps[name])
    for group in (rows, forward_rows):
        compare(list(group.values()), OURS)
    return [*rows.values(), *forward_rows.values()]


def _profile(title: str, step: Step) -> None:
    """Print the kernels of one hot step, the longest first."""
    if step.x_TH.device.type == "cpu":
        return
    for _ in range(5):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in profile.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    print(f"{title}: {total:.0f} us in {sum(event.count for event in kernels)} kernels")
    for event in kernels[:16]:
        print(f"  {event.self_device_time_total:9.1f} us {event.count:4d} x {event.key[:96]}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_layer", description=__doc__.splitlines()[0])
    main_shapes = [name for name, shape in SHAPES.items() if shape.main]
    parser.add_argument("--shape", nargs="+", default=main_shapes, choices=ALL_SHAPES)
    parser.add_argument("--variant", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--peers", action="store_true", help="also SonicMoE")
    parser.add_argument("--profile", action="store_true", help="kernels of one step of each")
    parser.add_argument("--repeats", type=int, default=60, help="timed steps of each variant")
    parser.add_argument("--heat", type=float, default=1.0, help="seconds of heating")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> list[Row]:
    """Bench each shape, printing its rows."""
    start = time.perf_counter()
    harness = Harness(args.device, repeats=args.repeats, heat_s=args.heat)
    print(HEADER)
    rows: list[Row] = []
    for name in args.shape:
        found = bench_shape(ALL_SHAPES[name], args, harness)
        rows += found
        floor = 4 * ALL_SHAPES[name].num_rows * ALL_SHAPES[name].ffn
        for row in found:
            print(line(row))
            if "saved" in row.extra:
                row.extra["saved_floor"] = floor
                saved, peak = row.extra["saved"], row.extra["peak"]
                print(
                    f"  saved {saved / 2**30:.3f} GiB, {saved / floor:.3f} of the floor; "
                    f"peak {peak / 2**30:.2f} GiB; prepared in {row.extra['prepare_s']} s"
                )
        print(f"{time.perf_counter() - start:.0f} s so far", flush=True)
        if args.json:
            save(args.json, args.device, rows, repeats=args.repeats, heat_s=args.heat)
    return rows


def main() -> None:
    """Command line."""
    run(parse())


if __name__ == "__main__":
    main()
