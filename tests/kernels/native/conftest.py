"""The native library, built once, and bound for each instruction set this CPU runs; the best ones in `make test`.

HEADRACE_NATIVE names another library, for example one of `build(extra=SANITIZE_FLAGS)`: with libasan and libubsan in
LD_PRELOAD these tests then run under the address and undefined behaviour sanitizers.
"""

import platform
from functools import cache
from pathlib import Path

import pytest
import torch

from headrace.back.kernels.native import build
from headrace.back.kernels.native.library import NativeLibrary, load

ISAS = [isa.name for isa in build.ISAS if not isa.machines or platform.machine() in isa.machines]


def _best() -> list[str]:
    """The sets that serve on this CPU: what `make test` builds. Before the first build any may be."""
    loaded = load()
    if not isinstance(loaded, NativeLibrary):
        return ISAS
    whole = [isa.name for isa in build.ISAS if isa.name in loaded.isas and not isa.only]
    return list(loaded.isas[loaded.isas.index(whole[-1]) :])


BEST = _best()
EVERY_ISA = [pytest.param(isa, marks=() if isa in BEST else pytest.mark.slow) for isa in ISAS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where slow tests are left out, those of other instruction sets, ten thousand cases, are not made first."""
    if "library" in metafunc.fixturenames:
        few = metafunc.config.getoption("markexpr") == "not slow"
        metafunc.parametrize("library", BEST if few else EVERY_ISA, indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here are products of shapes, dtypes and instruction sets: each value once; all, in `make slow`."""
    folder = f"{Path(__file__).parent}/"
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.covering(1))


@pytest.fixture(scope="session")
def library_path():
    """The library of all instruction sets where it is built, or else of the best ones."""
    loaded = load()
    return loaded.path if isinstance(loaded, NativeLibrary) else build.build(here=True)


@pytest.fixture(scope="session")
def complete_path():
    """The library of all instruction sets; for slow tests, as it takes minutes to compile."""
    return build.build()


@pytest.fixture(scope="session")
def bind_isa(library_path):
    """Instruction set -> the library bound for it; binding reads and digests all the sources."""
    return cache(lambda isa: NativeLibrary(library_path, isa=isa))


@pytest.fixture
def library(request, bind_isa, library_path):
    """The library bound for one instruction set, three threads wide."""
    if request.param not in bind_isa(None).isas:
        pytest.skip(f"this CPU does not run {request.param}, or {library_path.name} has none of it")
    native = bind_isa(request.param)
    native.set_threads(3)
    yield native
    native.set_threads(1)


@pytest.fixture
def newest(bind_isa):
    """The library bound for the best instruction set, on one thread until the test asks for more."""
    native = bind_isa(None)
    yield native
    native.set_threads(1)


@pytest.fixture
def poisoned():
    """torch fills uninitialised outputs with NaN while the test runs: what a kernel forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
