"""What pyproject.toml cannot say: a wheel holds the compiled kernels where they can be built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

sys.path.insert(0, str(Path(__file__).parent))
from csrc.build import LIBRARY, ROOT, build_if_possible


class BuildNative(Command):
    """Compile csrc/; an editable install, in place, only if MOE_OPS_NATIVE=1."""

    description = "compile the CUDA kernels of csrc/"
    user_options: ClassVar[list[tuple[str, str, str]]] = []
    editable_mode = False  # set by setuptools
    built = False

    def initialize_options(self) -> None:
        self.build_lib: Any = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        if self.editable_mode:
            build_if_possible(ROOT / LIBRARY, by_default=False)
        else:
            library = Path(self.build_lib) / LIBRARY
            library.unlink(missing_ok=True)  # of an earlier build
            self.built = build_if_possible(library)

    def get_source_files(self) -> list[str]:
        return [path.relative_to(ROOT).as_posix() for path in (ROOT / "csrc").glob("*.*")]


class BuildWheel(bdist_wheel):
    """A wheel for one platform, but for any Python, if it holds the library."""

    def run(self) -> None:
        self.run_command("build")
        built = self.get_finalized_command("build_native").built
        self.root_is_pure = not built
        self.distribution.has_ext_modules = lambda: built
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


build.sub_commands = [*build.sub_commands, ("build_native", None)]
setup(cmdclass={"bdist_wheel": BuildWheel, "build_native": BuildNative})
