"""The command line: `moe-ops info` says what runs here, `moe-ops demo` trains a small model,
`moe-ops layout` prints the places of ranks; other packages add commands (`moe_ops.extensions`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from . import __version__, comm, extensions, kernels
from .kernels import autotune, native

_DEMO_EXTRAS = ("matplotlib", "tqdm")
# Commands by name: the module, as of an extension, and a line of help.
_COMMANDS = {
    "demo": (".demo", "train a small MoE transformer with expert parallelism"),
    "layout": (".parallel.layout_command", "print which place each rank has in a parallel layout"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="moe-ops", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, exchange engines and kernels")
    helps = {name: text for name, (_, text) in _COMMANDS.items()}
    helps |= {name: f"see {entry.module}" for name, entry in extensions.commands().items()}
    parsers = {
        name: commands.add_parser(
            name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        for name, text in helps.items()
    }
    name = argv[0] if argv else ""
    if name not in parsers:
        parser.parse_args(argv)  # ends here for --help and for anything but `info`
        return _info()
    try:
        command = _command(name)
        command.add_arguments(parsers[name])
        return command.run(parser.parse_args(argv))
    except ModuleNotFoundError as error:
        if error.name not in _DEMO_EXTRAS:
            raise
        hint = "run: pip install 'moe-graph-ops[demo]'"
        print(f"{name}: needs {error.name}; {hint}", file=sys.stderr)
        return 1


def _command(name: str) -> Any:
    if name not in _COMMANDS:
        return extensions.commands()[name].load()
    return importlib.import_module(_COMMANDS[name][0], __package__)


def _info() -> int:
    lines = []
    for title, rows in (
        ("versions", _versions()),
        ("devices", _devices()),
        ("exchange engines", comm.available_engines().items()),
        (
            "kernels, in order of preference",
            ((op, ", ".join(k)) for op, k in kernels.table().items()),
        ),
    ):
        lines += [title, *(f"  {name:<28} {value}" for name, value in rows)]
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _versions() -> Iterator[tuple[str, str]]:
    yield "moe_ops", __version__
    yield "python", platform.python_version()
    yield "torch", torch.__version__
    yield "CUDA runtime", torch.version.cuda or "none: a CPU build of torch"
    yield "CUDA driver", _cuda_driver()
    for package in ("triton", "numpy"):
        yield package, _installed(package)
    yield "native kernels", native.status()
    yield "kernels' timings", str(autotune.user_table())


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cuda_driver() -> str:
    if (smi := shutil.which("nvidia-smi")) is None:
        return "not found: no nvidia-smi"
    query = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    return (answer.stdout or answer.stderr).strip().partition("\n")[0]


def _devices() -> Iterator[tuple[str, str]]:
    yield "cpu", f"{platform.machine()}, {torch.get_num_threads()} threads"
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index}",
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB",
        )
