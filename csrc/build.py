"""Compiles csrc/*.cu into one shared library, for setup.py and `make native`.

The library uses PyTorch's stable ABI alone, so one serves every Python and PyTorch 2.11 to 2.14.
Environment: CUDA_HOME (where to look for nvcc first), MOE_OPS_NVCC_FLAGS (more flags for nvcc).
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path("moe_ops", "lib", "libmoe_ops_cuda.so")
_USUAL_HOME = "/usr/local/cuda"
_HEADERS = Path("include", "torch", "csrc", "stable", "library.h")


class BuildError(Exception):
    """The library cannot be built; the message says why."""


class Tools(NamedTuple):
    """What a build needs: the compiler, and the folder of the `torch` package."""

    nvcc: Path
    torch: Path


def find_tools() -> Tools:
    """The compiler and PyTorch, or a BuildError that names what is missing and what to do."""
    if (nvcc := find_nvcc()) is None:
        where = os.environ.get("CUDA_HOME") or f"PATH and {_USUAL_HOME}"
        raise BuildError(f"no nvcc in {where}; install the CUDA toolkit or set CUDA_HOME")
    if (torch := find_torch()) is None:
        raise BuildError(
            "no PyTorch 2.11 or newer in sight; where it is installed, "
            "`pip install --no-build-isolation .` builds them"
        )
    return Tools(nvcc, torch)


def find_nvcc() -> Path | None:
    """CUDA_HOME alone where it is set, else the PATH and the toolkit's usual place."""
    if home := os.environ.get("CUDA_HOME"):
        found = shutil.which("nvcc", path=Path(home, "bin"))
    else:
        found = shutil.which("nvcc") or shutil.which("nvcc", path=Path(_USUAL_HOME, "bin"))
    return Path(found) if found else None


def find_torch() -> Path | None:
    """Folder of the `torch` package, even from pip's build isolation, which hides it but keeps the
    interpreter's prefix.
    """
    spec = importlib.util.find_spec("torch")
    folders = list(spec.submodule_search_locations or []) if spec else []
    folders += [os.path.join(sysconfig.get_path(name), "torch") for name in ("purelib", "platlib")]
    return next((Path(f) for f in folders if Path(f, _HEADERS).exists()), None)


def compile_command(tools: Tools) -> list[str]:
    """One source to one object file; both are to be added."""
    include = tools.torch / "include"
    return [
        str(tools.nvcc),
        *("-c", "-O3", "-std=c++17", "-Xcompiler", "-fPIC"),
        "-gencode=arch=compute_90a,code=sm_90a",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",  # 2.11, the oldest that the library loads in
        "-DUSE_CUDA",
        f"-I{include}",
        f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}",
        *shlex.split(os.environ.get("MOE_OPS_NVCC_FLAGS", "")),
    ]


def link_command(tools: Tools, objects: Sequence[Path], library: Path) -> list[str]:
    """Python loads PyTorch with local symbol scope, so libtorch must be among the NEEDED libraries
    although nothing in it is called directly.
    """
    needed = [f"-L{tools.torch / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch"]
    return [str(tools.nvcc), "-shared", "-o", str(library), *map(str, objects), *needed]


def build(library: Path, tools: Tools, root: Path) -> None:
    """Compile the sources in root/csrc that changed since the last call with these flags, all at
    once; link.
    """
    command = compile_command(tools)
    flags_hash = hashlib.sha256(shlex.join(command).encode()).hexdigest()[:16]
    csrc, folder = root / "csrc", root / "build" / "native" / flags_hash
    folder.mkdir(parents=True, exist_ok=True)
    headers = [path for ending in ("cuh", "h") for path in csrc.glob(f"*.{ending}")]
    newest_header = max((path.stat().st_mtime for path in headers), default=0)

    def compiled(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        changed = max(source.stat().st_mtime, newest_header)
        if not target.exists() or target.stat().st_mtime < changed:
            _say(f"compiling {source.name} with {tools.nvcc}, which may take minutes")
            started = time.time()
            part = _part(target)
            _run([*command, "-o", str(part), str(source)])
            os.utime(part, (started, started))  # an edit while nvcc runs is newer than the object
            part.replace(target)
        return target

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, sorted(csrc.glob("*.cu"))))
    library.parent.mkdir(parents=True, exist_ok=True)
    part = _part(library)
    _run(link_command(tools, objects, part))
    part.replace(library)  # never written in place: a process may have it mapped


def build_if_possible(library: Path, *, by_default: bool = True) -> bool:
    """Build as MOE_OPS_NATIVE says and print one line on it; whether the library was built.

    0: never. 1: always, and a failure is an error. Unset: if `by_default`, where the tools are
    found, and a failure is a warning.
    """
    wish = os.environ.get("MOE_OPS_NATIVE", "")
    if wish not in ("", "0", "1"):
        raise BuildError(f"MOE_OPS_NATIVE must be 0, 1 or unset, got {wish!r}")
    if wish == "0" or not (wish or by_default):
        _say("not built: MOE_OPS_NATIVE=0" if wish else "not built: MOE_OPS_NATIVE=1 builds them")
        return False
    try:
        build(library, find_tools(), ROOT)
    except BuildError as error:
        if wish:
            raise
        _say(f"not built: {error}")
        return False
    _say(f"built: {library}")
    return True


def _part(target: Path) -> Path:
    """A name for `target` while it is written, its own in every process."""
    return target.with_name(f"{target.stem}.{os.getpid()}{target.suffix}")


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = (done.stdout + done.stderr).strip()
    if done.returncode != 0:
        raise BuildError(f"`{shlex.join(command)}` failed\n{output}")
    if output:  # warnings
        print(output, file=sys.stderr)


def _say(text: str) -> None:
    print(f"moe_ops: native kernels: {text}", file=sys.stderr)


def main() -> int:
    """Build in place, for a development tree; returns the exit status."""
    try:
        build(ROOT / LIBRARY, find_tools(), ROOT)
    except BuildError as error:
        _say(f"not built: {error}")
        return 1
    _say(f"built: {ROOT / LIBRARY}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
