"""The command line: `moe-ops info` says what runs here, `moe-ops demo` trains a small model."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

import torch

from . import __version__, comm, kernels
from .kernels import autotune, native

_DEMO_EXTRAS = ("matplotlib", "tqdm")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="moe-ops", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, exchange engines and kernels")
    demo_parser = commands.add_parser(
        "demo",
        help="train a small MoE transformer with expert parallelism",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    if argv[:1] != ["demo"]:
        parser.parse_args(argv)  # ends here for --help and for anything but `info`
        return _info()
    try:
        from . import demo  # noqa: PLC0415 - `info` needs none of the demo's packages

        demo.add_arguments(demo_parser)
        return demo.run(parser.parse_args(argv))
    except ModuleNotFoundError as error:
        if error.name not in _DEMO_EXTRAS:
            raise
        print(f"demo: needs {error.name}; run: pip install 'moe-graph-ops[demo]'", file=sys.stderr)
        return 1


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
