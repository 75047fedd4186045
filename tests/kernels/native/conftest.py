"""The native library, built once, and bound for each instruction set this CPU runs."""

import pytest
import torch

from headrace.back.kernels.native import build
from headrace.back.kernels.native.library import NativeLibrary

ISAS = [isa.name for isa in build.ISAS]


@pytest.fixture(scope="session")
def library_path():
    return build.build()


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
