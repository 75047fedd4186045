"""How a child begins: the module it runs, and torch's libraries mapped beside its imports."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import sys, threading
def main():
    for thread in threading.enumerate():
        if thread.name == "map-torch":
            thread.join()
    mapped = "libtorch_cpu" in open("/proc/self/maps").read()
    print(mapped, "torch" in sys.modules, sys.argv[1:])
    return 3
"""


@pytest.mark.parametrize(("words", "mapped"), [(["--torch"], True), ([], False)])
def test_torchs_libraries_are_mapped_before_torch_is_imported(
    tmp_path: Path, words: list[str], mapped: bool
) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    done = subprocess.run(
        [sys.executable, "-m", "headrace.launch.begin", *words, "child", "--given", "1"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert done.stdout == f"{mapped} False ['--given', '1']\n"
