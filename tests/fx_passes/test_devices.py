"""The table of devices and its measurement."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fx_passes
import moe_ops
from fx_passes import cost_model, devices
from fx_passes.devices import Figures, calibrate, figures_of
from tests.ranks import expect_error_on_ranks, run_on_ranks

from .captured import fake_ranks
from .compiled import POST_GRAD
from .test_cost_model import BY_HAND, FIGURES


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's, still missing."""
    monkeypatch.setenv("MOE_OPS_TIMINGS", str(tmp_path / "timings.json"))
    devices._log_default.cache_clear()
    return tmp_path / "devices.json"


def test_table_of_devices(table: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert devices.user_table() == table
    shipped = figures_of("NVIDIA H200")
    assert shipped.flops_of(torch.bfloat16) == 660e12
    assert shipped.flops_of(torch.float8_e4m3fn) == 660e12, "as of the fastest"
    assert figures_of("cpu") != shipped
    with caplog.at_level(logging.INFO, logger="fx_passes"):
        assert figures_of("made up") == figures_of("made up") == shipped
    assert [record.args[0] for record in caplog.records] == ["made up"], "once"


def test_users_table_comes_first(table: Path) -> None:
    before = cost_model("cpu")
    table.write_text(json.dumps({"cpu": dataclasses.asdict(FIGURES)}))
    assert figures_of("cpu") == FIGURES
    assert repr(cost_model("cpu")) == repr(BY_HAND) != repr(before)


def test_figures_are_in_the_key_of_compiled_graphs(table: Path) -> None:
    keys = {fx_passes.options()[POST_GRAD].uuid()}
    table.write_text(json.dumps({devices.device_name(): dataclasses.asdict(FIGURES)}))
    assert fx_passes.options()[POST_GRAD].uuid() not in keys


@pytest.mark.parametrize("text", ["{", '{"cpu": {"launch_s": 1}}', "[]", '{"cpu": 1}'])
def test_broken_table_is_left_alone(
    table: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = figures_of("cpu")
    table.write_text(text)
    assert figures_of("cpu") == shipped
    assert str(table) in caplog.text


@pytest.mark.parametrize("wrong", [{"launch_s": 0}, {"matmul_flops": {}}, {"plan_s": "1"}])
def test_figures_are_positive(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be positive"):
        dataclasses.replace(FIGURES, **wrong)


def test_calibrate_turns_times_into_figures(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(bench: Any, run: Callable[[], Any], hot: bool = False) -> float:
        run()
        return 0.5

    monkeypatch.setattr(devices._Bench, "seconds", seconds)
    monkeypatch.setattr(devices, "_on_cpu", lambda: True)
    monkeypatch.setattr(devices, "device_name", lambda: "made up")
    row = calibrate()
    flops = dict.fromkeys(("bfloat16", "float16", "float32", "float64"), 2 * 256**3 / 0.5)
    measured = {"matmul_flops": flops, "memory_bytes_per_s": 2**28, "launch_s": 0.5 / 64}
    others = dataclasses.asdict(figures_of("NVIDIA H200"))
    assert row == others | measured
    assert json.loads(table.read_text()) == {"made up": row}
    assert figures_of("made up") == Figures(**row)


def _calibrate_on_ranks(rank: int, path: str) -> dict[str, Any]:
    """Few repetitions: whether figures come out, not whether they are steady."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_BURSTS", "_CALLS", "_WARM_UP"):
            patch.setattr(devices, name, 1)
        return calibrate(path, dist.group.WORLD)


@pytest.mark.dist
def test_calibrate_on_ranks(tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    first, second = run_on_ranks(2, _calibrate_on_ranks, str(path))
    assert first == second, "all ranks order their exchanges alike"
    assert json.loads(path.read_text()) == {"cpu": first}
    shipped = dataclasses.asdict(figures_of("cpu"))
    assert not [name for name, value in first.items() if value == shipped[name]]


@pytest.fixture
def set_up(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """As if `comm.setup` had been called with so many tokens of so many bytes."""

    def set_up(max_tokens: int, row_bytes: int) -> None:
        space = SimpleNamespace(max_tokens=max_tokens, row_bytes=row_bytes)
        monkeypatch.setattr(devices, "nvlink", SimpleNamespace(workspace=lambda name: space))

    return set_up


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param((8192, 14336), (4096, 8192), id="ample"),
        pytest.param((2048, 14336), (2048, 8192), id="few tokens"),
        pytest.param((8192, 4095), (4096, 4080), id="short rows, of whole 16 bytes"),
        pytest.param((100000, 1024), (8192, 1024), id="many short rows"),
        pytest.param((1024, 8192), (1024, 8192), id="8 MiB"),
    ],
)
def test_messages_fit_what_the_group_was_set_up_for(
    set_up: Callable[[int, int], None], sizes: tuple[int, int], expected: tuple[int, int]
) -> None:
    set_up(*sizes)
    with fake_ranks(2) as group:
        assert devices._message(group, devices._Bench(torch.device("cuda"))) == expected


def test_exchanges_are_of_the_size_they_are_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 tokens of 256 bytes, and 16; half of all copies leave."""
    planned: list[torch.Size] = []
    exchange_plan = moe_ops.exchange_plan

    def plan(ids: torch.Tensor, *args: Any, **sizes: Any) -> Any:
        planned.append(ids.shape)
        return exchange_plan(ids, *args, **sizes)

    def seconds(bench: Any, run: Callable[[], Any]) -> float:
        run()
        return float(planned[-1][0])

    monkeypatch.setattr(moe_ops, "exchange_plan", plan)
    monkeypatch.setattr(devices._Bench, "seconds", seconds)
    with fake_ranks(2) as group:
        found = devices._exchange(group, 40, 256, devices._Bench(torch.device("cpu")))
    assert set(planned) == {(16, 8), (40, 8)}
    copies = devices.expected_copies(40, 8, 2) / 2
    assert found["exchange_bytes_per_s"] == pytest.approx(copies * 256 / (40 / 2 - 16 / 2))


def test_calibrate_refuses_messages_too_small_to_tell(
    set_up: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before anything is measured; ranks agree on what they were set up for."""
    set_up(1023, 8192)
    monkeypatch.setattr(devices, "_on_cpu", lambda: False)
    monkeypatch.setattr(devices, "device_of", lambda group: torch.device("cuda"))
    monkeypatch.setattr(devices, "_progress", None)
    with fake_ranks(2) as group, pytest.raises(ValueError, match="got 1023 tokens of 8192 bytes"):
        calibrate(tmp_path / "devices.json", group)


def _calibrate_unmeasured(rank: int, paths: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "_progress", None)
        calibrate(paths[rank], dist.group.WORLD)


@pytest.mark.dist
def test_calibrate_refuses_on_every_rank_what_one_cannot_write(tmp_path: Path) -> None:
    paths = [str(tmp_path / "devices.json"), str(tmp_path / "missing" / "devices.json")]
    for kind, text in expect_error_on_ranks(2, _calibrate_unmeasured, paths):
        assert kind == "ValueError"
        assert "path must be a file in a folder that can be written, got " in text
        assert paths[1] in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", [".", "missing/devices.json"])
def test_calibrate_refuses_paths(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_progress", None)
    with pytest.raises(ValueError, match="calibrate: path must be a file in a folder that can be"):
        calibrate(tmp_path / name)


def test_calibrate_refuses_what_is_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_progress", None)
    with pytest.raises(TypeError, match=r"calibrate: group must be .* or None, got 'ranks'"):
        calibrate(tmp_path / "devices.json", "ranks")


def test_calibrate_makes_the_folder_of_the_users_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_OPS_TIMINGS", str(tmp_path / "new" / "timings.json"))
    monkeypatch.setattr(devices, "_progress", lambda steps, shown: [])
    row = calibrate()
    assert json.loads((tmp_path / "new" / "devices.json").read_text()) == {
        devices.device_name(): row
    }


@pytest.mark.gpu
def test_calibrate_on_gpu(table: Path) -> None:
    calibrate()
    figures = figures_of(torch.cuda.get_device_name())
    assert figures.memory_bytes_per_s > 2e11
    assert figures.flops_of(torch.bfloat16) > 2 * figures.flops_of(torch.float32) > 1e12
    assert 1e-7 < figures.launch_s < 1e-5
