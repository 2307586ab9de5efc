"""Choosing among kernels by measured times."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_ops import _library, kernels
from moe_ops.kernels import autotune
from moe_ops.kernels.kernel import Kernel, always

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
    autotune._tables.cache_clear()
    autotune._ranking.cache_clear()


def arguments(rows: int = 5, width: int = 8, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [torch.randn(rows, width, dtype=dtype), torch.randn(2, 4, width, dtype=dtype), OFFSETS]


def slow(*args: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return _reference(*args)


def wrong(*args: torch.Tensor) -> torch.Tensor:
    c_CO = _reference(*args)
    c_CO[-1, -1] += 1
    return c_CO


def kernels_of(**runs: Callable[..., Any]) -> list[Kernel]:
    return [Kernel(name, always, run) for name, run in runs.items()]


def offered(*found: Kernel) -> Any:
    return mock.patch.object(kernels, "_kernels", return_value={"grouped_mm": list(found)})


def test_the_fastest_is_chosen_from_the_user_table(table: Path) -> None:
    args = arguments()
    found = kernels_of(slow=slow, fast=_reference)
    with offered(*found):
        assert kernels.name_of("grouped_mm", *args) == "slow"
        times = autotune.tune("grouped_mm", args, found)
        assert times["slow"] > 20_000 > times["fast"]
        assert kernels.name_of("grouped_mm", *args) == "fast"
        assert kernels.choose("grouped_mm", *args) is _reference
    case = "grouped_mm float32 C<=8 I8 L2 O4"
    assert json.loads(table.read_text()) == {"cpu": {case: times}}


def test_cases_round_rows_only() -> None:
    def case(*args: Any) -> str:
        return autotune.case_of("grouped_mm", args)

    assert case(*arguments(rows=5)) == case(*arguments(rows=8)) != case(*arguments(rows=9))
    assert case(*arguments(width=8)) != case(*arguments(width=16))
    assert case(*arguments()) != case(*arguments(dtype=torch.bfloat16))
    a_CI, w_LOI, offsets_L = arguments()
    assert case(a_CI, w_LOI.mT.contiguous().mT, offsets_L).endswith(" transposed")
    assert case(a_CI[:0], w_LOI, offsets_L) == "grouped_mm float32 C0 I8 L2 O4"


def test_the_next_in_time_stands_in_for_a_kernel_that_refuses() -> None:
    args = arguments()
    slower, slow_one, fast = kernels_of(
        slower=lambda *a: slow(*a) + 0 * slow(*a), slow=slow, fast=_reference
    )
    assert list(autotune.tune("grouped_mm", args, [slower, slow_one, fast])) == [
        "slower",
        "slow",
        "fast",
    ]
    with offered(slower, slow_one, fast._replace(takes=lambda *args: False)):
        assert kernels.name_of("grouped_mm", *args) == "slow"


def test_a_wrong_kernel_gets_no_time(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "moe_ops"):
        times = autotune.tune("grouped_mm", arguments(), kernels_of(wrong=wrong, right=slow))
    assert list(times) == ["right"]
    assert "kernel wrong is wrong: output 0: Tensor-likes are not close!" in caplog.text


def test_the_table_of_the_user_comes_before_the_shipped_one(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments()
    case = autotune.case_of("grouped_mm", args)
    shipped = tmp_path / "shipped.json"
    monkeypatch.setattr(autotune, "_SHIPPED", shipped)
    shipped.write_text(json.dumps({"cpu": {case: {"a": 1.0, "b": 2.0}}}))
    forget()
    assert autotune.ranking("grouped_mm", args) == ["a", "b"]
    autotune._add(table, {"cpu": {case: {"a": 3.0, "b": 2.0}}})
    forget()
    assert autotune.ranking("grouped_mm", args) == ["b", "a"]
    assert not autotune.ranking("grouped_mm", arguments(width=16))


def test_a_broken_table_is_ignored(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    table.parent.mkdir()
    table.write_text("{")
    with caplog.at_level(logging.WARNING, "moe_ops"):
        assert not autotune.ranking("grouped_mm", arguments())
    assert str(table) in caplog.text


def test_autotune_times_a_case_once(monkeypatch: pytest.MonkeyPatch) -> None:
    args = arguments()
    found = kernels_of(slow=slow, fast=_reference)
    with offered(*found), mock.patch.object(kernels, "tune") as tune:
        kernels.choose("grouped_mm", *args)
        assert not tune.called
        monkeypatch.setenv("MOE_OPS_AUTOTUNE", "1")
        tune.side_effect = lambda op, *args: autotune.tune(op, args, found)
        for _ in range(2):
            assert kernels.choose("grouped_mm", *args) is _reference
        assert tune.call_count == 1


def test_tune_rejects_what_it_cannot_time() -> None:
    with pytest.raises(ValueError, match="tune: tensors must be on a GPU, got cpu"):
        kernels.tune("grouped_mm", *arguments())
    with pytest.raises(ValueError, match="tune: op must be an operator of moe_ops, got 'nothing'"):
        kernels.tune("nothing", *arguments())


def test_sizes_of_a_dynamic_graph_are_no_case() -> None:
    shape_env = torch.fx.experimental.symbolic_shapes.ShapeEnv()
    with torch._subclasses.FakeTensorMode(shape_env=shape_env) as mode:
        pass
    args = [mode.from_tensor(arg, static_shapes=False) for arg in arguments(rows=50)]
    assert not autotune.ranking("grouped_mm", args)


def test_the_shipped_table_names_kernels() -> None:
    timings = json.loads(autotune._SHIPPED.read_text())
    for cases in timings.values():
        for case, times in cases.items():
            known = kernels.table()[case.split(" ", 1)[0]]
            assert times and set(times) <= set(known), case
