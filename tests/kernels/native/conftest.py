"""The native library, built once, and bound for each instruction set this CPU runs.

HEADRACE_NATIVE names another library, for example one of `build(extra=SANITIZE_FLAGS)`: with libasan and libubsan in
LD_PRELOAD these tests then run under the address and undefined behaviour sanitizers.
"""

import platform
from pathlib import Path

import pytest
import torch

from headrace.back.kernels.native import build
from headrace.back.kernels.native.library import NativeLibrary
from headrace.base import env

ISAS = [isa.name for isa in build.ISAS if not isa.machines or platform.machine() in isa.machines]


@pytest.fixture(scope="session")
def library_path():
    named = env.get("HEADRACE_NATIVE") or "1"
    return build.build() if named in ("0", "1") else Path(named)


@pytest.fixture(params=ISAS)
def library(request, library_path):
    """The library bound for one instruction set, three threads wide."""
    newest = NativeLibrary(library_path)
    if request.param not in newest.isas:
        pytest.skip(f"this CPU does not run {request.param}")
    bound = NativeLibrary(library_path, isa=request.param)
    bound.set_threads(3)
    yield bound
    bound.set_threads(1)


@pytest.fixture
def newest(library_path):
    """The library bound for the best instruction set, on one thread until the test asks for more."""
    bound = NativeLibrary(library_path)
    yield bound
    bound.set_threads(1)


@pytest.fixture
def poisoned():
    """torch fills uninitialised outputs with NaN while the test runs: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
