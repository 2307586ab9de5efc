"""Commands and passes of other packages, found through entry points."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

import fx_passes
from moe_ops import cli, extensions

from .installed import ROOT, entry_points, write_metadata


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree as pip would install it, and a package that adds the command `greet`."""
    write_metadata(tmp_path, greet="greeting")
    monkeypatch.syspath_prepend(tmp_path)
    module = types.ModuleType("greeting")
    module.add_arguments = lambda parser: parser.add_argument("--name", default="you")
    module.run = _greet
    monkeypatch.setitem(sys.modules, "greeting", module)


def _greet(args: argparse.Namespace) -> int:
    if args.name == "matplotlib":
        raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
    sys.stdout.write(f"hello {args.name}")
    return 3


@pytest.mark.usefixtures("installed")
def test_command_runs_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["greet", "--name", "me"]) == 3
    assert capsys.readouterr().out == "hello me"


@pytest.mark.usefixtures("installed")
def test_command_is_listed_but_not_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "greeting", None)  # importing it fails
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "{info,demo," in out
    assert "greet" in out and "explain" in out
    assert cli.main(["info"]) == 0


@pytest.mark.usefixtures("installed")
def test_command_names_the_missing_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["greet", "--name", "matplotlib"]) == 1
    error = capsys.readouterr().err
    assert error == "greet: needs matplotlib; run: pip install 'moe-graph-ops[demo]'\n"


@pytest.mark.usefixtures("installed")
def test_passes_are_found() -> None:
    assert extensions.passes() is fx_passes


def test_nothing_is_found_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extensions, "entry_points", lambda group: [])
    assert extensions.passes() is None
    assert extensions.commands() == {}
    with pytest.raises(SystemExit):
        cli.main(["explain"])


def test_every_entry_point_leads_to_a_module_that_can_do_it() -> None:
    needed = {
        "moe_ops.commands": ("add_arguments", "run"),
        "moe_ops.passes": ("options", "explain"),
    }
    groups = entry_points()
    assert groups.keys() == needed.keys()
    for group, modules in groups.items():
        for path in modules.values():
            module = importlib.import_module(path)
            assert all(callable(getattr(module, name)) for name in needed[group]), path


def test_moe_ops_imports_no_passes() -> None:
    code = "import sys, moe_ops.cli, moe_ops.demo; sys.exit('fx_passes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
