"""`tune` finds the settings of the passes with which a model's steps take the least time on the
device, by running them.

One setting after another is varied, the rest being the best so far, until none gets better or the
time is over. What is compared runs in turns, so that a device that slows down does so for all. What
takes its place must gain more than 1 % and more than the noise, and in the end win against the
default once more.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import moe_ops
from moe_ops import comm
from moe_ops.comm import nvlink

from .config import MEASURED, PassConfig, as_json, config_of
from .defer_wgrad import DeferWgrad
from .devices import can_write
from .measure import Step
from .overlap_shared_experts import OverlapSharedExperts
from .pipeline import options
from .step import is_on_gpu
from .trials import Dropped, Ranks, attempt, first_step, seconds_of
from .windows import bounds_of

_log = logging.getLogger(__name__)

_CHUNKS = (1, 2, 4)
_SMS = (None, 4, 8, 12, 20, 32)
_MIN_US = (10.0, 50.0)
_ROUNDS, _FEWEST_ROUNDS = 12, 5
_TURN_S, _MOST_STEPS = 0.05, 10  # of one configuration in a round
_LEAST_GAIN = 0.01
_STANDARD_ERRORS = 3
_MUST_RUN = "tune: the model must run with the default"
_ERROR_OF_MEDIAN = 1.86  # of normal noise, in median absolute deviations / sqrt(number)


@dataclasses.dataclass(frozen=True)
class Tuned:
    """`config` is what `options` takes. `measured`: on what, and beside what else."""

    config: PassConfig
    measured: dict[str, Any]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON that `options(config=path)` reads, all at once."""
        text = json.dumps(as_json(self.config) | {MEASURED: self.measured}, indent=1)
        written = Path(f"{os.fspath(path)}.new")
        written.write_text(text + "\n")
        os.replace(written, path)

    def __str__(self) -> str:
        """For a person."""
        lines = [f"{'tried':<60}{'ms a step':>12}{'best so far':>12}"]
        for tried in self.measured["tried"]:
            found = tried.get("dropped") or "{ms:12.3f}{best_ms:12.3f}".format(**tried)
            lines.append(f"  {tried['settings']:<58}{found}")
        chosen, default = self.measured["chosen_ms"], self.measured["default_ms"]
        lines.append(f"chosen: {named(self.config)}")
        lines.append(f"  {chosen:.3f} ms a step, {default:.3f} by default")
        return "\n".join(lines)


def named(config: PassConfig) -> str:
    """What differs from the settings that `options()` has."""
    changes = [
        f"{name}={value!r}"
        for name, value in vars(config).items()
        if value != getattr(PassConfig(), name)
    ]
    return ", ".join(changes) or "the defaults"


def tune(
    model: Callable[..., Any],
    *inputs: Any,
    budget_s: float = 600.0,
    path: str | os.PathLike[str] | None = None,
    group: dist.ProcessGroup | None = None,
    candidates: Mapping[str, Sequence[Any]] | None = None,
    **how: Any,
) -> Tuned:
    """Run steps, forward and backward, of copies of `model` with different settings of the passes;
    returns the fastest, the default unless another is clearly faster.

    Every rank of `group` must call it, with the same settings, and gets the same answer; the
    slowest rank's time counts. The model, its gradients and counters, and the inputs stay as they
    are; parameters are shared, not copied. A configuration that does not compile, or raises on all
    ranks, is left out; what raises on one rank alone, within a step, ends as in training.

    Args:
        model, inputs: as for `explain`.
        budget_s: seconds after which no other setting is started; the default is compiled and timed
            however long that takes.
        path: JSON file for the result, which `options(config=path)` reads; rank 0 writes it.
        group: all ranks that run the model together; None: all there are.
        candidates: values to try by field of `PassConfig`; None: numbers of chunks and of an
            exchange's multiprocessors, and what runs during exchanges.
        how: as for `options`, and the default here. A field given by keyword is not varied.

    Raises:
        ModuleNotFoundError: tqdm is not there.
        OSError: on every rank, if the file cannot be written.
        ValueError: on every rank, if arguments are wrong or differ.
        RuntimeError: on every rank, if the model does not run with the default.
    """
    bar, ranks, inductor = progress_bar(), Ranks(group), how.pop("inductor", None)

    def check() -> tuple[PassConfig, dict[str, list[PassConfig]], float, str]:
        _check(budget_s, path if ranks.rank == 0 else None, candidates)
        default, varied = _configurations(candidates, **how)
        options(default, inductor=inductor)
        return default, varied, budget_s, repr(sorted((inductor or {}).items()))

    comm.agree("tune", ranks.group_name, check)
    default, varied, *_ = check()
    search = _Search(
        ranks=ranks,
        build=functools.partial(first_step, ranks, model, inputs, inductor),
        on_gpu=is_on_gpu(model, inputs),
        default=default,
        budget_s=budget_s,
    )
    with bar(total=round(budget_s), desc="tune", unit="s", disable=ranks.rank > 0) as search.bar:
        tuned = search.run(varied)
    why_not = None
    if path is not None and ranks.rank == 0:
        _, why_not = attempt(functools.partial(tuned.save, path))
    if why_not := ranks.why_not(why_not):  # all wait for the file
        raise OSError(f"tune: path must be writable, got {why_not}")
    return tuned


def _check(
    budget_s: float, path: str | os.PathLike[str] | None, candidates: Mapping[str, Any] | None
) -> None:
    if not isinstance(budget_s, (int, float)):
        raise ValueError(f"tune: budget_s must be a number, got {budget_s!r}")
    if not 0 < budget_s < math.inf:
        raise ValueError(f"tune: budget_s must be positive and finite, got {budget_s}")
    if path is not None and not can_write(path):
        raise ValueError(
            f"tune: path must be a file in a folder that can be written, got {os.fspath(path)!r}"
        )
    if candidates is not None and not isinstance(candidates, Mapping):
        raise ValueError(f"tune: candidates must be a dict of sequences, got {candidates!r}")
    for name, values in (candidates or {}).items():
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise ValueError(f"tune: candidates of {name} must be a sequence, got {values!r}")


def progress_bar() -> Any:
    """Of tqdm.

    Raises:
        ModuleNotFoundError: it is not there.
    """
    try:
        from tqdm import tqdm  # noqa: PLC0415 - an optional package
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "tune: the progress bar needs tqdm; run: pip install 'moe-graph-ops[demo]'", name="tqdm"
        ) from error
    return tqdm


def _configurations(
    candidates: Mapping[str, Sequence[Any]] | None, config: Any = None, **fixed: Any
) -> tuple[PassConfig, dict[str, list[PassConfig]]]:
    """The default and, by field, it with each of the values to try."""
    try:
        default = config_of(config, fixed)
    except OSError as error:
        raise ValueError(f"tune: config must be a file that can be read, got {error}") from error
    if candidates is None:
        candidates = candidates_of(default)
    varied = {
        name: [config_of(default, {name: value}) for value in values]
        for name, values in candidates.items()
        if name not in fixed
    }
    return default, varied


def candidates_of(default: PassConfig) -> dict[str, list[Any]]:
    """Values to try by field; what bounds the memory stays."""
    overlap = bounds_of(OverlapSharedExperts, default.overlap_shared_experts)
    defer = bounds_of(DeferWgrad, default.defer_wgrad)
    return {
        "chunk_exchange": list(_CHUNKS),
        "num_comm_sms": list(_SMS) if nvlink.group_names() else [],
        **{
            name: [bounds, False, *(dataclasses.replace(bounds, min_us=us) for us in _MIN_US)]
            for name, bounds in (("overlap_shared_experts", overlap), ("defer_wgrad", defer))
        },
    }


@dataclasses.dataclass
class _Search:
    """`build` compiles; `now`: seconds from the start, which all ranks agree on."""

    ranks: Ranks
    build: Callable[[PassConfig], tuple[Step, int]]
    on_gpu: bool
    default: PassConfig
    budget_s: float
    bar: Any = None
    now: float = 0.0
    longest_build_s: float = 0.0
    most_chunks: float = math.inf  # that a layer can run in
    num_steps: int = 1  # in a turn
    default_s: float = 0.0
    steps: dict[PassConfig, Step] = dataclasses.field(default_factory=dict)
    seen: set[PassConfig] = dataclasses.field(default_factory=set)
    tried: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    begin: float = 0.0

    def run(self, varied: Mapping[str, Sequence[PassConfig]]) -> Tuned:
        """`varied`: by field, configurations that have another value of it."""
        self.begin = time.perf_counter()
        self._start()
        best, before = self.default, None
        while best != before:
            before = best
            for name, others in varied.items():
                values = [getattr(other, name) for other in others]
                best = self._best(best, [dataclasses.replace(best, **{name: v}) for v in values])
        chosen_s = self.default_s
        if best != self.default:
            times = self._rounds([self.default, best])
            if _is_better(times[best], times[self.default]):
                chosen_s = statistics.median(times[best])
            else:
                best, chosen_s = self.default, self.default_s
        return Tuned(best, self._measured(chosen_s))

    def _measured(self, chosen_s: float) -> dict[str, Any]:
        return {
            "device": torch.cuda.get_device_name() if self.on_gpu else "cpu",
            "ranks": self.ranks.size,
            "torch": torch.__version__,
            "moe_ops": moe_ops.__version__,
            "default": named(self.default),
            "default_ms": 1e3 * self.default_s,
            "chosen_ms": 1e3 * chosen_s,
            "tried": self.tried,
        }

    def _start(self) -> None:
        """Compile the default, and see how long a step takes."""
        if why_not := self._compile(self.default):
            raise RuntimeError(f"{_MUST_RUN}, got {why_not}")
        seconds = self._rounds([self.default], num_rounds=1)[self.default][0]
        self.num_steps = min(max(math.ceil(_TURN_S / max(seconds, 1e-9)), 1), _MOST_STEPS)

    def _over(self) -> bool:
        """Whether there is no time to compile one more and to compare with the default."""
        turn_s = (self.num_steps + 1) * self.default_s
        return self.now + self.longest_build_s + 2 * _ROUNDS * turn_s > self.budget_s

    def _best(self, best: PassConfig, rivals: Sequence[PassConfig]) -> PassConfig:
        """The best of them."""
        running = [best]
        for rival in rivals:
            if rival in self.seen or rival.chunk_exchange > self.most_chunks or self._over():
                continue
            if why_not := self._compile(rival):
                self._drop(rival, why_not)
            else:
                running.append(rival)
        if running == [best]:
            return best
        times = self._rounds(running)
        found, medians = best, {config: statistics.median(times[config]) for config in running}
        for rival in running[1:]:
            if math.inf in times[rival]:
                self._drop(rival, "it failed in a later step")
                continue
            ms, best_ms = 1e3 * medians[rival], 1e3 * medians[best]
            self.tried.append({"settings": named(rival), "ms": ms, "best_ms": best_ms})
            if _is_better(times[rival], times[best]) and medians[rival] < medians[found]:
                found = rival
        if math.inf in times[found]:
            found = self.default
        self.steps = {config: self.steps[config] for config in {found, self.default}}
        return found

    def _compile(self, config: PassConfig) -> str | None:
        """Why it cannot be used."""
        self._show(f"compiles {named(config)}")
        self.seen.add(config)
        begin, why_not = time.perf_counter(), None
        try:
            self.steps[config], num_chunked = self.build(config)
            if config != self.default and config.chunk_exchange > 1 and not num_chunked:
                self.most_chunks = config.chunk_exchange - 1
                why_not = "no layer can run in so many chunks"
        except Dropped as error:
            why_not = str(error)
        took, self.now = self.ranks.most(time.perf_counter() - begin, self._elapsed())
        self.longest_build_s = max(self.longest_build_s, took)
        return why_not

    def _drop(self, config: PassConfig, why_not: str) -> None:
        self.steps.pop(config, None)
        self.tried.append({"settings": named(config), "dropped": why_not})
        if self.ranks.rank == 0:
            _log.warning("tune: left out %s: %s", named(config), why_not)

    def _rounds(
        self, configs: Sequence[PassConfig], num_rounds: int = _ROUNDS
    ) -> dict[PassConfig, list[float]]:
        """Seconds of a step by round, the slowest rank's; infinite once it failed."""
        times: dict[PassConfig, list[float]] = {config: [] for config in configs}
        for number in range(num_rounds):
            taken = dict.fromkeys(configs, math.inf)
            for config in configs[:: 1 if number % 2 else -1]:
                if math.inf not in times[config]:
                    taken[config] = self._seconds(config)
            *seconds, self.now = self.ranks.most(*taken.values(), self._elapsed())
            for config, value in zip(configs, seconds):
                times[config].append(value)
            self._show(f"{len(configs)} in turns, {1e3 * min(seconds):.3f} ms", at_once=False)
            if number + 1 >= _FEWEST_ROUNDS and self.now > self.budget_s:
                break
        if self.default in times:
            if math.inf in times[self.default]:
                raise RuntimeError(f"{_MUST_RUN}, got a step that failed, see the log")
            self.default_s = statistics.median(times[self.default])
        return times

    def _seconds(self, config: PassConfig) -> float:
        seconds, why_not = attempt(
            lambda: seconds_of(self.steps[config], self.num_steps, self.on_gpu)
        )
        if why_not:
            _log.warning("tune: %s failed: %s", named(config), why_not)
        return math.inf if why_not else seconds

    def _elapsed(self) -> float:
        return time.perf_counter() - self.begin

    def _show(self, text: str, at_once: bool = True) -> None:
        self.bar.set_postfix_str(text, refresh=at_once)
        self.bar.update(round(min(self.now, self.budget_s)) - self.bar.n)


def _is_better(times: Sequence[float], others: Sequence[float]) -> bool:
    """By more than noise, of times that were taken in turns."""
    if math.inf in (*times, *others):
        return False
    gains = [other - own for own, other in zip(times, others)]
    gain = statistics.median(gains)
    spread = statistics.median(abs(each - gain) for each in gains)
    noise = _STANDARD_ERRORS * _ERROR_OF_MEDIAN * spread / math.sqrt(len(gains))
    return gain > max(noise, _LEAST_GAIN * statistics.median(others))
