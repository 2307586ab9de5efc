"""The parent of the training processes: starts them, passes Ctrl-C on, judges the result."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch.multiprocessing as torch_mp

from .progress import Progress, is_finished, latest
from .settings import PASSES_PICTURE, PASSES_TEXT, PASSES_TRACE, Job, Refused, Settings

# What a run with default settings must reach.
LARGEST_LOSS = 2.0
SMALLEST_EXPERT_GAIN = 0.1
# Compiled and eager float32 sums differ in order only.
LARGEST_COMPILE_DIFFERENCE = 1e-3
LARGEST_RELOAD_DIFFERENCE = 1e-6
STOPPING = """
stopping when this step is done and saved (a first step compiles, up to a minute);
Ctrl-C again stops at once and keeps the last checkpoint"""
FAILED = 1
INTERRUPTED = 130


def launch(settings: Settings) -> int:
    """Run the demo; returns the exit status."""
    begin = time.perf_counter()
    for name in ("matplotlib", "tqdm"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"demo: needs {name}", name=name)
    Path(settings.out).mkdir(parents=True, exist_ok=True)
    with _only_run_in(settings.out):
        for name in (PASSES_TEXT, PASSES_PICTURE, PASSES_TRACE):  # not every run writes them
            Path(settings.out, name).unlink(missing_ok=True)
        try:
            if not _train(settings, _checkpoint_to_resume(settings)):
                return INTERRUPTED
        except (torch_mp.ProcessRaisedException, torch_mp.ProcessExitedException) as error:
            print(error, file=sys.stderr)
            return FAILED
        return _conclude(settings, begin)


def work(rank: int, job: Job) -> None:
    """Entry point of a worker process."""
    # A session of its own: the terminal's Ctrl-C reaches the parent alone.
    os.setsid()
    # Here, because the parent needs none of what it imports, which takes seconds.
    from .train import train  # noqa: PLC0415

    train(rank, job)


@contextlib.contextmanager
def _only_run_in(folder: str) -> Iterator[None]:
    """Two runs would delete each other's checkpoints."""
    with open(Path(folder, ".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(
                f"demo: out must not be in use by another run, got {folder}; give another --out"
            ) from error
        yield


def _checkpoint_to_resume(settings: Settings) -> Path | None:
    """The checkpoint of an unfinished run, or None after removing what must not be resumed."""
    root = settings.checkpoints
    found = latest(root)
    if found is None or settings.fresh or is_finished(found):
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir()
        return None
    theirs, ours = Progress.read(found).identity, settings.identity()
    for name in ours:
        if theirs.get(name) != ours[name]:
            raise Refused(
                f"demo: {name} must be {theirs.get(name)} to go on from {found}, got "
                f"{ours[name]}; use --fresh or another --out"
            )
    return found


class _Interrupts:
    """Counts Ctrl-C, and a polite kill as one, while its block runs."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.count = 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1

    def __enter__(self) -> _Interrupts:
        self._before = [signal.signal(s, self._note) for s in self._SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for s, handler in zip(self._SIGNALS, self._before):
            signal.signal(s, handler)

    @contextlib.contextmanager
    def ignored(self) -> Iterator[None]:
        """Children started here ignore Ctrl-C from their first instruction on."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)


def _train(settings: Settings, resume_from: Path | None) -> bool:
    """True if the workers came to the end, False if they were stopped."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    stop = multiprocessing.get_context("spawn").Event()
    with _Interrupts() as interrupts, tempfile.TemporaryDirectory() as scratch:
        job = Job(settings, resume_from, Path(scratch, "rendezvous"), os.getpid(), stop)
        with interrupts.ignored():
            workers = torch_mp.start_processes(
                work, args=(job,), nprocs=settings.world_size, join=False, start_method="spawn"
            )
        while not workers.join(timeout=0.2):
            if interrupts.count and not stop.is_set():
                stop.set()
                print(STOPPING, file=sys.stderr)
            if interrupts.count > 1:
                for process in workers.processes:
                    process.kill()
                    process.join()
                break
    newest = latest(settings.checkpoints)
    if newest is not None and is_finished(newest):
        return True
    print(f"stopped; {newest or 'no checkpoint'} is where the same command goes on")
    return False


def _conclude(settings: Settings, begin: float) -> int:
    """Print what came out, draw it, and decide."""
    # Here, because matplotlib takes a while to import.
    from . import report  # noqa: PLC0415

    out = Path(settings.out)
    newest = latest(settings.checkpoints)
    assert newest is not None
    progress = Progress.read(newest)
    metrics = json.loads((out / "metrics.json").read_text())
    report.draw_loss(progress, out / "loss.png")
    report.draw_experts(progress, out / "experts.png")
    failures = _print_and_judge(settings, metrics)
    metrics |= {"seconds": time.perf_counter() - begin, "failures": failures}
    metrics |= {"steps": progress.step, "settings": settings.identity()}
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    if (found := out / PASSES_TEXT).exists():
        print(f"\nwhat the passes do to a block\n{found.read_text()}")
    for name in ("loss.png", "experts.png", "metrics.json", PASSES_PICTURE, PASSES_TRACE):
        if (out / name).exists():
            print(out / name)
    print(f"{metrics['seconds']:.0f} s in all")
    for failure in failures:
        print(f"demo: {failure}", file=sys.stderr)
    return FAILED if failures else 0


def _print_and_judge(settings: Settings, metrics: dict[str, Any]) -> list[str]:
    """Print the numbers; returns what must hold and does not."""
    loss, reloaded = metrics["validation_loss"], metrics["validation_loss_reloaded"]
    without = metrics["validation_loss_without_experts"]
    gain = without - loss
    print(f"validation loss                   {loss:.4f} nats a byte")
    print(f"  with the experts' output zero   {without:.4f}, {gain:+.4f}")
    print(f"  from the checkpoint, reloaded   {reloaded:.4f}")
    checks = [
        (
            abs(reloaded - loss) <= LARGEST_RELOAD_DIFFERENCE,
            f"the reloaded validation loss must be {loss}, got {reloaded}",
        )
    ]
    if (difference := metrics["compiled_against_eager"]) is not None:
        tensor = metrics["compiled_against_eager_tensor"]
        print(f"compiled step against eager       {difference:.1e} relative, at {tensor}")
        checks += [
            (
                difference <= LARGEST_COMPILE_DIFFERENCE,
                f"compiled and eager must differ by at most {LARGEST_COMPILE_DIFFERENCE}, got "
                f"{difference} at {tensor}",
            )
        ]
    if settings.is_default():
        checks += [
            (loss < LARGEST_LOSS, f"validation loss must be below {LARGEST_LOSS}, got {loss}"),
            (
                gain >= SMALLEST_EXPERT_GAIN,
                f"experts must be worth {SMALLEST_EXPERT_GAIN} nats a byte, got {gain}",
            ),
        ]
    return [text for holds, text in checks if not holds]
