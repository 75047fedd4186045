"""Compiles resize.cpp into a library of its own: `python -m headrace.front.media.resize_library`.

`make` and the installation do so; without a compiler Pillow resizes all pictures. Nothing here
needs NumPy: setup.py runs it too. The file's name holds a digest of the source, so that a library
of another one is never loaded.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from headrace.base import env
from headrace.base.errors import MissingDependency, StartError

SOURCE = Path(__file__).resolve().with_name("resize.cpp")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-Wno-psabi")


def library_path() -> Path:
    """Where the library of this source belongs."""
    digest = hashlib.sha256(SOURCE.read_bytes() + repr(_FLAGS).encode()).hexdigest()[:12]
    return SOURCE.with_name(f"libheadrace_resize-{digest}.so")


def build(folder: Path = SOURCE.parent) -> Path:
    """Compiles the library into `folder`, if it is not there."""
    path = folder / library_path().name
    if path.exists():
        return path
    named = env.get("CXX")
    known = filter(None, map(shutil.which, [named] if named else ["g++", "clang++", "c++"]))
    compiler = next(known, None)
    if compiler is None:
        raise MissingDependency("no C++ compiler found: Pillow resizes all pictures")
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as scratch:
        compiled = Path(scratch) / path.name
        command = [compiler, *_FLAGS, str(SOURCE), "-o", str(compiled)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise StartError(f"{SOURCE.name} does not compile:\n{done.stderr}")
        compiled.rename(path)  # atomic: a second builder writes the same
    return path


if __name__ == "__main__":
    try:
        print(build())
    except (MissingDependency, StartError, OSError) as error:
        sys.exit(f"error: {error}")
