"""Builds the native CPU kernels into the package. Everything else about the package stands in pyproject.toml.

Without a C++ compiler the package installs without them: the CPU then uses PyTorch's ops, and the decisions printed at
start say so. torch is not needed here and must not become a build requirement (an isolated build would fetch it).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NATIVE = Path("headrace/back/kernels/native")


def native_builder():
    """headrace.back.kernels.native.build, loaded without its parent packages: those need torch."""
    sys.path.insert(0, str(ROOT))
    spec = importlib.util.spec_from_file_location("native_build", ROOT / NATIVE / "build.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """Copies the Python files, then compiles the kernels beside them."""

    def run(self):
        super().run()
        if self.editable_mode:
            return  # `make` builds them in place, again whenever a source has changed
        builder = native_builder()
        folder = Path(self.build_lib).resolve() / NATIVE
        try:
            self.announce(f"native kernels: {builder.build(folder=folder)}", level=3)
        except builder.StartError as error:
            self.warn(f"installing without native CPU kernels: {error.message}")


class NativeDistribution(Distribution):
    """Holds a library: the wheel is of one platform."""

    def has_ext_modules(self):
        return True


class PlatformWheel(bdist_wheel):
    """Of a platform, but of no Python version: the library knows nothing of Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=NativeDistribution,
    cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel},
)
