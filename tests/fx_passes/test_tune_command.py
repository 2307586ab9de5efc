"""`moe-ops tune`, as a user runs it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fx_passes import demo_model
from fx_passes.config import read
from moe_ops import cli
from tests.installed import write_metadata

from .test_trials import plain_graphs

TINY = ["--hidden=16", "--ffn=8", "--layers=1", "--heads=2", "--experts=4", "--batch=2"]
TINY += ["--context=8", "--device=cpu"]


needs_tqdm = pytest.mark.skipif(
    importlib.util.find_spec("tqdm") is None, reason="optional package tqdm is not installed"
)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_metadata(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@needs_tqdm
@pytest.mark.usefixtures("installed")
@plain_graphs
def test_tunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process; `test_explain_command` starts two. Within a second there is time for the
    default alone.
    """

    def start(work: Any, args: tuple[Any, ...], num_processes: int, **how: Any) -> None:
        assert num_processes == 1
        work(0, *args)

    monkeypatch.setattr(demo_model.torch_mp, "start_processes", start)
    out = tmp_path / "tuned.json"
    argv = ["tune", *TINY, "--world-size=1", "--without=fuse_swiglu", "--budget=1"]
    threads = torch.get_num_threads()
    assert cli.main([*argv, f"--out={out}"]) == 0
    torch.set_num_threads(threads)
    said = capsys.readouterr()
    assert said.out.splitlines()[-1] == f"written to {out}"
    assert "chosen: fuse_swiglu=False" in said.out
    assert "no other setting was tried: the budget ended" in said.out
    assert "tune: 100%" in said.err, "the progress bar"
    assert not read(out).fuse_swiglu
    measured = json.loads(out.read_text())["measured"]
    assert measured["ranks"] == 1 and measured["default_ms"] > 0


@needs_tqdm
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--experts=3", "tune: experts must be a multiple of 2, got 3"),
        ("--without=magic", "settings must be among"),
        ("--budget=0", "tune: budget must be positive and finite, got 0"),
        (
            "--out=absent/tuned.json",
            "tune: out must be a file in a folder that can be written, got absent",
        ),
    ],
)
def test_rejects_wrong_use(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", *TINY, "--world-size=2", option]) == demo_model.WRONG_USE
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("installed")
def test_asks_for_tqdm_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def must_not_start(*args: object, **options: object) -> None:
        raise AssertionError("processes must not be started")

    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(demo_model.torch_mp, "start_processes", must_not_start)
    assert cli.main(["tune", *TINY]) == 1
    assert "tune: needs tqdm; run: pip install" in capsys.readouterr().err
