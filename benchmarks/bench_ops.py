"""Times each operator against the stock form and other libraries, over the model shapes.

    python -m benchmarks.bench_ops --op permute --shape Qwen3 --json out.json

An operator's entry stands in `SPECS`; timing in `benchmarks.harness`.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator

import torch

import moe_ops  # noqa: F401 - registers the operators

from . import specs_data, specs_matmul
from .harness import HEADER, Harness, Row, line, reason, save
from .peers import Peers
from .workloads import ALL_SHAPES, ROUTINGS, SHAPES, Scene, Shape

SPECS = {**specs_data.SPECS, **specs_matmul.SPECS}
# What runs where nothing is chosen, after everything on the main shapes with random routing.
_MATMULS = tuple(name for name in SPECS if name.startswith(("grouped_mm/", "grouped_mm_wgrad/")))
_ON_OTHERS = ("grouped_mm/fc1", "grouped_mm/fc2", "grouped_mm_wgrad/fc1", "unpermute")
_ON_ZIPF = ("sort_slots", "unpermute", "grouped_mm/fc1", "grouped_mm_wgrad/fc1")


@dataclasses.dataclass(frozen=True)
class Item:
    shape: Shape
    routing: str
    specs: tuple[str, ...]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_ops", description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", default=[], help=f"of {', '.join(SPECS)}, or a prefix")
    parser.add_argument("--shape", nargs="+", default=[], choices=ALL_SHAPES)
    parser.add_argument("--routing", nargs="+", default=[], choices=ROUTINGS)
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--peers", action="store_true", help="also the other libraries")
    parser.add_argument("--quick", action="store_true", help="one shape, fewer repeats")
    parser.add_argument("--repeats", type=int, help="timed calls of each backend (60, quick 20)")
    parser.add_argument("--heat", type=float, help="seconds of heating (1.0, quick 0.3)")
    parser.add_argument("--budget", type=float, help="start nothing after so many seconds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def chosen_specs(names: list[str]) -> tuple[str, ...]:
    """Specs named in full or by their operator.

    Raises:
        SystemExit: a name that fits none.
    """
    for name in names:
        if not any(_fits(spec, name) for spec in SPECS):
            raise SystemExit(f"bench_ops: --op must be among {', '.join(SPECS)}, got {name}")
    return tuple(spec for spec in SPECS if not names or any(_fits(spec, n) for n in names))


def _fits(spec: str, name: str) -> bool:
    return spec == name or spec.startswith(f"{name}/")


def plan(args: argparse.Namespace) -> Iterator[Item]:
    """What to run, the most wanted first."""
    specs = chosen_specs(args.op)
    if args.shape or args.routing or args.quick:
        for name in args.shape or (["Qwen3"] if args.quick else list(SHAPES)):
            for routing in args.routing or ["random"]:
                yield Item(ALL_SHAPES[name], routing, specs)
        return

    def among(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(spec for spec in specs if spec in names)

    main = [shape for shape in SHAPES.values() if shape.main]
    for shape in main:
        yield Item(shape, "random", specs)
        yield Item(shape, "aligned", among(_MATMULS))
    for shape in SHAPES.values():
        if not shape.main:
            yield Item(shape, "random", specs if args.op else among(_ON_OTHERS))
    for shape in main[:2]:
        yield Item(shape, "zipf", among(_ON_ZIPF))


def run(args: argparse.Namespace) -> list[Row]:
    """Run the plan, printing rows as they come and saving them after each shape."""
    start = time.perf_counter()
    repeats = args.repeats or (20 if args.quick else 60)
    heat_s = args.heat if args.heat is not None else (0.3 if args.quick else 1.0)
    harness = Harness(args.device, repeats=repeats, heat_s=heat_s)
    items = list(plan(args))
    peers = Peers(*(("moe-ops", "DeepGEMM") if args.peers else ()))
    for name, why in peers.missing.items():
        print(f"without {name}: {why}")
    print(HEADER)
    rows: list[Row] = []
    left_out = []
    for item in items:
        scene = Scene(item.shape, item.routing, args.device)
        for spec in item.specs:
            if args.budget and time.perf_counter() - start > args.budget:
                left_out.append(f"{spec} {item.shape.name} {item.routing}")
                continue
            for row in _rows(harness, spec, scene, peers):
                print(line(row), flush=True)
                rows.append(row)
        if args.json:
            settings = {"repeats": repeats, "heat_s": heat_s, "missing": peers.missing}
            save(args.json, args.device, rows, **settings, left_out=left_out)
    print(f"{len(rows)} rows in {time.perf_counter() - start:.0f} s")
    if left_out:
        print(f"out of time for {len(left_out)}: {', '.join(left_out)}")
    return rows


def _rows(harness: Harness, spec: str, scene: Scene, peers: Peers) -> list[Row]:
    start = time.perf_counter()
    with torch.no_grad():
        try:
            rows = harness.rows_of(SPECS[spec](scene, peers))
        except Exception as error:  # noqa: BLE001 - the other operators' times are worth having
            row = Row(op=spec, shape=scene.shape.name, routing=scene.routing, backend="all")
            row.failure = reason(error)
            rows = [row]
    for row in rows:
        row.extra["seconds"] = round(time.perf_counter() - start, 2)
    return rows


def main() -> None:
    """Command line."""
    run(parse())


if __name__ == "__main__":
    main()
