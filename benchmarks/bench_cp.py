"""Times attention over a sequence that two GPUs share, forward + backward, against one GPU.

    python -m benchmarks.bench_cp --tokens 65536 131072 --json out.json

One sequence, causal, bf16, 32 query and 8 key heads of 128. Steps run back to back, hot, variants
interleaved in rounds; quoted are the median over rounds, of the slower rank, and the range over the
median. "scaling": one GPU's time for the whole sequence, over the ranks, over the variant's.

- one GPU: PyTorch's flash attention over the whole sequence, on every rank alone.
- ring, ring compiled: `cp_attention`, called or compiled with the passes.
- PyTorch: its `context_parallel`, keys repeated for the query heads; "contiguous": without its load
  balance, so that the last rank has most to do.

Letters: P ranks, S tokens of the whole sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import fx_passes
from moe_ops.ops.cp_attention import cp_attention
from moe_ops.ops.cp_split import cp_split

from .bench_exchange import timing_of
from .harness import HEADER, Row, fill, line, relative_error, save
from .launch import launch
from .specs_exchange import ROUNDS, Ranks, WrongResult

TOKENS = (32768, 65536, 131072)
ALONE, RING = "one GPU", "ring"
# Of out and gradients in bf16, against those of one GPU.
LIMIT = 2e-2
Tensors = Sequence[torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Shape:
    """q [1, heads, S, size] and k, v [1, kv_heads, S, size]."""

    tokens: int
    heads: int = 32
    kv_heads: int = 8
    size: int = 128

    @property
    def num_flops(self) -> int:
        """Forward and backward: 7 matmuls of half of S * S."""
        return 7 * self.tokens**2 * self.heads * self.size

    def tensors(self, device: str) -> list[torch.Tensor]:
        """q, k, v and the gradient of out, equal on all ranks."""
        torch.manual_seed(0)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        sizes = [(1, number, self.tokens, self.size) for number in heads]
        return [torch.randn(size, device=device, dtype=dtype) for size in sizes]


class Step:
    """Out and gradients of an attention."""

    def __init__(self, attend: Attend, tensors: Tensors) -> None:
        self.attend, (*leaves, self.grad) = attend, tensors
        self.leaves = [x.detach().requires_grad_() for x in leaves]

    def __call__(self) -> list[torch.Tensor]:
        out = self.attend(*self.leaves)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.grad)]


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, on this device."""
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        return functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )


@contextlib.contextmanager
def shared_by_pytorch(mesh: DeviceMesh, tensors: Tensors, balanced: bool) -> Iterator[Step]:
    """A step on this rank's part, while PyTorch's attention is that of all ranks."""
    from torch.distributed.tensor.experimental._attention import _cp_options  # noqa: PLC0415

    q, k, v, grad = tensors
    repeats = q.shape[1] // k.shape[1]
    buffers = [x.clone() for x in (q, *(x.repeat_interleave(repeats, 1) for x in (k, v)), grad)]
    before, _cp_options.enable_load_balance = _cp_options.enable_load_balance, balanced
    try:
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers)):
            yield Step(flash, buffers)
    finally:
        _cp_options.enable_load_balance = before


class Bench:
    """The rows of one shape."""

    def __init__(self, shape: Shape, args: argparse.Namespace, ranks: Ranks) -> None:
        self.shape, self.args, self.ranks = shape, args, ranks
        self.tensors = shape.tensors(ranks.device)
        self.results = Step(flash, self.tensors)()
        self.rows: dict[str, Row] = {}

    def split(self, tensors: Tensors) -> list[torch.Tensor]:
        return [cp_split(x, 2, group=self.ranks.group) for x in tensors]

    def variants(self) -> dict[str, Callable[[], AbstractContextManager[Step]]]:
        """What gives a step, by name."""

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return cp_attention(q, k, v, group=self.ranks.group)[0]

        compiled = torch.compile(attend, fullgraph=True, dynamic=False, options=fx_passes.options())
        parts = self.split(self.tensors)
        found: dict[str, Callable[[], AbstractContextManager[Step]]] = {
            ALONE: lambda: contextlib.nullcontext(Step(flash, self.tensors)),
            RING: lambda: contextlib.nullcontext(Step(attend, parts)),
            f"{RING} compiled": lambda: contextlib.nullcontext(Step(compiled, parts)),
        }
        if self.ranks.on_gpu:
            mesh = DeviceMesh.from_group(self.ranks.group, "cuda")
            shared = functools.partial(shared_by_pytorch, mesh, self.tensors)
            found["PyTorch"] = functools.partial(shared, True)
            found["PyTorch, contiguous"] = functools.partial(shared, False)
        return found

    def expected(self, name: str) -> list[torch.Tensor]:
        """Out, and gradients where heads are as in ours."""
        if name == ALONE:
            return self.results
        if name.endswith("contiguous"):
            return [self.results[0].chunk(self.ranks.size, 2)[self.ranks.rank]]
        return self.split(self.results if name.startswith(RING) else self.results[:1])

    def check(self, name: str, make: Callable[[], AbstractContextManager[Step]]) -> None:
        with make() as step:
            found = step()
        error = max(relative_error(f, e) for f, e in zip(found, self.expected(name)))
        self.rows[name].error = error
        if not error <= LIMIT:
            raise WrongResult(f"error is {error}")

    def measure(self) -> list[Row]:
        """Times of all variants that are right."""
        samplers = {}
        for name, make in self.variants().items():
            row = Row(op="attention", shape=str(self.shape.tokens), routing="causal", backend=name)
            self.rows[name] = row
            _, row.failure = self.ranks.attempt(functools.partial(self.check, name, make))
            if not row.failure:
                samplers[name] = functools.partial(self.sample, make)
        samples, failures = self.ranks.interleave(samplers)
        for name in samplers:
            row = self.rows[name]
            row.failure = failures.get(name, "")
            if not row.failure:
                share = 1 if name == ALONE else self.ranks.size
                timing = timing_of([us for (us,) in samples[name]])
                fill(row, timing, num_flops=self.shape.num_flops // share)
        alone = self.rows[ALONE].us
        for name, row in self.rows.items():
            if name != ALONE and alone and row.us:
                row.extra["scaling"] = round(alone / self.ranks.size / row.us, 3)
        return list(self.rows.values())

    def sample(self, make: Callable[[], AbstractContextManager[Step]]) -> list[float]:
        """Microseconds a step."""
        with make() as step:
            return self.ranks.sample(step, self.args.repeats)


def bench(ranks: Ranks, args: argparse.Namespace) -> list[Row]:
    """The rows of all shapes; rank 0 prints and saves them."""
    rows: list[Row] = []
    if ranks.rank == 0:
        print(HEADER)
    for tokens in args.tokens:
        shape = Shape(tokens, args.heads, args.kv_heads, args.size)
        found = Bench(shape, args, ranks).measure()
        rows += found
        gc.collect()
        if ranks.rank == 0:
            for row in found:
                print(line(row), row.extra)
            if args.json:
                save(args.json, ranks.device, rows, repeats=args.repeats, rounds=ROUNDS)
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_cp", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128, help="elements a head")
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--repeats", type=int, default=3, help="steps between two events")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def main() -> None:
    """Command line."""
    launch(bench, parse())


if __name__ == "__main__":
    main()
