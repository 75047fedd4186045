"""Machines with a GPU lack the development tools: files with tests for GPUs are read without them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
WORDS = re.compile(r"mark.gpu|ONE_GPU|test_cuda import .*DEVICES")
"""Of a file with tests for GPUs, as `make test-gpu` looks for them."""
LACKING = (
    *("anthropic", "cohere", "gguf", "grpc_tools", "hypothesis", "jsonschema", "openai"),
    *("playwright", "pytest_asyncio", "smg_grpc_proto"),
)
COLLECT = f"""
import sys
from importlib.machinery import PathFinder

import pytest

find = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {LACKING} else find(name, path, target)
PathFinder.find_spec = staticmethod(find_spec)
plugins = ("-p", "pytest_timeout", "-p", "no:cacheprovider")
sys.exit(pytest.main([*plugins, "-q", "-m", "gpu", "--collect-only", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_files_with_gpu_tests_need_no_development_tools() -> None:
    files = [
        str(path)
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if WORDS.search(path.read_text()) and path != Path(__file__)
    ]
    assert len(files) > 20
    done = subprocess.run(
        [sys.executable, "-c", COLLECT, *files],
        cwd=ROOT,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.slow
def test_all_gpu_tests_are_in_files_that_are_looked_for() -> None:
    """A mark that comes by an imported name does not stand in the file."""
    assert f'"{WORDS.pattern}"' in (ROOT / "Makefile").read_text()
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-n", "0", "-m", "gpu"]
    listed = subprocess.run(
        [*command, "--collect-only", "-p", "no:cacheprovider", "tests"],
        cwd=ROOT, capture_output=True, text=True,
    ).stdout  # fmt: skip
    files = {line.partition("::")[0] for line in listed.splitlines() if "::" in line}
    assert len(files) > 40, listed[-2000:]
    others = {name for name in files if not name.startswith("tests/kernels/triton/")}
    assert not {name for name in others if not WORDS.search((ROOT / name).read_text())}
