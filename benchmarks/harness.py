"""The only place that times: variants of one piece of work against each other, correctness first.

Protocol. Every variant's result is checked before anything is timed, and what is wrong gets no
time. Variants are interleaved, in an order that rotates from round to round, and timed by CUDA
events (by `time.perf_counter` on the CPU); quoted are the median and the spread (90th minus 10th
percentile, over the median).

- Matrix work runs hot: the card reaches its power limit first, and nothing lets it cool down.
- Memory-bound work runs cold: before each call the L2 cache is filled with other, clean lines, and
  the device is kept busy while the call is being launched, so that launching is not measured.

A JSON file names the commit: the checkout's, or what the environment variable BENCH_COMMIT says,
which is for copies of the tree without its .git.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from moe_ops import _library

# Ceilings measured on an H200, 2026-11-29: a copy's bytes read + written, a dense bf16 matmul.
COPY_BYTES_PER_S = 4.21e12
MATMUL_FLOPS_PER_S = 756e12
# Read between two cold calls: four times an H200's L2.
FLUSH_BYTES = 256 << 20
# A spin of about 0.4 ms, in which a cold call is launched.
SPIN_CYCLES = 700_000
# After hot work this recent, a fraction of the heating is enough.
STILL_HOT_S = 2.0


@dataclasses.dataclass(frozen=True)
class Backend:
    """`run` does the work; `view` turns what it returned into what `Work.error_of` compares.

    `run` is checked by its first call.
    """

    name: str
    run: Callable[[], Any]
    view: Callable[[Any], Any] = lambda result: result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """One piece of work, done by several backends; the first one is ours.

    `error_of` returns the error of a result relative to a reference in higher precision, infinity
    if it is wrong in kind. Exactly one of `num_bytes` (memory-bound) and `num_flops` is given.
    """

    op: str
    shape: str
    routing: str
    backends: Sequence[Backend]
    error_of: Callable[[Any], float]
    limit: float
    num_bytes: int | None = None
    num_flops: int | None = None
    kernel: str = ""


@dataclasses.dataclass(frozen=True)
class Timing:
    us: float
    spread: float


@dataclasses.dataclass(kw_only=True)
class Row:
    """One line of the table. `rate` is in GB/s or TFLOP/s, `ratio` is the best correct peer's time
    over this one.
    """

    op: str
    shape: str
    routing: str
    backend: str
    kernel: str = ""
    us: float | None = None
    spread: float | None = None
    rate: float | None = None
    unit: str = ""
    roofline: float | None = None
    ratio: float | None = None
    error: float | None = None
    failure: str = ""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)


class Harness:
    """Times work on one device."""

    def __init__(self, device: str, *, repeats: int = 60, heat_s: float = 1.0) -> None:
        self.device = torch.device(device)
        self.repeats = repeats
        self.heat_s = heat_s
        self._hot_until = -math.inf
        self._flush: torch.Tensor | None = None

    def rows_of(self, work: Work) -> list[Row]:
        """Check all backends, time the correct ones together."""
        rows, runs = [], {}
        for number, backend in enumerate(work.backends):
            row = Row(op=work.op, shape=work.shape, routing=work.routing, backend=backend.name)
            row.kernel = "" if number else work.kernel
            self._check(work, backend, row)
            rows.append(row)
            if not row.failure:
                runs[backend.name] = backend.run
        timings = self.measure(runs, hot=work.num_flops is not None)
        for row in rows:
            if row.backend in timings:
                fill(row, timings[row.backend], num_bytes=work.num_bytes, num_flops=work.num_flops)
        compare(rows, ours={work.backends[0].name})
        return rows

    def _check(self, work: Work, backend: Backend, row: Row) -> None:
        try:
            row.error = work.error_of(backend.view(backend.run()))
        except Exception as error:  # noqa: BLE001 - the others' times are worth having
            row.failure = reason(error)
            return
        if not row.error <= work.limit:
            row.failure = f"wrong: error {row.error:.2e}, at most {work.limit:.0e}"

    def measure(self, runs: dict[str, Callable[[], Any]], *, hot: bool) -> dict[str, Timing]:
        """Time each of `runs`, interleaved."""
        if not runs:
            return {}
        if self.device.type == "cpu":
            samples = self._samples_on_cpu(runs)
        else:
            samples = self._samples_on_cuda(runs, hot)
        return {name: _timing(values) for name, values in samples.items()}

    def _rounds(self, names: list[str]) -> Iterable[str]:
        for number in range(self.repeats):
            first = number % len(names)
            yield from names[first:] + names[:first]

    def _samples_on_cpu(self, runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {name: [] for name in runs}
        for name in self._rounds(list(runs)):
            start = time.perf_counter()
            runs[name]()
            samples[name].append(1e6 * (time.perf_counter() - start))
        return samples

    def _samples_on_cuda(
        self, runs: dict[str, Callable[[], Any]], hot: bool
    ) -> dict[str, list[float]]:
        events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in runs}
        if hot:
            self._heat(runs)
        for name in self._rounds(list(runs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if not hot:
                torch.cuda._sleep(SPIN_CYCLES)
                self._fill_cache()
            start.record()
            runs[name]()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
        if hot:
            self._hot_until = time.perf_counter()
        return {
            name: [1e3 * start.elapsed_time(end) for start, end in pairs]
            for name, pairs in events.items()
        }

    def _heat(self, runs: dict[str, Callable[[], Any]]) -> None:
        still_hot = time.perf_counter() - self._hot_until < STILL_HOT_S
        end = time.perf_counter() + self.heat_s * (0.3 if still_hot else 1.0)
        while time.perf_counter() < end:
            for run in runs.values():
                run()
            torch.cuda.synchronize()

    def _fill_cache(self) -> None:
        """Reads, so that no line has to be written back while the next call is timed."""
        if self._flush is None:
            self._flush = torch.zeros(FLUSH_BYTES // 4, device=self.device)
        self._flush.sum()


def _timing(samples_us: list[float]) -> Timing:
    median = statistics.median(samples_us)
    if len(samples_us) < 3:
        return Timing(median, 0.0)
    deciles = statistics.quantiles(samples_us, n=10)
    return Timing(median, (deciles[-1] - deciles[0]) / median)


def reason(error: Exception) -> str:
    """An error as one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """|found - expected| / |expected|, infinity if a value is not finite or a shape differs."""
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return math.inf
    expected = expected.double()
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def fill(
    row: Row, timing: Timing, *, num_bytes: int | None = None, num_flops: int | None = None
) -> None:
    """Time, rate and share of the ceiling of one row."""
    row.us, row.spread = timing.us, timing.spread
    seconds = timing.us * 1e-6
    if num_flops is not None:
        row.rate, row.unit = num_flops / seconds * 1e-12, "TFLOP/s"
        row.roofline = num_flops / seconds / MATMUL_FLOPS_PER_S
    elif num_bytes is not None:
        row.rate, row.unit = num_bytes / seconds * 1e-9, "GB/s"
        row.roofline = num_bytes / seconds / COPY_BYTES_PER_S


def compare(rows: list[Row], ours: set[str]) -> None:
    """Fill `ratio` of our rows: the fastest other one of the same work over it."""
    peers = [row.us for row in rows if row.us is not None and row.backend not in ours]
    for row in rows:
        if row.us is not None and row.backend in ours and peers:
            row.ratio = min(peers) / row.us


HEADER = (
    f"{'op':<28}{'shape':<17}{'routing':<8}{'backend':<40}{'us':>9}{'±%':>5}"
    f"{'rate':>8} {'unit':<8}{'% roof':>7}{'x peer':>7}{'error':>8}"
)


def line(row: Row) -> str:
    """A row as text."""

    def number(value: float | None, width: int, digits: int, factor: float = 1.0) -> str:
        return " " * width if value is None else f"{value * factor:>{width}.{digits}f}"

    backend = f"{row.backend}: {row.kernel}" if row.kernel else row.backend
    start = f"{row.op:<28}{row.shape:<17}{row.routing:<8}{backend:<40}"
    if row.failure:
        return f"{start} {row.failure}"
    spread = None if row.spread is None else min(row.spread, 9.99)
    error = "" if row.error is None else f"{row.error:>8.0e}"
    return (
        f"{start}{number(row.us, 9, 1)}{number(spread, 5, 0, 100)}{number(row.rate, 8, 1)} "
        f"{row.unit:<8}{number(row.roofline, 7, 1, 100)}{number(row.ratio, 7, 2)}{error}"
    )


def environment(device: str) -> dict[str, Any]:
    """What the figures depend on."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": os.environ.get("BENCH_COMMIT") or _commit(),
        "source": _library.source_hash(),
        "command": sys.argv,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": _versions(),
        "device": "cpu",
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["device"] = properties.name
        found["sms"] = properties.multi_processor_count
        found["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        )
    return found


def _versions() -> dict[str, str]:
    names = ("triton", "sgl-deep-gemm", "moe-ops", "sonic-moe", "quack-kernels")
    installed = {d.name: d.version for d in importlib.metadata.distributions() if d.name in names}
    return dict(sorted(installed.items()))


def _commit() -> str:
    folder = str(pathlib.Path(__file__).parent)
    commit = _output("git", "-C", folder, "rev-parse", "HEAD")
    if commit and _output("git", "-C", folder, "status", "--porcelain"):
        commit += " with changes"
    return commit or "unknown"


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def save(path: str, device: str, rows: list[Row], **more: Any) -> None:
    """Write rows and environment as JSON."""
    content = {**environment(device), **more, "rows": [dataclasses.asdict(row) for row in rows]}
    pathlib.Path(path).write_text(json.dumps(content, indent=1, default=str) + "\n")
