"""Building the library: cached by content, complete without a new compiler, a clear error without any (PLT-07)."""

import ctypes
import os
import re
import stat
import subprocess
import sys

import pytest

from headrace.back.kernels.native import build
from headrace.back.kernels.native.library import NativeLibrary
from headrace.base.errors import MissingDependency


def test_an_unchanged_tree_compiles_nothing(library_path):
    before = library_path.stat()
    again = build.build(here=True)
    assert again == library_path and again.stat().st_mtime_ns == before.st_mtime_ns


def test_another_compiler_or_flag_gives_another_file(tmp_path):
    compiler = build.find_compiler()
    plain = build.library_path(compiler, tmp_path)
    assert plain == build.library_path(compiler, tmp_path)
    assert plain != build.library_path(compiler, tmp_path, extra=("-g",))
    other = tmp_path / "g++"
    other.write_text("#!/bin/sh\necho another version\n")
    other.chmod(0o700)
    assert plain != build.library_path(str(other), tmp_path)


NEED_TILES = {"linear_blocks_dequantized"}
"""Kernels for matrix tiles alone."""


@pytest.mark.slow
def test_the_complete_library_holds_every_set_that_the_compiler_knows(complete_path):
    library = ctypes.CDLL(str(complete_path))
    known = [isa.name for isa in build._known(build.find_compiler())]
    assert len(known) >= 3 and all(hasattr(library, f"hr_linear_{name}") for name in known)


def test_every_kernel_exists_for_every_instruction_set_of_the_library(library_path):
    library = ctypes.CDLL(str(library_path))
    files = [path for path in build.sources() if path.stem.startswith("native_")]
    kernels = {
        path.stem.removeprefix("native_"): re.findall(r"HR_EXPORT\((\w+)\)", path.read_text())
        for path in files
    }
    assert len(kernels) >= 6
    assert set(kernels) >= NEED_TILES
    for isa in build.ISAS:
        if hasattr(library, f"hr_linear_{isa.name}"):
            found = {
                kernel
                for kernel, names in kernels.items()
                if hasattr(library, f"hr_{kernel}_{isa.name}")
                or (names and all(hasattr(library, f"hr_{name}_{isa.name}") for name in names))
            }
            if isa.only:  # of the others it has those that use its instructions
                assert found >= NEED_TILES
            else:
                assert found == set(kernels) - NEED_TILES, isa.name


def test_no_compiler_is_named_as_the_reason(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingDependency, match="no C\\+\\+ compiler \\(no-such-compiler\\) found"):
        build.build()


@pytest.mark.slow
def test_an_instruction_set_the_compiler_lacks_is_left_out(tmp_path, monkeypatch):
    """The library then has the others, and a machine that would like the missing one runs the best of these."""
    unknown = build.Isa(name="avx512dot", machines=(), flags=("-march=of-tomorrow",))
    portable = build.Isa(name="portable", machines=(), flags=("-O0",))
    monkeypatch.setattr(build, "ISAS", (portable, unknown))
    few = [
        path
        for path in build.sources()
        if path.suffix == ".h" or path.stem in ("pool", "native_probe")
    ]
    monkeypatch.setattr(build, "sources", lambda: few)
    path = build.build(folder=tmp_path)
    library = ctypes.CDLL(str(path))
    assert hasattr(library, "hr_probe_portable") and not hasattr(library, "hr_probe_avx512dot")


def test_for_this_cpu_alone_there_are_its_best_set_and_those_it_takes_kernels_from(
    library_path, tmp_path
):
    compiler = build.find_compiler()
    best = build._best(build._known(compiler), compiler, tmp_path)
    runnable = NativeLibrary(library_path).isas
    assert tuple(isa.name for isa in best) == runnable[-len(best) :]
    assert [bool(isa.only) for isa in best] == [False] + [True] * (len(best) - 1)


@pytest.mark.slow
def test_a_library_for_this_cpu_alone_is_built_until_there_is_one_of_all(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ISAS", (build.Isa(name="portable", machines=(), flags=("-O0",)),))
    few = [path for path in build.sources() if path.suffix == ".h" or path.stem == "native_probe"]
    monkeypatch.setattr(build, "sources", lambda: few)
    alone = build.build(folder=tmp_path, here=True)
    assert alone.name.endswith("-portable.so") and build.build(folder=tmp_path, here=True) == alone
    every = build.build(folder=tmp_path)
    assert every != alone and build.build(folder=tmp_path, here=True) == every


def test_the_cache_folder_serves_when_the_package_is_read_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    folder = build._writable_folder()
    assert folder == tmp_path / "cache/native"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_building_needs_no_torch():
    code = (
        "import sys, importlib.util as u; sys.modules['torch'] = None\n"
        "s = u.spec_from_file_location('b', 'headrace/back/kernels/native/build.py')\n"
        "m = u.module_from_spec(s); sys.modules['b'] = m; s.loader.exec_module(m); print(m.source_digest())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == build.source_digest()


def test_one_library_serves_every_torch_and_every_python(library_path):
    """Nothing of libtorch or Python is linked or named in it (PLT-19): tensors go in as addresses and sizes."""
    data = library_path.read_bytes()
    assert not re.search(
        rb"libtorch|libc10|libpython|_ZN2at|_ZN3c10|_ZN5torch|PyObject|PyErr", data
    )
    code = f"import ctypes; ctypes.CDLL({str(library_path)!r}).hr_cpu_isas"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
