"""Times exchange_plan, dispatch and combine between two GPUs, engine by engine and against others.

    python -m benchmarks.bench_exchange --shape DSv3 Qwen3 --peers --json out.json

Starts one process a GPU. Every process draws its own tokens and uniformly random distinct experts.
Plans are in capacity mode; ours on the engine `nvlink` must equal ours on the group's own backend
bit for bit, others must deliver the same rows. Calls run back to back, hot, `--repeats` between two
events, backends interleaved in rounds; quoted are the median over rounds, of the slower rank, and
the range over the median.

"combine" gets rows in the window, as compiled layers place them, "combine, rows elsewhere" rows
outside it, which are pushed. Rates count the rows that must leave a rank, one a (token, other
rank), whatever a backend sends; their roofline is the link. `--beside` times matmuls alone and with
an exchange on a second stream. Backends stand in `benchmarks.specs_exchange`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_ops import comm
from moe_ops.comm.nvlink import DEFAULT_SMS

from .harness import HEADER, Row, Timing, compare, fill, line, save
from .launch import launch
from .specs_exchange import (
    ROUNDS,
    Candidate,
    Exchange,
    Ranks,
    Result,
    Tensors,
    captured,
    deep_ep,
    deep_ep_buffer,
    deep_ep_version,
    differences,
    nvlink_group,
    our_runs,
    stock,
)
from .workloads import Shape

SHAPES = {
    shape.name: shape
    for shape in (
        Shape("DSv3", 8192, 7168, 2048, 64, 8),
        Shape("Qwen3", 16384, 2048, 768, 128, 8),
        Shape("Mixtral", 8192, 4096, 14336, 8, 2),
        Shape("small", 128, 7168, 2048, 64, 8),
    )
}
TINY = Shape("tiny", 64, 128, 32, 8, 2)
ALL_SHAPES = {**SHAPES, TINY.name: TINY}
OPS = (
    "exchange_plan",
    "dispatch",
    "dispatch, fp8",
    "plan + dispatch",
    "combine",
    "combine, weights",
    "combine, addend",
    "combine, rows elsewhere",
)
# Bulk copies between two H200, per direction, measured 2026-11-29.
LINK_BYTES_PER_S = 330e9
SMS = (4, 8, 12, 14, 16, 24, 32)
BESIDE_REPEATS = 20
BESIDE_MATMULS = 3
BESIDE_SIZE = (16384, 4096, 4096)
HEAT_S = 1.0


def timing_of(samples_us: Sequence[float]) -> Timing:
    median = statistics.median(samples_us)
    return Timing(median, (max(samples_us) - min(samples_us)) / median)


class Bench:
    """The rows of one shape."""

    def __init__(self, shape: Shape, args: argparse.Namespace, ranks: Ranks) -> None:
        self.ranks, self.shape, self.args = ranks, shape, args
        self.work = Exchange(shape, ranks)
        self.groups: list[dist.ProcessGroup] = []
        self.rows: list[Row] = []
        own = our_runs(self.work, ranks.group)
        self.expected = {op: [x.clone() for x in run()] for op, run in own.items()}
        self.own = Candidate(comm.engine(ranks.group), own, self.our_fault)

    def our_fault(self, op: str, outputs: Tensors) -> str:
        return differences(outputs, self.expected[op])

    def row(self, op: str, backend: str, failure: str = "") -> Row:
        row = Row(op=op, shape=self.shape.name, routing="random", backend=backend, failure=failure)
        row.extra = {
            "copy_capacity": self.work.copy_capacity,
            "row_capacity": self.work.row_capacity,
            "off_rank_bytes": self.work.off_rank_bytes,
        }
        return row

    def add(self, *rows: Row) -> None:
        self.rows += rows
        if self.ranks.rank == 0 and rows:
            print("\n".join(line(row) for row in rows), flush=True)

    def offer(self, name: str, make: Callable[[], Result]) -> list[Result]:
        """What `make` makes, or nothing and a row that says why."""
        made, failure = self.ranks.attempt(make)
        if made is None:
            self.add(self.row("all", name, failure))
            return []
        return [made]

    def nvlink(self, name: str, num_sms: int) -> Candidate:
        self.groups.append(nvlink_group(self.work, self.ranks, num_sms))
        runs = our_runs(self.work, self.groups[-1])
        return Candidate(name, runs, self.our_fault)

    def graph_of(self, candidate: Candidate) -> Candidate:
        runs = {op: captured(run) for op, run in candidate.runs.items()}
        return dataclasses.replace(candidate, name=f"{candidate.name}, graph", runs=runs)

    def by_sms(self, numbers: Sequence[int]) -> list[Candidate]:
        found = []
        for number in numbers:
            name = f"nvlink, {number} SMs"
            found += self.offer(name, functools.partial(self.nvlink, name, number))
        return found

    def candidates(self, buffer: Any) -> list[Candidate]:
        """`buffer` is DeepEP's, None without it."""
        found = []
        if self.ranks.on_gpu:
            found += self.offer(
                "nvlink", lambda: self.nvlink(f"nvlink, {DEFAULT_SMS} SMs", DEFAULT_SMS)
            )
            if found:
                found += self.offer("nvlink, graph", functools.partial(self.graph_of, found[0]))
        found.append(self.own)
        if buffer is not None:
            found += self.offer("DeepEP", lambda: deep_ep(self.work, buffer))
        return [*found, *self.offer("stock", lambda: stock(self.work, self.ranks))]

    def table(self, candidates: Sequence[Candidate], ops: Sequence[str]) -> None:
        """Check all candidates, time the correct ones together, operator by operator."""
        for op in ops:
            rows = {c.name: self.row(op, c.name) for c in candidates if op in c.runs}
            samplers = {}
            for candidate in candidates:
                if op not in candidate.runs:
                    continue
                row, run = rows[candidate.name], candidate.runs[op]
                row.kernel = candidate.detail
                _, row.failure = self.ranks.attempt(functools.partial(candidate.check, op))
                if not row.failure:
                    samplers[candidate.name] = functools.partial(
                        self.ranks.sample, run, self.args.repeats
                    )
            samples, failures = self.ranks.interleave(samplers)
            for name in samplers:
                rows[name].failure = failures.get(name, "")
                if name not in failures:
                    self.fill(rows[name], timing_of([us for (us,) in samples[name]]))
            compare(list(rows.values()), {c.name for c in candidates if c.ours})
            self.add(*rows.values())

    def fill(self, row: Row, timing: Timing) -> None:
        row.us, row.spread = timing.us, timing.spread
        if row.op != "exchange_plan":
            ways = 2 if row.op == "dispatch + combine" else 1
            bytes_per_s = ways * self.work.off_rank_bytes / (timing.us * 1e-6)
            row.rate, row.unit = bytes_per_s * 1e-9, "GB/s"
            row.roofline = bytes_per_s / LINK_BYTES_PER_S

    def beside(self, candidates: Sequence[Candidate]) -> None:
        """Matmuls alone and beside the exchanges of each candidate, and those alone."""
        made = self.offer("3 matmuls", lambda: Beside(self.ranks))
        if not made:
            return
        made[0].heat()
        sample = made[0].sample
        samplers = {"alone": functools.partial(sample, (), BESIDE_MATMULS)}
        for candidate in candidates:
            runs = (candidate.runs["dispatch"], candidate.runs["combine"])
            samplers[f"beside {candidate.name}"] = functools.partial(sample, runs, BESIDE_MATMULS)
            samplers[f"{candidate.name}, alone"] = functools.partial(sample, runs, 0)
        samples, failures = self.ranks.interleave(samplers)
        for name in samplers:
            self.add(*self.beside_rows(name, samples[name], failures.get(name, "")))

    def beside_rows(self, name: str, samples: list[list[float]], failure: str) -> list[Row]:
        """`samples` hold the matmuls' and the exchange's time of each round."""
        matmul = self.row("3 matmuls", name, failure)
        exchange = self.row("dispatch + combine", name)
        if failure:
            return [matmul]
        timings = [timing_of(column) for column in zip(*samples)]
        num_flops = 2 * BESIDE_MATMULS * math.prod(BESIDE_SIZE)
        rows = []
        if not name.endswith(", alone"):
            fill(matmul, timings[0], num_flops=num_flops)
            rows.append(matmul)
        if name != "alone":
            self.fill(exchange, timings[1])
            rows.append(exchange)
        return rows

    def close(self) -> None:
        """Give back the groups of one shape; their candidates are gone."""
        gc.collect()
        if self.ranks.on_gpu:
            torch.cuda.synchronize()
        self.ranks.align()
        for group in self.groups:
            dist.destroy_process_group(group)


class Beside:
    """Matmuls on the current stream, an exchange on a second one."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        rows, inner, columns = BESIDE_SIZE
        options: Any = {"device": ranks.device, "dtype": torch.bfloat16}
        self.stream = torch.cuda.Stream(priority=-1)
        self.a, self.b = torch.randn(rows, inner, **options), torch.randn(inner, columns, **options)
        self.out = torch.empty(rows, columns, **options)
        self.one = torch.ones(1, device=ranks.device)

    def heat(self) -> None:
        end = time.perf_counter() + HEAT_S
        while time.perf_counter() < end:
            torch.mm(self.a, self.b, out=self.out)
            torch.cuda.synchronize()

    def sample(self, exchange: Sequence[Callable[[], Tensors]], num_matmuls: int) -> list[float]:
        """Microseconds of the matmuls and of the exchange, medians of calls back to back."""
        times: list[Any] = []
        for _ in range(BESIDE_REPEATS):
            begin, end, sent, back = (torch.cuda.Event(enable_timing=True) for _ in range(4))
            dist.all_reduce(self.one, dist.ReduceOp.MAX, group=self.ranks.group)  # start together
            begin.record()
            self.stream.wait_event(begin)
            with torch.cuda.stream(self.stream):
                sent.record()
                for run in exchange:
                    run()
                back.record()
            for _ in range(num_matmuls):
                torch.mm(self.a, self.b, out=self.out)
            end.record()
            torch.cuda.current_stream().wait_stream(self.stream)
            times.append(((begin, end), (sent, back)))
        torch.cuda.synchronize()
        return [
            1e3 * statistics.median(start.elapsed_time(stop) for start, stop in pairs)
            for pairs in zip(*times)
        ]


def bench_shape(shape: Shape, args: argparse.Namespace, ranks: Ranks, buffer: Any) -> list[Row]:
    bench = Bench(shape, args, ranks)
    candidates = bench.candidates(buffer)
    bench.table(candidates, OPS)
    if args.sms is not None:
        bench.table(bench.by_sms(args.sms or SMS), ("dispatch", "combine"))
    if args.beside:
        bench.beside([c for c in candidates if c.ours and "graph" not in c.name])
    candidates.clear()
    bench.close()
    return bench.rows


@torch.no_grad()
def bench(ranks: Ranks, args: argparse.Namespace) -> list[Row]:
    """The rows of all shapes; rank 0 prints and saves them."""
    start = time.perf_counter()
    missing, buffer = "", None
    if args.peers:
        hidden = max(ALL_SHAPES[name].hidden for name in args.shape)
        buffer, missing = ranks.attempt(lambda: deep_ep_buffer(ranks, hidden))
    rows: list[Row] = []
    if ranks.rank == 0:
        print(HEADER)
    for name in args.shape:
        if missing:
            row = Row(op="all", shape=name, routing="random", backend="DeepEP", failure=missing)
            rows.append(row)
            if ranks.rank == 0:
                print(line(row))
        rows += bench_shape(ALL_SHAPES[name], args, ranks, buffer)
        if ranks.rank == 0 and args.json:
            settings = {"repeats": args.repeats, "rounds": ROUNDS, "ranks": ranks.size}
            save(args.json, ranks.device, rows, **settings, deep_ep=deep_ep_version())
    if ranks.rank == 0:
        print(f"{len(rows)} rows in {time.perf_counter() - start:.0f} s", flush=True)
    return rows


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_exchange", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=ALL_SHAPES)
    parser.add_argument("--peers", action="store_true", help="also DeepEP")
    parser.add_argument("--sms", nargs="*", type=int, help=f"also nvlink on so many SMs ({SMS})")
    parser.add_argument("--beside", action="store_true", help="also beside matmuls")
    parser.add_argument("--json", help="write all figures to this file")
    parser.add_argument("--repeats", type=int, default=50, help="calls between two events")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    """Start the processes and wait for them."""
    launch(bench, args)


def main() -> None:
    """Command line."""
    run(parse())


if __name__ == "__main__":
    main()
