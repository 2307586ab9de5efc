"""The README's example runs as it is written."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def first_example() -> str:
    return re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL).group(1)


def test_example_is_short() -> None:
    assert len(first_example().splitlines()) <= 15


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="no compiler for Inductor's C++"
)
def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(first_example(), README.name, "exec"), {})
    assert capsys.readouterr().out.startswith("loss ")
