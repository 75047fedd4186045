"""The tests of the kernels in Triton's interpreter: in a process of their own, since a process either interprets
kernels or compiles them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.base import env

pytest.importorskip("triton")
pytestmark = pytest.mark.long


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    [
        "kernels",
        "draw",
        "token_scores",
        "sampling",
        "prefill",
        "decode_hopper",
        "codes",
        "cascade",
        "fixed",
    ],
)
def test_every_kernel_agrees_with_its_reference_in_the_interpreter(name: str) -> None:
    command = [sys.executable, "-m", "pytest", f"tests/kernels/triton/test_{name}.py", "-x"]
    done = subprocess.run(
        [*command, "-W", "ignore::RuntimeWarning", "-p", "no:cacheprovider"],
        env=env.child_environment(TRITON_INTERPRET="1", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "passed" in done.stdout, done.stdout
