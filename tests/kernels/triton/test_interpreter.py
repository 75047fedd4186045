"""The tests of the kernels in Triton's interpreter: in a process of their own, since a process either interprets
kernels or compiles them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace.base import env

pytest.importorskip("triton")
pytestmark = pytest.mark.long


FILES = (
    "kernels",
    "attention_plans",
    "sample",
    "token_scores",
    "sampling",
    "prefill",
    "decode_hopper",
    "quantized",
    "cascade",
    "fixed",
    "linear_fp8",
    "linear_int4",
    "linear_int8",
    "recurrent",
    "latent",
    "mixture",
    "experts_quantized",
    "lora_linear",
    "spans",
    "steps",
    "sparse",
    "rope",
    "persistent",
)


# The interpreter multiplies tiles through numpy. OpenBLAS's kernels for some CPUs (Haswell, Zen) give a row other bits
# at another place of a tile, which the kernels themselves must not; those of the oldest CPU do not, on any.
ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "Nehalem"}


def run_interpreted(choice: str, *names: str) -> None:
    """Runs the tests of `choice` (-m) of these files, in one process: importing takes seconds."""
    files = [f"tests/kernels/triton/test_{name}.py" for name in names]
    quiet = ("-x", "-W", "ignore::RuntimeWarning", "-p", "no:cacheprovider", "--timeout=600")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", choice, *quiet, *files],
        env=env.child_environment(**ENVIRONMENT),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "passed" in done.stdout, done.stdout


@pytest.mark.timeout(1200)
def test_every_kernel_agrees_with_its_reference_in_the_interpreter() -> None:
    run_interpreted("not slow", *FILES)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FILES)
def test_every_case_agrees_with_its_reference_in_the_interpreter(name: str) -> None:
    run_interpreted("slow or not slow", name)
