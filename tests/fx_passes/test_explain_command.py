"""`moe-ops explain`, as a user runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fx_passes import demo_model
from moe_ops import cli
from tests.installed import write_metadata

TINY = ["--hidden=16", "--ffn=8", "--layers=1", "--heads=2", "--experts=4", "--batch=2"]
TINY += ["--context=8", "--device=cpu"]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_metadata(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.dist
@pytest.mark.timeout(600)
def test_explains_on_two_processes(installed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trace = installed / "trace.json"
    argv = ["explain", *TINY, "--trace", str(trace), "--without", "fuse_swiglu"]
    status, said = cli.main(argv), capfd.readouterr()
    assert status == 0, said.err
    lines = said.out.splitlines()
    assert sum(line == "calls after the passes" for line in lines) == 1, "rank 0 alone prints"
    assert not any("fuse_swiglu" in line for line in lines)
    assert any("dispatch_start" in line for line in lines)
    assert any(line.split() == ["split_exchange", "4", "32", "B", "more"] for line in lines)
    names = {record["name"] for record in json.loads(trace.read_text())["traceEvents"]}
    assert {"dispatch", "combine", "exchange_plan"} <= names


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--experts=3", "explain: experts must be a multiple of 2, got 3"),
        ("--without=magic", "settings must be among"),
        ("--config=absent.json", "absent.json"),
    ],
)
def test_rejects_wrong_use(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["explain", *TINY, "--world-size=2", option]
    assert cli.main(argv) == demo_model.WRONG_USE
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_asks_for_matplotlib_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    monkeypatch.setattr(demo_model.torch_mp, "start_processes", _must_not_start)
    assert cli.main(["explain", *TINY, "--picture", "p.png"]) == 1
    assert "explain: needs matplotlib; run: pip install" in capsys.readouterr().err


def _must_not_start(*args: object, **options: object) -> None:
    raise AssertionError("processes must not be started")
