"""The search for the fastest settings, with a device that is made up; `test_trials` runs models."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import fx_passes
from fx_passes.config import PassConfig, read
from fx_passes.defer_wgrad import DeferWgrad
from fx_passes.trials import Dropped, Ranks
from fx_passes.tune import Tuned, candidates_of, tune
from tests.ranks import expect_error_on_ranks, run_on_ranks

from .compiled import POST_GRAD

MODULE = importlib.import_module("fx_passes.tune")  # the package has the function by this name
DEFAULT = PassConfig()
X = torch.ones(2)
CANDIDATES = {"chunk_exchange": [1, 2, 4], "defer_wgrad": [True, False]}
Seconds = Callable[[PassConfig, int], float]


class Bar:
    """In place of tqdm's."""

    def __init__(self, total: int, desc: str, unit: str, disable: bool) -> None:
        self.total, self.disable, self.n = total, disable, 0
        self.texts: list[str] = []

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def set_postfix_str(self, text: str, refresh: bool) -> None:
        self.texts.append(text)

    def update(self, number: int) -> None:
        self.n += number


@dataclasses.dataclass
class Device:
    """A step takes `seconds(its settings, number of the call)`, and compiling it `compile_s`; why
    it cannot, says `why_not`.
    """

    seconds: Seconds
    compile_s: float = 1.0
    why_not: Callable[[PassConfig], str | None] = lambda config: None
    now: float = 0.0
    num_calls: int = 0
    compiled: list[PassConfig] = dataclasses.field(default_factory=list)
    bars: list[Bar] = dataclasses.field(default_factory=list)

    def first_step(self, ranks: Ranks, model: Any, inputs: Any, inductor: Any, config: Any) -> Any:
        self.now += self.compile_s
        self.compiled.append(config)
        if reason := ranks.why_not(self.why_not(config)):
            raise Dropped(reason)
        return config, config.chunk_exchange - 1

    def seconds_of(self, config: PassConfig, number: int, on_gpu: bool) -> float:
        self.num_calls += 1
        seconds = self.seconds(config, self.num_calls)
        self.now += (number + 1) * seconds
        return seconds

    def tune(self, **how: Any) -> Tuned:
        def bar(**options: Any) -> Bar:
            self.bars.append(Bar(**options))
            return self.bars[-1]

        stand_ins = {
            "first_step": self.first_step,
            "seconds_of": self.seconds_of,
            "time": SimpleNamespace(perf_counter=lambda: self.now),
            "progress_bar": lambda: bar,
        }
        with mock.patch.multiple(MODULE, **stand_ins):
            return tune(torch.sin, X, **{"budget_s": 1e9, "candidates": CANDIDATES, **how})


def gains(config: PassConfig, call: int) -> float:
    """Four chunks are best, and wgrads that stay; together they gain 28 %."""
    chunked = {1: 1.0, 2: 0.9, 4: 0.8, 8: 0.85}[config.chunk_exchange]
    return 0.1 * chunked * (1.0 if config.defer_wgrad else 0.9)


def test_finds_the_fastest_and_tries_nothing_twice() -> None:
    device = Device(gains)
    tuned = device.tune()
    assert tuned.config == PassConfig(chunk_exchange=4, defer_wgrad=False)
    assert tuned.measured["default_ms"] == pytest.approx(100)
    assert tuned.measured["chosen_ms"] == pytest.approx(72)
    assert len(device.compiled) == len(set(device.compiled)) == 6
    assert [tried["settings"] for tried in tuned.measured["tried"]] == [
        *("chunk_exchange=2", "chunk_exchange=4"),
        "chunk_exchange=4, defer_wgrad=False",
        *("defer_wgrad=False", "chunk_exchange=2, defer_wgrad=False"),
    ]
    text = str(tuned)
    assert "72.000 ms a step, 100.000 by default" in text
    assert "chosen: chunk_exchange=4, defer_wgrad=False" in text


def test_gains_must_exceed_noise() -> None:
    noise = random.Random(0)
    for _ in range(50):
        tuned = Device(lambda config, call: 0.1 * noise.uniform(0.9, 1.1)).tune()
        assert tuned.config == DEFAULT
        assert tuned.measured["chosen_ms"] == tuned.measured["default_ms"]

    def three_percent(config: PassConfig, call: int) -> float:
        return (0.097 if config.chunk_exchange == 2 else 0.1) * noise.uniform(0.995, 1.005)

    assert Device(three_percent).tune().config == PassConfig(chunk_exchange=2)
    assert Device(lambda config, call: 0.1 - 0.0005 * config.chunk_exchange).tune().config == (
        PassConfig(chunk_exchange=4)
    ), "1.5 %, without noise"
    assert Device(lambda config, call: 0.1 - 0.0002 * config.chunk_exchange).tune().config == (
        DEFAULT
    ), "0.6 %"


@pytest.mark.parametrize("per_call", [0.02, -0.002])
def test_drift_is_no_gain(per_call: float) -> None:
    assert Device(lambda config, call: 0.1 * (1 + per_call) ** call).tune().config == DEFAULT


def test_chosen_wins_against_the_default_once_more() -> None:
    def lucky_at_first(config: PassConfig, call: int) -> float:
        return 0.05 if config.chunk_exchange == 2 and call < 60 else 0.1

    device = Device(lucky_at_first)
    tuned = device.tune(candidates={"chunk_exchange": [2]})
    assert tuned.measured["tried"][0]["ms"] == pytest.approx(50)
    assert tuned.config == PassConfig(chunk_exchange=2)
    device = Device(lambda config, call: lucky_at_first(config, call + 25))
    tuned = device.tune(candidates={"chunk_exchange": [2]})
    assert tuned.measured["tried"][0]["ms"] == pytest.approx(50), "over when they meet again"
    assert tuned.config == DEFAULT
    assert tuned.measured["chosen_ms"] == pytest.approx(100)


def test_leaves_out_what_fails(caplog: pytest.LogCaptureFixture) -> None:
    def fails_late(config: PassConfig, call: int) -> float:
        if not config.defer_wgrad and call > 30:
            raise MemoryError("no room")
        return gains(config, call)

    why_not = {2: "InductorError: a bug"}
    device = Device(fails_late, why_not=lambda config: why_not.get(config.chunk_exchange))
    with caplog.at_level(logging.WARNING, "fx_passes"):
        tuned = device.tune()
    assert tuned.config == PassConfig(chunk_exchange=4)
    dropped = [t["dropped"] for t in tuned.measured["tried"] if "dropped" in t]
    assert dropped == ["InductorError: a bug", "it failed in a later step"]
    assert "left out chunk_exchange=2: InductorError: a bug" in caplog.text
    assert "chunk_exchange=4, defer_wgrad=False failed: MemoryError: no room" in caplog.text
    assert "InductorError: a bug" in str(tuned)


def test_default_must_run() -> None:
    def no_step(config: PassConfig, call: int) -> float:
        raise ValueError("step 2")

    device = Device(gains, why_not=lambda config: "Unsupported: graph break")
    with pytest.raises(RuntimeError, match="must run with the default, got Unsupported: graph b"):
        device.tune()
    with pytest.raises(RuntimeError, match="must run with the default, got a step that failed"):
        Device(no_step).tune()


def test_more_chunks_than_fit_are_not_tried() -> None:
    device = Device(gains)
    with mock.patch.object(
        device, "first_step", lambda *args: (args[-1], device.compiled.append(args[-1]))
    ):
        tuned = device.tune(candidates={"chunk_exchange": [2, 4, 8]})
    assert device.compiled == [DEFAULT, PassConfig(chunk_exchange=2)]
    assert tuned.measured["tried"][0]["dropped"] == "no layer can run in so many chunks"


def test_ends_in_time() -> None:
    for budget_s in (10.0, 25.0, 60.0, 200.0):
        device = Device(gains, compile_s=10)
        device.tune(budget_s=budget_s)
        assert device.now < max(budget_s, 15) + 15, "what is under way ends first"
        assert (len(device.compiled) == 6) == (budget_s == 200)
        (bar,) = device.bars
        assert bar.total == budget_s and 10 <= bar.n <= budget_s
        assert bar.texts[0] == "compiles the defaults"
        assert bar.texts[1] == "1 in turns, 100.000 ms"
    device = Device(gains, compile_s=10)
    assert device.tune(budget_s=10).config == DEFAULT
    assert device.compiled == [DEFAULT]


def test_what_is_given_is_the_default() -> None:
    given = PassConfig(defer_wgrad=DeferWgrad(max_bytes=5), lower=False)
    device = Device(gains)
    tuned = device.tune(config=given, chunk_exchange=2, candidates=None)
    assert {config.chunk_exchange for config in device.compiled} == {2}, "not varied"
    assert not any(config.lower for config in device.compiled)
    bounds = [c.defer_wgrad for c in device.compiled if isinstance(c.defer_wgrad, DeferWgrad)]
    assert {each.max_bytes for each in bounds} == {5} and len({b.min_us for b in bounds}) > 1
    assert tuned.config == dataclasses.replace(given, chunk_exchange=2, defer_wgrad=False)
    assert tuned.measured["default"].startswith("chunk_exchange=2, defer_wgrad=DeferWgrad(")


def test_multiprocessors_are_varied_where_the_engine_has_them() -> None:
    assert not candidates_of(DEFAULT)["num_comm_sms"]
    with mock.patch.object(MODULE.nvlink, "group_names", return_value=["0"]):
        values = candidates_of(DEFAULT)
    assert None in values["num_comm_sms"] and 8 in values["num_comm_sms"]
    for name, tried in values.items():
        for value in tried:
            fx_passes.options(**{name: value})
        assert any(value != getattr(DEFAULT, name) for value in tried), name


def test_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    path.write_text("of an earlier run")
    tuned = Device(gains).tune(path=path)
    assert read(path) == tuned.config != DEFAULT
    assert fx_passes.options(config=path) == fx_passes.options(tuned.config)
    measured = json.loads(path.read_text())["measured"]
    assert (measured["device"], measured["ranks"]) == ("cpu", 1)
    assert measured["torch"] == torch.__version__
    assert [*tmp_path.iterdir()] == [path]


def test_rejects_wrong_arguments(tmp_path: Path) -> None:
    for message, how in {
        "tune: budget_s must be positive and finite, got 0": {"budget_s": 0},
        "tune: budget_s must be positive and finite, got inf": {"budget_s": math.inf},
        "tune: budget_s must be a number, got '60'": {"budget_s": "60"},
        "tune: budget_s must be a number, got None": {"budget_s": None},
        r"tune: candidates must be a dict of sequences, got \['": {
            "candidates": ["chunk_exchange"]
        },
        "tune: candidates of num_comm_sms must be a sequence, got 8": {
            "candidates": {"num_comm_sms": 8}
        },
        "tune: candidates of lower must be a sequence, got 'no'": {"candidates": {"lower": "no"}},
        "options: config must be a PassConfig or a path, got a dict": {"config": {"lower": True}},
        "tune: path must be a file in a folder": {"path": tmp_path / "none" / "tuned.json"},
        "that can be written, got '.*'": {"path": tmp_path},
        "tune: config must be a file that can be read": {"config": tmp_path / "none.json"},
        "options: inductor must leave post_grad": {"inductor": {POST_GRAD: print}},
        "settings must be among .*, got chunks": {"candidates": {"chunks": [2]}},
        "chunk_exchange must be a positive": {"candidates": {"chunk_exchange": [0]}},
        "settings must be among .*, got fuse_all": {"fuse_all": True},
    }.items():
        device = Device(gains)
        with pytest.raises(ValueError, match=message):
            device.tune(**how)
        assert not device.compiled


def test_asks_for_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ModuleNotFoundError, match=r"tune: .* needs tqdm; run: pip install"):
        tune(torch.sin, X)


def _tune_on_rank(rank: int, folder: str) -> tuple[Any, ...]:
    """Two chunks are fast on rank 0 alone, three fail on rank 1 alone, four are best."""
    takes = {1: (0.1, 0.1), 2: (0.05, 0.11), 3: (0.05, 0.05), 4: (0.08, 0.09)}
    device = Device(
        lambda config, call: takes[config.chunk_exchange][rank],
        why_not=lambda config: "bad" if config.chunk_exchange == 3 and rank == 1 else None,
    )
    path = Path(folder, "tuned.json")
    tuned = device.tune(candidates={"chunk_exchange": [2, 3, 4]}, path=path)
    assert read(path) == tuned.config, "it is there when any rank returns"
    assert [bar.disable for bar in device.bars] == [rank > 0]
    return tuned.config, tuned.measured, device.compiled


def _budget_on_rank(rank: int) -> list[PassConfig]:
    """One rank alone runs out of time; each would stop elsewhere."""
    device = Device(gains, compile_s=1 + 30 * rank)
    device.tune(budget_s=100)
    return device.compiled


@pytest.mark.dist
def test_ranks_agree(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, _tune_on_rank, str(tmp_path))
    assert first == second
    config, measured, _ = first
    assert config == PassConfig(chunk_exchange=4)
    assert measured["ranks"] == 2
    assert measured["chosen_ms"] == pytest.approx(90), "the slowest rank counts"
    assert measured["tried"][0] == {"settings": "chunk_exchange=3", "dropped": "rank 1: bad"}
    first, second = run_on_ranks(2, _budget_on_rank)
    assert first == second and 1 < len(first) < 6


def _other_budget(rank: int) -> None:
    Device(gains).tune(budget_s=1.0 + rank)


def _unwritable(rank: int, folder: str) -> None:
    with mock.patch.object(Tuned, "save", side_effect=PermissionError("read-only")):
        Device(gains).tune(path=Path(folder, "tuned.json"))


@pytest.mark.dist
def test_errors_are_those_of_all_ranks(tmp_path: Path) -> None:
    for kind, text in expect_error_on_ranks(2, _other_budget):
        assert kind == "ValueError" and "same settings" in text
    for kind, text in expect_error_on_ranks(2, _unwritable, str(tmp_path)):
        assert (kind, text) == (
            "OSError",
            "tune: path must be writable, got rank 0: PermissionError: read-only",
        )
    for kind, text in expect_error_on_ranks(2, _no_folder, str(tmp_path)):
        assert kind == "ValueError" and "path must be a file in a folder" in text
    for kind, text in expect_error_on_ranks(2, _other_inductor):
        assert kind == "ValueError" and "same settings" in text
    for kind, text in expect_error_on_ranks(2, _no_config, str(tmp_path)):
        assert kind == "ValueError" and "config must be a file that can be read" in text


def _other_inductor(rank: int) -> None:
    Device(gains).tune(inductor={"max_autotune": bool(rank)})


def _no_config(rank: int, folder: str) -> None:
    path = Path(folder, f"config{rank}.json")
    if rank == 0:
        path.write_text("{}")
    Device(gains).tune(config=path)


def _no_folder(rank: int, folder: str) -> None:
    Device(gains).tune(path=Path(folder, "none", "tuned.json"))


def test_is_exported() -> None:
    assert fx_passes.tune is tune
