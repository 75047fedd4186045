"""Puts into the package what is not Python: native CPU kernels and the demo models, unpacked. All else stands in
pyproject.toml.

Without a C++ compiler the package installs without kernels: the CPU then uses PyTorch's ops, and the
decisions printed at start say so. torch is not needed here and must not become a build requirement
(an isolated build would fetch it).
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
NATIVE = Path("headrace/back/kernels/native")
MEDIA = Path("headrace/front/media")
DEMO_MODELS = {"demo_model": ROOT / "demo" / "model", "demo_models": ROOT / "demo" / "models"}


def load_alone(path):
    """A module of headrace, loaded without its parent packages: those need torch."""
    sys.path.insert(0, str(ROOT))
    spec = importlib.util.spec_from_file_location(f"headrace_{path.stem}", ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildWithData(build_py):
    """Copies the Python files, then the demo models and the compiled kernels beside them."""

    def run(self):
        super().run()
        unpack_weights = load_alone(Path("headrace/launch/packed_weights.py")).unpack_weights
        if self.editable_mode:
            unpack_weights(DEMO_MODELS["demo_model"])
            return  # a checkout holds the models, and `make` builds the kernels in place
        package = Path(self.build_lib).resolve() / "headrace"
        for name, folder in DEMO_MODELS.items():
            shutil.copytree(folder, package / name, dirs_exist_ok=True)
        for packed in unpack_weights(package / "demo_model"):
            packed.unlink()
        for folder in (NATIVE, MEDIA):
            for older in (package.parent / folder).glob("*.so"):
                older.unlink()
        builder = load_alone(NATIVE / "build.py")
        try:
            shutil.copy2(self._library(builder), package.parent / NATIVE)
        except builder.StartError as error:
            self.warn(f"installing without native CPU kernels: {error.message}")
        resizer = load_alone(MEDIA / "resize_library.py")
        try:
            resizer.build(package.parent / MEDIA)
        except resizer.StartError as error:
            self.warn(f"installing without fast resizing: {error.message}")

    def _library(self, builder):
        """The library of all instruction sets: that of the checkout if there is one. Its objects stay behind."""
        built = builder.library_path(builder.find_compiler(), ROOT / NATIVE)
        if built.exists():
            return built
        scratch = Path(self.get_finalized_command("build").build_base).resolve() / "native"
        scratch.mkdir(parents=True, exist_ok=True)
        return builder.build(folder=scratch)


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
    cmdclass={"build_py": BuildWithData, "bdist_wheel": PlatformWheel},
)
