"""Times an expert-parallel layer, and a stack of four with attention and shared experts, on two
GPUs, forward + backward, and measures how much of the exchanges nothing hides.

    python -m benchmarks.bench_stack --shape DSv3 Qwen3 --json out.json

bf16, fresh gradients each step, tokens drawn by each rank, plans in capacity mode with room for a
tenth more than an even routing. Steps run back to back, hot, variants interleaved in rounds; quoted
are the median over rounds, of the slower rank, and the range over the median. "exposed" is what
share of the exchanges' kernels' time no other kernel runs beside, by the profiler, of the slower
rank.

- stock: the layer as one writes it in PyTorch, `all_to_all_single` with splits read by the host.
- compiled: ours without passes; passes: with them; "2 batches": the tokens' halves one after the
  other in one graph; "2 chunks": `chunk_exchange=2`; "graph": the whole step as a CUDA graph.

Letters: T tokens a rank, K top-k, E experts, P ranks, H hidden, F ffn, S = T * K slots.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional

import fx_passes
from fx_passes.expected_sizes import expected_copies
from fx_passes.measure import Phase, measure
from fx_passes.timeline import EXCHANGE, EXPOSED, seconds_of
from moe_ops import comm
from moe_ops.demo.model import Attention, rotary_table
from moe_ops.nn import MoE, MoEConfig

from .bench_exchange import timing_of
from .harness import HEADER, Row, compare, fill, line, relative_error, save
from .launch import launch
from .specs_exchange import ROUNDS, Ranks, WrongResult, captured
from .workloads import Shape

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("DSv3", 8192, 7168, 2048, 64, 8),
        Shape("Qwen3", 16384, 2048, 768, 128, 8),
        Shape("OLMoE", 16384, 2048, 1024, 64, 8),
        Shape("Mixtral", 8192, 4096, 14336, 8, 2),
    )
}
TINY = Shape("tiny", 64, 32, 16, 4, 2)
ALL_SHAPES = {**SHAPES, TINY.name: TINY}
NUM_LAYERS = 4
CONTEXT = 4096
HEAD_DIM = 128
LAYER = ("stock", "stock compiled", "compiled", "compiled, graph", "passes", "passes, graph")
STACK = (
    *("compiled", "compiled, graph", "passes", "passes, graph"),
    *("passes, 2 chunks, graph", "passes, 2 batches, graph"),
)
MODELS = {"layer": LAYER, "stack": STACK}
ROOM = 1.1
NUM_OUTPUTS = 64  # of dispatch and of sums, for all captured variants
# Of outputs and gradients, each some bf16 matmuls deep, against eager ones.
LIMIT = 3e-2


class StockMoE(nn.Module):
    """The layer as one writes it in PyTorch, on the parameters of another."""

    def __init__(self, moe: MoE, shape: Shape, ranks: Ranks) -> None:
        super().__init__()
        self.gate, self.w13, self.w2 = moe.router.weight, moe.experts.w13, moe.experts.w2
        self.top_k, self.num_experts = shape.top_k, shape.num_experts
        self.group, self.num_ranks = ranks.group, ranks.size

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        # In float32, or bf16 logits would choose other experts than ours for some tokens.
        probabilities = functional.linear(x_TH.float(), self.gate.float()).softmax(-1)
        weights_TK, ids_TK = probabilities.topk(self.top_k, dim=-1)
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        slots_S = ids_TK.flatten().argsort(stable=True)
        tokens_S = slots_S // self.top_k
        counts_E = functional.one_hot(ids_TK.flatten(), self.num_experts).sum(0)
        arriving_E = all_to_all_single_autograd(counts_E, None, None, self.group)
        sent = counts_E.view(self.num_ranks, -1).sum(1).tolist()
        arriving_PL = arriving_E.view(self.num_ranks, -1)
        received = arriving_PL.sum(1).tolist()
        rows_CH = all_to_all_single_autograd(x_TH[tokens_S], received, sent, self.group)

        experts = torch.arange(arriving_PL.shape[1], device=x_TH.device).repeat(self.num_ranks)
        order_C = experts.repeat_interleave(arriving_E).argsort(stable=True)
        offsets_L = arriving_PL.sum(0).cumsum(0).int()
        h = torch._grouped_mm(rows_CH[order_C], self.w13.mT, offs=offsets_L)
        gate, up = h.chunk(2, dim=-1)
        z = torch._grouped_mm(functional.silu(gate) * up, self.w2.mT, offs=offsets_L)
        back_CH = torch.empty_like(z).index_copy(0, order_C, z)
        rows_SH = all_to_all_single_autograd(back_CH, sent, received, self.group)
        rows_SH = rows_SH * weights_TK.flatten()[slots_S][:, None].to(rows_SH.dtype)
        return torch.zeros_like(x_TH).index_add(0, tokens_S, rows_SH)


class Block(nn.Module):
    """Attention over sequences, then experts, each added to the residual stream."""

    def __init__(self, moe: MoE, shape: Shape, context: int) -> None:
        super().__init__()
        self.context = context
        self.attention_norm, self.moe_norm = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention = Attention(shape.hidden, max(1, shape.hidden // HEAD_DIM))
        self.moe = moe

    def forward(self, x_TH: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        x_BTH = self.attention_norm(x_TH).view(-1, self.context, x_TH.shape[-1])
        x_TH = x_TH + self.attention(x_BTH, table).flatten(0, 1)
        return x_TH + self.moe(self.moe_norm(x_TH))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, shape: Shape, ranks: Ranks) -> None:
        super().__init__()
        context = min(CONTEXT, shape.num_tokens // 2)
        moes = [make_moe(shape, ranks, shared_ffn=shape.ffn) for _ in range(NUM_LAYERS)]
        blocks = nn.ModuleList(Block(moe, shape, context) for moe in moes)
        self.blocks = blocks.to(ranks.device, torch.bfloat16)
        table = rotary_table(context, min(HEAD_DIM, shape.hidden))
        self.register_buffer("table", table.to(ranks.device, torch.bfloat16))

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x_TH = block(x_TH, self.table)
        return x_TH


class Batches(nn.Module):
    """The halves of the tokens, one after the other."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.model(half) for half in x_TH.chunk(2)])


def capacities(shape: Shape, ranks: Ranks) -> tuple[int, int]:
    """Of copies and of rows."""
    copies = ROOM * expected_copies(shape.num_tokens, shape.top_k, ranks.size)
    most = ranks.size * shape.num_tokens
    return min(math.ceil(copies), most), min(math.ceil(ROOM * shape.num_rows), most * shape.top_k)


def make_moe(shape: Shape, ranks: Ranks, shared_ffn: int = 0) -> MoE:
    copy_capacity, row_capacity = capacities(shape, ranks)
    config = MoEConfig(
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        shared_ffn_hidden_size=shared_ffn,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        size_mode="capacity",
        max_tokens=shape.num_tokens,
        copy_capacity=copy_capacity,
        row_capacity=row_capacity,
    )
    moe = MoE(config, ranks.group).to(ranks.device, torch.bfloat16)
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.02)
    dist.broadcast(moe.router.weight.detach(), 0, group=ranks.group)
    return moe


@dataclasses.dataclass
class Step:
    """A training step of one variant on fixed inputs; `leaves` get gradients."""

    function: Callable[[torch.Tensor], torch.Tensor]
    x_TH: torch.Tensor
    grad_TH: torch.Tensor
    leaves: Sequence[nn.Parameter]

    def __call__(self) -> torch.Tensor:
        for leaf in (self.x_TH, *self.leaves):
            leaf.grad = None
        y_TH = self.function(self.x_TH)
        y_TH.backward(self.grad_TH)
        return y_TH.detach()

    def gradients(self) -> dict[str, torch.Tensor]:
        """Some of those that the last call left."""
        found = {"grad_x": self.x_TH.grad, "grad": self.leaves[-1].grad}
        return {name: value for name, value in found.items() if value is not None}

    def results(self) -> dict[str, torch.Tensor]:
        """Output and some gradients."""
        y_TH = self()
        return {"y": y_TH, **{name: value.clone() for name, value in self.gradients().items()}}


def make_step(name: str, model: nn.Module, shape: Shape, ranks: Ranks) -> Step:
    """The variant called `name` of `model`."""
    torch.manual_seed(1 + ranks.rank)
    x_TH, grad_TH = torch.randn(2, shape.num_tokens, shape.hidden, device=ranks.device).bfloat16()
    leaves = list(model.parameters())
    if "stock" in name:
        model = StockMoE(model, shape, ranks)  # type: ignore[arg-type]
    if "2 batches" in name:
        model = Batches(model)
    function: Any = model
    if name != "stock":
        options = None
        if "passes" in name:
            options = fx_passes.options(chunk_exchange=2 if "2 chunks" in name else 1)
        function = torch.compile(model, fullgraph=True, dynamic=False, options=options)
    return Step(function, x_TH.requires_grad_(), grad_TH, leaves)


@dataclasses.dataclass
class Replay:
    """A step as a CUDA graph, which reads that one's tensors."""

    step: Step

    def __post_init__(self) -> None:
        self.run = captured(lambda: (self.step(),))
        self.leaves = self.step.gradients()  # the graph's own

    def __call__(self) -> torch.Tensor:
        (y_TH,) = self.run()
        return y_TH

    def results(self) -> dict[str, torch.Tensor]:
        """As those of a step."""
        return {"y": self().clone(), **{name: g.clone() for name, g in self.leaves.items()}}


class Bench:
    """The rows of one model of one shape."""

    def __init__(self, kind: str, shape: Shape, args: argparse.Namespace, ranks: Ranks) -> None:
        self.kind, self.shape, self.args, self.ranks = kind, shape, args, ranks
        torch.manual_seed(ranks.rank)
        self.model = make_moe(shape, ranks) if kind == "layer" else Stack(shape, ranks)
        step = make_step("eager", self.model, shape, ranks)
        self.expected = dataclasses.replace(step, function=self.model).results()
        self.rows: dict[str, Row] = {}
        self.steps: dict[str, Step | Replay] = {}

    def prepare(self, name: str) -> None:
        """Compile and check a variant."""
        row = Row(op=self.kind, shape=self.shape.name, routing="random", backend=name)
        begin = time.perf_counter()
        self.rows[name] = row
        step, row.failure = self.ranks.attempt(functools.partial(self._prepare, name, row))
        row.extra["prepare_s"] = round(time.perf_counter() - begin, 1)
        if step is not None:
            self.steps[name] = step

    def _prepare(self, name: str, row: Row) -> Step | Replay:
        # One function, compiled for every shape and variant.
        with torch._dynamo.config.patch(
            capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True, recompile_limit=256
        ):
            step: Step | Replay = make_step(name, self.model, self.shape, self.ranks)
            if "graph" in name:
                step = Replay(step)
            found = step.results()
        errors = {key: relative_error(found[key], self.expected[key]) for key in found}
        row.error = max(errors.values())
        if not row.error <= LIMIT:
            raise WrongResult(f"errors are {errors}")
        for moe in self.model.modules():
            if isinstance(moe, MoE):
                moe.check_overflow()
        return step

    def measure(self) -> list[Row]:
        """Times of all variants, interleaved, then what each leaves exposed."""
        samplers = {
            name: functools.partial(self.ranks.sample, step, self.args.repeats)
            for name, step in self.steps.items()
        }
        self.ranks.attempt(self.heat)  # what fails here fails below
        samples, failures = self.ranks.interleave(samplers)
        experts = NUM_LAYERS if self.kind == "stack" else 1
        for name in samplers:
            row = self.rows[name]
            row.failure = failures.get(name, "")
            if not row.failure:
                timing = timing_of([us for (us,) in samples[name]])
                fill(row, timing, num_flops=3 * experts * self.shape.layer_flops)
        if self.ranks.on_gpu:
            for name in [name for name in self.steps if name not in failures]:
                found, failure = self.ranks.attempt(functools.partial(self.exposed, name))
                self.rows[name].extra |= found or {"exposed failed": failure}
        compare(list(self.rows.values()), {name for name in self.rows if "stock" not in name})
        return list(self.rows.values())

    def heat(self) -> None:
        for _ in range(self.args.heat):
            for step in self.steps.values():
                step()

    def exposed(self, name: str) -> dict[str, float]:
        """Milliseconds of exchanges in a step, and the share that nothing hides."""

        def step(phase: Phase) -> None:
            with phase("step"):
                dist.barrier(self.ranks.control)  # of the hosts; else the first exchange is one
                self.steps[name]()

        (events,) = measure(step).values()
        exchange = seconds_of(events, EXCHANGE)
        share = seconds_of(events, EXPOSED) / exchange if exchange else 0.0
        exchange, share = self.ranks.most([exchange, share])
        return {"exchange_ms": 1e3 * exchange, "exposed": share}


def bench(ranks: Ranks, args: argparse.Namespace) -> list[Row]:
    """The rows of all shapes; rank 0 prints and saves them."""
    rows: list[Row] = []
    if ranks.rank == 0:
        print(HEADER)
    for name in args.shape:
        shape = ALL_SHAPES[name]
        if ranks.on_gpu:
            ranks.group = _group(shape, ranks)
        for kind in args.model:
            made = Bench(kind, shape, args, ranks)
            for variant in args.variant or MODELS[kind]:
                if variant in MODELS[kind]:
                    made.prepare(variant)
            found = made.measure()
            rows += found
            del made
            gc.collect()
            if ranks.rank == 0:
                for row in found:
                    print(line(row), row.extra)
                if args.json:
                    save(args.json, ranks.device, rows, repeats=args.repeats, rounds=ROUNDS)
    return rows


def _group(shape: Shape, ranks: Ranks) -> dist.ProcessGroup:
    group = dist.new_group(list(range(ranks.size)))
    comm.setup(
        group,
        engine="nvlink",
        max_tokens=shape.num_tokens,
        hidden_size=shape.hidden,
        dtype=torch.bfloat16,
        window_bytes=NUM_OUTPUTS * capacities(shape, ranks)[0] * shape.hidden * 2,
    )
    return group


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_stack", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=ALL_SHAPES)
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--variant", nargs="+", choices=sorted({*LAYER, *STACK}))
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--repeats", type=int, default=5, help="steps between two events")
    parser.add_argument("--heat", type=int, default=5, help="steps of each before timing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def main() -> None:
    """Command line."""
    launch(bench, parse())


if __name__ == "__main__":
    main()
