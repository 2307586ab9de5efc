"""Choosing among kernels by measured times."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from moe_ops import _library, kernels
from moe_ops.kernels import autotune
from moe_ops.kernels.kernel import Kernel

_reference = _library.OPS["grouped_mm"].reference
OFFSETS = torch.tensor([3, 5], dtype=torch.int32)


@pytest.fixture(autouse=True)
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "deep" / "timings.json"
    monkeypatch.setenv("MOE_OPS_TIMINGS", str(path))
    monkeypatch.delenv("MOE_OPS_AUTOTUNE", raising=False)
    forget()
    yield path
    forget()


def forget() -> None:
    autotune._of_this_process.clear()
    autotune._tables.cache_clear()
    kernels._in_order.cache_clear()


def arguments(rows: int = 5, width: int = 8, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [torch.randn(rows, width, dtype=dtype), torch.randn(2, 4, width, dtype=dtype), OFFSETS]


def slow(*args: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return _reference(*args)


def wrong(*args: torch.Tensor) -> torch.Tensor:
    c_CO = _reference(*args)
    c_CO[-1, -1] += 1
    return c_CO


def slower_still(*args: torch.Tensor) -> torch.Tensor:
    slow(*args)
    return slow(*args)


def failing(*args: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no such instruction")


def add_cases(table: Path, name: str) -> None:
    for number in range(20):
        autotune._add(table, {"cpu": {f"{name} {number}": {"a": 1.0}}})


def kernels_of(**runs: Callable[..., Any]) -> list[Kernel]:
    return [Kernel(name, lambda *args: True, run) for name, run in runs.items()]


def tune(args: Sequence[Any]) -> dict[str, float]:
    """As `kernels.tune`, on the CPU."""
    times = autotune.tune("grouped_mm", args, kernels._kernels()["grouped_mm"])
    kernels._in_order.cache_clear()
    return times


def offered(*found: Kernel) -> Any:
    return mock.patch.object(kernels, "_kernels", return_value={"grouped_mm": list(found)})


def test_the_fastest_is_chosen_from_the_user_table(table: Path) -> None:
    args = arguments()
    with offered(*kernels_of(slow=slow, fast=_reference)):
        assert kernels.name_of("grouped_mm", *args) == "slow"
        times = tune(args)
        assert times["slow"] > 20_000 > times["fast"]
        assert kernels.name_of("grouped_mm", *args) == "fast"
        assert kernels.choose("grouped_mm", *args) is _reference
    case = "grouped_mm float32 C<=8 I8 L2 O4"
    assert json.loads(table.read_text()) == {"cpu": {case: times}}


def test_cases_round_rows_only() -> None:
    def case(*args: Any) -> str:
        return autotune.case_of("grouped_mm", autotune.key_of(args))

    assert case(*arguments(rows=5)) == case(*arguments(rows=8)) != case(*arguments(rows=9))
    assert case(*arguments(width=8)) != case(*arguments(width=16))
    assert case(*arguments()) != case(*arguments(dtype=torch.bfloat16))
    a_CI, w_LOI, offsets_L = arguments()
    assert case(a_CI, w_LOI.mT.contiguous().mT, offsets_L).endswith(" strided")
    assert case(a_CI[:0], w_LOI, offsets_L) == "grouped_mm float32 C0 I8 L2 O4"
    ids_TK = torch.zeros(5, 2, dtype=torch.int32)
    key = autotune.key_of((ids_TK, 64, None, None))
    assert autotune.case_of("sort_slots", key) == "sort_slots int32 K2 T<=8 num_experts=64"


def test_the_next_in_time_stands_in_for_a_kernel_that_refuses() -> None:
    args = arguments()
    slower, slow_one, fast = kernels_of(slower=slower_still, slow=slow, fast=_reference)
    with offered(slower, slow_one, fast):
        assert list(tune(args)) == ["slower", "slow", "fast"]
    kernels._in_order.cache_clear()
    with offered(slower, slow_one, fast._replace(takes=lambda *args: False)):
        assert kernels.name_of("grouped_mm", *args) == "slow"


def test_a_kernel_that_is_wrong_or_fails_is_never_chosen(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments()
    with offered(*kernels_of(wrong=wrong, failing=failing, right=slow)):
        with caplog.at_level(logging.ERROR, "moe_ops"):
            times = tune(args)
        assert times["wrong"] == times["failing"] == math.inf > times["right"]
        assert "kernel wrong is not to be used: AssertionError: Tensor-likes" in caplog.text
        assert "kernel failing is not to be used: RuntimeError: no such instruction" in caplog.text
        assert kernels.name_of("grouped_mm", *args) == "right"
    monkeypatch.setenv("MOE_OPS_AUTOTUNE", "1")
    kernels._in_order.cache_clear()
    with offered(*kernels_of(wrong=wrong, failing=failing)):
        assert kernels.choose("grouped_mm", *args) is _reference


def test_the_table_of_the_user_comes_before_the_shipped_one(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = autotune.key_of(arguments())
    case = autotune.case_of("grouped_mm", key)
    shipped = tmp_path / "shipped.json"
    monkeypatch.setattr(autotune, "_SHIPPED", shipped)
    shipped.write_text(json.dumps({"cpu": {case: {"a": 1.0, "b": 2.0}}}))
    forget()
    assert autotune.times_of("grouped_mm", key) == {"a": 1.0, "b": 2.0}
    table.parent.mkdir()
    table.write_text(json.dumps({"cpu": {case: {"a": 3.0}}}))
    forget()
    assert autotune.times_of("grouped_mm", key) == {"a": 3.0}
    assert autotune.times_of("grouped_mm", autotune.key_of(arguments(width=16))) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"cpu": []}', '{"cpu": {"case": {"a": "fast"}}}'])
def test_a_broken_table_is_ignored(
    text: str, table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table.parent.mkdir()
    table.write_text(text)
    with caplog.at_level(logging.WARNING, "moe_ops"):
        assert autotune.times_of("grouped_mm", autotune.key_of(arguments())) is None
    assert str(table) in caplog.text


def test_a_table_that_cannot_be_written_serves_this_process(
    table: Path, caplog: pytest.LogCaptureFixture
) -> None:
    table.parent.write_text("a file")
    args = arguments()
    with offered(*kernels_of(slow=slow, fast=_reference)):
        with caplog.at_level(logging.WARNING, "moe_ops"):
            tune(args)
        assert "kept for this process only" in caplog.text
        assert kernels.name_of("grouped_mm", *args) == "fast"


def test_a_table_that_cannot_be_read_is_not_replaced(table: Path) -> None:
    table.parent.mkdir()
    table.write_text(text := '{"cpu": {},}')
    with offered(*kernels_of(slow=slow, fast=_reference)):
        tune(arguments())
    assert table.read_text() == text


def test_processes_that_write_at_once_lose_nothing(table: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=add_cases, args=(table, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(json.loads(table.read_text())["cpu"]) == 40


def test_autotune_times_a_case_once(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments()
    with offered(*kernels_of(slow=slow, fast=_reference)):
        assert kernels.choose("grouped_mm", *args) is slow
        monkeypatch.setenv("MOE_OPS_AUTOTUNE", "1")
        with mock.patch.object(kernels, "tune", side_effect=lambda op, *a: tune(a)) as tuned:
            for _ in range(2):
                assert kernels.choose("grouped_mm", *args) is _reference
        assert tuned.call_count == 1


def test_a_kernel_that_came_later_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments()
    first, second, last = kernels_of(slow=slow, fast=_reference, last=slower_still)
    with offered(second):
        tune(args)
    kernels._in_order.cache_clear()
    with offered(first, second, last):
        assert [k.name for k in kernels._in_order("grouped_mm", autotune.key_of(args))] == [
            *("slow", "fast", "last")
        ]
        monkeypatch.setenv("MOE_OPS_AUTOTUNE", "1")
        with mock.patch.object(kernels, "tune", side_effect=lambda op, *a: tune(a)):
            assert kernels.choose("grouped_mm", *args) is _reference


def test_tune_rejects_what_it_cannot_time() -> None:
    with pytest.raises(ValueError, match="tune: tensors must be on a GPU, got them on"):
        kernels.tune("grouped_mm", *arguments())
    with pytest.raises(ValueError, match="op must be the name of an operator, got 'nothing'"):
        kernels.tune("nothing", *arguments())


def test_sizes_of_a_dynamic_graph_are_no_case() -> None:
    """Then the first of the list runs."""
    mode = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    args = [mode.from_tensor(arg, static_shapes=False) for arg in arguments(rows=50)]
    with offered(*kernels_of(slow=slow, fast=_reference)):
        assert kernels.name_of("grouped_mm", *args) == "slow"


def test_the_shipped_table_names_kernels() -> None:
    timings = json.loads(autotune._SHIPPED.read_text())
    assert timings["NVIDIA H200"]
    for cases in timings.values():
        for case, times in cases.items():
            known = {"triton", *kernels.table()[case.split(" ", 1)[0]]}  # Triton is optional
            assert times and set(times) <= set(known), case
