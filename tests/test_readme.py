"""The README's example runs as it is written."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def example(index: int) -> str:
    return examples()[index]


needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="no compiler for Inductor's C++"
)


def test_example_is_short() -> None:
    assert len(example(0).splitlines()) <= 15


@needs_compiler
def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(example(0), README.name, "exec"), {})
    assert capsys.readouterr().out.startswith("loss ")


def torchrun(code: str, num_processes: int, folder: Path) -> None:
    (folder / "train.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(num_processes), "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(README.parent)}
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=240)


@needs_compiler
@pytest.mark.dist
def test_example_runs_on_two_processes(tmp_path: Path) -> None:
    torchrun(example(1), 2, tmp_path)
    assert (tmp_path / "checkpoint" / ".metadata").exists()


@pytest.mark.dist
def test_layout_example_runs_on_four_processes(tmp_path: Path) -> None:
    (code,) = [code for code in examples() if "fully_shard_moe" in code]
    torchrun(code, 4, tmp_path)


def test_explain_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = [code for code in examples() if "fx_passes.explain" in code]
    monkeypatch.chdir(tmp_path)
    exec(compile(code, README.name, "exec"), {})
    assert "calls after the passes" in capsys.readouterr().out
    assert (tmp_path / "passes.json").exists()
