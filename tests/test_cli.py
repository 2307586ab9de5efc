"""The command line: info, demo's options, and what a missing package looks like."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_ops import _library, cli

ROOT = Path(__file__).parent.parent


def test_info_lists_versions_devices_engines_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "moe_ops.demo", None)  # importing it fails
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    for word in ("moe_ops", torch.__version__, "CUDA runtime", "triton", "cpu", "gloo", "nccl"):
        assert word in out
    for op in _library.OPS:
        assert op in out


def test_info_ends_quietly_when_nobody_reads() -> None:
    command = [sys.executable, "-m", "moe_ops", "info"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 0
    assert process.stderr is not None
    assert b"BrokenPipe" not in process.stderr.read()


def test_demo_help_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--help"])
    assert stop.value.code == 0
    assert "(default: " in capsys.readouterr().out


def test_demo_names_the_missing_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(args: object) -> int:
        raise ModuleNotFoundError("No module named 'tqdm'", name="tqdm")

    monkeypatch.setattr("moe_ops.demo.run", run)
    assert cli.main(["demo"]) == 1
    error = capsys.readouterr().err
    assert error == "demo: needs tqdm; run: pip install 'moe-graph-ops[demo]'\n"


def test_demo_hides_no_other_import_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moe_ops.demo.absent", None)

    def run(args: object) -> int:
        importlib.import_module("moe_ops.demo.absent")
        return 0

    monkeypatch.setattr("moe_ops.demo.run", run)
    with pytest.raises(ModuleNotFoundError, match="absent"):
        cli.main(["demo"])


@pytest.mark.parametrize("argv", [[], ["train"], ["info", "--verbose"]], ids=str)
def test_rejects_unknown_commands(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert "usage: moe-ops" in capsys.readouterr().err
