"""Writes the bytecode of the tests as pytest's workers look for it, with their assertions rewritten.

    python -m tests.bytecode

Workers begin at the same moment with the same file: in a fresh checkout each of them rewrote all, 9 processor seconds
apiece. What cannot be written here they write for themselves. Beside it one process imports the packages that tests
need: the oracles and clients are installed without bytecode, as most of their modules are never imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion import rewrite

TESTS = Path(__file__).parent
IMPORTING = ("api/test_audio.py", "models/test_parity.py")
"""They import PyTorch, transformers, the clients and Hypothesis: 9 processor seconds of compiling."""


def write(path: Path) -> bool:
    """Whether it had to be written."""
    folder = rewrite.get_cache_dir(path)
    cached = folder / (path.stem + rewrite.PYC_TAIL)
    if rewrite._read_pyc(path, cached) is not None:
        return False
    folder.mkdir(exist_ok=True)
    stat, code = rewrite._rewrite_test(path, None)
    state: Any = SimpleNamespace(trace=print)
    return bool(rewrite._write_pyc(state, code, stat, cached))


def importing() -> subprocess.Popen[bytes]:
    """A process that collects a few tests, for the bytecode of what they import."""
    quiet = ("--collect-only", "-q", "-n", "0", "-p", "no:cacheprovider")
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *quiet, *(str(TESTS / name) for name in IMPORTING)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
    )


def main() -> None:
    paths = sorted((*TESTS.rglob("test_*.py"), *TESTS.rglob("conftest.py")))
    with importing(), ProcessPoolExecutor(min(len(os.sched_getaffinity(0)), 16)) as pool:
        print(
            sum(pool.map(write, paths, chunksize=16)), "of", len(paths), "files of tests rewritten"
        )


if __name__ == "__main__":
    main()
