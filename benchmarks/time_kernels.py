"""Makes the table of kernels' times that is shipped: every kernel on every shape, random routing.

    python -m benchmarks.time_kernels --out moe_ops/kernels/timings.json

What stands in the file for this device is replaced case by case.
"""

from __future__ import annotations

import argparse
import os

import torch

from moe_ops import kernels

from .specs_matmul import forward_operands, wgrad_operands
from .workloads import ALL_SHAPES, MATMULS, SHAPES, WGRADS, Scene


def time_kernels(scene: Scene) -> None:
    """The operators that several kernels serve."""
    offsets_L = scene.maps[2]
    calls = [("sort_slots", "", (scene.ids_TK, scene.shape.num_experts, None, None))]
    calls += [
        ("grouped_mm", matmul, (*forward_operands(scene, matmul), offsets_L)) for matmul in MATMULS
    ]
    calls += [
        ("grouped_mm_wgrad", matmul, (*wgrad_operands(scene, matmul), offsets_L))
        for matmul in WGRADS
    ]
    for op, matmul, args in calls:
        ranked = sorted(kernels.tune(op, *args).items(), key=lambda item: item[1])
        times = (f"{kernel} {us:.0f} us" for kernel, us in ranked)
        print(f"{scene.shape.name:<17} {op:<16} {matmul:<9}", *times, sep="  ", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="time_kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="the table to make or to add to")
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=ALL_SHAPES)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    """Time all kernels on each shape."""
    os.environ["MOE_OPS_TIMINGS"] = args.out
    for name in args.shape:
        with torch.no_grad():
            time_kernels(Scene(ALL_SHAPES[name], "random", args.device))


def main() -> None:
    """Command line."""
    run(parse())


if __name__ == "__main__":
    main()
