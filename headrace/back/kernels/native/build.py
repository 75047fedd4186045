"""Compiles the native CPU kernels into one shared library: `python -m
headrace.back.kernels.native.build [--here]`.

Every `native_*.cpp` beside an op is compiled once per instruction set with a name of its own
(hr_linear_avx2, ...); the loader binds the best one the CPU runs. An instruction set the compiler
does not know is left out, never an error. The file's name holds a digest of the sources
and of the compiler: an unchanged tree compiles nothing, and a library of other sources is never
loaded. `--here` compiles what this CPU runs best and no other set: a fifth of the work. This file
imports nothing of headrace that needs torch: setup.py runs it too.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from headrace.base import env
from headrace.base.errors import MissingDependency, StartError

FOLDER = Path(__file__).resolve().parent
COMMAND = "python -m headrace.back.kernels.native.build"
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math",
    "-ffp-contract=off", "-pthread", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas",
    "-Wno-maybe-uninitialized",
)  # fmt: skip
SANITIZE_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")


@dataclass(frozen=True, kw_only=True)
class Isa:
    """An instruction set: its suffix in symbol names, the machines it exists on, the compiler
    flags. `only`: kernels that do not name this header have nothing to gain and are taken from the
    next worse set."""

    name: str
    machines: tuple[str, ...]
    flags: tuple[str, ...]
    only: str = ""


_ARM = ("aarch64", "arm64")
_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_DOT = (*_V4, "-mavx512bf16", "-mavx512vnni")
# Worst first; the position is the bit in hr_cpu_isas(). "portable" compiles on every machine.
ISAS: tuple[Isa, ...] = (
    Isa(name="portable", machines=(), flags=()),
    Isa(name="avx2", machines=("x86_64", "AMD64"), flags=("-march=x86-64-v3",)),
    Isa(name="avx512", machines=("x86_64", "AMD64"), flags=_V4),
    Isa(name="avx512dot", machines=("x86_64", "AMD64"), flags=_DOT),
    Isa(
        name="amx",
        machines=("x86_64", "AMD64"),
        flags=(*_DOT, "-mgfni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
        only="native/amx",
    ),
    Isa(name="armdot", machines=_ARM, flags=("-march=armv8.2-a+dotprod",)),
    Isa(name="armbf16", machines=_ARM, flags=("-march=armv8.6-a+dotprod+bf16",)),
)


def sources() -> list[Path]:
    """Every file the library is made of, in a fixed order: the pool and headers here, the kernels
    beside their ops."""
    here = [*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")]
    return sorted(here) + sorted(FOLDER.parent.glob("*/native_*.cpp"))


def source_digest() -> str:
    """12 hex digits over the sources and the flags: what the loader asks of a library."""
    digest = hashlib.sha256(repr((_FLAGS, ISAS)).encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def find_compiler() -> str:
    """$CXX, or g++, clang++ or c++ on the path; MissingDependency without one."""
    named = env.get("CXX")
    for name in [named] if named else ["g++", "clang++", "c++"]:
        if path := shutil.which(name):
            return path
    raise MissingDependency(
        f"no C++ compiler ({named or 'g++, clang++, c++'}) found: install one or set CXX; "
        "without the native kernels the CPU uses PyTorch's ops"
    )


def library_path(
    compiler: str, folder: Path = FOLDER, *, extra: tuple[str, ...] = (), isa: Isa | None = None
) -> Path:
    """Where the library of these sources and this compiler belongs. One for `isa` alone has the
    longer name."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
    made_by = hashlib.sha256(version + repr(extra).encode()).hexdigest()[:8]
    alone = f"-{isa.name}" if isa else ""
    return folder / f"libheadrace_native-{source_digest()}-{made_by}{alone}.so"


def build(
    *,
    folder: Path | None = None,
    extra: tuple[str, ...] = (),
    jobs: int | None = None,
    here: bool = False,
) -> Path:
    """Builds what is missing and returns the library's path.

    folder: None puts it beside this file, or into the cache folder (0700) when that is not
    writable. extra: further compiler flags (SANITIZE_FLAGS for a checked build). jobs: compilers at
    once; None takes the machine's cores. here: only the best instruction set of this CPU, unless a
    library of all is there.
    """
    compiler = find_compiler()
    folder = folder or _writable_folder()
    path = library_path(compiler, folder, extra=extra)
    if path.exists():
        return path
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        isas = _known(compiler)
        if here:
            isas = _best(isas, compiler, Path(scratch))
            path = library_path(compiler, folder, extra=extra, isa=isas[-1])
            if path.exists():
                return path
        units = _units(Path(scratch), compiler, isas, extra)
        with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
            objects = list(pool.map(_compile, units))
        linked = Path(scratch) / path.name
        link = [compiler, "-shared", "-pthread", *extra, *objects, "-o", str(linked)]
        _checked(link)
        linked.rename(path)  # atomic: a second builder writes the same bytes under the same name
    return path


def _known(compiler: str) -> list[Isa]:
    """The instruction sets of this machine's kind that the compiler knows, worst first."""
    machine = platform.machine()
    return [
        isa
        for isa in ISAS
        if (not isa.machines or machine in isa.machines) and _knows(compiler, isa)
    ]


def _best(isas: list[Isa], compiler: str, scratch: Path) -> list[Isa]:
    """The best of `isas` that this CPU runs, behind those that it takes kernels from."""
    probe = scratch / "cpu.so"
    sources = [str(path) for path in FOLDER.glob("*.cpp")]
    _checked([compiler, *_FLAGS, "-O0", "-DHR_DIGEST=0", "-shared", *sources, "-o", str(probe)])
    bits = ctypes.CDLL(str(probe)).hr_cpu_isas()
    runnable = [isa for isa in isas if bits >> ISAS.index(isa) & 1]
    first = max(i for i, isa in enumerate(runnable) if not isa.only)
    return runnable[first:]


def _writable_folder() -> Path:
    if os.access(FOLDER, os.W_OK):
        return FOLDER
    folder = env.cache_dir() / "native"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _units(
    scratch: Path, compiler: str, isas: list[Isa], extra: tuple[str, ...]
) -> list[list[str]]:
    """One compiler command per object; the slow ones (wide vectors) first."""
    units = []
    for isa in reversed(isas):
        for path in sources():
            if path.name.startswith("native_") and isa.only in path.read_text():
                out = scratch / f"{path.stem}_{isa.name}.o"
                flags = (*_FLAGS, *isa.flags, f"-DHR_ISA={isa.name}", *extra)
                units.append([compiler, *flags, "-c", str(path), "-o", str(out)])
    for path in FOLDER.glob("*.cpp"):
        flags = (*_FLAGS, f"-DHR_DIGEST={source_digest()}", *extra)
        units.append([compiler, *flags, "-c", str(path), "-o", str(scratch / f"{path.stem}.o")])
    return units


def _knows(compiler: str, isa: Isa) -> bool:
    probe = [compiler, *isa.flags, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(probe, capture_output=True).returncode == 0


def _compile(command: list[str]) -> str:
    """Compiles one object, or takes it from an earlier build of the same source, headers and
    flags."""
    out = Path(command[-1])
    kept = out.parent.parent / ".objects" / f"{out.stem}-{_object_digest(command)}.o"
    if not kept.exists():
        _checked(command)
        kept.parent.mkdir(mode=0o700, exist_ok=True)
        for older in kept.parent.glob(f"{out.stem}-*.o"):
            older.unlink(missing_ok=True)
        out.rename(kept)
    return str(kept)


def _object_digest(command: list[str]) -> str:
    """Of the flags, the compiler, the source and the headers it includes."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True).stdout
    digest = hashlib.sha256(repr(command[:-3]).encode() + version)
    for path in _with_headers(Path(command[-3])):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _with_headers(source: Path) -> list[Path]:
    """A source and all headers of ours it includes, directly or not."""
    files: list[Path] = []
    queue = [source]
    while queue:
        path = queue.pop()
        if path not in files:
            files.append(path)
            names = re.findall(r'#include "(?:\.\./native/)?(\w+\.h)"', path.read_text())
            queue += [FOLDER / name for name in names]
    return files


def _checked(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise StartError(f"the native kernels do not compile: {' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    try:
        print(build(here="--here" in sys.argv[1:]))
    except StartError as error:
        sys.exit(f"error: {error.message}")
