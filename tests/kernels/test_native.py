"""The native library: building it with a stand-in for nvcc and with the real one, loading it."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from csrc import build
from moe_ops import cli
from moe_ops.kernels import native
from tests.gpu import skip_without_library

# Notes its arguments, and writes its output or, for a source with "broken" in its name, fails.
NVCC = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
case "$*" in *broken*) echo "error: no such word" >&2; exit 1;; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && echo object > "$2"; shift; done
"""
TINY = """
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

__global__ void add_one_kernel(float* x) { x[threadIdx.x] += 1; }

void add_one(torch::stable::Tensor x) {
  void* stream = nullptr;
  aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream);
  add_one_kernel<<<1, x.size(0), 0, (cudaStream_t)stream>>>(x.mutable_data_ptr<float>());
}

STABLE_TORCH_LIBRARY(moe_ops_tiny, m) { m.def("add_one(Tensor(a!) x) -> ()"); }
STABLE_TORCH_LIBRARY_IMPL(moe_ops_tiny, CUDA, m) { m.impl("add_one", TORCH_BOX(&add_one)); }
"""


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUDA_HOME", "MOE_OPS_NVCC_FLAGS", "MOE_OPS_NATIVE", "MOE_OPS_NATIVE_LIBRARY"):
        monkeypatch.delenv(name, raising=False)
    native._state.cache_clear()
    yield
    native._state.cache_clear()


def fake_nvcc(folder: Path) -> Path:
    """A CUDA_HOME with NVCC in it."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "nvcc").write_text(NVCC)
    (folder / "bin" / "nvcc").chmod(0o755)
    return folder


def set_gpu(monkeypatch: pytest.MonkeyPatch, present: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: present)


# Loading.


def test_import_asks_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "is_available")
    spec = importlib.util.spec_from_file_location("moe_ops.kernels.fresh", native.__file__)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("present", [True, False], ids=["gpu", "no gpu"])
def test_missing_library_is_one_log_line(
    present: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    set_gpu(monkeypatch, present)
    monkeypatch.setattr(native, "_BUILT", tmp_path / "x.so")
    with caplog.at_level(logging.INFO, native.__name__):
        assert not native.available() and not native.available()
    assert len(caplog.records) == 1
    assert f"not built: no {tmp_path}/x.so; run `python -m csrc.build`" in caplog.text
    assert native.status().startswith("not built: ")


@pytest.mark.parametrize("off", [True, False], ids=["MOE_OPS_NATIVE=0", "no gpu"])
def test_library_is_left_alone(off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.so").touch()
    monkeypatch.setattr(native, "_BUILT", tmp_path / "x.so")
    monkeypatch.setattr(torch.ops, "load_library", None)
    set_gpu(monkeypatch, off)
    if off:
        monkeypatch.setenv("MOE_OPS_NATIVE", "0")
    assert not native.available()
    where = f"built: {tmp_path}/x.so, not loaded: no GPU"
    assert native.status() == ("off: MOE_OPS_NATIVE=0" if off else where)


def test_broken_library_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "x.so").write_text("no library")
    monkeypatch.setattr(native, "_BUILT", tmp_path / "x.so")
    set_gpu(monkeypatch, True)
    assert not native.available() and not native.available()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert native.status().startswith(f"cannot load: {tmp_path}/x.so")


@pytest.mark.parametrize("text", [None, "no library"], ids=["missing", "broken"])
def test_named_library_must_load(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text:
        (tmp_path / "x.so").write_text(text)
    monkeypatch.setenv("MOE_OPS_NATIVE_LIBRARY", str(tmp_path / "x.so"))
    set_gpu(monkeypatch, True)
    problem = r"MOE_OPS_NATIVE_LIBRARY: .*x\.so; .*run `python -m csrc\.build`"
    with pytest.raises(RuntimeError, match=problem):
        native.available()
    assert "MOE_OPS_NATIVE_LIBRARY" in native.status()


def test_named_library_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.so").touch()
    monkeypatch.setenv("MOE_OPS_NATIVE_LIBRARY", str(tmp_path / "x.so"))
    set_gpu(monkeypatch, True)
    loaded: list[Path] = []
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    assert native.available() and native.available()
    assert native.status() == f"built: {tmp_path}/x.so"
    assert loaded == [tmp_path / "x.so"]


def test_info_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["info"])
    line = next(x for x in capsys.readouterr().out.splitlines() if "native kernels" in x)
    assert native.status() in line


# Building.


def test_finds_nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_USUAL_HOME", str(tmp_path / "usual"))
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    assert build.find_nvcc() is None
    with pytest.raises(build.BuildError, match=r"no nvcc in PATH and .*usual; install"):
        build.find_tools()
    for home in ("usual", "path"):  # from the last to be looked at
        assert build.find_nvcc() != tmp_path / home / "bin" / "nvcc"
        fake_nvcc(tmp_path / home)
        assert build.find_nvcc() == tmp_path / home / "bin" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert build.find_nvcc() is None
    fake_nvcc(tmp_path / "home")
    assert build.find_nvcc() == tmp_path / "home" / "bin" / "nvcc"


def test_finds_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.find_torch() == Path(torch.__file__).parent
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # as in pip's isolation
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "home")))
    assert build.find_torch() is None
    with pytest.raises(build.BuildError, match="pip install --no-build-isolation"):
        build.find_tools()
    header = tmp_path / "platlib" / "torch" / "include" / "torch" / "csrc" / "stable" / "library.h"
    header.parent.mkdir(parents=True)
    header.touch()
    assert build.find_torch() == tmp_path / "platlib" / "torch"


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPS_NVCC_FLAGS", "-lineinfo '-DA=b c'")
    tools = build.Tools(Path("/cuda/nvcc"), Path("/python/torch"))
    assert build.compile_command(tools) == [
        *("/cuda/nvcc", "-c", "-O3", "-std=c++17"),
        *("-Xcompiler", "-fPIC", "-gencode=arch=compute_90a,code=sm_90a"),
        *("-DTORCH_TARGET_VERSION=0x020b000000000000", "-DUSE_CUDA"),
        *("-I/python/torch/include", "-I/python/torch/include/torch/csrc/api/include"),
        *("-lineinfo", "-DA=b c"),
    ]
    link = " ".join(build.link_command(tools, [Path("a.o"), Path("b.o")], Path("x.so")))
    libraries = "-L/python/torch/lib -Xlinker --no-as-needed -ltorch"
    assert link == f"/cuda/nvcc -shared -o x.so a.o b.o {libraries}"


def test_compiles_only_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = build.Tools(fake_nvcc(tmp_path) / "bin" / "nvcc", tmp_path)
    csrc = tmp_path / "csrc"
    csrc.mkdir()
    paths = [csrc / name for name in ("a.cu", "b.cu", "c.cuh")]
    for path in paths:
        path.touch()
        os.utime(path, (0, 0))

    def sources_compiled() -> list[str]:
        calls = tmp_path / "bin" / "calls"
        calls.unlink(missing_ok=True)
        build.build(tmp_path / "lib" / "x.so", tools, tmp_path)
        *compiles, link = calls.read_text().splitlines()
        assert link.count(".o ") == len(list(csrc.glob("*.cu"))) and "-shared" in link
        assert [path.name for path in (tmp_path / "lib").iterdir()] == ["x.so"]
        return sorted(line.rpartition("/")[2] for line in compiles)

    assert sources_compiled() == ["a.cu", "b.cu"]
    assert sources_compiled() == []
    for path, compiled in zip(paths, (["a.cu"], ["b.cu"], ["a.cu", "b.cu"])):
        os.utime(path, None)
        assert sources_compiled() == compiled
        os.utime(path, (0, 0))
        assert sources_compiled() == []
    monkeypatch.setenv("MOE_OPS_NVCC_FLAGS", "-lineinfo")
    assert sources_compiled() == ["a.cu", "b.cu"]
    paths[1].unlink()
    assert sources_compiled() == []


@pytest.mark.parametrize("wish", ["", "0", "1", "yes"])
def test_failure_is_an_error_where_asked_for(
    wish: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_OPS_NATIVE", wish)
    monkeypatch.setenv("CUDA_HOME", str(fake_nvcc(tmp_path / "home")))
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "broken.cu").touch()
    if problem := {"1": "nvcc.* failed\nerror: no such", "yes": "unset, got 'yes'"}.get(wish):
        with pytest.raises(build.BuildError, match=f"(?s){problem}"):
            build.build_if_possible(tmp_path / "x.so")
    else:
        assert not build.build_if_possible(tmp_path / "x.so")
        reason = "MOE_OPS_NATIVE=0" if wish else "error: no such word"
        assert "not built: " in (error := capsys.readouterr().err) and reason in error


# Packaging.

TIMINGS = "moe_ops/kernels/timings.json"
IGNORED = shutil.ignore_patterns("__pycache__", "*.so")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what packages are made of, with a library that `make native` has left in it."""
    tree = tmp_path / "tree"
    for name in ("moe_ops", "fx_passes", "csrc"):
        shutil.copytree(build.ROOT / name, tree / name, ignore=IGNORED)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(build.ROOT / name, tree)
    (tree / build.LIBRARY).parent.mkdir(exist_ok=True)
    (tree / build.LIBRARY).write_text("left by make")
    return tree


def run(tree: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tree,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def package(tree: Path, kind: str, **environment: str) -> tuple[Path, str]:
    """The wheel or sdist that setuptools builds, as pip has it do; what it printed."""
    script = f"from setuptools import build_meta; build_meta.build_{kind}('{tree / kind}')"
    done = run(tree, "-c", script, **environment)
    (path,) = (tree / kind).iterdir()
    return path, done.stderr


def test_wheel_holds_the_library_where_nvcc_is(tree: Path, tmp_path: Path) -> None:
    home = fake_nvcc(tmp_path / "home")
    wheel, printed = package(tree, "wheel", CUDA_HOME=str(home))
    assert wheel.name.endswith("-py3-none-linux_x86_64.whl")
    assert "native kernels: built: " in printed
    with zipfile.ZipFile(wheel) as files:
        assert files.read(str(build.LIBRARY)) == b"object\n"
        assert files.read(TIMINGS) == (build.ROOT / TIMINGS).read_bytes()
        assert not [name for name in files.namelist() if ".data/" in name or "csrc" in name]

    # The next one, in the same tree, must not take it along.
    command = ["-m", "pip", "wheel", "-v", ".", "--no-deps", "--no-build-isolation", "-w", "plain"]
    done = run(tree, *command, PIP_NO_INDEX="1", CUDA_HOME=str(tmp_path))
    assert f"native kernels: not built: no nvcc in {tmp_path}" in done.stdout + done.stderr
    (wheel,) = (tree / "plain").iterdir()
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as files:
        assert TIMINGS in files.namelist()
        assert not [name for name in files.namelist() if name.endswith(".so")]
        files.extractall(tmp_path / "site")
    script = "from moe_ops.kernels import native; print(native.__file__, native.status())"
    done = run(tmp_path, "-c", script, PYTHONPATH=str(tmp_path / "site"))
    path, _, status = done.stdout.partition(" ")
    assert Path(path).is_relative_to(tmp_path / "site") and status.startswith("not built: ")


@pytest.mark.parametrize("wish", ["", "1"], ids=["unset", "MOE_OPS_NATIVE=1"])
def test_editable_install_builds_if_asked_to(wish: str, tree: Path, tmp_path: Path) -> None:
    home = fake_nvcc(tmp_path / "home")
    wheel, _ = package(tree, "editable", CUDA_HOME=str(home), MOE_OPS_NATIVE=wish)
    assert (home / "bin" / "calls").exists() == bool(wish)
    assert (tree / build.LIBRARY).read_text() == ("object\n" if wish else "left by make")
    with zipfile.ZipFile(wheel) as files:
        assert not [name for name in files.namelist() if name.endswith(".so")]


def test_sdist_holds_the_sources(tree: Path) -> None:
    sdist, _ = package(tree, "sdist")
    with tarfile.open(sdist) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    sources = {f"csrc/{path.name}" for path in (tree / "csrc").iterdir()}
    assert names >= {"setup.py", *sources}
    assert str(build.LIBRARY) not in names


# With the real compiler.


@pytest.fixture(scope="module")
def tiny_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if build.find_nvcc() is None or shutil.which("g++") is None:
        pytest.skip("no compiler: nvcc and g++ are needed")
    root = tmp_path_factory.mktemp("tiny")
    (root / "csrc").mkdir()
    (root / "csrc" / "tiny.cu").write_text(TINY)
    library = root / build.LIBRARY
    build.build(library, build.find_tools(), root)
    return library


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no compiler: readelf is needed")
def test_library_needs_torch_and_no_python(tiny_library: Path) -> None:
    read = ["readelf", "--dynamic", "--wide", str(tiny_library)]
    lines = subprocess.run(read, capture_output=True, text=True, check=True).stdout.splitlines()
    needed = [line.partition("[")[2].rstrip("]") for line in lines if "(NEEDED)" in line]
    assert "libtorch.so" in needed
    assert not [name for name in needed if "python" in name or "cuda" in name]


@pytest.mark.gpu
def test_library_runs(tiny_library: Path) -> None:
    torch.ops.load_library(tiny_library)
    x = torch.arange(5.0, device="cuda")
    torch.ops.moe_ops_tiny.add_one(x)
    assert x.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.gpu
def test_library_of_this_tree_loads() -> None:
    skip_without_library()
    assert torch.ops.moe_ops_native.grouped_mm.default
