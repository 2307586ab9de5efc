"""Times what the passes add to compiling a model, and the tracing of a layer of many ranks.

    python -m benchmarks.bench_compile --json out.json

- compile: forward and backward of the demo's model with `--layers` layers, from a call to a step
  done, without caches, with the passes and without, in turn.
- trace: forward and backward graphs of a layer of `--ranks` ranks, of which only this one exists.

Quoted are medians of `--repeats` and their range over the median.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

import fx_passes
from fx_passes.compat import graph_backend
from moe_ops.demo.model import ByteModel
from moe_ops.demo.settings import Settings
from moe_ops.nn import MoE, MoEConfig

from .bench_exchange import timing_of
from .harness import HEADER, Row, line, save

NUM_TOKENS = 4096


def compile_step(model: nn.Module, tokens_BT: torch.Tensor, options: dict[str, Any] | None) -> None:
    """A first step, from nothing."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(model, fullgraph=True, dynamic=False, options=options)
        logits, router_loss = compiled(tokens_BT)
        (logits.float().square().mean() + router_loss).backward()
    if tokens_BT.is_cuda:
        torch.cuda.synchronize()


def trace_layer(num_ranks: int) -> None:
    """Graphs of both directions, by the passes, without generated code."""
    config = MoEConfig(hidden_size=64, ffn_hidden_size=32, num_experts=4 * num_ranks, top_k=8)
    layer = MoE(config, dist.group.WORLD)
    graphs: dict[str, torch.fx.Graph] = {}
    backend = graph_backend(fx_passes.options(), graphs.__setitem__)
    torch._dynamo.reset()
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):  # nothing is exchanged
        x_TH = torch.zeros(NUM_TOKENS, 64, requires_grad=True)
        compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend=backend)
        compiled(x_TH).sum().backward()
    assert graphs.keys() == {"forward", "backward"}


def seconds(act: Callable[[], None]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def bench(args: argparse.Namespace) -> list[Row]:
    """Both tables' rows."""
    settings = Settings(layers=args.layers, device=args.device)
    model = ByteModel(settings).to(args.device)
    size = (settings.batch, settings.context)
    tokens_BT = torch.randint(256, size, device=args.device)
    variants = {"without passes": None, "passes": fx_passes.options()}
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(args.repeats + 1):
        for name, options in variants.items():
            taken = seconds(lambda options=options: compile_step(model, tokens_BT, options))  # type: ignore[misc]
            found[name] += [taken] if number else []  # the first imports and warms up
    rows = [_row("compile", f"{args.layers} layers", name, found[name]) for name in variants]
    rows[1].ratio = rows[0].us / rows[1].us  # type: ignore[operator]

    dist.init_process_group("fake", rank=0, world_size=args.ranks, store=FakeStore())
    times = [seconds(lambda: trace_layer(args.ranks)) for _ in range(args.repeats)]
    dist.destroy_process_group()
    rows.append(_row("trace", f"{args.ranks} ranks", "passes", times))
    return rows


def _row(op: str, shape: str, backend: str, times: list[float]) -> Row:
    timing = timing_of([1e6 * taken for taken in times])
    row = Row(op=op, shape=shape, routing="", backend=backend)
    row.us, row.spread = timing.us, timing.spread
    return row


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_compile", description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def main() -> None:
    """Command line."""
    args = parse()
    rows = bench(args)
    print("\n".join((HEADER, *map(line, rows))))
    if args.json:
        save(args.json, args.device, rows, repeats=args.repeats)


if __name__ == "__main__":
    main()
