"""Every kernel compiles for GPUs that are not here, to their matrix instructions (cross_compile.py); a few of them in
every run of the tests, all of them for all targets among the slow ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.base import env

pytest.importorskip("triton")
from headrace.back.kernels.triton.room import BY_TARGET
from tests.kernels.triton import cases
from tests.kernels.triton.machine_code import descriptors, is_whole

pytestmark = pytest.mark.long
TARGETS = [
    *("cuda:80", "cuda:89", "cuda:90", "cuda:100", "cuda:120"),
    *("hip:gfx942", "hip:gfx950", "hip:gfx1100", "hip:gfx1201"),
]
MATRIX = {
    "cuda:80": "mma.sync",
    "cuda:89": "mma.sync",
    "cuda:90": "wgmma",
    "cuda:100": "tcgen05.mma",
    "cuda:120": "mma.sync",
    "hip:gfx942": "v_mfma",
    "hip:gfx950": "v_mfma",
    "hip:gfx1100": "v_wmma",
    "hip:gfx1201": "v_wmma",
}


def compiled(cache: Path, *words: str) -> list[dict]:
    """What cross_compile.py prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.cross_compile", *words],
        env=env.child_environment(TRITON_CACHE_DIR=str(cache), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.timeout(400)
def test_a_product_compiles_for_nvidia_and_amd(tmp_path: Path) -> None:
    found = compiled(tmp_path, "skinny split", "cuda:90", "hip:gfx942")
    assert len(found) == 2
    for one in found:
        assert MATRIX[one["target"]] in one["found"], one
    assert "griddepcontrol" in found[0]["found"] and "cp.async" in found[0]["found"]


def test_cases_of_hopper_are_compiled_for_it_alone() -> None:
    named = [title for title, _ in cases.CASES if "Hopper" in title]
    assert len(named) > 10
    assert all(set(cases.ONLY[title]) == {"cuda:90"} for title in named)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", ["chunks gated_delta 24", "chunks ssd_scan"])
def test_machine_code_of_chunks_finds_its_tiles(case: str, tmp_path: Path) -> None:
    """KRN-13: values of 20 in a tile of 32 columns got descriptors of another register's number."""
    known = []
    for one in compiled(tmp_path, "--code", case, "cuda:90"):
        if "wgmma" in one["found"]:
            known += descriptors(Path(one["code"]))
    assert known and all(map(is_whole, known)), [hex(one) for one in known]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_for(target: str, tmp_path: Path) -> None:
    found = compiled(tmp_path, target)
    too_large = [one for one in found if one["shared"] > BY_TARGET[target]]
    assert not too_large, too_large
    prefill = [
        one
        for one in found
        if one["case"] == "attention 32/8x128" and one["kernel"] == "prefill_kernel"
    ]
    assert MATRIX[target] in prefill[0]["found"], prefill
    for kernel in ("prefill_hopper_kernel", "decode_hopper_kernel"):
        assert (target == "cuda:90") == any(one["kernel"] == kernel for one in found)
